"""What is simulated, and one engine of it: rows that each get a token a step, and requests that wait for a row.

Rows of an engine get a token each a step, so an engine has a clock that counts steps: a call that begins at 100 and has
48 tokens ends at 148. Between two events an engine's rows are the same, and its step takes as long as at the mean
length of that time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from arborl.cluster.plan_work import Script


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated."""

    draw: Callable[[random.Random], Script]
    groups: int
    """Of a batch."""
    members: int
    """Episodes of a group."""
    engines: int
    slots: int
    """Requests that an engine samples at once."""
    room: float
    """Tokens whose keys and values an engine keeps."""
    sampling_step: Callable[[float, float], float]
    """Seconds of a step, by rows and by tokens they look at."""
    reading: Callable[[float], float]
    """Seconds to read so many new tokens."""
    learn: Callable[[float, float], float]
    """Seconds of an update, by tokens of its trees and sampled tokens."""
    publish: float
    """Seconds for new weights to come to the engines, which stand still for them."""
    max_lag: int = 0
    concurrency: int = 1 << 30
    redundancy: int = 0
    shared: bool = False
    """Whether engines stand still while the learner works, since they are on the same devices."""
    updates: int = 6
    seed: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """A place of a batch and who plays it."""

    batch: int
    at: int
    attempt: int = 0
    begun: int | None = None
    ended: int = 0
    tokens: float = 0.0
    sampled: float = 0.0
    finished: bool = False
    prompt: int = 0
    engine: int = -1
    playing: list[Episode] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        return self.batch, self.at


@dataclass(slots=True, eq=False)
class Episode:
    """One in play."""

    group: Group
    script: Script
    engine: int
    turn: int = 0
    context: float = 0.0
    """Tokens that only it looks at."""
    ends: float = 0.0
    """The engine's clock when its call ends."""
    live: bool = False
    gone: bool = False


class Engine:
    """One replica. `at` is when its clock was right."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.at = self.clock = self.owed = self.busy = self.context = 0.0
        self.rows = 0
        self.step = 1.0
        self.held = False
        self.calls: list[tuple[float, int, Episode]] = []
        self.waiting: deque[Episode] = deque()
        self.groups: dict[int, int] = {}
        """Rows of each group: what they have in common is looked at once."""
        self.epoch = self.count = 0

    def advance(self, now: float) -> None:
        """Bring the clock to `now`."""
        spent = now - self.at
        self.at = now
        if self.held or not self.rows or spent <= 0:
            return
        self.busy += spent
        read = min(self.owed, spent)
        self.owed -= read
        steps = (spent - read) / self.step
        self.clock += steps
        self.context += steps * self.rows

    def admit(self) -> None:
        """Take in who waits, as far as there is room."""
        while self.waiting and self.rows < self.setting.slots:
            episode = self.waiting[0]
            if self.rows and self.context > self.setting.room:
                break
            self.waiting.popleft()
            if episode.gone:
                continue
            turn = episode.script[episode.turn]
            group = episode.group
            first = id(group) not in self.groups
            self.groups[id(group)] = self.groups.get(id(group), 0) + 1
            new = turn.read if episode.turn or first else 0
            self.owed += self.setting.reading(new)
            self.context += (group.prompt if first else 0) + episode.context + (turn.read if episode.turn else 0)
            episode.context += turn.read if episode.turn else 0
            episode.ends, episode.live = self.clock + turn.reply, True
            self.rows += 1
            self.count += 1
            heapq.heappush(self.calls, (episode.ends, self.count, episode))

    def leave(self, episode: Episode) -> None:
        """Its call is over, or nobody wants it any more."""
        if not episode.live:
            return
        episode.live = False
        said = episode.script[episode.turn].reply - max(0.0, episode.ends - self.clock)
        episode.context += said
        self.rows -= 1
        self.context -= episode.context
        key = id(episode.group)
        self.groups[key] -= 1
        if not self.groups[key]:
            del self.groups[key]
            self.context -= episode.group.prompt
        if not self.rows:
            self.context = 0.0

    def next_end(self) -> float | None:
        """When the next call ends, if nothing else happens."""
        while self.calls and not self.calls[0][2].live:
            heapq.heappop(self.calls)
        if self.held or not self.calls:
            return None
        left = max(0.0, self.calls[0][0] - self.clock)
        self.step = self.setting.sampling_step(self.rows, max(0.0, self.context + self.rows * left / 2))
        return self.at + self.owed + left * self.step
