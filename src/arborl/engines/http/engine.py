"""Servers of one model, asked over HTTP; which of them a request goes to, `arborl.engines.replicas` says.

A server that comes back is given the newest weights, and asked whether it has them, before its first request. A
completion counts only if the weights that sampled it are known to be ours: a server that was restarted unseen answers
from those it began with.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from arborl.chat import Renderer
from arborl.engines.checks import check_sampling, read_prompt
from arborl.engines.copies import PROMPT, Probe, params
from arborl.engines.draw_tokens import StopTexts
from arborl.engines.engine import Weights, told
from arborl.engines.http.files import WeightFiles
from arborl.engines.http.replicas import (
    Clients,
    ServerReplica,
    client_of,
    compare_tokenizers,
    key_of,
    said_it,
    versions_from,
)
from arborl.engines.http.servers import ChatServer, Client, Piece, meet
from arborl.engines.replicas import Replicas, Unreachable, now
from arborl.errors import EngineError
from arborl.types import Completion, FinishReason, Message, Metrics, Sampling, ToolSpec

log = logging.getLogger(__name__)


class HttpEngine:
    """Servers of one model.

    Args:
        model: the learner's.
        urls: the servers.
        max_context: longest prompt and completion together.
        max_requests: under way at each server; where all have so many, no further episodes are begun.
        dtype: what the servers compute in; `auto` is the model's.
        named: what they call their model; without it, the one they have.
        weights_dir: where weights are put for them.
        seconds: what a request may take, and how long to wait where no server answers.
        key: the environment variable that holds their key.
        sampling: how the run draws tokens, for the probe after an update.
        renderer: the run's, whose tokenizer must be theirs; without one, it is not compared.
        training: whether they are to be given weights. Else they are asked as they are.
        chats: only chat with them, whoever they are.
    """

    proves_weights = True

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
    ):
        self.model, self.max_context, self.max_requests = model, max_context, max_requests
        self.vocabulary = int(model.config.vocab_size)
        self.named, self.seconds, self.renderer, self.training = named, seconds, renderer, training
        self.decode = renderer.tokenizer.decode if renderer is not None else None
        self.follows_weights, self.chats = training, chats
        self.headers = {"Authorization": f"Bearer {key_of(key)}"} if key is not None else {}
        self.replicas = [ServerReplica(url.rstrip("/")) for url in urls]
        self.routes = Replicas(self.replicas, self._revive, seconds)
        self.run = uuid.uuid4().hex[:8]
        """In the labels of our versions: nobody else's weights carry it."""
        self.version = 0
        self.weights: Weights = dict(model.state_dict())
        kind = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        self.probe = Probe(model, sampling or Sampling(), kind)
        self.counts = dict.fromkeys(("sampled", "requests"), 0.0)
        self.gap = self.update_seconds = 0.0
        """Of the last update: how far its probe was off, and how long it took."""
        self.closed = False
        self._clients: Clients | None = None
        self.files = WeightFiles(model, weights_dir) if training else None
        try:
            now(self._open())
        except BaseException:
            if self.files is not None:
                self.files.close()
            raise
        self.chat = self._chat if isinstance(self.replicas[0].server, ChatServer) else None

    # ------------------------------------------------------------------------------------------ as an engine

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of `prompt` at the session's server, or at another where that one is gone."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        tokens = read_prompt(prompt, self.vocabulary, self.max_context).tolist()
        check_sampling(sampling)
        if sampling.stop_texts and self.decode is None:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        began = time.perf_counter()
        done = await self.routes.ask(session, lambda replica: self._ask(replica, tokens, sampling))
        if self.closed:
            raise EngineError("the engine was closed")
        self.counts["sampled"] += len(done.tokens)
        self.counts["requests"] += 1
        return replace(done, seconds=time.perf_counter() - began)

    async def _ask(self, replica: ServerReplica, prompt: list[int], sampling: Sampling) -> Completion:
        """One answer of one server, whose weights are ours; Unreachable where they are not."""
        server, client, facts = replica.server, self._client(replica), replica.facts
        assert server is not None
        assert facts is not None
        if isinstance(server, ChatServer):
            raise EngineError(f"{replica.url} only chats: it takes no token ids")
        began_at = replica.version
        stops = StopTexts(self.decode, sampling.stop_texts) if self.decode and sampling.stop_texts else None
        how = params(sampling, self.max_context, len(prompt))
        pieces = server.sample(client, facts.model, prompt, sampling, how, bool(stops or sampling.seconds))
        tokens, logprobs, last = list[int](), list[float](), Piece([], [])
        try:
            async with asyncio.timeout(sampling.seconds), aclosing(pieces):
                async for last in pieces:
                    if len(last.tokens) != len(last.logprobs):
                        raise EngineError(f"{replica.url}: {len(last.tokens)} tokens, {len(last.logprobs)} scores")
                    for token, logprob in zip(last.tokens, last.logprobs, strict=True):
                        tokens.append(token)
                        logprobs.append(logprob)
                        if stops is not None and said_it(stops, tokens):
                            last = Piece([], [], FinishReason.STOP)
                            break
                    if last.finish is not None:
                        break
        except TimeoutError:
            last = Piece([], [], FinishReason.ABORT)
        if last.finish is None:
            raise Unreachable(f"{replica.url}: its answer broke off")
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("the model's output for this prompt is not finite (NaN or infinite)")
        versions = [self.version] * len(tokens)
        if self.training:
            versions = await versions_from(replica, client, last, len(tokens), began_at, self.run)
        version, mixed = told(versions, self.version)
        return Completion(tuple(tokens), tuple(logprobs), last.finish, version, versions=mixed)

    async def _chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling, *, session: str
    ) -> tuple[Message, FinishReason]:
        """The next message, from a server that only chats."""

        async def ask(replica: ServerReplica) -> tuple[Message, FinishReason]:
            assert isinstance(replica.server, ChatServer)
            assert replica.facts is not None
            return await replica.server.chat(self._client(replica), replica.facts.model, messages, tools, sampling)

        return await self.routes.ask(session, ask)

    async def load(self, weights: Weights, version: int) -> None:
        """Give every server the weights, and see that they have arrived; one that fails gets them when it is back."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        if not self.training:
            return
        began = time.perf_counter()
        await self.routes.settle(await self._publish(weights, version))
        self.update_seconds = time.perf_counter() - began

    async def _publish(self, weights: Weights, version: int) -> dict[ServerReplica, EngineError]:
        """All servers that answer have the weights; except for these."""
        assert self.files is not None
        if weights or self.files.folder is None:
            self.weights = dict(weights) or self.weights
            await asyncio.to_thread(self.files.write, self.weights, version)
        folder = self.files.folder
        assert folder is not None
        errors = await self.routes.publish(version, lambda replica: self._update(replica, folder))
        self.version = version
        self.files.only(folder)
        return errors

    async def _update(self, replica: ServerReplica, folder: Path, unless_held: bool = False) -> None:
        """Give one server the weights, and ask whether it has them. Who was away for a moment has them still."""
        server, client = replica.server, self._client(replica)
        assert server is not None
        assert not isinstance(server, ChatServer)
        version = self.routes.coming
        label = f"{self.run}:{version}"
        if not unless_held or await server.label(client) != label:
            await server.update(client, folder, label)
        if (held := await server.label(client)) != label:
            raise EngineError(f"{replica.url} was given weights {label} and says that it holds {held!r}")
        replica.version = version
        said = await self._ask(replica, list(PROMPT), self.probe.question)
        self.gap = self.probe.check(said, self.weights, replica.url, server.hint)

    async def close(self) -> None:
        """Whoever still waits is told; servers go on with the weights they have."""
        self.closed = True
        self.routes.close()
        if self._clients is not None and self._clients.loop is asyncio.get_running_loop():
            await self._leave()
        if self.files is not None:
            self.files.close()

    @property
    def crowded(self) -> bool:
        """Whether every server has as much as it is to have."""
        return self.routes.crowded(self.max_requests)

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, requests, those sent again, servers lost and for how long; servers that
        answer now; and of the last update its seconds and its probe."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        return (
            {f"engine/{name}": value for name, value in counts.items()}
            | self.routes.metrics()
            | {
                "engine/update_seconds": self.update_seconds,
                "engine/probe_gap": self.gap,
            }
        )

    # ------------------------------------------------------------------------------------------ servers

    async def _open(self) -> None:
        """Everything that can be wrong with the servers is found here. All must answer, for a name may be wrong."""
        try:
            for replica in self.replicas:
                await self._meet(replica)
                replica.up = True
            kinds = {type(replica.server) for replica in self.replicas}
            if len(kinds) > 1:
                raise EngineError("engine.urls: servers of several kinds. Name servers of one kind")
            if self.training:
                for error in (await self._publish(self.model.state_dict(), 0)).values():
                    raise error
            else:
                log.warning("%s: measured as it is; it is not given the weights of model.name", self.replicas[0].url)
        finally:
            await self._leave()

    async def _leave(self) -> None:
        """Close what belongs to this loop."""
        self.routes.leave()
        clients, self._clients = self._clients, None
        for client in clients.by_url.values() if clients is not None else ():
            await client.aclose()

    async def _meet(self, replica: ServerReplica) -> None:
        """See who answers, that it can do what is wanted, and that it is of this model."""
        client = self._client(replica)
        replica.server, replica.facts = await meet(client, self.named, self.chats)
        if self.training and replica.server.cannot_train:
            raise EngineError(f"{replica.url} cannot be trained with: {replica.server.cannot_train}")
        context = replica.facts.context
        if context is not None and context < self.max_context:
            raise EngineError(
                f"{replica.url} reads {context} tokens, and sampling.max_context={self.max_context}. Start it with "
                f"--max-model-len {self.max_context}, or write sampling.max_context={context}"
            )
        if self.renderer is not None:
            await compare_tokenizers(replica, client, self.renderer)

    async def _revive(self, replica: ServerReplica) -> None:
        """Give a server that answers again the newest weights."""
        await self._meet(replica)
        if not self.training:
            replica.version = self.routes.coming
            return
        assert self.files is not None
        assert self.files.folder is not None
        await self._update(replica, self.files.folder, unless_held=True)

    def _client(self, replica: ServerReplica) -> Client:
        loop = asyncio.get_running_loop()
        if self._clients is None or self._clients.loop is not loop:
            self._clients = Clients(loop)
        if replica.url not in self._clients.by_url:
            made = client_of(replica.url, self.headers, self.seconds, self.max_requests)
            self._clients.by_url[replica.url] = made
        return self._clients.by_url[replica.url]
