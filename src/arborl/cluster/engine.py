"""Engines on a Ray cluster, behind `Engine`: each a process with a copy of the weights (`engine_host.py`).

Which of them a request goes to, and what happens when one goes, is decided as for servers (`arborl.engines.remote.replicas`).
Weights are put into the object store once an update; every node fetches them from there once, and every process of the
node reads them where they are. What was put last stays there, and is what a process is given that takes the place of a
dead one. Where a model has adapters, only these move after the first time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from arborl.cluster.arrays import as_arrays
from arborl.cluster.connection import Actor, Cluster
from arborl.cluster.engine_host import EngineHost, EnginePlan
from arborl.cluster.host import OtherVersions, Told, check_versions
from arborl.cluster.seats import Seat
from arborl.engines.engine import Engine, TokenListener, Weights
from arborl.engines.engine_requests import check_sampling, read_prompt
from arborl.engines.remote.replicas import Replica, ReplicaPool, ReplicaUnavailable, WeightMismatch, run_blocking
from arborl.engines.remote.weight_sync import MAX_COARSE_GAP, MAX_LOGPROB_GAP, PROBE_PROMPT, WeightProbe
from arborl.errors import EngineError
from arborl.models.lora import has_lora
from arborl.types import Completion, Metrics, Sampling

log = logging.getLogger(__name__)

SUMS = ("sampled", "read", "reused", "steps", "preempted", "restarted", "seconds")
"""Counts of an engine that add up over several."""


@dataclass(eq=False, slots=True)
class EngineReplica(Replica):
    """One engine of the cluster."""

    seat: Seat | None = None
    sharing: int = 1
    """Engines on its GPU."""
    actor: Actor | None = None
    told: Told | None = None
    starting: Any = None
    """Its answer to come that it is ready."""
    gone: bool = True
    """It needs a new process."""
    fresh: bool = True
    """It has never been given weights."""
    cpus: int = 1

    @property
    def where(self) -> str:
        return f"{self.name} (process {self.told.pid} on {self.told.address})" if self.told else self.name


class RayEngine(Engine):
    """Several engines.

    Args:
        cluster: where they are.
        model: the learner's.
        seats: the GPU of each engine, or None for one that has none.
        plan: what they are made by.
    """

    follows_weights = verifies_weights = True
    shares_weights = False

    def __init__(
        self,
        cluster: Cluster,
        model: PreTrainedModel,
        seats: Sequence[Seat | None],
        plan: EnginePlan,
    ):
        self.cluster, self.model, made = cluster, model, plan.settings
        self.max_context, self.max_requests = int(made["max_context"]), int(made["max_requests"])
        self.vocabulary, self.decodes = int(model.config.vocab_size), bool(plan.tokenizer)
        placed = cluster.placement
        self.replicas = [
            EngineReplica(f"engine {number}", seat=seat, sharing=seats.count(seat), cpus=placed.cpus_per_engine)
            for number, seat in enumerate(seats)
        ]
        self.routes = ReplicaPool(self.replicas, self._revive, placed.seconds, "engine")
        self.plan = cluster.ray.put(plan)
        self.base: Any = None
        """What does not change, in the object store, where the model has adapters."""
        self.newest: Any = None
        """What changes, as it was last put there."""
        self.probe = WeightProbe(model, plan.sampling, str(model.dtype).removeprefix("torch."))
        self.known: Completion | None = None
        """What an engine with the newest weights says to the probe's question."""
        self.counts = dict.fromkeys((*SUMS, "requests"), 0.0)
        self.held: dict[str, float] = {}
        """The share of its pages that each engine holds."""
        self.gap = self.update_seconds = 0.0
        self.closed = False
        run_blocking(self._open())

    # ------------------------------------------------------------------------------------------ as an engine

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        """Sample a continuation of `prompt` by the session's engine, or by another where that one is gone."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        tokens = read_prompt(prompt, self.vocabulary, self.max_context)
        check_sampling(sampling)
        if sampling.stop_texts and not self.decodes:
            raise EngineError("stop_texts need an engine that can read tokens; give it `decode`")
        began = time.perf_counter()
        said = await self.routes.ask(session, lambda replica: self._ask(replica, tokens, sampling, session))
        if self.closed:
            raise EngineError("the engine was closed")
        self.counts["requests"] += 1
        return replace(said, seconds=time.perf_counter() - began)

    async def _ask(self, replica: EngineReplica, prompt: Any, sampling: Sampling, session: str) -> Completion:
        assert replica.actor is not None
        asked = replica.actor.generate.remote(np.asarray(prompt), sampling, session)
        said, wrong, counts = await self._answer(replica, asked)
        for name in SUMS:
            self.counts[name] += counts.get(f"engine/{name}", 0.0)
        self.held[replica.name] = counts.get("engine/block_usage", 0.0)
        if said is None:
            raise EngineError(f"{replica.name}: {wrong}")
        return said  # type: ignore[no-any-return]

    async def _answer(
        self, replica: EngineReplica, asked: Any, seconds: float | None = None, keep: bool = False
    ) -> Any:
        """What a process answers; Unreachable where it is gone, or answers nothing in time. Who stops waiting ends the
        request there too, unless it is to be kept."""
        errors = self.cluster.ray.exceptions
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked.future()), seconds)
        except asyncio.CancelledError:
            if not keep:
                self._forget(asked)
            raise
        except TimeoutError:
            why = f"{replica.where} has not answered for {seconds:g} s"
        except errors.RayTaskError as error:  # our own code broke there, or what it calls
            cause = error.cause if isinstance(error.cause, Exception) else error
            why = f"{replica.where}: {type(cause).__name__}: {_line(cause)}"
        except errors.ActorDiedError as error:
            why = f"{replica.where} is gone: {_why(error)}"
        except errors.RayError as error:
            why = f"{replica.where} cannot be reached: {type(error).__name__}"
        replica.gone = True
        raise ReplicaUnavailable(why)

    def _forget(self, asked: Any) -> None:
        try:
            self.cluster.ray.cancel(asked, recursive=False)
        except Exception:  # it is over, or the process is gone: there is nothing left to end
            log.debug("a request could not be cancelled", exc_info=True)

    async def load(self, weights: Weights, version: int) -> None:
        """Give every engine the weights, and see that they have arrived; one that fails gets them when it is back."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        began = time.perf_counter()
        await self.routes.settle(await self._publish(weights, version))
        self.update_seconds = time.perf_counter() - began

    async def _publish(self, weights: Weights, version: int) -> dict[EngineReplica, EngineError]:
        given = dict(weights) or dict(self.model.state_dict())
        await asyncio.to_thread(self._put, given)
        self.known = None
        errors = await self.routes.publish(version, lambda replica: self._give(replica, given))
        for replica, error in errors.items():
            if isinstance(error, WeightMismatch):
                raise error
            log.debug("%s took no weights: %s", replica.name, error)
        return errors

    def _put(self, weights: Weights) -> None:
        """Into the object store; what was there before goes when nobody reads it any more."""
        if not has_lora(self.model):
            self.newest = self.cluster.ray.put(as_arrays(weights))
            return
        if self.base is None:
            self.base = self.cluster.ray.put(as_arrays({n: t for n, t in weights.items() if "lora_" not in n}))
        self.newest = self.cluster.ray.put(as_arrays({n: t for n, t in weights.items() if "lora_" in n}))

    async def _give(self, replica: EngineReplica, weights: Weights | None = None) -> None:
        """Give one engine the weights, and compare what it says: with the learner's model, where these are the
        learner's `weights` of this moment; else with what the others say."""
        assert replica.actor is not None
        version = self.routes.target_version
        parts = [part for part in (self.base if replica.fresh else None, self.newest) if part is not None]
        seconds = self.cluster.placement.seconds
        await self._answer(replica, replica.actor.load.remote(version, *parts), seconds)
        replica.fresh, replica.version = False, version
        said = await self._ask(replica, np.asarray(PROBE_PROMPT), self.probe.question, "probe")
        self.counts["sampled"] -= len(said.tokens)
        if weights is not None and (self.known is None or self.known.tokens != said.tokens):
            self.gap = self.probe.check(said, weights, replica.where)
            self.known = self.known or said
        elif self.known is not None:
            compare(said, self.known, self.probe.dtype, replica.where)

    async def close(self) -> None:
        """Whoever still waits is told; the processes end."""
        if self.closed:
            return
        self.closed = True
        self.routes.close()
        for replica in self.replicas:
            if replica.actor is not None:
                self.cluster.stop(replica.actor)

    @property
    def is_saturated(self) -> bool:
        """Whether every engine has as much as it is to have."""
        return self.routes.is_saturated(self.max_requests)

    def metrics(self) -> Metrics:
        """Since the last call, over all engines: as of `LocalEngine`; requests sent again, engines lost and for how
        long; engines that answer now; and of the last update its seconds and its probe."""
        counts = dict(self.counts)
        self.counts.update(dict.fromkeys(counts, 0.0))
        known = counts["read"] + counts["reused"]
        return {f"engine/{name}": value for name, value in counts.items()} | self.routes.metrics() | {
            "engine/hit_rate": counts["reused"] / known if known else 0.0,
            "engine/block_usage": max(self.held.values(), default=0.0),
            "engine/update_seconds": self.update_seconds,
            "engine/probe_gap": self.gap,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------ processes

    async def _open(self) -> None:
        """All must start and take weights: what is wrong with the cluster is found here."""
        try:
            await asyncio.gather(*map(self._start, self.replicas))
            for replica in self.replicas:
                replica.up = True
            for error in (await self._publish(self.model.state_dict(), 0)).values():
                raise error
        finally:
            self.routes.leave_loop()

    async def _start(self, replica: EngineReplica) -> None:
        """A process for it, with no weights yet; one that is on its way is waited for, whoever began it."""
        if replica.gone:
            if replica.actor is not None:
                self.cluster.stop(replica.actor)  # it may only have been out of reach, and must not go on
            replica.told, replica.fresh, replica.version, replica.gone = None, True, None, False
            gpu = replica.seat is not None
            replica.actor = self.cluster.start(
                EngineHost, self.plan, gpu, cpus=replica.cpus, seat=replica.seat, sharing=replica.sharing
            )
            replica.starting = replica.actor.told.remote()
        if replica.told is None:
            replica.told = await self._answer(replica, replica.starting, self.cluster.placement.seconds, keep=True)
            check_versions(self.cluster.versions, replica.told.versions, replica.where)
            log.info("%s is ready", replica.where)

    async def _revive(self, replica: EngineReplica) -> None:
        """A new process in the place of one that is gone, with the newest weights."""
        try:
            await self._start(replica)
            await self._give(replica)
        except (OtherVersions, WeightMismatch):
            replica.gone = True
            raise


def compare(said: Completion, known: Completion, dtype: str, whose: str) -> None:
    """OtherWeights where two engines say different things of the tokens that both have sampled."""
    tokens = zip(said.tokens, known.tokens, strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens))
    same = list(zip(said.logprobs[:count], known.logprobs[:count], strict=True))
    gap = sum(abs(a - b) for a, b in same) / len(same) if same else float("inf")
    if not gap <= MAX_LOGPROB_GAP.get(dtype, MAX_COARSE_GAP):
        raise WeightMismatch(
            f"{whose} does not say what the other engines say, though it was given their weights: the log-probabilities"
            f" of {len(same)} tokens differ by {gap:.2g} on average"
        )


def _why(error: Exception) -> str:
    """The sentence of Ray's that says what happened; where its own code broke at the start, that error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "creation task" in lines[0]:
        return lines[-1][:300]
    text = " ".join(lines)
    begin = text.find("The actor is dead because")
    return (text[begin:] if begin >= 0 else text).split(". ")[0][:300]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
