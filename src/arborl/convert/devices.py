"""GPUs, strategies and engines of another system as `learner`, `placement` and `engine`, divided by the planner.

There the same GPUs often sample and learn in turns. Here engines and ranks of the learner have GPUs of their own, so
the planner divides the GPUs. With one GPU everything is in one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from arborl.cluster.planner.hardware import device_named
from arborl.cluster.planner.model_shape import SHORT_NAMES
from arborl.cluster.planner.rank_memory import engine_memory
from arborl.cluster.planner.run_planner import MAX_DEVICES, PlacementPlan, RunPlanner
from arborl.cluster.planner.workload import workload_from_options
from arborl.config.config_base import validate
from arborl.config.run_config import RunConfig
from arborl.convert.draft import Draft
from arborl.errors import ConfigError

GPU = "h100"
"""Their files do not name a GPU model: plans are for 80 GB."""
STRATEGIES = {
    "fsdp": "fsdp2", "fsdp2": "fsdp2", "megatron": "fsdp2", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3",
    "ddp": "ddp",
}  # fmt: skip
MEGATRON = "FSDP2 in place of Megatron: weights are sharded over all ranks, layers are not divided"
SHARED = "there the same GPUs sample and learn in turns; here they are divided"
REPLICAS = "replicas of Arbor's engine, one GPU each; engine=vllm and engine=sglang are the others"
IN_PROCESS = "Arbor's engine, in the learner's process; engine=vllm and engine=sglang are the others"
CACHE = "Arbor's engine sizes its KV cache by the free memory: engine.kv_tokens"
WHOLE = "an engine has one GPU, which holds the model"
LAG_NOTE = " with rollout.max_lag=1; with 0, as written, engines and learner wait for each other"
SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
"""Billions of parameters in a model's name."""
SGLANG = "start the server: python -m sglang.launch_server --model-path MODEL --tp-size {} --port 30000"


