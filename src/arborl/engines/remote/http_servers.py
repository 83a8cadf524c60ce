"""The HTTP interfaces of vLLM, SGLang and OpenAI-compatible chat servers.

For training a server must take and return token ids, take weights, and report which weights it has: one that was
restarted between two requests answers as usual, from the weights it was started with.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from arborl.engines.remote.replicas import ReplicaUnavailable
from arborl.errors import EngineError
from arborl.types import FinishReason, Message, Sampling, ToolCall, ToolSpec

Client = httpx.AsyncClient
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
RETRIED = (408, 429)
"""Statuses below 500 after which another server may succeed."""
UPDATE_SECONDS = 900.0


@dataclass(slots=True)
class CompletionChunk:
    """Tokens of a streamed completion; the last chunk has the finish reason."""

    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(weight label, begin, end) of tokens, if the server reports it."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    model: str
    context: int | None


async def request_json(client: Client, method: str, path: str, seconds: float | None = None, **options: Any) -> Any:
    """The response's JSON. ReplicaUnavailable if another server may succeed; EngineError if the request is wrong."""
    with _transport_errors(client):
        response = await client.request(method, path, timeout=seconds or httpx.USE_CLIENT_DEFAULT, **options)
    return _parse(client, path, response.status_code, response.content)


def _parse(client: Client, path: str, status: int, content: bytes) -> Any:
    url = f"{str(client.base_url).rstrip('/')}{path}"
    if status >= 500 or status in RETRIED:
        raise ReplicaUnavailable(f"{url} answers {status}: {_error_message(content)}")
    if status in (401, 403):
        raise EngineError(f"{url} answers {status}: {_error_message(content)} (engine.args.api_key_env names its key)")
    if status >= 400:
        raise EngineError(f"{url} answers {status}: {_error_message(content)}")
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        raise EngineError(f"{url} answers with no JSON: {content[:100]!r}") from error


def _error_message(content: bytes) -> str:
    try:
        body = json.loads(content)
        found = body.get("error", body.get("detail", body.get("message", body)))
        found = found.get("message", found) if isinstance(found, Mapping) else found
    except (ValueError, AttributeError):
        found = content.decode(errors="replace")
    return " ".join(str(found).split())[:300]


@contextmanager
def _transport_errors(client: Client) -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL) as error:
        name = type(error).__name__
        text = {"ConnectError": "no server there (connection refused)", "ReadTimeout": "took too long"}.get(name, name)
        detail = f": {error}" if str(error) and name != "ConnectError" else ""
        raise ReplicaUnavailable(f"{client.base_url}: {text}{detail}") from error


async def has_route(client: Client, path: str, method: str = "GET") -> bool:
    """Whether the server has this route and allows it; it may reject missing arguments."""
    with _transport_errors(client):
        response = await client.request(method, path, json={} if method == "POST" else None)
    return response.status_code not in (403, 404, 405)


