"""Episodes, engines, tools and a learner as events on one clock; nothing is computed, and chance comes from one seed.

Updates follow `rollout/pipeline.py`: a batch is begun when the weights are young enough, an update takes the oldest
groups that are finished, and who would be too old for the next is begun again.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from arborl.cluster.simulate_engine import Engine, Episode, Group, Setting


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step on average, the first one aside."""

    step: float
    """Seconds."""
    wait: float
    """Seconds that the learner waits for groups."""
    learn: float
    publish: float
    engine_busy: float
    """Share of the time in which an engine has something to sample."""
    learner_busy: float
    lag: float
    """Versions by which what is trained on is older than the weights, on average."""
    lag_max: int
    again: float
    """Groups begun again, a step."""
    sampled: float
    """Tokens a second."""


class Simulation:
    """One run."""

    def __init__(self, setting: Setting):
        self.setting, self.chance = setting, random.Random(setting.seed)
        self.now, self.count, self.version, self.next = 0.0, 0, 0, 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.engines = [Engine(setting) for _ in range(setting.engines)]
        self.load = [0] * setting.engines
        self.lightest = [(0, at) for at in range(setting.engines)]
        self.sizes: dict[int, int] = {}
        self.places: list[Group] = []
        self.queue: deque[tuple[Group, int]] = deque()
        self.playing = 0
        self.waiting_since: float | None = 0.0
        self.rows: list[dict[str, float]] = []
        self.lags: list[int] = []
        self.again = self.finished = 0
        self.last = 0.0

    def run(self) -> Outcome:
        self._begin()
        while self.version < self.setting.updates and self.events:
            self.now, _, act, given = heapq.heappop(self.events)
            act(*given)
        done = self.rows[: self.version]
        rows = done[1:] or done
        span = sum(row["step"] for row in rows)
        lags = self.lags or [0]
        return Outcome(
            step=fmean(row["step"] for row in rows),
            wait=fmean(row["wait"] for row in rows),
            learn=fmean(row["learn"] for row in rows),
            publish=self.setting.publish,
            engine_busy=sum(engine.busy for engine in self.engines) / len(self.engines) / max(self.now, 1e-12),
            learner_busy=sum(row["learn"] for row in rows) / max(span, 1e-12),
            lag=fmean(lags),
            lag_max=max(lags),
            again=self.again / max(1, self.version),
            sampled=sum(row["sampled"] for row in rows) / max(span, 1e-12),
        )

    def _at(self, when: float, act: Callable[..., None], *given: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, act, given))

    # ------------------------------------------------------------------------------------------ episodes

    def _begin(self) -> None:
        """What may be begun with these weights."""
        setting = self.setting
        while self.next <= self.version + setting.max_lag:
            self.sizes[self.next] = setting.groups
            self.places += [Group(self.next, at) for at in range(setting.groups)]
            self.next += 1
        for group in self.places:
            if group.begun is None and not group.playing and group.engine == -1:
                group.engine = -2
                spare = 1 if group.attempt else 0  # whoever was late has one to spare
                self.queue += [(group, group.attempt)] * (setting.members + setting.redundancy + spare)
        self._fill()

    def _fill(self) -> None:
        """Begin episodes, up to so many at once."""
        touched: dict[int, Engine] = {}
        while self.queue and self.playing < self.setting.concurrency:
            group, attempt = self.queue.popleft()
            if group.attempt != attempt or group.finished:
                continue
            script = self.setting.draw(self.chance)
            if group.begun is None:
                group.begun, group.prompt = self.version, script[0].read
            engine = self._engine(group)
            episode = Episode(group, script, engine)
            group.playing.append(episode)
            self.playing += 1
            self.load[engine] += 1
            heapq.heappush(self.lightest, (self.load[engine], engine))
            self._ask(episode, touched)
        for asked in touched.values():
            self._plan(asked)

    def _engine(self, group: Group) -> int:
        """Siblings go to one engine, where there are enough groups for all; else wherever is least to do."""
        if group.engine >= 0:
            return group.engine
        while True:
            load, engine = self.lightest[0]
            if load == self.load[engine]:
                break
            heapq.heappop(self.lightest)
        if self.setting.engines <= self.setting.groups:
            group.engine = engine
        return engine

    def _ask(self, episode: Episode, touched: dict[int, Engine] | None = None) -> None:
        engine = self.engines[episode.engine]
        engine.advance(self.now)
        engine.waiting.append(episode)
        engine.admit()
        if touched is None:
            self._plan(engine)
        else:
            touched[episode.engine] = engine

    def _plan(self, engine: Engine) -> None:
        engine.epoch += 1
        when = engine.next_end()
        if when is not None:
            self._at(when, self._said, engine, engine.epoch)

    def _said(self, engine: Engine, epoch: int) -> None:
        """The next call of an engine has ended, and all that end with it."""
        if epoch != engine.epoch:
            return
        engine.advance(self.now)
        if engine.calls:
            engine.clock = max(engine.clock, engine.calls[0][0])
        while engine.calls and engine.calls[0][0] <= engine.clock + 0.5:
            episode = heapq.heappop(engine.calls)[2]
            if episode.live:
                engine.leave(episode)
                outside = episode.script[episode.turn].outside
                self._at(self.now + outside, self._answered, episode)
        engine.admit()
        self._plan(engine)

    def _answered(self, episode: Episode) -> None:
        """Tools and environment have answered."""
        if episode.gone:
            return
        episode.turn += 1
        if episode.turn < len(episode.script):
            self._ask(episode)
            return
        self._gone(episode)
        group = episode.group
        group.playing.remove(episode)
        group.ended += 1
        said = sum(turn.reply for turn in episode.script)
        group.sampled += said
        group.tokens += sum(turn.read for turn in episode.script[1:]) + said
        if group.ended >= self.setting.members:
            group.finished = True
            self.finished += 1
            self._leave(group)
            self._take()
        self._fill()

    def _gone(self, episode: Episode) -> None:
        episode.gone = True
        self.playing -= 1
        self.load[episode.engine] -= 1
        heapq.heappush(self.lightest, (self.load[episode.engine], episode.engine))

    def _leave(self, group: Group) -> None:
        """Nobody waits for who still plays in it."""
        left, group.playing = group.playing, []
        for episode in left:
            engine = self.engines[episode.engine]
            engine.advance(self.now)
            engine.leave(episode)
            self._gone(episode)
            engine.admit()
            self._plan(engine)

    # ------------------------------------------------------------------------------------------ updates

    def _due(self) -> list[Group]:
        bound = self.version - self.setting.max_lag
        return [group for group in self.places if group.begun is not None and group.begun <= bound]

    def _take(self) -> None:
        """Begin an update, where one is waited for and enough groups are finished."""
        owed = self.sizes[self.version]
        if self.waiting_since is None or self.finished < owed:
            return
        if any(group.attempt and not group.finished for group in self._due()):
            return
        finished = [group for group in self.places if group.finished]
        finished.sort(key=lambda group: (group.begun, -group.attempt, group.order))
        chosen = finished[:owed]
        taken = {id(group) for group in chosen}
        self.places = [group for group in self.places if id(group) not in taken]
        due = {id(group) for group in self._due()}
        self.places = [self._again(group) if id(group) in due else group for group in self.places]
        self.finished = sum(group.finished for group in self.places)
        tokens = sum(group.tokens + group.prompt for group in chosen)
        sampled = sum(group.sampled for group in chosen)
        learn = self.setting.learn(tokens, sampled)
        waited, self.waiting_since = self.now - self.waiting_since, None
        if len(self.rows):
            self.lags += [self.version - (group.begun or 0) for group in chosen]
        self.rows.append({"wait": waited, "learn": learn, "sampled": sampled, "step": 0.0})
        if self.setting.shared:
            self._hold(True)
        self._at(self.now + learn, self._publish)

    def _again(self, group: Group) -> Group:
        """It would be too old for the next update: another takes its place."""
        self._leave(group)
        fresh = Group(group.batch, group.at, group.attempt + 1)
        group.attempt = -1  # what is still queued for it is passed over
        self.again += 1
        return fresh

    def _publish(self) -> None:
        if not self.setting.shared:
            self._hold(True)
        self._at(self.now + self.setting.publish, self._published)

    def _published(self) -> None:
        self.rows[-1]["step"] = self.now - self.last
        self.last = self.now
        self.version += 1
        self.waiting_since = self.now
        self._hold(False)
        self._begin()
        self._take()

    def _hold(self, held: bool) -> None:
        for engine in self.engines:
            engine.advance(self.now)
            engine.held = held
            self._plan(engine)


def simulate(setting: Setting) -> Outcome:
    """How a run goes.

    Example:
        simulate(Setting(draw=lambda chance: (Turn(100, 50, 0.5),), groups=16, members=8, engines=1, slots=128, …))
    """
    return Simulation(setting).run()
