"""Sampling by HTTP servers of one model; `replicas.py` selects the server of a request.

A server that comes back gets the newest weights, and its copy is verified, before its first request. A completion
counts only if the server reports weights of this run: one that was restarted meanwhile answers from the weights it was
started with.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import httpx
from transformers import PreTrainedModel

from arborl.chat import Renderer
from arborl.engines.engine import TokenListener, Weights, completion_versions
from arborl.engines.engine_requests import StopTextMatcher
from arborl.engines.remote.http_servers import (
    ChatServer,
    Client,
    CompletionChunk,
    Server,
    ServerInfo,
    SglangServer,
    TokenServer,
    detect_server,
)
from arborl.engines.remote.replicas import Replica, ReplicaPool, ReplicaUnavailable, run_blocking
from arborl.engines.remote.weight_sync import (
    PROBE_PROMPT,
    SyncedEngine,
    WeightFiles,
    label_version,
    sampling_params,
    span_versions,
)
from arborl.errors import EngineError
from arborl.types import Completion, FinishReason, Message, Metrics, Sampling, ToolSpec

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 2.0
"""Shorter than the servers' own (5 s); otherwise a request may use a connection that the server is closing."""
TOKENIZER_TEXT = "Hello, world! 12 + 30 = 42\n\tdef f(x): return x ** 2  # éß 你好"
"""A text that different tokenizers are unlikely to split alike."""


@dataclass(eq=False, slots=True)
class ServerReplica(Replica):
    """One server; its name is its URL."""

    server: Server | None = None
    info: ServerInfo | None = None

    @property
    def url(self) -> str:
        return self.name

    @property
    def token_server(self) -> TokenServer:
        assert self.server is not None
        if isinstance(self.server, ChatServer):
            raise EngineError(f"{self.url} only chats: it takes no token ids")
        return self.server

    @property
    def model(self) -> str:
        assert self.info is not None
        return self.info.model


