"""Engines on a Ray cluster, behind `Engine`: actors with a `LocalEngine` and a copy of the weights.

Routing and retries are those of engine servers (`arborl.engines.remote.replicas`). Weights are put into the object
store once per update, as byte arrays; every node fetches them once, and its processes share that memory. A restarted
engine gets the weights that were put last. With LoRA only the adapter is sent after the first time.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from arborl.chat.tokenizer import Tokenizer
from arborl.cluster.placement.actors import ActorInfo, ClusterActor, VersionMismatch, check_versions
from arborl.cluster.placement.batched_calls import ActorCalls
from arborl.cluster.placement.ray_cluster import Actor, GpuSlot, RayCluster
from arborl.engines.engine import Engine, TokenListener, Weights
from arborl.engines.engine_requests import check_sampling, read_prompt
from arborl.engines.remote.replicas import Replica, ReplicaPool, ReplicaUnavailable, WeightMismatch, run_blocking
from arborl.engines.remote.weight_sync import MAX_COARSE_GAP, MAX_LOGPROB_GAP, PROBE_PROMPT, WeightProbe
from arborl.errors import EngineError
from arborl.models.lora import ADAPTER_NAME, has_lora
from arborl.types import Completion, Metrics, Sampling

log = logging.getLogger(__name__)

SUMS = ("sampled", "read", "reused", "steps", "preempted", "restarted", "seconds")
"""Counts that are summed over engines."""


WeightArrays = dict[str, tuple[str, tuple[int, ...], NDArray[np.uint8]]]
"""By name: dtype, shape, bytes."""
EngineAnswer = tuple[Completion | None, str, Metrics]
"""Completion or error text, and the engine's counts since the last answer."""


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """What is needed to build the learner's model, without its weights."""

    kind: type
    """Class of the model in transformers."""
    config: Any
    dtypes: Mapping[str, torch.dtype]
    """By parameter name."""
    float32_head: bool
    adapters: Any
    """peft's configuration; None without adapters."""
    threads: int
    deterministic: bool

    @classmethod
    def of(cls, model: PreTrainedModel, head: str, threads: int, deterministic: bool) -> ModelRecipe:
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        adapters = model.peft_config[ADAPTER_NAME] if has_lora(model) else None
        return cls(type(model), model.config, dtypes, head == "float32", adapters, threads, deterministic)

    def build(self, device: str) -> PreTrainedModel:
        """The model with random weights; execution paths are checked with them."""
        from arborl.models.model_loading import empty_model

        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        model = empty_model(self.kind, self.config)
        if self.adapters is not None:
            model.add_adapter(self.adapters, ADAPTER_NAME)
        rng = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            mean, spread = (0.0, 0.02) if parameter.ndim > 1 else (1.0, 0.1)
            parameter.normal_(mean, spread, generator=rng)
            parameter.data = parameter.data.to(self.dtypes[name])
        if self.float32_head:
            from arborl.models.output_heads import float32_head

            float32_head(model)
        return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What all engines of a run are built from."""

    model: ModelRecipe
    settings: Mapping[str, Any]
    """Arguments of `LocalEngine`."""
    tokenizer: Mapping[str, bytes]
    """Files of the tokenizer by name, for stop texts."""
    sampling: Sampling
    """Sampling settings of the run, for warm-up."""


class EngineActor(ClusterActor):
    """An actor with a `LocalEngine` and a copy of the weights."""

    def __init__(self, paths: Sequence[str], allow_unsafe: bool, plan: EnginePlan, gpu: bool):
        super().__init__(paths, allow_unsafe)
        from arborl.engines.local import LocalEngine

        if gpu and not torch.cuda.is_available():
            raise EngineError("torch finds no GPU on the node")
        self.version: int | None = None
        model = plan.model.build("cuda" if gpu else "cpu")
        tokenizer = _read_tokenizer(plan.tokenizer)
        decode = None if tokenizer is None else tokenizer.decode
        self.engine = LocalEngine(model, decode=decode, tokenizer=tokenizer, **plan.settings)
        self.engine.warm_up(plan.sampling)

    async def load(self, version: int, *parts: WeightArrays) -> int:
        """Load weights, in one or several parts."""
        for arrays in parts:
            await self.engine.load(as_tensors(arrays), version)
        self.version = version
        return version

    async def generate(self, prompt: NDArray[Any], sampling: Sampling, session: str) -> EngineAnswer:
        if self.version is None:
            return None, "no weights loaded yet", {}
        try:
            completion = await self.engine.generate(prompt.tolist(), sampling, session=session)
        except EngineError as error:
            return None, str(error), self.engine.metrics()
        return completion, "", self.engine.metrics()


def _read_tokenizer(files: Mapping[str, bytes]) -> Tokenizer | None:
    """The tokenizer in `files`; None without files."""
    from arborl.chat.tokenizer import FileTokenizer

    if not files:
        return None
    with TemporaryDirectory(prefix="arborl-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = FileTokenizer(folder)
        tokenizer.decode([0])
    return tokenizer


@dataclass(eq=False, slots=True)
class EngineReplica(Replica):
    gpu: GpuSlot | None = None
    sharing: int = 1
    """Engines on its GPU."""
    actor: Actor | None = None
    calls: ActorCalls | None = None
    """Batched calls of the actor."""
    info: ActorInfo | None = None
    starting: Any = None
    """Pending call of `info`."""
    gone: bool = True
    """Whether it needs a new process."""
    fresh: bool = True
    """Whether it has no weights yet."""
    cpus: int = 1

    @property
    def where(self) -> str:
        return f"{self.name} (process {self.info.pid} on {self.info.address})" if self.info else self.name


class RayEngine(Engine):
    follows_weights = verifies_weights = True
    shares_weights = False

    def __init__(self, cluster: RayCluster, model: PreTrainedModel, gpus: Sequence[GpuSlot | None], plan: EnginePlan):
        self.cluster, self.model, settings = cluster, model, plan.settings
        self.max_context, self.max_requests = int(settings["max_context"]), int(settings["max_requests"])
        self.vocabulary, self.decodes = int(model.config.vocab_size), bool(plan.tokenizer)
        placed = cluster.placement
        self.replicas = [
            EngineReplica(f"engine {number}", gpu=gpu, sharing=gpus.count(gpu), cpus=cluster.engine_cpus)
            for number, gpu in enumerate(gpus)
        ]
        self.routes = ReplicaPool(self.replicas, self._revive, placed.seconds, "engine")
        self.plan = cluster.ray.put(plan)
        self.base: Any = None
        """Frozen weights in the object store, of a model with adapters."""
        self.newest: Any = None
        """Trained weights in the object store, as last put."""
        self.probe = WeightProbe(model, plan.sampling, str(model.dtype).removeprefix("torch."))
        self.known: Completion | None = None
        """The probe's completion by an engine with the newest weights."""
        self.counts = dict.fromkeys((*SUMS, "requests"), 0.0)
        self.held: dict[str, float] = {}
        """Share of cache pages in use, by engine."""
        self.gap = self.update_seconds = 0.0
        self.closed = False
        run_blocking(self._open())

    # ------------------------------------------------------------------------------------------ engine interface

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, session: str, listener: TokenListener | None = None
    ) -> Completion:
        """Sample with the session's engine, or with another one if it is gone."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        tokens = read_prompt(prompt, self.vocabulary, self.max_context)
        check_sampling(sampling, edits=True)
        if sampling.stop_texts and not self.decodes:
            raise EngineError("stop_texts need a tokenizer, and this engine has none")
        began = time.perf_counter()
        completion = await self.routes.ask(session, lambda replica: self._ask(replica, tokens, sampling, session))
        if self.closed:
            raise EngineError("the engine was closed")
        self.counts["requests"] += 1
        return replace(completion, seconds=time.perf_counter() - began)

    def check_request(self, sampling: Sampling) -> None:
        check_sampling(sampling, edits=True)  # schemas are compiled by the actors

    async def _ask(self, replica: EngineReplica, prompt: Any, sampling: Sampling, session: str) -> Completion:
        assert replica.calls is not None
        call = replica.calls.call("generate", np.asarray(prompt), sampling, session)
        completion, error, counts = await self._answer(replica, call)
        for name in SUMS:
            self.counts[name] += counts.get(f"engine/{name}", 0.0)
        self.held[replica.name] = counts.get("engine/block_usage", 0.0)
        if completion is None:
            raise EngineError(f"{replica.name}: {error}")
        return completion  # type: ignore[no-any-return]

    async def _answer(self, replica: EngineReplica, call: Future[Any], seconds: float | None = None) -> Any:
        """Result of a call; ReplicaUnavailable if the process is gone or does not answer in time."""
        errors = self.cluster.ray.exceptions
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), seconds)
        except TimeoutError:
            why = f"{replica.where} has not answered{'' if seconds is None else f' for {seconds:g} s'}"
        except errors.RayTaskError as error:  # an exception on the actor
            cause = error.cause if isinstance(error.cause, Exception) else error
            why = f"{replica.where}: {type(cause).__name__}: {_line(cause)}"
        except errors.ActorDiedError as error:
            why = f"{replica.where} is gone: {_death_cause(error)}"
        except errors.RayError as error:
            why = f"{replica.where} cannot be reached: {type(error).__name__}"
        except Exception as error:  # of a batched call
            why = f"{replica.where}: {type(error).__name__}: {_line(error)}"
        replica.gone = True
        raise ReplicaUnavailable(why)

    async def load(self, weights: Weights, version: int) -> None:
        """Send weights to every engine and verify them; an engine that fails gets them when it is back."""
        if self.closed:
            raise EngineError("the engine is closed; make another")
        began = time.perf_counter()
        await self.routes.settle(await self._publish(weights, version))
        self.update_seconds = time.perf_counter() - began

    async def _publish(self, weights: Weights, version: int) -> dict[EngineReplica, EngineError]:
        state = dict(weights) or dict(self.model.state_dict())
        await asyncio.to_thread(self._put, state)
        self.known = None
        errors = await self.routes.publish(version, lambda replica: self._send_weights(replica, state))
        for replica, error in errors.items():
            if isinstance(error, WeightMismatch):
                raise error
            log.debug("%s did not load the weights: %s", replica.name, error)
        return errors

    def _put(self, weights: Weights) -> None:
        """Put weights into the object store; Ray frees the previous ones."""
        if not has_lora(self.model):
            self.newest = self.cluster.ray.put(as_arrays(weights))
            return
        if self.base is None:
            self.base = self.cluster.ray.put(as_arrays({n: t for n, t in weights.items() if "lora_" not in n}))
        self.newest = self.cluster.ray.put(as_arrays({n: t for n, t in weights.items() if "lora_" in n}))

    async def _send_weights(self, replica: EngineReplica, weights: Weights | None = None) -> None:
        """Send weights to one engine and check its probe: against the learner's model if `weights` are the learner's
        current ones, else against the other engines."""
        assert replica.actor is not None
        version = self.routes.target_version
        parts = [part for part in (self.base if replica.fresh else None, self.newest) if part is not None]
        seconds = self.cluster.placement.seconds
        await self._answer(replica, replica.actor.load.remote(version, *parts).future(), seconds)
        replica.fresh, replica.version = False, version
        answer = await self._ask(replica, np.asarray(PROBE_PROMPT), self.probe.question, "probe")
        self.counts["sampled"] -= len(answer.tokens)
        if weights is not None and (self.known is None or self.known.tokens != answer.tokens):
            self.gap = self.probe.check(answer, weights, replica.where)
            self.known = self.known or answer
        elif self.known is not None:
            compare_probes(answer, self.known, self.probe.dtype, replica.where)

    async def close(self) -> None:
        """Fail pending requests and kill the actors."""
        if self.closed:
            return
        self.closed = True
        self.routes.close()
        for replica in self.replicas:
            if replica.actor is not None:
                self.cluster.stop(replica.actor)

    @property
    def is_saturated(self) -> bool:
        """Whether every engine is at its request limit."""
        return self.routes.is_saturated(self.max_requests)

    def metrics(self) -> Metrics:
        """Sums over engines since the last call, as in `LocalEngine`; retries, lost engines; time and probe gap of the
        last update."""
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

    def kill_replica(self, session: str) -> None:
        """Kill the process that serves this session, as a fault injected on purpose. Its requests move to other
        replicas, and it is replaced."""
        replica = self.routes.sessions.get(session) or next(iter(self.routes.up), None)
        if replica is not None and replica.info is not None:
            log.warning("killing %s (injected by faults)", replica.where)
            self.cluster.ray.kill(replica.actor, no_restart=True)

    async def _open(self) -> None:
        """Start all engines and load weights; errors of the cluster appear here."""
        try:
            await asyncio.gather(*map(self._start, self.replicas))
            for replica in self.replicas:
                replica.up = True
            for error in (await self._publish(self.model.state_dict(), 0)).values():
                raise error
        finally:
            self.routes.leave_loop()

    async def _start(self, replica: EngineReplica) -> None:
        """Start a process without weights, or wait for one that is starting."""
        if replica.gone:
            if replica.actor is not None:
                self.cluster.stop(replica.actor)  # it may have been unreachable only, and must not continue
            replica.info, replica.fresh, replica.version, replica.gone = None, True, None, False
            replica.actor = self.cluster.start(
                EngineActor,
                self.plan,
                replica.gpu is not None,
                cpus=replica.cpus,
                gpu=replica.gpu,
                sharing=replica.sharing,
            )
            replica.calls = ActorCalls(replica.actor)
            replica.starting = replica.actor.info.remote()
        if replica.info is None:
            replica.info = await self._answer(replica, replica.starting.future(), self.cluster.placement.seconds)
            check_versions(self.cluster.versions, replica.info.versions, replica.where)
            log.info("%s is ready", replica.where)

    async def _revive(self, replica: EngineReplica) -> None:
        """Replace a lost process by a new one with the newest weights."""
        try:
            await self._start(replica)
            await self._send_weights(replica)
        except (VersionMismatch, WeightMismatch):
            replica.gone = True
            raise


def compare_probes(answer: Completion, known: Completion, dtype: str, name: str) -> None:
    """OtherWeights if the log-probabilities of two engines differ on the tokens that both have sampled."""
    tokens = zip(answer.tokens, known.tokens, strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens))
    same = list(zip(answer.logprobs[:count], known.logprobs[:count], strict=True))
    gap = sum(abs(a - b) for a, b in same) / len(same) if same else float("inf")
    if not gap <= MAX_LOGPROB_GAP.get(dtype, MAX_COARSE_GAP):
        raise WeightMismatch(
            f"{name} disagrees with the other engines after the same weight update: the log-probabilities of "
            f"{len(same)} tokens differ by {gap:.2g} on average"
        )


def _death_cause(error: Exception) -> str:
    """Ray's sentence about the cause; for an error in the constructor, that error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "creation task" in lines[0]:
        return lines[-1][:300]
    text = " ".join(lines)
    begin = text.find("The actor is dead because")
    return (text[begin:] if begin >= 0 else text).split(". ")[0][:300]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ------------------------------------------------------------------------------------------------ weights


def as_arrays(weights: Mapping[str, Tensor]) -> WeightArrays:
    """Bytes of the weights; tied weights once, under their first name."""
    found: WeightArrays = {}
    places: set[tuple[int, torch.Size]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape)
        if place in places and tensor.numel():
            continue
        places.add(place)
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy())
    return found


def as_tensors(arrays: WeightArrays) -> dict[str, Tensor]:
    """Tensors in the memory of the arrays, which is read-only."""
    found = {}
    for name, (dtype, shape, flat) in arrays.items():
        kind = getattr(torch, dtype)
        if not flat.size:
            found[name] = torch.empty(shape, dtype=kind)
            continue
        with warnings.catch_warnings():  # about read-only memory
            warnings.simplefilter("ignore")
            found[name] = torch.from_numpy(flat).view(kind).reshape(shape)
    return found


def weight_bytes(weights: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
