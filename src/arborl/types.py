"""The nouns of Arbor: plain records that every room shares.

Frozen, slotted, no torch, no I/O. Agents exchange `Message`s; what crossed the line between program and model is a
`Call`; calls of all attempts at a `Task` are a `Group`, their tokens a `TokenTree`, a sampled one a row of `Terms`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arborl.errors import EpisodeError
from arborl.fast_init import fast_init
from arborl.tokens import Tokens

Metrics = dict[str, float]
"""Names are `room/what`; values are plain numbers."""
Role = Literal["system", "user", "assistant", "tool"]


class FinishReason(StrEnum):
    """Why the engine stopped sampling one completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StopReason(StrEnum):
    """Why an episode ended; one list for environments, agents, metrics and people."""

    DONE = "done"
    """The environment reached a terminal state, or the agent gave its answer."""
    TRUNCATED = "truncated"
    """The environment cut the episode short (its own step limit)."""
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    """The next prompt would not fit the model's context."""
    TIMEOUT = "timeout"
    """The episode passed its deadline."""
    ERROR = "error"
    """Something broke; `Episode.failure` says what and where."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call the model wrote. One that did not parse is still a call, with its `error`."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the model is told about a tool; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. A failure is a result too: the model reads `content` either way."""

    content: str
    ok: bool = True
    kind: str = "ok"
    """`ok`, or the kind of failure: `unknown_tool`, `malformed`, `arguments`, `exception`, `timeout`."""
    seconds: float = 0.0


@fast_init
@dataclass(frozen=True, slots=True)
class Message:
    """One message in OpenAI's shape.

    A sampled assistant message keeps its text exactly as sampled in `content` (without the stop token); `tool_calls`
    is then what a parser read out of that text. Messages written by hand may have `tool_calls` and no text.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    sampled: bool = False
    """True when `content` is what the model wrote, so a template must be given the text and not the parsed calls."""


@dataclass(frozen=True, slots=True)
class Task:
    """The data half of a problem. Everything random about it comes from `seed`."""

    id: str
    messages: tuple[Message, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Dataset columns (answer, document, …); they reach rewards, tools and environments by name."""
    source: str = ""
    agent: str | None = None
    env: str | None = None
    seed: int = 0


class SamplingDistribution(NamedTuple):
    """The distribution tokens are drawn from, as far as it is not the model's; see `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@fast_init
@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. `temperature=0` takes the likeliest token."""

    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    """Decides this request's randomness, together with the position of each token; neighbours do not matter."""
    stop: tuple[int, ...] = ()
    """Token ids that end the completion; the one sampled is part of it."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the completion as soon as they have been written; they are part of it."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that hold this much of the probability."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the likeliest."""
    seconds: float | None = None
    """The completion ends after this long, with whatever has been sampled."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def drawn(self) -> SamplingDistribution:
        """What decides the distribution; the rest decides where it ends."""
        return SamplingDistribution(self.temperature, self.top_k, self.top_p, self.min_p)


NOT_SAMPLED = -1
"""The version of what no policy sampled: it was given."""


@fast_init
@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled."""

    tokens: tuple[int, ...]
    """Exactly what was sampled, the stop token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from."""
    finish: FinishReason
    version: int = 0
    """Of the weights that sampled its last token; `NOT_SAMPLED` where none did, and its log-probabilities are NaN."""
    seconds: float = 0.0
    versions: tuple[int, ...] = ()
    """Of each token, where weights changed on the way; else none, and all have `version`."""

    def __post_init__(self) -> None:
        for what, own in (("log-probabilities", self.logprobs), ("versions", self.versions or self.tokens)):
            if len(self.tokens) != len(own):
                raise ValueError(f"{len(self.tokens)} tokens but {len(own)} {what} in one completion")

    @property
    def oldest(self) -> int:
        """The oldest version that sampled one of its tokens."""
        return min(self.versions, default=self.version)


@fast_init
@dataclass(frozen=True, slots=True)
class Call:
    """One model call, exactly as it happened: the ids the engine was given and what it sampled."""

    prompt: Sequence[int]
    """Of a recorded call `Tokens`: a line of ids, shared with the calls that go on from it, and a length."""
    completion: Completion
    turn: int  # index of the agent's turn this call served
    trained: bool = True
    """Whether its tokens become loss terms; not, where an agent says that they are not its own doing."""
    messages: tuple[Message, ...] = ()
    """What the agent asked with: for people to read. Training looks at the ids alone."""
    reply: Message | None = None
    """What was read out of the completion: its text, and the tool calls in it."""
    drawn: SamplingDistribution | None = None
    """The distribution its tokens are from, where that is not the run's."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Of each sampled token the likeliest others with their log-probabilities, where asked for: for people to read."""

    @property
    def whole(self) -> Tokens:
        """The prompt and what was sampled behind it."""
        return Tokens(self.prompt) + self.completion.tokens


