"""What a request may say, field by field. A field that is none of these is refused, and so is one that would change the
answer in a way that is not there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_CHOICES = 16
MOST_LIKELY = 20
MOST_FIELDS = 64
MOST_MESSAGES = 10_000
MOST_PROMPTS = 4 * MOST_CHOICES
LONGEST_NAME = 512
"""Characters."""
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=8, fail_fast=True)]
Object = dict[str, Any]
Messages = Annotated[list[Object], Field(max_length=MOST_MESSAGES, fail_fast=True)]
ToolList = Annotated[list[Object], Field(max_length=128, fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
"""Lists stop at the first wrong item: an error for each of 100,000 would take seconds."""


def _are_short(given: Object) -> Object:
    if not all(isinstance(value, str) and len(key) + len(value) <= 2 * LONGEST_NAME for key, value in given.items()):
        raise ValueError(f"give texts of up to {LONGEST_NAME} characters")
    return given


Metadata = Annotated[Object, Field(max_length=16), AfterValidator(_are_short)]


class Body(BaseModel):
    """Of any request."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"more than {MOST_FIELDS} fields")
        return given


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken, and never done."""


class Drawing(Body):
    """How tokens are drawn; the same for all that samples."""

    model: str = Field("", max_length=LONGEST_NAME)
    """As `/v1/models` says; without one, the model that is served."""
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """Without one, the run's own."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    user: str | None = Field(None, max_length=LONGEST_NAME)
    metadata: Metadata | None = None
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
    logit_bias: Annotated[Object, Field(max_length=0)] | None = None
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


class FunctionName(Body):
    name: str = Field(max_length=LONGEST_NAME)


class ToolChoice(Body):
    """One tool by its name, as chat completions write it (`function`) or as responses do (`name`)."""

    type: Literal["function"]
    function: FunctionName | None = None
    name: str | None = Field(None, max_length=LONGEST_NAME)


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(min_length=1)
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
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

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[Ids], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    )
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
        if len(self.prompts) * self.n > MOST_PROMPTS:
            raise ValueError(f"prompt: {len(self.prompts)} times n={self.n}; at most {MOST_PROMPTS} in one request")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


class ResponseRequest(Drawing):
    """`POST /v1/responses`, in its plain form: nothing is kept between two of them."""

    input: str | Messages
    instructions: str | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    text: Object | None = None
    include: Annotated[list[str], Field(max_length=0, fail_fast=True)] | None = None

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
