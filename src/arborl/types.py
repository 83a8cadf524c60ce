"""The data model of all packages.

Frozen, slotted, no torch, no I/O. Agents exchange `Message`s; a model call is a `Call`; the episodes of a `Task` are a
`Group`, their tokens a `TokenTree`, and each sampled token is a row of `Terms`.
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
"""Names are `package/quantity`; values are numbers."""
Role = Literal["system", "user", "assistant", "tool"]


class FinishReason(StrEnum):
    """Why the engine stopped sampling one completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """The environment reached a terminal state, or the agent answered."""
    TRUNCATED = "truncated"
    """The environment truncated the episode (its step limit)."""
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    """The next prompt does not fit the context."""
    TIMEOUT = "timeout"
    """The episode exceeded its deadline."""
    ERROR = "error"
    """An error; see `Episode.failure`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. A call that could not be parsed has an `error`."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Description of a tool for the model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call. The model reads `content`, also of a failure."""

    content: str
    ok: bool = True
    kind: str = "ok"
    """`ok`, or the kind of failure: `unknown_tool`, `malformed`, `arguments`, `exception`, `timeout`."""
    seconds: float = 0.0


@fast_init
@dataclass(frozen=True, slots=True)
class Message:
    """One message in OpenAI's format.

    A sampled assistant message has its exact text in `content` (without the stop token); `tool_calls` are parsed from
    it. Messages written by hand may have `tool_calls` and no text.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    sampled: bool = False
    """Whether `content` was sampled: a template then renders the text, not the parsed calls."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem as data. All its randomness comes from `seed`."""

    id: str
    messages: tuple[Message, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the data set (answer, document, …); passed to rewards, tools and environments by name."""
    source: str = ""
    agent: str | None = None
    env: str | None = None
    seed: int = 0


class SamplingDistribution(NamedTuple):
    """Settings of `Sampling` that change the distribution of tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@fast_init
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `temperature=0` is greedy."""

    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    """With the position of a token, determines its randomness; other requests do not matter."""
    stop: tuple[int, ...] = ()
    """Token ids that end the completion and are part of it."""
    stop_texts: tuple[str, ...] = ()
    """Stop strings; they are part of the completion."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this probability relative to the most likely one."""
    seconds: float | None = None
    """Timeout of the completion; the tokens so far are kept."""
    schema: str = ""
    """JSON schema (as JSON) that the text satisfies: only tokens that can lead there are sampled."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it occurs in the completion so far."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of all tokens that occur in the completion so far."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens have probability 0."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits depend on the tokens sampled so far, by a schema or penalties."""
        return bool(self.schema) or self.penalizes

    @property
    def drawn(self) -> SamplingDistribution:
        """The settings that determine the distribution."""
        return SamplingDistribution(self.temperature, self.top_k, self.top_p, self.min_p)


NOT_SAMPLED = -1
"""Policy version of tokens that were not sampled (demonstrations, offline rows)."""


@fast_init
@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens of one model call."""

    tokens: tuple[int, ...]
    """Sampled token ids with the stop token."""
    logprobs: tuple[float, ...]
    """Log-probability of each token under the sampling distribution."""
    finish: FinishReason
    version: int = 0
    """Policy version of the last token; `NOT_SAMPLED` if given, with NaN log-probabilities."""
    seconds: float = 0.0
    versions: tuple[int, ...] = ()
    """Policy version of each token if weights changed meanwhile; else empty, and all have `version`."""

    def __post_init__(self) -> None:
        for what, column in (("log-probabilities", self.logprobs), ("versions", self.versions or self.tokens)):
            if len(self.tokens) != len(column):
                raise ValueError(f"{len(self.tokens)} tokens but {len(column)} {what} in one completion")

    @property
    def oldest(self) -> int:
        """The oldest policy version of its tokens."""
        return min(self.versions, default=self.version)


@fast_init
@dataclass(frozen=True, slots=True)
class Call:
    """One model call: prompt token ids and completion."""

    prompt: Sequence[int]
    """`Tokens` for recorded calls: memory is shared with calls that extend it."""
    completion: Completion
    turn: int  # index of the agent's turn this call served
    trained: bool = True
    """Whether its tokens become loss terms."""
    messages: tuple[Message, ...] = ()
    """The messages of the prompt, for display. Training uses token ids only."""
    reply: Message | None = None
    """The parsed completion: text and tool calls."""
    drawn: SamplingDistribution | None = None
    """The sampling distribution if it is not that of the run."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Most likely other tokens with log-probabilities for each sampled token, for display."""
    schema: str = ""
    """As in `Sampling`."""

    @property
    def whole(self) -> Tokens:
        """Prompt and completion."""
        return Tokens(self.prompt) + self.completion.tokens


@fast_init
@dataclass(frozen=True, slots=True)
class Turn:
    """One step of the agent: its message and the observation."""

    message: Message
    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    state_key: str = ""
    """Key of the state *before* the message, for algorithms that compare equal states."""
    info: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as data, for other processes and files."""

    where: str
    """Component: `environment 'frozen_lake'`, `tool 'search'`, `reward 'exact'`."""
    kind: str  # exception type, or `timeout`
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"


@dataclass(slots=True)
class Episode:
    """One attempt at a task. Not changed after it is scored."""

    id: str
    task: Task
    seed: int = 0
    """Seed of environment and sampling; with `task` and the messages it replays the episode."""
    opening: tuple[Message, ...] = ()  # first observation
    turns: list[Turn] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    stop: StopReason = StopReason.DONE
    rewards: dict[str, float] = field(default_factory=dict)
    """Weighted rewards by name; `reward` is their sum."""
    metrics: Metrics = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    judged: bool = field(default=False, compare=False)
    """Whether all rewards of single episodes are computed; rewards of groups follow."""
    weight: float = 1.0
    """Weight of its loss, from an offline row; 0 is evaluated and not trained."""
    turn_weight: float = 0.0
    """Weight of the rewards of turns in `rewards`: that of `env`, else 0."""

    def fail(self, error: EpisodeError) -> Failure:
        """Mark the episode as failed. Its calls stay, its rewards are removed."""
        trace = "".join(traceback.format_exception(error.cause))
        self.failure = Failure(error.where, error.kind, str(error.cause), trace)
        self.stop = StopReason.TIMEOUT if error.kind == "timeout" else StopReason.ERROR
        self.rewards.clear()
        return self.failure

    @property
    def reward(self) -> float:
        """The sum of `rewards`."""
        return sum(self.rewards.values())

    @property
    def answer(self) -> str:
        """The text of the agent's last message."""
        return self.turns[-1].message.content if self.turns else ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of all replies. A turn of an agent with tools has several replies; its message is the last."""
        return [tool_call for call in self.calls if call.reply for tool_call in call.reply.tool_calls]

    @property
    def branches(self) -> list[int]:
        """The branch of each call, numbered by their last calls. A call that extends another is in its branch:
        `[1 | 2], [1 | 3], [1 3 9 | 4]` are 0 1 1.
        """
        tips: list[tuple[Tokens, int]] = []
        found: list[int] = []
        for call in self.calls:
            prompt, whole = Tokens(call.prompt), call.whole
            extended = [(tip, branch) for tip, branch in tips if tip.begins(prompt)]
            origin, branch = max(extended, key=lambda one: len(one[0]), default=(None, len(set(found))))
            found.append(branch)
            tips = [one for one in tips if one[0] is not origin and one[0] != whole]
            tips.append((whole, branch))
        last = {branch: number for number, branch in enumerate(found)}
        latest = sorted(last, key=last.__getitem__)
        return [latest.index(branch) for branch in found]

    @property
    def is_offline(self) -> bool:
        """Whether no call was sampled."""
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
    """Reward of one additional greedy episode that is not trained: the baseline of ReMax."""

    @property
    def valid_episodes(self) -> list[Episode]:
        """Episodes without a failure; failed ones are excluded from baseline and loss."""
        return [episode for episode in self.episodes if episode.failure is None]


# ------------------------------------------------------------------------------------------------ training data

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The unique tokens of a group in depth-first order.

    Token `q` attends to token `k` iff `k <= q < end[k]`, and its position id is `depth[q]`. Two concatenated
    trees (with `end` of the second shifted) are again such a tree, so packing needs no other rule.
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
    """Index in that tree of the predicting token."""
    token: Ints
    logprob: Floats
    """Log-probability under the sampling policy; NaN if not sampled."""
    advantage: Floats
    weight: Floats
    """Weight in the loss of the step, which is the weighted sum over all micro-batches."""
    episode: Ints
    """Number of the episode in the batch."""
    call: Ints  # number of the call in the batch
    turn: Ints  # the turn within its episode
    version: Ints
    """Policy version; `NOT_SAMPLED` if given."""
    proximal: Floats
    """Log-probability under the weights at the start of the update; NaN if unknown, like all below."""
    reference: Floats
    """Log-probability under the reference model."""
    value: Floats
    """Value estimate at the predicting position, before the update."""
    target: Floats
    """Target of the value, or the reference point of KTO."""
    after: Floats
    """Value estimate after this token, if it is the last of a truncated episode."""
    teacher: Floats  # log-probability under the teacher
    drawn: Floats | None = None
    """Rows of `SamplingDistribution`; NaN for that of the run; None if all are."""
    place: Ints | None = None  # row in the whole batch
    allowed: NDArray[np.object_] | None = None
    """The tokens that a schema allowed, as `SchemaMatcher.allowed`; None for all, also instead of the column."""

    def __len__(self) -> int:
        return len(self.token)

    def pick(self, rows: NDArray[Any]) -> Terms:
        """The terms of these rows."""
        columns: Iterator[Any] = (getattr(self, name) for name in self.__slots__)
        picked: Iterator[Any] = (None if column is None else column[rows] for column in columns)
        return Terms(*picked)


@dataclass(frozen=True, slots=True)
class Forest:
    """A batch of the learner: one tree per group, and the terms of all trees."""

    trees: tuple[TokenTree, ...]
    terms: Terms
    raw_tokens: int
    """Number of tokens without shared prefixes."""
