"""`arborl plan`: predicted memory and step time of a run on hardware that is not available here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import AsJson, FileAndSettings, check_choice, file_and_settings, option, other_systems
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from arborl.cluster.planner.run_planner import PlacementPlan, RunPlanner
    from arborl.cluster.planner.workload import Workload
    from arborl.config.run_config import RunConfig

STRATEGIES = ("auto", "ddp", "fsdp2", "tensor")
TABLE_WIDTH = 118
Distribution = Annotated[str | None, option(metavar="MEDIAN[,P99]")]


def plan(
    arguments: FileAndSettings = None,
    gpus: Annotated[int | None, option(help="Number of GPUs; default: 1 to 4,096.")] = None,
    gpu: Annotated[str, typer.Option(help="GPU model; `cpu` is one core each.")] = "h200",
    earlier: Annotated[
        Path | None, option("--from", metavar="RUN", help="Use the lengths and latencies of an earlier run.")
    ] = None,
    prompt_tokens: Distribution = None,
    reply_tokens: Distribution = None,
    observed_tokens: Distribution = None,
    turns: Annotated[int | None, option(help="Model calls per episode.")] = None,
    tool_seconds: Distribution = None,
    lag: Annotated[int | None, option(help="max_lag of asynchronous training; default: the run's, or 1.")] = None,
    strategy: Annotated[str, typer.Option(help="ddp, fsdp2 or tensor; auto: the run's, or the fastest.")] = "auto",
    weak: Annotated[bool, option("--weak", help="Weak scaling: multiply tasks per step by the GPUs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict memory and step time on up to 4,096 GPUs. Also utilization and staleness. Nothing is downloaded."""
    from arborl.cluster.planner.hardware import device_named
    from arborl.cluster.planner.run_planner import DEVICE_COUNTS, RunPlanner
    from arborl.config.load_config import load

    device = device_named(gpu)
    check_options(gpus, strategy, lag)
    file, settings = file_and_settings(arguments)
    with other_systems(file):
        config = load(file, settings)
    work = read_work(config, earlier, (prompt_tokens, reply_tokens, observed_tokens, turns, tool_seconds))
    start = time.perf_counter()
    chosen: Any = None if strategy == "auto" else strategy
    planners = {
        count: RunPlanner.of(_scale_tasks(config, count) if weak else config, device, work, lag, chosen)
        for count in ((gpus,) if gpus is not None else DEVICE_COUNTS)
    }
    placements = {count: list(planner.plans(count)) for count, planner in planners.items()}
    first = next(iter(planners.values()))
    if as_json:
        typer.echo(json.dumps(plan_json(first, placements), indent=2))
    else:
        print_plan(first, placements, time.perf_counter() - start)


def check_options(gpus: int | None, strategy: str, lag: int | None) -> None:
    from arborl.cluster.planner.run_planner import check_devices

    if gpus is not None:
        check_devices(gpus)
    check_choice("--strategy", strategy, STRATEGIES)
    if lag is not None and lag < 1:
        raise ConfigError(f"--lag {lag}: must be at least 1. Synchronous training is always planned too.")


def read_work(config: RunConfig, earlier: Path | None, numbers: tuple[Any, ...]) -> Workload:
    """Lengths and latencies of an earlier run, or of the options."""
    from arborl.cluster.planner.workload import workload_from_options, workload_from_run

    if earlier is None:
        return workload_from_options(config, *numbers)
    if any(number is not None for number in numbers):
        raise ConfigError("--from sets lengths and latencies. Leave out --from, or the other options.")
    return workload_from_run(earlier.expanduser())


def _scale_tasks(config: RunConfig, factor: int) -> RunConfig:
    rollout = config.rollout
    changes: dict[str, Any] = {"tasks_per_step": rollout.tasks_per_step * factor}
    if "concurrency" in rollout.model_fields_set and isinstance(rollout.concurrency, int):
        changes["concurrency"] = rollout.concurrency * factor
    return config.model_copy(update={"rollout": rollout.model_copy(update=changes)})


