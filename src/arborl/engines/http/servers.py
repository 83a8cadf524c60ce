"""What is said to a server: vLLM's, SGLang's, and one that only chats.

For training a server must take and give token ids, take weights, and say which weights it holds: one that was restarted
between two requests answers as if nothing had happened, with the weights it began with.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from arborl.engines.replicas import Unreachable
from arborl.errors import EngineError
from arborl.types import FinishReason, Message, Sampling, ToolCall, ToolSpec

Client = httpx.AsyncClient
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
UPDATE = 900.0
"""Seconds that an update may take."""


@dataclass(slots=True)
class Piece:
    """Tokens that have come; the last piece says why it is the last."""

    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Labels of the weights that sampled which tokens, where the server says so."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself."""

    model: str
    context: int | None


async def call(client: Client, method: str, path: str, seconds: float | None = None, **more: Any) -> Any:
    """The answer's JSON. Unreachable where another server may do better; EngineError where the request is at fault."""
    try:
        reply = await client.request(method, path, timeout=seconds or httpx.USE_CLIENT_DEFAULT, **more)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise Unreachable(f"{client.base_url}: {_why(error)}") from error
    return _read(client, path, reply.status_code, reply.content)


def _read(client: Client, path: str, status: int, content: bytes) -> Any:
    at = f"{str(client.base_url).rstrip('/')}{path}"
    if status >= 500 or status in (408, 429):
        raise Unreachable(f"{at} answers {status}: {_complaint(content)}")
    if status in (401, 403):
        raise EngineError(f"{at} answers {status}: {_complaint(content)} (engine.api_key_env names its key)")
    if status >= 400:
        raise EngineError(f"{at} answers {status}: {_complaint(content)}")
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        raise EngineError(f"{at} answers with no JSON: {content[:100]!r}") from error


def _complaint(content: bytes) -> str:
    """What it says is wrong, in one line."""
    try:
        said = json.loads(content)
        found = said.get("error", said.get("detail", said.get("message", said)))
        found = found.get("message", found) if isinstance(found, Mapping) else found
    except (ValueError, AttributeError):
        found = content.decode(errors="replace")
    return " ".join(str(found).split())[:300]


def _why(error: Exception) -> str:
    kind = type(error).__name__
    told = {"ConnectError": "no server there (connection refused)", "ReadTimeout": "took too long"}.get(kind, kind)
    return f"{told}{f': {error}' if str(error) and kind != 'ConnectError' else ''}"


async def has(client: Client, path: str, method: str = "GET") -> bool:
    """Whether there is such an address, and it is open; it may want arguments that are not given."""
    try:
        reply = await client.request(method, path, json={} if method == "POST" else None)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise Unreachable(f"{client.base_url}: {_why(error)}") from error
    return reply.status_code not in (403, 404, 405)