class HttpEngine(SyncedEngine):
    """Servers of one model.

    Args:
        max_requests: concurrent requests per server; no new episodes start while all servers have so many.
        named: the servers' name of the model; the only one they serve by default.
        weights_dir: folder for weights that the servers read.
        seconds: timeout of a request, and of waiting while no server answers.
        key: environment variable with the API key.
        sampling: the run's sampling parameters, for the probe after an update.
        renderer: the run's; its tokenizer must equal the servers'. Without one it is not compared.
        training: whether the servers get weights; otherwise they are evaluated as they are.
        chats: use the chat endpoint of any server.
        kind: `http` for servers of any kind, `sglang` for SGLang only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        urls: Sequence[str],
        max_context: int = 1024,
        max_requests: int = 256,
        dtype: str = "auto",
        named: str | None = None,
        weights_dir: Path | None = None,
        seconds: float = 600.0,
        key: str | None = None,
        sampling: Sampling | None = None,
        renderer: Renderer | None = None,
        training: bool = True,
        chats: bool = False,
        kind: Literal["http", "sglang"] = "http",
    ):
        super().__init__(model, max_context, renderer.tokenizer.decode if renderer else None, dtype, sampling)
        self.max_requests, self.named, self.seconds = max_requests, named, seconds
        self.renderer, self.training = renderer, training
        self.follows_weights, self.chats, self.kind = training, chats, kind
        self.headers = {"Authorization": f"Bearer {api_key(key)}"} if key is not None else {}
        self.replicas = [ServerReplica(url.rstrip("/")) for url in urls]
        self.routes = ReplicaPool(self.replicas, self._revive, seconds)
        self.weights: Weights = dict(model.state_dict())
        self._clients: dict[str, Client] = {}
        """By URL, of the event loop `_loop`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.files = WeightFiles(model, weights_dir) if training else None
        try:
            run_blocking(self._open())
        except BaseException:
            if self.files is not None:
                self.files.close()
            raise
        self.chat = self._chat if isinstance(self.replicas[0].server, ChatServer) else None

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        tokens = self.checked_prompt(prompt, sampling)
        started = time.perf_counter()
        completion = await self.routes.ask(session, lambda replica: self._request(replica, tokens, sampling))
        if self.closed:
            raise EngineError("the engine was closed")
        self.counts["sampled"] += len(completion.tokens)
        self.counts["requests"] += 1
        return replace(completion, seconds=time.perf_counter() - started)

    async def _request(self, replica: ServerReplica, prompt: list[int], sampling: Sampling) -> Completion:
        """A completion by one server; ReplicaUnavailable if its weights are not this run's."""
        server, client = replica.token_server, self._client(replica)
        version_before = replica.version
        stops = StopTextMatcher.make(self.decode, sampling)
        params = sampling_params(sampling, self.max_context, len(prompt))
        chunks = server.sample(client, replica.model, prompt, sampling, params, bool(stops or sampling.seconds))
        tokens, logprobs, last = list[int](), list[float](), CompletionChunk([], [])
        try:
            async with asyncio.timeout(sampling.seconds), aclosing(chunks):
                async for last in chunks:
                    if len(last.tokens) != len(last.logprobs):
                        raise EngineError(f"{replica.url}: {len(last.tokens)} tokens, {len(last.logprobs)} logprobs")
                    for token, logprob in zip(last.tokens, last.logprobs, strict=True):
                        tokens.append(token)
                        logprobs.append(logprob)
                        if stops is not None and stops.reached(tokens):
                            last = CompletionChunk([], [], FinishReason.STOP)
                            break
                    if last.finish is not None:
                        break
        except TimeoutError:
            last = CompletionChunk([], [], FinishReason.ABORT)
        if last.finish is None:
            raise ReplicaUnavailable(f"{replica.url}: its response ended early")
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("the model's output for this prompt is not finite (NaN or infinite)")
        versions = [self.version] * len(tokens)
        if self.training:
            versions = await self._versions(replica, last, len(tokens), version_before)
        version, mixed = completion_versions(versions, self.version)
        return Completion(tuple(tokens), tuple(logprobs), last.finish, version, versions=mixed)

    async def _versions(
        self, replica: ServerReplica, last: CompletionChunk, count: int, before: int | None
    ) -> list[int]:
        """The policy version of each of `count` tokens; ReplicaUnavailable if the server has other weights."""
        versions = span_versions(last.spans, count, self.run)
        if count and len(versions) == count:
            return versions
        current = label_version(await replica.token_server.label(self._client(replica)), self.run)
        if last.spans or current is None or before is None:
            replica.version = None
            raise ReplicaUnavailable(f"{replica.url}: it was restarted, and holds other weights")
        return [before] * count

    async def _chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling, *, session: str
    ) -> tuple[Message, FinishReason]:
        async def request(replica: ServerReplica) -> tuple[Message, FinishReason]:
            assert isinstance(replica.server, ChatServer)
            return await replica.server.chat(self._client(replica), replica.model, messages, tools, sampling)

        return await self.routes.ask(session, request)

    async def load(self, weights: Weights, version: int) -> None:
        """Send the weights to every server and verify them; a server that fails gets them when it is back."""
        self.check_open()
        if not self.training:
            return
        started = time.perf_counter()
        await self.routes.settle(await self._publish(weights, version))
        self.update_seconds = time.perf_counter() - started

    async def _publish(self, weights: Weights, version: int) -> dict[ServerReplica, EngineError]:
        """Send the weights to all servers that are up; returns the errors of those that failed."""
        assert self.files is not None
        if weights or self.files.folder is None:
            self.weights = dict(weights) or self.weights
            await asyncio.to_thread(self.files.write, self.weights, version)
        folder = self.files.folder
        assert folder is not None
        errors = await self.routes.publish(version, lambda replica: self._update(replica, folder))
        self.version = version
        self.files.remove_others(folder)
        return errors

    async def _update(self, replica: ServerReplica, folder: Path, unless_current: bool = False) -> None:
        server, client = replica.token_server, self._client(replica)
        version = self.routes.target_version
        label = f"{self.run}:{version}"
        if not unless_current or await server.label(client) != label:
            await server.update(client, folder, label)
        if (reported := await server.label(client)) != label:
            raise EngineError(f"{replica.url} was given weights {label} and reports {reported!r}")
        replica.version = version
        completion = await self._request(replica, list(PROBE_PROMPT), self.probe.question)
        self.gap = self.probe.check(completion, self.weights, replica.url, server.hint)

    async def close(self) -> None:
        self.closed = True
        self.routes.close()
        if self._loop is asyncio.get_running_loop():
            await self._leave_loop()
        if self.files is not None:
            self.files.close()

    @property
    def is_saturated(self) -> bool:
        return self.routes.is_saturated(self.max_requests)

    def metrics(self) -> Metrics:
        """Also retries, lost servers and seconds, and servers that are up."""
        return super().metrics() | self.routes.metrics()

    # ------------------------------------------------------------------------------------------ servers

    async def _open(self) -> None:
        """Connect to all servers and check them. All must answer at the start: a URL may be wrong."""
        try:
            for replica in self.replicas:
                await self._connect(replica)
                replica.up = True
            if len({type(replica.server) for replica in self.replicas}) > 1:
                raise EngineError("engine.args.urls: servers of several kinds. Name servers of one kind")
            if self.training:
                for error in (await self._publish(self.model.state_dict(), 0)).values():
                    raise error
            else:
                log.warning("%s: evaluated as it is; it does not get the weights of model.name", self.replicas[0].url)
        finally:
            await self._leave_loop()

    async def _leave_loop(self) -> None:
        self.routes.leave_loop()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    async def _connect(self, replica: ServerReplica) -> None:
        """Detect the server's kind, and check its abilities, context and tokenizer."""
        client = self._client(replica)
        replica.server, replica.info = await detect_server(client, self.named, self.chats, self.kind)
        if self.training and replica.server.cannot_train:
            raise EngineError(f"{replica.url} cannot be trained with: {replica.server.cannot_train}")
        if self.training and isinstance(replica.server, SglangServer):
            check_untruncated(self.probe.sampling, replica.url)
        context = replica.info.context
        if context is not None and context < self.max_context:
            raise EngineError(
                f"{replica.url} reads {context} tokens, and sampling.max_context={self.max_context}. Start it with "
                f"{replica.server.context_option} {self.max_context}, or write sampling.max_context={context}"
            )
        if self.renderer is not None and not isinstance(replica.server, ChatServer):
            await self._compare_tokenizers(replica, client, self.renderer)

    async def _compare_tokenizers(self, replica: ServerReplica, client: Client, renderer: Renderer) -> None:
        theirs = await replica.token_server.encode(client, replica.model, TOKENIZER_TEXT)
        ours = list(renderer.tokenizer.encode(TOKENIZER_TEXT))
        if theirs is not None and theirs != ours:
            raise EngineError(
                f"{replica.url} has another tokenizer: it splits {TOKENIZER_TEXT[:13]!r}… into {len(theirs)} tokens, "
                f"{theirs[:4]}…, and model.name's into {len(ours)}, {ours[:4]}…. Serve the model of model.name"
            )

    async def _revive(self, replica: ServerReplica) -> None:
        await self._connect(replica)
        if not self.training:
            replica.version = self.routes.target_version
            return
        assert self.files is not None
        assert self.files.folder is not None
        await self._update(replica, self.files.folder, unless_current=True)

    def _client(self, replica: ServerReplica) -> Client:
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._clients = asyncio.get_running_loop(), {}
        if replica.url not in self._clients:
            self._clients[replica.url] = make_client(replica.url, self.headers, self.seconds, self.max_requests)
        return self._clients[replica.url]


def make_client(url: str, headers: dict[str, str], seconds: float, requests: int) -> Client:
    """A client of a server with a timeout per request and one kept connection per concurrent request."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=requests, keepalive_expiry=KEEPALIVE_SECONDS
    )  # fmt: skip
    timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


def check_untruncated(sampling: Sampling, url: str) -> None:
    """Raise EngineError for truncated sampling: SGLang's log-probabilities are those of the whole distribution."""
    truncated = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    if names := [name for name, is_set in truncated.items() if is_set]:
        off = {"top_k": 0, "top_p": 1, "min_p": 0}
        raise EngineError(
            f"{url} is an SGLang server, whose log-probabilities do not include sampling.{names[0]}. Write "
            f"sampling.{names[0]}={off[names[0]]}, or use vLLM"
        )


def api_key(variable: str) -> str:
    if not (found := os.environ.get(variable)):
        raise EngineError(
            f"engine.args.api_key_env={variable}: there is no such environment variable. Set it to the key"
        )
    return found