async def stream_events(client: Client, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
    """Server-sent events of a request. Closing the iterator aborts the request at the server."""
    with _transport_errors(client):
        async with client.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                _parse(client, path, response.status_code, await response.aread())
            async for line in response.aiter_lines():
                text = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if text and text != "[DONE]":
                    event = json.loads(text)
                    if isinstance(event, Mapping) and "error" in event:
                        raise _event_error(event["error"])(f"{client.base_url}: {_error_message(text.encode())}")
                    yield event


def _event_error(error: Any) -> type[EngineError]:
    """The kind of an error in a stream, as `_parse` by the status: a wrong request is not repeated."""
    code = error.get("code") if isinstance(error, Mapping) else None
    return EngineError if isinstance(code, int) and 400 <= code < 500 and code not in RETRIED else ReplicaUnavailable


class VllmServer:
    """vLLM's OpenAI server. With `--enable-scale-out` it reports the weights of every token; otherwise it is queried
    after each completion. Updates need `VLLM_SERVER_DEV_MODE=1`."""

    name = "vLLM"
    hint = " Start it with --logprobs-mode processed_logprobs, and on a CPU with arborl's worker extension."
    context_option = "--max-model-len"

    def __init__(self, has_generate: bool, is_dev: bool, has_extension: bool):
        self.has_generate, self.is_dev, self.has_extension = has_generate, is_dev, has_extension

    @property
    def cannot_train(self) -> str:
        if self.is_dev:
            return ""
        return (
            "it takes no weights and does not report which it has: start vLLM (0.32 or newer) with the environment "
            "variable VLLM_SERVER_DEV_MODE=1"
        )

    @classmethod
    async def detect(cls, client: Client) -> VllmServer | None:
        if not await has_route(client, "/version"):
            return None
        has_generate = await has_route(client, "/inference/v1/generate", "POST")
        is_dev = await has_route(client, "/weight_info")
        has_extension = False
        if is_dev:
            try:
                await request_json(client, "POST", "/collective_rpc", json={"method": "arborl_present"})
                has_extension = True
            except EngineError:
                pass
        return cls(has_generate, is_dev, has_extension)

    async def sample(
        self, client: Client, model: str, prompt: list[int], sampling: Sampling, params: Mapping[str, Any], stream: bool
    ) -> AsyncGenerator[CompletionChunk, None]:
        options = {"ignore_eos": True, "logprobs": 0}
        if self.has_generate:
            path, read = "/inference/v1/generate", _generate_chunk
            params = {**params, **options, "detokenize": False}
            body: dict[str, Any] = {"model": model, "token_ids": prompt, "sampling_params": params, "stream": stream}
        else:
            path, read = "/v1/completions", _completions_chunk
            params = {**params, "top_k": params["top_k"] or -1, **options}
            body = {"model": model, "prompt": prompt, "return_token_ids": True, "stream": stream, **params}
        if not stream:
            yield read(_first_choice(client, await request_json(client, "POST", path, json=body)), True)
            return
        async for event in stream_events(client, path, body):
            if event.get("choices"):
                yield read(_first_choice(client, event), False)

    async def label(self, client: Client) -> str:
        return str((await request_json(client, "GET", "/weight_info"))["weight_version"]) if self.is_dev else ""

    async def update(self, client: Client, folder: Path, label: str) -> None:
        """Load weights from a folder. Requests pause, keep their tokens and continue; prefixes are computed again."""
        method = "arborl_reload" if self.has_extension else "reload_weights"
        await request_json(
            client, "POST", "/pause", UPDATE_SECONDS, params={"mode": "keep", "clear_cache": "false"}
        )  # fmt: skip
        try:
            body = {"method": method, "kwargs": {"weights_path": str(folder)}}
            await request_json(client, "POST", "/collective_rpc", UPDATE_SECONDS, json=body)
            cleared = await request_json(
                client, "POST", "/reset_prefix_cache", params={"reset_running_requests": "true"}
            )  # fmt: skip
            if cleared is not None and not cleared.get("success", True):
                raise ReplicaUnavailable(f"{client.base_url}: its prefix cache could not be cleared")
            await request_json(client, "POST", "/update_weight_version", json={"new_version": label})
        finally:
            await request_json(client, "POST", "/resume")

    async def encode(self, client: Client, model: str, text: str) -> list[int] | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return list((await request_json(client, "POST", "/tokenize", json=body))["tokens"])


def _first_choice(client: Client, body: Any) -> Any:
    try:
        return body["choices"][0]
    except (LookupError, TypeError) as error:
        raise EngineError(f"{client.base_url}: a response without choices: {str(body)[:100]}") from error


def _generate_chunk(choice: Any, is_whole: bool) -> CompletionChunk:
    content = (choice.get("logprobs") or {}).get("content") or []
    spans = [(span["version"], span["start"], span["end"]) for span in choice.get("weight_versions") or ()]
    tokens = list(choice.get("token_ids") or ())
    return CompletionChunk(tokens, [each["logprob"] for each in content], _finish(choice, is_whole), spans)


def _completions_chunk(choice: Any, is_whole: bool) -> CompletionChunk:
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if choice.get("token_ids") is None:
        raise EngineError("the server returns no token ids (return_token_ids): it is too old to train with")
    return CompletionChunk(list(choice["token_ids"]), [float(x) for x in logprobs], _finish(choice, is_whole))


def _finish(choice: Any, is_whole: bool) -> FinishReason | None:
    reason = choice.get("finish_reason")
    return None if reason is None and not is_whole else FINISH.get(str(reason), FinishReason.ABORT)


class SglangServer:
    """SGLang's native interface (0.5.1 or newer). An update waits for running requests, so each request has one
    version."""

    name = "SGLang"
    hint = " It must not run with SGLANG_RETURN_ORIGINAL_LOGPROB, or with another model."
    context_option = "--context-length"

    def __init__(self, info_path: str = "/model_info", reports_version: bool = True):
        self.info_path, self.reports_version = info_path, reports_version

    @property
    def cannot_train(self) -> str:
        return "" if self.reports_version else "it does not report which weights it has: use SGLang 0.5.1 or newer"

    @classmethod
    async def detect(cls, client: Client) -> SglangServer | None:
        for path in ("/model_info", "/get_model_info"):  # the second is the older name
            if await has_route(client, path):
                info = await request_json(client, "GET", path)
                if await has_route(client, "/health"):
                    await request_json(client, "GET", "/health")  # 503 while it starts or ends
                return cls(path, isinstance(info, Mapping) and "weight_version" in info)
        return None

    async def sample(
        self, client: Client, model: str, prompt: list[int], sampling: Sampling, params: Mapping[str, Any], stream: bool
    ) -> AsyncGenerator[CompletionChunk, None]:
        """SGLang also ends at the model's own end tokens; `ignore_eos` would ignore the stop tokens too. A completion
        that ended at a token that is no stop token of this request is continued."""
        same = {name: params[name] for name in ("temperature", "top_p", "min_p", "stop_token_ids")}
        renamed = {
            "top_k": params["top_k"] or -1, "sampling_seed": int(params["seed"]) % 2**31,
            "stop": list(sampling.stop_texts), "no_stop_trim": True,
        }  # fmt: skip
        tokens: list[int] = []
        spans: list[tuple[str, int, int]] = []
        most, continues = int(params["max_tokens"]), True
        while continues:
            length = {"max_new_tokens": most - len(tokens)}
            body = {"input_ids": prompt + tokens, "sampling_params": same | renamed | length, "return_logprob": True}
            begin, continues = len(tokens), False
            async for event in self._events(client, body, stream):
                pairs, finish, label = _sglang_event(client, event, len(tokens) - begin)
                tokens += [token for token, _ in pairs]
                if label is not None and pairs:
                    spans.append((label, len(tokens) - len(pairs), len(tokens)))
                reason = None if finish is None else FINISH.get(str(finish.get("type")), FinishReason.ABORT)
                own_end = reason is FinishReason.STOP and not isinstance((finish or {}).get("matched"), str)
                if own_end and len(tokens) > begin and tokens[-1] not in params["stop_token_ids"]:
                    continues, reason = len(tokens) < most, FinishReason.LENGTH
                ends = reason is not None and not continues
                yield CompletionChunk(
                    [token for token, _ in pairs], [logprob for _, logprob in pairs], reason if ends else None,
                    list(spans) if ends else [],
                )  # fmt: skip

    async def _events(self, client: Client, body: dict[str, Any], stream: bool) -> AsyncIterator[Any]:
        if not stream:
            yield await request_json(client, "POST", "/generate", json=body | {"stream": False})
            return
        async for event in stream_events(client, "/generate", body | {"stream": True}):
            yield event

    async def label(self, client: Client) -> str:
        return str((await request_json(client, "GET", self.info_path)).get("weight_version", ""))

    async def update(self, client: Client, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        result = await request_json(client, "POST", "/update_weights_from_disk", UPDATE_SECONDS, json=body)
        if not result.get("success"):
            raise EngineError(f"{client.base_url}: refused the weights: {result.get('message')}")

    async def encode(self, client: Client, model: str, text: str) -> list[int] | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return list((await request_json(client, "POST", "/tokenize", json=body))["tokens"])
        except EngineError:  # older versions have no such route
            return None


def _sglang_event(
    client: Client, event: Any, seen: int
) -> tuple[list[tuple[int, float]], Mapping[str, Any] | None, str | None]:
    """New tokens with log-probabilities, the finish reason and the label of the weights. A streamed event has all
    tokens so far, or with `--incremental-streaming-output` the new ones only."""
    try:
        meta = event["meta_info"]
        listed, finish, label = meta["output_token_logprobs"], meta.get("finish_reason"), meta.get("weight_version")
        count = int(meta.get("output_token_logprobs_length", len(listed))) - seen
        pairs = [(int(pair[1]), float(pair[0])) for pair in (listed[-count:] if count > 0 else [])]
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(
            f"{client.base_url}: a response without meta_info.output_token_logprobs: {str(event)[:200]}"
        ) from error
    tokens, ids = [token for token, _ in pairs], event.get("output_ids")
    if tokens and ids is not None and list(ids)[-len(tokens) :] != tokens:
        raise EngineError(f"{client.base_url}: output_ids and output_token_logprobs have other tokens")
    finish = {"type": finish} if isinstance(finish, str) else finish
    return pairs, finish, None if label is None else str(label)


class ChatServer:
    """A server that takes and returns messages: it can be evaluated and not trained."""

    name = "chat"
    hint = ""
    context_option = "its option of the context length,"
    cannot_train = (
        "it takes and returns text, without token ids, log-probabilities and weight versions. Use it with `arborl "
        "evaluate`; for training use a vLLM or SGLang server"
    )

    async def chat(
        self, client: Client, model: str, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling
    ) -> tuple[Message, FinishReason]:
        body: dict[str, Any] = {
            "model": model,
            "messages": [message_to_dict(message) for message in messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,
        }
        if sampling.stop_texts:
            body["stop"] = list(sampling.stop_texts)
        if tools:
            body["tools"] = [{"type": "function", "function": asdict(tool)} for tool in tools]
        choice = _first_choice(client, await request_json(client, "POST", "/v1/chat/completions", json=body))
        reply = choice.get("message") or {}
        calls = tuple(_tool_call(each) for each in reply.get("tool_calls") or ())
        message = Message("assistant", reply.get("content") or "", calls, sampled=not calls)
        return message, FINISH.get(str(choice.get("finish_reason")), FinishReason.STOP)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") or {}
    name, text = str(function.get("name", "")), function.get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        return ToolCall(str(call.get("id", "")), name, {}, f"arguments are no JSON: {error}")
    return ToolCall(str(call.get("id", "")), name, arguments if isinstance(arguments, dict) else {})


def message_to_dict(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls and not message.sampled:
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return found | {name: value for name, value in optional.items() if value is not None}


TokenServer = VllmServer | SglangServer
Server = TokenServer | ChatServer


async def detect_server(
    client: Client, named: str | None, chat: bool = False, kind: str = "http"
) -> tuple[Server, ServerInfo]:
    """The kind of a server and its model; `chat` uses the chat endpoint of any kind, `kind=sglang` accepts SGLang
    only."""
    url = str(client.base_url).rstrip("/")
    server: Server | None = None
    if kind == "sglang":
        server = await SglangServer.detect(client)
        if server is None:
            raise EngineError(f"{url} is not an SGLang server: it has no /model_info. Write engine=http for others")
    elif not chat:
        server = await VllmServer.detect(client) or await SglangServer.detect(client)
    models = await request_json(client, "GET", "/v1/models")
    listed = {str(one.get("id")): one for one in (models or {}).get("data") or () if not one.get("parent")}
    if len(listed) == 1 and (named is None or isinstance(server, SglangServer)):
        named = next(iter(listed))  # SGLang's name of a model is the folder of the last update
    if named not in listed:
        remedy = "write engine.args.model=NAME" if named is None else f"engine.args.model={named} is not among them"
        raise EngineError(f"{url} serves {', '.join(listed) or 'no model'}: {remedy}")
    assert named is not None
    context = listed[named].get("max_model_len")
    return server or ChatServer(), ServerInfo(named, int(context) if context is not None else None)