async def events(client: Client, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
    """The events of a streamed answer. Leaving it ends the request at the server, too."""
    try:
        async with client.stream("POST", path, json=body) as reply:
            if reply.status_code >= 400:
                _read(client, path, reply.status_code, await reply.aread())
            async for line in reply.aiter_lines():
                text = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if text and text != "[DONE]":
                    said = json.loads(text)
                    if isinstance(said, Mapping) and "error" in said:
                        raise Unreachable(f"{client.base_url}: {_complaint(text.encode())}")
                    yield said
    except httpx.TransportError as error:
        raise Unreachable(f"{client.base_url}: {_why(error)}") from error


class VllmServer:
    """vLLM's OpenAI server. With `--enable-scale-out` it says of every token which weights sampled it; else, after each
    completion, it is asked which weights it holds. Weights need `VLLM_SERVER_DEV_MODE=1`."""

    name = "vLLM"
    hint = " Start it with --logprobs-mode processed_logprobs, and on a CPU with arborl's worker extension."

    def __init__(self, tokens: bool, dev: bool, extension: bool):
        self.tokens, self.dev, self.extension = tokens, dev, extension

    @property
    def cannot_train(self) -> str:
        if self.dev:
            return ""
        return (
            "it takes no weights and does not say which it holds: start vLLM (0.32 or newer) with the environment "
            "variable VLLM_SERVER_DEV_MODE=1"
        )

    @classmethod
    async def meet(cls, client: Client) -> VllmServer | None:
        if not await has(client, "/version"):
            return None
        tokens = await has(client, "/inference/v1/generate", "POST")
        dev = await has(client, "/weight_info")
        extension = False
        if dev:
            try:
                await call(client, "POST", "/collective_rpc", json={"method": "arborl_present"})
                extension = True
            except EngineError:
                pass
        return cls(tokens, dev, extension)

    async def sample(
        self, client: Client, model: str, prompt: list[int], sampling: Sampling, how: Mapping[str, Any], stream: bool
    ) -> AsyncGenerator[Piece, None]:
        more = {"ignore_eos": True, "logprobs": 0}
        if self.tokens:
            path = "/inference/v1/generate"
            inside = {**how, **more, "detokenize": False}
            body: dict[str, Any] = {"model": model, "token_ids": prompt, "sampling_params": inside, "stream": stream}
            read = _of_tokens
        else:
            path, read = "/v1/completions", _of_completions
            inside = {**how, "top_k": how["top_k"] or -1, **more}
            body = {"model": model, "prompt": prompt, "return_token_ids": True, "stream": stream, **inside}
        if not stream:
            yield read(_first(client, await call(client, "POST", path, json=body)), True)
            return
        async for said in events(client, path, body):
            if said.get("choices"):
                yield read(_first(client, said), False)

    async def label(self, client: Client) -> str:
        """The weights that it holds."""
        return str((await call(client, "GET", "/weight_info"))["weight_version"]) if self.dev else ""

    async def update(self, client: Client, folder: Path, label: str) -> None:
        """Requests wait meanwhile, and go on after it with what they have; what was read is read again."""
        method = "arborl_reload" if self.extension else "reload_weights"
        await call(client, "POST", "/pause", UPDATE, params={"mode": "keep", "clear_cache": "false"})
        try:
            asked = {"method": method, "kwargs": {"weights_path": str(folder)}}
            await call(client, "POST", "/collective_rpc", UPDATE, json=asked)
            emptied = await call(client, "POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
            if emptied is not None and not emptied.get("success", True):
                raise Unreachable(f"{client.base_url}: its prefix cache could not be emptied")
            await call(client, "POST", "/update_weight_version", json={"new_version": label})
        finally:
            await call(client, "POST", "/resume")

    async def encode(self, client: Client, model: str, text: str) -> list[int] | None:
        """Its own tokens of a text."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return list((await call(client, "POST", "/tokenize", json=body))["tokens"])


def _first(client: Client, said: Any) -> Any:
    try:
        return said["choices"][0]
    except (LookupError, TypeError) as error:
        raise EngineError(f"{client.base_url}: an answer without choices: {str(said)[:100]}") from error


def _of_tokens(choice: Any, whole: bool) -> Piece:
    said = (choice.get("logprobs") or {}).get("content") or []
    spans = [(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or ()]
    tokens = list(choice.get("token_ids") or ())
    return Piece(tokens, [each["logprob"] for each in said], _finish(choice, whole), spans)


def _of_completions(choice: Any, whole: bool) -> Piece:
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if choice.get("token_ids") is None:
        raise EngineError("the server gives no token ids (return_token_ids): it is too old to train with")
    return Piece(list(choice["token_ids"]), [float(x) for x in logprobs], _finish(choice, whole))


def _finish(choice: Any, whole: bool) -> FinishReason | None:
    reason = choice.get("finish_reason")
    return None if reason is None and not whole else FINISH.get(str(reason), FinishReason.ABORT)


class SglangServer:
    """SGLang's own interface. An update waits for the requests under way, so each is of one version."""

    name = "SGLang"
    hint = " Truncated sampling (top_k, top_p, min_p) is not in its log-probabilities: leave it out."
    cannot_train = ""

    @classmethod
    async def meet(cls, client: Client) -> SglangServer | None:
        return cls() if await has(client, "/get_model_info") or await has(client, "/model_info") else None

    async def sample(
        self, client: Client, model: str, prompt: list[int], sampling: Sampling, how: Mapping[str, Any], stream: bool
    ) -> AsyncGenerator[Piece, None]:
        inside = {
            "max_new_tokens": how["max_tokens"], "temperature": how["temperature"], "top_k": how["top_k"] or -1,
            "top_p": how["top_p"], "min_p": how["min_p"], "stop_token_ids": how["stop_token_ids"], "ignore_eos": True,
            "sampling_seed": int(how["seed"]) % 2**31, "stop": list(sampling.stop_texts), "no_stop_trim": True,
        }  # fmt: skip
        said = await call(
            client, "POST", "/generate", json={"input_ids": prompt, "sampling_params": inside, "return_logprob": True}
        )
        about = said["meta_info"]
        pairs = about["output_token_logprobs"]
        finish = about.get("finish_reason") or {}
        reason = FINISH.get(str(finish.get("type") if isinstance(finish, Mapping) else finish), FinishReason.ABORT)
        label = about.get("weight_version")
        spans = [(str(label), 0, len(pairs))] if label is not None else []
        yield Piece([int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs], reason, spans)

    async def label(self, client: Client) -> str:
        said = await call(client, "GET", "/get_model_info")
        return str(said.get("weight_version", ""))

    async def update(self, client: Client, folder: Path, label: str) -> None:
        asked = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        said = await call(client, "POST", "/update_weights_from_disk", UPDATE, json=asked)
        if not said.get("success"):
            raise EngineError(f"{client.base_url}: refused the weights: {said.get('message')}")

    async def encode(self, client: Client, model: str, text: str) -> list[int] | None:
        try:
            said = await call(
                client, "POST", "/tokenize", json={"model": model, "prompt": text, "add_special_tokens": False}
            )
            return list(said["tokens"])
        except EngineError:  # older ones have no such address
            return None


class ChatServer:
    """A server that takes messages and gives messages: it can be measured, and not trained with."""

    name = "chat"
    hint = ""
    cannot_train = (
        "it takes and gives text: which tokens it sampled, with what probability and from which weights, it does not "
        "say. It serves `arborl evaluate`. For training take a vLLM or SGLang server"
    )

    async def chat(
        self, client: Client, model: str, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling
    ) -> tuple[Message, FinishReason]:
        body: dict[str, Any] = {
            "model": model,
            "messages": [as_dict(message) for message in messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,
        }
        if sampling.stop_texts:
            body["stop"] = list(sampling.stop_texts)
        if tools:
            body["tools"] = [{"type": "function", "function": asdict(tool)} for tool in tools]
        choice = _first(client, await call(client, "POST", "/v1/chat/completions", json=body))
        said = choice.get("message") or {}
        calls = tuple(_call(each) for each in said.get("tool_calls") or ())
        reply = Message("assistant", said.get("content") or "", calls, sampled=not calls)
        return reply, FINISH.get(str(choice.get("finish_reason")), FinishReason.STOP)


def _call(given: Mapping[str, Any]) -> ToolCall:
    function = given.get("function") or {}
    name, text = str(function.get("name", "")), function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return ToolCall(str(given.get("id", "")), name, {}, f"arguments are no JSON: {error}")
    return ToolCall(str(given.get("id", "")), name, arguments if isinstance(arguments, dict) else {})


def as_dict(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls and not message.sampled:
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    return found


Server = VllmServer | SglangServer | ChatServer


async def meet(client: Client, named: str | None, chat: bool = False) -> tuple[Server, Facts]:
    """Who answers there, and with which model; to chat alone, it does not matter who."""
    found: Server | None = ChatServer() if chat else await VllmServer.meet(client) or await SglangServer.meet(client)
    models = await call(client, "GET", "/v1/models")
    listed = {str(one.get("id")): one for one in (models or {}).get("data") or () if not one.get("parent")}
    if named is not None and named not in listed:
        raise EngineError(
            f"{str(client.base_url).rstrip('/')} serves {', '.join(listed) or 'no model'}, and not engine.model={named}"
        )
    if named is None and len(listed) != 1:
        raise EngineError(
            f"{str(client.base_url).rstrip('/')} serves {', '.join(listed) or 'no model'}: write engine.model=NAME"
        )
    name = named or next(iter(listed))
    context = listed[name].get("max_model_len")
    return found or ChatServer(), Facts(name, int(context) if context is not None else None)