@dataclass(slots=True)
class DeviceRequest:
    """Devices that files of another system ask for."""

    learner: int = 1
    """GPUs of the learner, over all nodes."""
    nodes: int = 1
    strategy: str = "ddp"
    """A key of STRATEGIES."""
    offload: str = "none"
    engine: str = ""
    """`vllm`, `sglang`; empty: another, in the learner's process."""
    engines: Sequence[int] = ()
    """GPUs of the engines; empty: the learner's."""
    split: int = 1
    """GPUs of an engine: its tensor parallel size."""
    memory_share: float | None = None
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Their keys, by the field that they decide; `parallel`: division of layers and sequences in the learner."""

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return max(self.learner, max(self.engines, default=-1) + 1)

    @property
    def separate(self) -> bool:
        """Whether no GPU both samples and learns."""
        return bool(self.engines) and min(self.engines) >= self.learner

    def text(self) -> str:
        """One line for the report."""
        parts = [f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + f" on {self.nodes} nodes" * (self.nodes > 1)]
        parts.append(
            f"learner {self.strategy} on {self.learner}" + f", offload {self.offload}" * (self.offload != "none")
        )
        where = f" on {len(self.engines)}" if self.engines else " on the same"
        parts.append(f"engine {self.engine or 'of its own'}{where}" + f", {self.split} each" * (self.split > 1))
        return "; ".join(parts)


def place(draft: Draft, request: DeviceRequest, gpus: int | None = None) -> None:
    """Write learner, placement and engine, and one report line for each of their keys.

    Args:
        request: devices of their files.
        gpus: GPUs of the user's machine, in place of theirs.
    """
    count = min(gpus or request.gpus, MAX_DEVICES)
    planner = _planner(draft)
    if count == 1:
        _one_device(draft, request, planner, is_requested=gpus == 1)
    else:
        _several(draft, request, planner, count)
    _other_models(draft, request)
    draft.notes += _notes(draft, request, planner, count)


def _planner(draft: Draft) -> RunPlanner | str:
    """The planner of the run, or why there is none. A model of unknown shape is planned by the size in its name."""
    tree = draft.tree()
    tree["model"] = {"name": "seedling"} | tree.get("model", {})
    name = str(tree["model"]["name"])
    size = SIZE.search(name.rpartition("/")[2])
    nearest = min(SHORT_NAMES, key=lambda one: abs(float(one[:-1]) - float(size[1]))) if size else None
    error = ""
    for shape in dict.fromkeys((name, nearest or name)):
        tree["model"]["name"] = shape
        try:
            config = validate(RunConfig, tree)
            return RunPlanner.of(config, device_named(GPU), workload_from_options(config))
        except ConfigError as problem:
            error = error or str(problem).partition(". ")[0].partition(", and the planner")[0]
    return error


def _one_device(draft: Draft, request: DeviceRequest, planner: RunPlanner | str, is_requested: bool) -> None:
    """One process: no ranks, the engine beside the learner."""
    why = "one GPU, as --gpus says" if is_requested and request.gpus > 1 else ""
    offload = request.offload
    if why and not isinstance(planner, str):
        offload = "none" if planner.fits(1)[0].fits else "all"
    for name, path, ours, reason in (
        ("learner", "learner.ranks", 1, why),
        ("strategy", "learner.strategy", "single", why or "one GPU: nothing is sharded"),
        ("parallel", "learner.strategy", "single", why or "one GPU: nothing is divided"),
        ("offload", "learner.offload", offload, why and "by the memory of one GPU"),
        ("engine", "engine.name", "local", IN_PROCESS),
        ("split", "engine.name", "local", "" if request.split == 1 else why or WHOLE),
    ):
        _set(draft, request, name, path, ours, reason)
    _idle(draft, request, "memory_share", CACHE)
    _idle(draft, request, "mapping", "one GPU")


def _several(draft: Draft, request: DeviceRequest, planner: RunPlanner | str, count: int) -> None:
    ranks, engines = _division(request, planner, count)
    strategy = STRATEGIES[request.strategy] if ranks > 1 else "single"
    offload, lost = request.offload, ""
    if offload != "none" and strategy.startswith("zero"):
        strategy, lost = "fsdp2", f"{request.strategy} does not offload here: FSDP2 does"
    changed = "" if ranks == request.learner and (request.separate or not engines) else f"{SHARED}: {ranks} learn"
    if count != request.gpus:
        changed = f"{count} GPUs, as --gpus says"
    _set(draft, request, "learner", "learner.ranks", ranks, changed)
    megatron = MEGATRON if request.strategy == "megatron" else lost
    _set(draft, request, "strategy", "learner.strategy", strategy, megatron)
    _set(draft, request, "parallel", "learner.strategy", strategy, megatron or "sharded over all ranks")
    _set(draft, request, "offload", "learner.offload", offload, "")
    if ranks > 1 or engines:
        draft.settings["placement.name"] = "ray" if engines or request.nodes > 1 else "local"
    _engines(draft, request, planner, ranks, engines)


def _engines(draft: Draft, request: DeviceRequest, planner: RunPlanner | str, ranks: int, engines: int) -> None:
    if request.split > 1 and not _fits_one(planner) and request.engine in ("vllm", "sglang"):
        draft.settings.pop("placement.name", None)
        if ranks > 1:
            draft.settings["placement.name"] = "ray"
        _server(draft, request)
        return
    if not engines:
        _set(draft, request, "engine", "engine.name", "local", IN_PROCESS)
    else:
        _set(draft, request, "engine", "placement.engines", engines, REPLICAS)
        mapped = list(range(ranks, ranks + engines))
        draft.settings |= {"placement.engines": engines, "placement.device_mapping.engines": mapped}
        _set(draft, request, "mapping", "placement.device_mapping.engines", mapped, "" if request.separate else SHARED)
    path = "placement.engines" if engines else "engine.name"
    ours = engines or "local"
    _set(draft, request, "split", path, ours, "" if request.split == 1 else WHOLE)
    _idle(draft, request, "memory_share", CACHE)
    _idle(draft, request, "mapping", "the engine is in the learner's process")


STAYS = {
    "reference_offload": "the reference stays on the GPU: learner.offload=all moves it, with gradients and optimiser",
    "critic_offload": "the critic stays on the GPU: policy and critic have one setting, learner.offload",
}


def _other_models(draft: Draft, request: DeviceRequest) -> None:
    """Offload of the reference and of the critic, which follow `learner.offload`."""
    ours = draft.settings.get("learner.offload", "none")
    moved = {"reference_offload": ours == "all", "critic_offload": ours != "none"}
    for name, why in STAYS.items():
        for key in request.keys.get(name, ()):
            if key not in draft.source or key in draft.accounted():
                continue
            value = draft.source[key]
            if moved[name]:
                draft.set(key, value, "learner.offload", ours, "" if value else "one setting for all models")
            elif value:
                draft.lose(key, value, why)
            else:
                draft.skip(key, value, "off, as here")


def _server(draft: Draft, request: DeviceRequest) -> None:
    """The model needs several GPUs for sampling: their own engine."""
    if request.engine == "vllm":
        _set(draft, request, "engine", "engine.name", "vllm", f"one vLLM of {request.split} GPUs")
        _set(draft, request, "split", "engine.args.tensor_parallel_size", request.split, "")
        if request.memory_share is not None:
            _set(draft, request, "memory_share", "engine.args.gpu_memory_utilization", request.memory_share, "")
    else:
        _set(draft, request, "engine", "engine.name", "sglang", SGLANG.format(request.split))
        draft.settings["engine.args.urls"] = ["http://localhost:30000"]
        _set(draft, request, "split", "engine.name", "sglang", "--tp-size of the server")
        _set(draft, request, "memory_share", "engine.name", "sglang", "--mem-fraction-static of the server")
    _idle(draft, request, "mapping", "CUDA_VISIBLE_DEVICES of the server chooses its GPUs")


def _division(request: DeviceRequest, planner: RunPlanner | str, count: int) -> tuple[int, int]:
    """Ranks of the learner and engines: theirs where they are separate, else the planner's fastest division."""
    if request.separate and count == request.gpus:
        return request.learner, max(len(request.engines) // (1 if _fits_one(planner) else request.split), 1)
    if not request.engine:
        return count, 0
    if request.split > 1 and not _fits_one(planner):
        return max(count - request.split, 1), 1  # one engine of several GPUs
    plan = None if isinstance(planner, str) else _fastest(planner, count)
    return (plan.ranks, plan.engines) if plan is not None else (count - count // 2, count // 2)


def _fastest(planner: RunPlanner, count: int) -> PlacementPlan | None:
    return next((plan for plan in planner.plans(count) if plan.mode == "async" and plan.split == 1), None)


def _fits_one(planner: RunPlanner | str) -> bool:
    """Whether one GPU holds the model for sampling; an unknown model does not."""
    if isinstance(planner, str):
        return False
    memory = engine_memory(planner.shape, planner.config, planner.device, 1)
    return memory is not None


def _notes(draft: Draft, request: DeviceRequest, planner: RunPlanner | str, count: int) -> list[str]:
    """Theirs, ours, what the planner says, and what one GPU would do instead."""
    settings = draft.settings
    ours = [f"{path}={settings[path]}" for path in sorted(settings) if path.split(".")[0] in ("placement", "engine")]
    ours += [
        f"{path}={settings[path]}"
        for path in ("learner.strategy", "learner.ranks", "learner.offload")
        if path in settings
    ]
    notes = [f"theirs: {request.text()}", f"ours: {' '.join(ours) or 'one process'}"]
    if isinstance(planner, str):
        return [*notes, f"not planned: {planner}"]
    gpu, name = GPU.upper(), draft.settings.get("model.name")
    if planner.config.model.name != name:
        notes.append(f"the shape of {name} is not known: planned as {planner.config.model.name}")
    if count > 1:
        plan = _fastest(planner, count)
        if plan is None:
            notes.append(f"planned for {count} × {gpu}: does not fit")
        else:
            memory, max_lag = plan.learner_bytes / 2**30, planner.config.rollout.max_lag
            notes.append(
                f"planned for {count} × {gpu}: {plan.engines} engines, learner {plan.strategy} × {plan.ranks} with "
                f"{memory:.0f} GiB each; about {plan.estimate.step:.0f} s a step{LAG_NOTE * (not max_lag)}"
            )
    fits = "; ".join(map(str, planner.fits(1)))
    hint = "convert with --gpus 1" if count > 1 else "as written here"
    return [*notes, f"on one {gpu} ({hint}): {fits}"]


def _set(draft: Draft, request: DeviceRequest, name: str, path: str, ours: Any, why: str) -> None:
    """Our setting, with a report line for each of their keys; without a key of theirs it is their default."""
    for key in request.keys.get(name, ()):
        if key in draft.source and key not in draft.accounted():
            draft.set(key, draft.source[key], path, ours, why)
    usual = {"learner.ranks": 1, "learner.strategy": "single", "learner.offload": "none", "engine.name": "local"}
    if usual.get(path) != ours or path in draft.settings:
        draft.settings[path] = ours


def _idle(draft: Draft, request: DeviceRequest, name: str, why: str) -> None:
    draft.skip_rest(request.keys.get(name, ()), why)