def plan_json(first: RunPlanner, placements: dict[int, list[PlacementPlan]]) -> dict[str, Any]:
    return {
        "model": first.shape.name,
        "parameters": first.shape.sizes.parameters,
        "dtype": first.config.model.dtype,
        "gpu": first.device.name,
        "work": first.workload.description,
        "measured": dict(first.workload.measured),
        "fits": {
            str(count): [{"name": fit.name, "fits": fit.fits, "gib": round(fit.gib, 1)} for fit in first.fits(count)]
            for count in placements
        },
        "plans": [one.row() for listed in placements.values() for one in listed],
    }


def print_plan(first: RunPlanner, placements: dict[int, list[PlacementPlan]], seconds: float) -> None:
    from rich.console import Console

    console = Console()
    if console.width < TABLE_WIDTH:  # wrapped lines are better than numbers that are cut off
        console = Console(width=TABLE_WIDTH)
    name, sizes, device = first.shape.name, first.shape.sizes, first.device.name.upper()
    dtype, rollout = first.config.model.dtype, first.config.rollout
    count = f"{sizes.parameters / 1e9:.2f}B" if sizes.parameters >= 1e9 else f"{sizes.parameters / 1e6:.1f}M"
    typer.echo(f"{name}: {count} parameters in {dtype}, {device}")
    typer.echo(f"a step: {rollout.tasks_per_step} × {rollout.group_size} episodes, {first.workload.description}")
    if first.device.cuda and sizes.item >= 4:
        typer.echo(f"model.dtype={dtype} is slow on a GPU and needs twice the memory. Write model.dtype=bfloat16.")
    for devices in sorted({min(placements), max(placements)}) if len(placements) == 1 else (1, 8):
        typer.echo(f"{name} on {devices}×{device}: {'; '.join(map(str, first.fits(devices)))}")
    if first.workload.measured:
        measured = ", ".join(f"{part} {value:.2f} s" for part, value in first.workload.measured.items())
        typer.echo(f"earlier run, on its own device: {measured}")
    if without := [str(devices) for devices, listed in placements.items() if not listed]:
        typer.echo(f"{', '.join(without)} GPUs: no placement fits into memory; see the lines above.")
    if not any(placements.values()):
        return
    console.print(placement_table([one for listed in placements.values() for one in listed]))
    if len(placements) == 1:
        for one in next(iter(placements.values())):
            parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in one.learner_parts.items())
            text = f"{parts} -> {one.learner_bytes / 2**30:.1f} GiB at {one.micro_batch_tokens:,} tokens"
            text += ", gradient checkpointing" if one.recompute else ""
            typer.echo(f"{one.mode}, memory of a learner rank: {text}")
    typer.echo(f"planned in {seconds:.1f} s; errors against measured runs: docs/results/planner.md")


def placement_table(rows: Sequence[PlacementPlan]) -> Table:
    from arborl.cli.terminal_table import new_table

    table = new_table(
        "GPUs", "mode", "engines", "learner", "GiB", "step s", "wait", "learn", "sampling", "learning", "lag", "tok/s",
        left=("mode", "engines", "learner"), no_wrap=True,
    )  # fmt: skip
    for one in rows:
        out = one.estimate
        engines = f"{one.engines}" + (f"×{one.split}" if one.split > 1 else "")
        memory = f"{one.learner_bytes / 2**30:.0f}" + (f", {one.engine_bytes / 2**30:.0f}" if one.engine_bytes else "")
        table.add_row(
            f"{one.devices}", one.mode, engines, f"{one.strategy}×{one.ranks}",
            memory, f"{out.step:.3g}", f"{out.wait:.3g}", f"{out.learn:.3g}",
            f"{out.engine_busy:.0%}", f"{out.learner_busy:.0%}", f"{out.lag:.1f}",
            f"{out.sampled:,.0f}",
        )  # fmt: skip
    return table
