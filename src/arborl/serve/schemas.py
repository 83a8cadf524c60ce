"""Request bodies as pydantic models. Unknown fields are errors, and so are values that are not supported."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from arborl.chat.json_schema import ANY_OBJECT

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_FIELDS = 64
MAX_MESSAGES = 10_000
MAX_PROMPTS = 4 * MAX_CHOICES
MAX_NAME_CHARS = 512
Object = dict[str, Any]
# Lists stop at the first wrong item (`fail_fast`): an error for each of 100,000 items would take seconds.
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=8, fail_fast=True)]
Messages = Annotated[list[Object], Field(max_length=MAX_MESSAGES, fail_fast=True)]
ToolList = Annotated[list[Object], Field(max_length=128, fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


def _check_metadata(metadata: Object) -> Object:
    if not all(isinstance(text, str) and len(key) + len(text) <= 2 * MAX_NAME_CHARS for key, text in metadata.items()):
        raise ValueError(f"values must be texts of up to {MAX_NAME_CHARS} characters")
    return metadata


Metadata = Annotated[Object, Field(max_length=16), AfterValidator(_check_metadata)]


class RequestBody(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        return data


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted and ignored


class SamplingRequest(RequestBody):
    """Fields of every route that samples."""

    model: str = Field("", max_length=MAX_NAME_CHARS)  # name from `/v1/models`; default: the served model
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)  # default: the run's
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    user: str | None = Field(None, max_length=MAX_NAME_CHARS)
    metadata: Metadata | None = None
    store: Literal[False] | None = None

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < 1e-6:
            raise ValueError("must be 0 (greedy) or at least 1e-6")
        return temperature


class CompletionOptions(SamplingRequest):
    """Fields of both `/v1/chat/completions` and `/v1/completions`."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[str, Field(min_length=1, max_length=256)] | Stops | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[Object, Field(max_length=0)] | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextFormat(BaseModel):
    type: Literal["text"] = "text"

    def schema_text(self) -> str:
        """As `Sampling.schema`."""
        return ""


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]

    def schema_text(self) -> str:
        return ANY_OBJECT


class NamedSchema(RequestBody):
    """Without `schema`, any JSON object."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None  # masks are always exact

    def schema_text(self) -> str:
        return ANY_OBJECT if self.schema_ is None else json.dumps(self.schema_, separators=(",", ":"))


class JsonSchemaFormat(RequestBody):
    """Of chat completions."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def schema_text(self) -> str:
        return self.json_schema.schema_text()


class NamedSchemaFormat(NamedSchema):
    """Of responses."""

    type: Literal["json_schema"]


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ResponseText(RequestBody):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] = TextFormat()
    verbosity: Literal["medium"] | None = None


class FunctionName(RequestBody):
    name: str = Field(max_length=MAX_NAME_CHARS)


class ToolChoice(RequestBody):
    """One tool by name: `function.name` in chat completions, `name` in responses."""

    type: Literal["function"]
    function: FunctionName | None = None
    name: str | None = Field(None, max_length=MAX_NAME_CHARS)


class ChatRequest(CompletionOptions):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(min_length=1)
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class CompletionRequest(CompletionOptions):
    """`POST /v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    """Text, which never contains control tokens; or token ids, which may."""
    max_tokens: int | None = Field(16, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs: log-probabilities of the prompt are not computed")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: not supported; leave it out")
        if not self.prompts:
            raise ValueError("prompt: empty")
        if len(self.prompts) * self.n > MAX_PROMPTS:
            raise ValueError(f"prompt: {len(self.prompts)} times n={self.n}; at most {MAX_PROMPTS} in one request")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


class ResponseRequest(SamplingRequest):
    """`POST /v1/responses`, without state between requests."""

    input: str | Messages
    instructions: str | None = None
    tools: ToolList | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None
    text: ResponseText | None = None
    include: Annotated[list[str], Field(max_length=0, fail_fast=True)] | None = None

    @property
    def response_format(self) -> Any:
        return None if self.text is None else self.text.format

    def text_format(self) -> Object:
        """The format of the text, as a response states it."""
        return (self.response_format or TextFormat()).model_dump(by_alias=True, exclude_none=True)


class SessionRequest(RequestBody):
    """`POST /v1/agents/{name}/sessions`."""

    fields: Object = Field(default_factory=dict)
    """Task fields that the agent or its tools read, such as `document_content`."""
    seed: int = Field(0, ge=0, lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    """Default: the temperature of the run's evaluation."""


class SessionMessageRequest(RequestBody):
    """`POST /v1/agents/{name}/sessions/{id}/messages`."""

    content: str = Field(min_length=1)
    stream: bool = False  # send tool calls and tool results as events while the agent works


class StepRequest(RequestBody):
    """`POST /e/{id}/step`."""

    content: str


class RewardRequest(RequestBody):
    """`POST /e/{id}/reward`."""

    reward: float = Field(allow_inf_nan=False)
    answer: str | None = None  # the answer that reward functions of the run read
