"""Which server a request goes to, and what happens when one goes or comes back.

Calls of one episode go to one server, which has read its beginning; a new episode goes to the one with the least to do.
A server that fails is left alone, and its requests go to others. When it answers again it is given the newest weights,
and asked whether it has them, before its first request. A completion counts only if the weights that sampled it are
known to be ours: a server that was restarted unseen answers from those it began with.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from arborl.chat import Renderer
from arborl.engines.checks import check_sampling, read_prompt
from arborl.engines.copies import PROMPT, OtherWeights, Probe, params
from arborl.engines.draw_tokens import StopTexts
from arborl.engines.engine import Weights, told
from arborl.engines.http.files import WeightFiles
from arborl.engines.http.replicas import (
    Here,
    Replica,
    client_of,
    compare_tokenizers,
    key_of,
    now,
    said_it,
    versions_from,
)
from arborl.engines.http.servers import ChatServer, Client, Piece, Unreachable, meet
from arborl.errors import EngineError
from arborl.types import Completion, Finish, Message, Metrics, Sampling, ToolSpec

log = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds between two attempts to reach a server that is gone."""
SESSIONS = 20_000
"""Episodes whose server is remembered."""


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
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self.sessions: OrderedDict[str, Replica] = OrderedDict()
        self.run = uuid.uuid4().hex[:8]
        """In the labels of our versions: nobody else's weights carry it."""
        self.version, self.coming = 0, 0
        self.weights: Weights = dict(model.state_dict())
        kind = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
        self.probe = Probe(model, sampling or Sampling(), kind)
        self.counts = dict.fromkeys(("sampled", "requests", "retried", "lost"), 0.0)
        self.gap = self.update_seconds = 0.0
        """Of the last update: how far its probe was off, and how long it took."""
        self.closed = False
        self._here: Here | None = None
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
        while True:
            replica = await self._choose(session)
            replica.busy += 1
            try:
                done = await self._ask(replica, tokens, sampling)
            except Unreachable as error:
                self._lose(replica, str(error))
                self.counts["retried"] += 1
                continue
            finally:
                replica.busy -= 1
            if self.closed:
                raise EngineError("the engine was closed")
            self.counts["sampled"] += len(done.tokens)
            self.counts["requests"] += 1
            return replace(done, seconds=time.perf_counter() - began)

    async def _ask(self, replica: Replica, prompt: list[int], sampling: Sampling) -> Completion:
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
                            last = Piece([], [], Finish.STOP)
                            break
                    if last.finish is not None:
                        break
        except TimeoutError:
            last = Piece([], [], Finish.ABORT)
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
    ) -> tuple[Message, Finish]:
        """The next message, from a server that only chats."""
        while True:
            replica = await self._choose(session)
            assert isinstance(replica.server, ChatServer)
            assert replica.facts is not None
            replica.busy += 1
            try:
                return await replica.server.chat(self._client(replica), replica.facts.model, messages, tools, sampling)
            except Unreachable as error:
                self._lose(replica, str(error))
                self.counts["retried"] += 1
            finally:
                replica.busy -= 1

    async def load(self, weights: Weights, version: int) -> None:
        """Give every server the weights, and see that they have arrived; one that fails gets them when it is back."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        if not self.training:
            return
        began = time.perf_counter()
        errors = await self._publish(weights, version)
        for replica, error in errors.items():
            self._lose(replica, str(error))
        if not any(replica.up for replica in self.replicas):
            for error in errors.values():
                if not isinstance(error, Unreachable):  # no waiting will mend it
                    raise error
            await self._choose("update")  # waits for one to come back with these weights, or says why none does
        self.update_seconds = time.perf_counter() - began

    async def _publish(self, weights: Weights, version: int) -> dict[Replica, EngineError]:
        """All servers that answer have the weights; except for these."""
        assert self.files is not None
        if weights or self.files.folder is None:
            self.weights = dict(weights) or self.weights
            await asyncio.to_thread(self.files.write, self.weights, version)
        folder = self.files.folder
        assert folder is not None
        self.coming = version
        coming, self._in_loop().coming = self._in_loop().coming, {}
        for task in coming.values():
            task.cancel()  # it may be about to hand out the weights before these
        self._look_after()
        up = [replica for replica in self.replicas if replica.up]
        outcomes = await asyncio.gather(*(self._update(replica, folder) for replica in up), return_exceptions=True)
        errors: dict[Replica, EngineError] = {}
        for replica, outcome in zip(up, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                errors[replica] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        self.version = version
        self.sessions.clear()  # what a server had read of an episode must be read again in any case
        self.files.only(folder)
        return errors

    async def _update(self, replica: Replica, folder: Path, unless_held: bool = False) -> None:
        """Give one server the weights, and ask whether it has them. Who was away for a moment has them still."""
        server, client = replica.server, self._client(replica)
        assert server is not None
        assert not isinstance(server, ChatServer)
        version = self.coming
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
        here, self._here = self._here, None
        if here is not None and here.loop is asyncio.get_running_loop():
            for task in here.coming.values():
                task.cancel()
            here.changed.set()
            for client in here.clients.values():
                await client.aclose()
        if self.files is not None:
            self.files.close()

    @property
    def crowded(self) -> bool:
        """Whether every server has as much as it is to have."""
        up = [replica for replica in self.replicas if replica.up]  # where none is, requests find out and say so
        return bool(up) and all(replica.busy >= self.max_requests for replica in up)

    def metrics(self) -> Metrics:
        """Since the last call: tokens sampled, requests, those sent again, servers lost; servers that answer now; and
        of the last update its seconds and its probe."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        up = float(sum(replica.up for replica in self.replicas))
        return {f"engine/{name}": value for name, value in counts.items()} | {
            "engine/servers": up,
            "engine/update_seconds": self.update_seconds,
            "engine/probe_gap": self.gap,
        }

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
        here, self._here = self._here, None
        if here is not None:
            for client in here.clients.values():
                await client.aclose()

    async def _meet(self, replica: Replica) -> None:
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

    async def _choose(self, session: str) -> Replica:
        """The session's server; else the one with the least to do. Waits where none answers, and then says why."""
        here, until = self._in_loop(), time.perf_counter() + self.seconds
        while True:
            self._look_after()
            up = [replica for replica in self.replicas if replica.up]
            if up:
                chosen = self.sessions.get(session)
                if chosen is None or not chosen.up:
                    chosen = min(up, key=lambda replica: replica.busy)
                self.sessions[session] = chosen
                self.sessions.move_to_end(session)
                while len(self.sessions) > SESSIONS:
                    self.sessions.popitem(last=False)
                return chosen
            here.changed.clear()
            try:
                await asyncio.wait_for(here.changed.wait(), max(0.0, until - time.perf_counter()))
            except TimeoutError:
                why = "; ".join(f"{replica.why}" for replica in self.replicas)
                raise EngineError(f"no server has answered for {self.seconds:g} s: {why}") from None
            if self.closed:
                raise EngineError("the engine was closed")

    def _look_after(self) -> None:
        """See that somebody tries to get every server back that is gone."""
        here = self._in_loop()
        for replica in self.replicas:
            if not replica.up and (replica.url not in here.coming or here.coming[replica.url].done()):
                here.coming[replica.url] = asyncio.create_task(self._fetch_back(replica))

    def _lose(self, replica: Replica, why: str) -> None:
        """Send nothing there until it has been given the newest weights."""
        replica.why = why
        if replica.up:
            replica.up = False
            self.counts["lost"] += 1
            log.warning("a server is left alone until it answers again: %s", why)
        self._look_after()

    async def _fetch_back(self, replica: Replica) -> None:
        """Try until it answers; give it the newest weights, and only then requests."""
        while not self.closed:
            version = self.coming
            try:
                await self._meet(replica)
                if self.training:
                    assert self.files is not None
                    assert self.files.folder is not None
                    await self._update(replica, self.files.folder, unless_held=True)
            except EngineError as error:
                if replica.why != (why := str(error)) and not isinstance(error, (Unreachable, OtherWeights)):
                    log.warning("a server that answers again is not taken back: %s", why)
                replica.why = why
            else:
                if not self.training or (version == self.coming and replica.version == self.coming):
                    replica.up = True
                    log.warning("%s answers again, with the weights of version %d", replica.url, version)
                    self._in_loop().changed.set()
                    return
            await asyncio.sleep(AGAIN)

    def _client(self, replica: Replica) -> Client:
        if replica.url not in (here := self._in_loop()).clients:
            here.clients[replica.url] = client_of(replica.url, self.headers, self.seconds, self.max_requests)
        return here.clients[replica.url]

    def _in_loop(self) -> Here:
        loop = asyncio.get_running_loop()
        if self._here is None or self._here.loop is not loop:
            self._here = Here(loop)
        return self._here
