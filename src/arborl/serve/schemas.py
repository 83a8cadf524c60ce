"""What a request may say, field by field. A field that is none of these is refused, and so is one that would change the
answer in a way that is not there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_CHOICES = 16
MOST_LIKELY = 20
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=8)]
Object = dict[str, Any]


class Body(BaseModel):
    """Of any request."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken, and never done."""


class Drawing(Body):
    """How tokens are drawn; the same for all that samples."""

    model: str = ""
    """As `/v1/models` says; without one, the model that is served."""
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """Without one, the run's own."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    user: str | None = None
    metadata: Object | None = None
    store: Literal[False] | None = None

    @field_validator("temperature")
    @classmethod
    def _is_not_too_cold(cls, given: float | None) -> float | None:
        if given is not None and 0 < given < 1e-6:
            raise ValueError("give 0, for the likeliest token, or a number from 1e-6 up")
        return given


class Sampled(Drawing):
    """What chat completions and completions have in common."""

    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[str, Field(min_length=1, max_length=256)] | Stops | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    return_token_ids: bool = False
    """Also tell the ids of the prompt and of each choice."""

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _nothing_is_nothing(cls, given: Any) -> Any:
        return 0 if isinstance(given, float) and given == 0 else given

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Plain(BaseModel):
    type: Literal["text"] = "text"


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: list[Object] = Field(min_length=1, max_length=10_000)
    tools: list[Object] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool = True
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    response_format: Plain | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _are_of_log_probabilities(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text, in which nothing is a control token; or token ids, in which anything may be."""
    max_tokens: int | None = Field(16, ge=1)
    echo: bool = False
    """Begin the text with the prompt."""
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _are_possible(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs: log-probabilities of the prompt are not computed")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: only what is shown is sampled; leave it out")
        if not self.prompts:
            raise ValueError("prompt: empty")
        if len(self.prompts) * self.n > 4 * MOST_CHOICES:
            raise ValueError(f"prompt: {len(self.prompts)} times n={self.n}; at most {4 * MOST_CHOICES} in one request")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


class ResponseRequest(Drawing):
    """`POST /v1/responses`, in its plain form: nothing is kept between two of them."""

    input: str | list[Object]
    instructions: str | None = None
    tools: list[Object] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    text: Object | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None

    @field_validator("text")
    @classmethod
    def _is_plain(cls, given: Object | None) -> Object | None:
        if given and given.get("format", {"type": "text"}) != {"type": "text"}:
            raise ValueError("text.format: only {'type': 'text'}")
        return given


class SessionRequest(Body):
    """`POST /v1/agents/{name}/sessions`."""

    fields: Object = Field(default_factory=dict)
    """What tasks of the run had as columns and its tools ask for: `document_content`, …"""
    seed: int = Field(0, ge=0, lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """Without one, as the run was evaluated."""


class StepRequest(Body):
    """`POST /e/{id}/step`."""

    content: str


class RewardRequest(Body):
    """`POST /e/{id}/reward`."""

    reward: float = Field(allow_inf_nan=False)
    answer: str | None = None
    """What rewards of the run read as the answer."""


class SayRequest(Body):
    """`POST /v1/agents/{name}/sessions/{id}/messages`."""

    content: str = Field(min_length=1)
    stream: bool = False
    """Also tell tool calls and their answers, as they happen."""
