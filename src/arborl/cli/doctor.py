"""`arborl doctor`: is this machine ready to train, and if not, what to do."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from itertools import pairwise
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

TESTED = ((3, 11), (3, 12))


@dataclass(frozen=True, slots=True)
class Check:
    """One row: what was looked at, how it stands, and what to do about it."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Check the installation. Exit code 1 if anything failed."""
    checks = examine(CHECKS)
    if as_json:
        import json

        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        from rich.console import Console

        Console().print(table(checks))
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


def examine(questions: Sequence[Callable[[], Check]]) -> list[Check]:
    """Ask each question; one that breaks is a failed row."""
    checks = []
    for question in questions:
        try:
            checks.append(question())
        except Exception as error:
            name = question.__name__.replace("_", " ")
            checks.append(Check(name, "fail", f"{type(error).__name__}: {error}", "Reinstall: pip install -U arborl"))
    return checks


def table(checks: Sequence[Check]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    shown = Table("check", "", box=box.SIMPLE)
    shown.add_column("found", overflow="fold")
    shown.add_column("what to do", overflow="fold")
    for check in checks:
        state = Text(check.state, style=colours[check.state])
        shown.add_row(check.name, state, Text(check.detail), Text(check.advice))
    return shown


# ------------------------------------------------------------------------------------------------ the questions


def python() -> Check:
    found = python_version()
    if tuple(map(int, found.split(".")[:2])) not in TESTED:
        return Check("python", "warn", found, "Arbor is tested on Python 3.11 and 3.12.")
    return Check("python", "ok", found)


def torch() -> Check:
    import torch

    return Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", "ok", ", ".join(names))
    if torch.version.cuda:
        return Check(
            "gpu", "warn", f"none seen, though torch is built for CUDA {torch.version.cuda}", "Check nvidia-smi."
        )
    return Check("gpu", "ok", "none; the CPU is used")


def transformers() -> Check:
    import transformers

    return Check("transformers", "ok", transformers.__version__)


EXTRAS = {
    "peft": "LoRA adapters (model.lora.rank)",
    "serve": "arborl tools serve",
    "mcp": "tools over MCP",
    "smollm2": "model=smollm2",
    "optuna": "arborl tune",
    "vllm": "engine=vllm, unless engine.python names an environment that has it",
    "reasoning_gym": "env=reasoning_gym",
    "textarena": "env=textarena",
    "openenv": "env=openenv",
}
"""Optional parts that something here uses, and what for. Others in the package's metadata do nothing yet."""


def extras() -> Check:
    """Which optional parts are there, as the package's own metadata lists what each needs, and what more are for."""
    needs: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for line in metadata("arborl").get_all("Requires-Dist") or []:
        requirement, _, condition = line.partition(";")
        extra = condition.partition("extra ==")[2].strip(" '\"").replace("-", "_")
        if extra in needs:
            needs[extra].append(_project(requirement))
    there = [extra for extra, projects in needs.items() if projects and all(map(_installed, projects))]
    missing = "; ".join(f"{extra}: {what}" for extra, what in EXTRAS.items() if extra not in there)
    advice = f"Not installed, and not needed but for these. pip install 'arborl[NAME]'. {missing}" if missing else ""
    return Check("extras", "ok", ", ".join(there) or "none", advice)


def embedded_model() -> Check:
    from arborl.models.seedling import WEIGHTS

    files = sorted(WEIGHTS.glob("*.safetensors"))
    if not files:
        advice = "Reinstall arborl, or make it: python -m arborl.seedling.make"
        return Check("embedded model", "fail", f"no weights in {WEIGHTS}", advice)
    size = sum(file.stat().st_size for file in WEIGHTS.iterdir() if file.is_file())
    return Check("embedded model", "ok", f"seedling, {size / 1e6:.1f} MB")


def chat_template() -> Check:
    """A render must begin with the one before it; else every turn starts a new branch and little is shared."""
    from arborl.chat import Renderer
    from arborl.models.seedling import WEIGHTS
    from arborl.types import Message, ToolCall

    talk = [
        Message("system", "Be brief."),
        Message("user", "What is 2 + 3?"),
        Message("assistant", tool_calls=(ToolCall("call-0", "calculator", {"expression": "2 + 3"}),)),
        Message("tool", "5", tool_call_id="call-0", name="calculator"),
        Message("assistant", "5"),
        Message("user", "And 3 + 4?"),
    ]
    if not (WEIGHTS / "tokenizer.json").is_file():
        return Check("chat template", "fail", "not checked: the embedded model has no tokenizer", "See embedded model.")
    renderer = Renderer.from_folder(WEIGHTS)
    shown = [renderer.text(talk[:end]) for end in (2, 4, 6)]
    for before, after in pairwise(shown):
        if not after.startswith(before):
            return Check("chat template", "warn", "rewrites what was said", "Training works; each turn is a branch.")
    return Check("chat template", "ok", "append-only")


def run_folder() -> Check:
    """A real write, in `runs/` or where it will be made, that leaves nothing behind."""
    folder = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Check("runs/", "ok", f"{(Path() / 'runs').absolute()} can be written")
    except OSError as error:
        return Check(
            "runs/", "fail", f"cannot write in {folder.absolute()}: {error.strerror}", "Write output_dir=FOLDER."
        )


def sandbox() -> Check:
    """How the `python` tool and code rewards isolate what the model wrote; found by starting a guest."""
    from arborl.sandbox import SandboxError, best_level

    try:
        found = best_level()
    except SandboxError as error:
        return Check("sandbox", "warn", str(error), "Tools that run code will not work here.")
    if not found.isolates:
        advice = (
            "Runs that execute code do not start. Install bubblewrap (apt install bubblewrap) or allow user name "
            "spaces; sandbox.allow_unsafe=true starts them all the same."
        )
        return Check("sandbox", "warn", str(found), advice)
    return Check("sandbox", "ok", str(found))


def processor() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cpu", "ok", f"{cores} core{'s' if cores > 1 else ''}")


def memory() -> Check:
    if not hasattr(os, "sysconf"):
        return Check("memory", "ok", "unknown on this system")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if total < 2:
        return Check(
            "memory", "warn", f"{total:.1f} GiB", "Keep rollout.concurrency and learner.micro_batch_tokens low."
        )
    return Check("memory", "ok", f"{total:.1f} GiB")


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