@fast_init
@dataclass(frozen=True, slots=True)
class Turn:
    """One step of the agent: its message and the environment's answer."""

    message: Message
    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    state_key: str = ""
    """Names the environment's state *before* the message, for algorithms that compare equal states."""
    info: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, as data: it crosses processes and is written to files."""

    where: str
    """The border it crossed, by name: `environment 'frozen_lake'`, `tool 'search'`, `reward 'exact'`."""
    kind: str  # exception type, or `timeout`
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"


@dataclass(slots=True)
class Episode:
    """One attempt at a task. Filled while it runs and while it is scored; not changed afterwards."""

    id: str
    task: Task
    seed: int = 0
    """Decides the environment's chance and the sampling; with `task` and the messages it replays the episode."""
    opening: tuple[Message, ...] = ()  # what the environment said at the start
    turns: list[Turn] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stop: StopReason = StopReason.DONE
    rewards: dict[str, float] = field(default_factory=dict)
    """By name, weights already applied; `reward` is their sum."""
    metrics: Metrics = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    judged: bool = field(default=False, compare=False)
    """Whether every reward has been asked about it; rewards that compare a group's episodes have yet to."""
    weight: float = 1.0
    """Of its loss, beside others', where a given row says so; 0 is looked at and not learned from."""
    turn_weight: float = 0.0
    """What the turns' own rewards count in `rewards`: the weight of `env`, 0 where it is not asked for."""

    def fail(self, error: EpisodeError) -> Failure:
        """Mark the episode as failed. It keeps what was recorded, and no reward: half a sum would be none."""
        trace = "".join(traceback.format_exception(error.cause))
        self.failure = Failure(error.where, error.kind, str(error.cause), trace)
        self.stop = StopReason.TIMEOUT if error.kind == "timeout" else StopReason.ERROR
        self.rewards.clear()
        return self.failure

    @property
    def reward(self) -> float:
        """The number the algorithm learns from."""
        return sum(self.rewards.values())

    @property
    def answer(self) -> str:
        """The text of the agent's last message."""
        return self.turns[-1].message.content if self.turns else ""

    @property
    def branches(self) -> list[int]:
        """The branch of each call, in order of their last calls: one that goes on from another's end is in its branch.

        Example (the second call forgets the first, the third goes on from the second):
            [1 | 2], [1 | 3], [1 3 9 | 4]   ->   0 1 1
        """
        tips: list[tuple[Tokens, int]] = []
        found: list[int] = []
        for call in self.calls:
            prompt, whole = Tokens(call.prompt), call.whole
            begun = [(tip, branch) for tip, branch in tips if tip.begins(prompt)]
            origin, branch = max(begun, key=lambda one: len(one[0]), default=(None, len(set(found))))
            found.append(branch)
            tips = [one for one in tips if one[0] is not origin and one[0] != whole]
            tips.append((whole, branch))
        last = {branch: number for number, branch in enumerate(found)}
        latest = sorted(last, key=last.__getitem__)
        return [latest.index(branch) for branch in found]

    @property
    def is_offline(self) -> bool:
        """Whether what was said in it was given, and no policy's doing."""
        return bool(self.calls) and all(call.completion.version == NOT_SAMPLED for call in self.calls)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(call.completion.tokens) for call in self.calls)


@dataclass(slots=True)
class Group:
    """The episodes of one task: the unit of credit, filtering and staleness."""

    task: Task
    episodes: list[Episode]
    greedy: float | None = None
    """Reward of one extra episode played at temperature 0, which is not trained; a baseline for who asks for it."""

    @property
    def valid_episodes(self) -> list[Episode]:
        """Episodes that count: a failed one leaves the baseline and the loss together."""
        return [episode for episode in self.episodes if episode.failure is None]


# ------------------------------------------------------------------------------------------------ what is learned

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The unique tokens of a group in depth-first order.

    Token `q` sees token `k` exactly when `k <= q < end[k]`, and its position id is `depth[q]`. Two trees laid end
    to end (the second's `end` shifted by the first's length) are again such a tree, so packing needs no other rule.
    """

    tokens: Ints
    depth: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Terms:
    """One row per sampled token, as equal-length columns."""

    tree: Ints  # index of the tree the token lives in
    position: Ints
    """Index in that tree of the token whose output predicts this one."""
    token: Ints
    logprob: Floats
    """Under the policy that sampled it; NaN where it was given."""
    advantage: Floats
    weight: Floats
    """Share of this term in the step's loss; the loss is the weighted sum, whatever the split into micro-batches."""
    episode: Ints
    """Counts the episodes of the whole batch, 0, 1, 2, …"""
    call: Ints  # counts the calls of the whole batch
    turn: Ints  # the turn within its episode
    version: Ints
    """Of the weights that sampled it; `NOT_SAMPLED` where none did."""
    proximal: Floats
    """Log-probability under the weights as they were when this update began; NaN where not known, as in all below."""
    reference: Floats
    """Log-probability under the frozen reference policy."""
    value: Floats
    """The critic's estimate at the predicting position, before the update."""
    target: Floats
    """What the critic should have said there, or KTO's reference point; filled by credit."""
    after: Floats
    """The critic's estimate of what follows this token, where it is the last of an episode that was cut short."""
    teacher: Floats  # log-probability under the teacher
    drawn: Floats | None = None
    """How each was drawn, a row of `SamplingDistribution` each; NaN where, and none if everywhere, as the run draws."""
    place: Ints | None = None  # its row when the batch was planted, whatever was picked since

    def __len__(self) -> int:
        return len(self.token)

    def pick(self, rows: NDArray[Any]) -> Terms:
        """The same columns, only these rows."""
        columns: Iterator[Any] = (getattr(self, name) for name in self.__slots__)
        picked: Iterator[Any] = (None if column is None else column[rows] for column in columns)
        return Terms(*picked)


@dataclass(frozen=True, slots=True)
class Forest:
    """A batch for the learner: one tree a group, and the terms of all of them."""

    trees: tuple[TokenTree, ...]
    terms: Terms
    raw_tokens: int
    """Tokens that one row per branch would have run; `sum(len(tree))` over this is the share that is computed."""
