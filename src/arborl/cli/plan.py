"""`arborl plan`: what a run would take on devices that are not here, and how long its steps would last."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.arguments import one_path, split
from arborl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from arborl.cluster.plan import Forecaster, Placed
    from arborl.cluster.plan_work import Work
    from arborl.config.run_config import RunConfig

OPTIONS = (
    "--gpus", "--gpu", "--from", "--prompt-tokens", "--reply-tokens", "--observed-tokens", "--turns", "--tool-seconds",
    "--lag", "--strategy", "--weak", "--json", "--help",
)  # fmt: skip
STRATEGIES = ("auto", "ddp", "fsdp2", "tensor")
BRIEF = 3_000
"""Model calls of each simulation where many sizes are planned."""
WIDTH = 118
"""Columns of the table."""
Number = Annotated[str | None, typer.Option(metavar="MEDIAN[,P99]", show_default=False)]


Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE a.b=c", help="A run's YAML file, and settings on top of it.", show_default=False),
]
Gpus = Annotated[int | None, typer.Option(help="How many; without, 1 to 4,096.", show_default=False)]
Earlier = Annotated[
    Path | None,
    typer.Option("--from", metavar="RUN", help="Lengths and latencies of an earlier run.", show_default=False),
]
Turns = Annotated[int | None, typer.Option(help="Model calls an episode.", show_default=False)]
Lag = Annotated[int | None, typer.Option(help="max_lag of the asynchronous way; the run's, or 1.", show_default=False)]


def plan(
    arguments: Arguments = None,
    gpus: Gpus = None,
    gpu: Annotated[str, typer.Option(help="Of which kind; `cpu` is one core each.")] = "h200",
    earlier: Earlier = None,
    prompt_tokens: Number = None,
    reply_tokens: Number = None,
    observed_tokens: Number = None,
    turns: Turns = None,
    tool_seconds: Number = None,
    lag: Lag = None,
    strategy: Annotated[str, typer.Option(help="ddp, fsdp2 or tensor; auto: the run's, or the quickest.")] = "auto",
    weak: Annotated[bool, typer.Option("--weak", help="As many times the tasks a step as there are GPUs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Foretell memory, step time, utilisation and staleness on 1 to 4,096 GPUs. Nothing is started or downloaded.

    Example: arborl plan run.yaml model.name=7b model.dtype=bfloat16 --gpus 8 --gpu h200 --tool-seconds 0.5,8
    """
    paths, settings = split(arguments or (), OPTIONS)
    file = one_path(paths, "file")

    from arborl.cluster.hardware import device_named
    from arborl.cluster.plan import SWEEP
    from arborl.config.load_config import load

    device = device_named(gpu)
    check(gpus, strategy, lag)
    config = load(Path(file) if file is not None else None, settings)
    work = work_of(config, earlier, (prompt_tokens, reply_tokens, observed_tokens, turns, tool_seconds))
    began = time.perf_counter()
    made = [
        (_forecaster(_grown(config, count) if weak else config, device, work, lag, strategy, gpus is None), count)
        for count in ((gpus,) if gpus is not None else SWEEP)
    ]
    placed = {count: list(forecaster.place(count)) for forecaster, count in made}
    first = made[0][0]
    if as_json:
        typer.echo(json.dumps(as_rows(first, placed), indent=2))
    else:
        show(first, placed, time.perf_counter() - began)


def check(gpus: int | None, strategy: str, lag: int | None) -> None:
    """Refuse what cannot be planned."""
    from arborl.cluster.plan import check_devices

    if gpus is not None:
        check_devices(gpus)
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"--strategy {strategy}: must be one of {', '.join(STRATEGIES)}.{did_you_mean(strategy, STRATEGIES)}"
        )
    if lag is not None and lag < 1:
        raise ConfigError(f"--lag {lag}: the asynchronous way has at least 1; the synchronous one is planned anyway.")


def work_of(config: RunConfig, earlier: Path | None, numbers: tuple[Any, ...]) -> Work:
    """Of an earlier run, or of the numbers that were given."""
    from arborl.cluster.plan_work import given, of_run

    if earlier is None:
        return given(config, *numbers)
    if any(number is not None for number in numbers):
        raise ConfigError("--from has lengths and latencies of its own. Leave it out, or the numbers.")
    return of_run(earlier.expanduser())


def _forecaster(config: RunConfig, device: Any, work: Work, lag: int | None, strategy: str, brief: bool) -> Forecaster:
    from dataclasses import replace

    from arborl.cluster.plan import Forecaster

    made = Forecaster.of(config, device, work, lag, None if strategy == "auto" else strategy)  # type: ignore[arg-type]
    return replace(made, calls=BRIEF) if brief else made


def _grown(config: RunConfig, count: int) -> RunConfig:
    """With as many times the tasks a step."""
    rollout = config.rollout
    more: dict[str, Any] = {"tasks_per_step": rollout.tasks_per_step * count}
    if "concurrency" in rollout.model_fields_set and isinstance(rollout.concurrency, int):
        more["concurrency"] = rollout.concurrency * count
    return config.model_copy(update={"rollout": rollout.model_copy(update=more)})


def as_rows(first: Forecaster, placed: dict[int, list[Placed]]) -> dict[str, Any]:
    """All of it as JSON."""
    return {
        "model": first.shape.name,
        "parameters": first.shape.sizes.parameters,
        "dtype": first.config.model.dtype,
        "gpu": first.device.name,
        "work": first.work.told,
        "measured": dict(first.work.measured),
        "fits": {
            str(count): [{"what": fit.what, "fits": fit.fits, "gib": round(fit.gib, 1)} for fit in first.fits(count)]
            for count in placed
        },
        "plans": [one.row() for ways in placed.values() for one in ways],
    }


def show(first: Forecaster, placed: dict[int, list[Placed]], seconds: float) -> None:
    """For people."""
    from rich.console import Console

    terminal = Console()
    if terminal.width < WIDTH:  # a line that wraps is better than numbers that are cut off
        terminal = Console(width=WIDTH)
    sizes, device = first.shape.sizes, first.device.name.upper()
    many = f"{sizes.parameters / 1e9:.2f}B" if sizes.parameters >= 1e9 else f"{sizes.parameters / 1e6:.1f}M"
    rollout = first.config.rollout
    typer.echo(f"{first.shape.name}: {many} parameters in {first.config.model.dtype}, {device}")
    typer.echo(f"a step: {rollout.tasks_per_step} × {rollout.group_size} episodes, {first.work.told}")
    if first.device.cuda and sizes.item >= 4:
        typer.echo(f"model.dtype={first.config.model.dtype} is slow on a GPU and takes twice the memory: bfloat16?")
    for count in sorted({min(placed), max(placed)}) if len(placed) == 1 else (1, 8):
        typer.echo(f"{first.shape.name} on {count}×{device}: {'; '.join(map(str, first.fits(count)))}")
    if first.work.measured:
        told = ", ".join(f"{name} {value:.2f} s" for name, value in first.work.measured.items())
        typer.echo(f"the earlier run, on its own device: {told}")
    if without := [str(count) for count, ways in placed.items() if not ways]:
        typer.echo(f"{', '.join(without)} GPUs: no way to place it has room; the lines above say what has.")
    if not any(placed.values()):
        return
    terminal.print(table([one for ways in placed.values() for one in ways]))
    if len(placed) == 1:
        for one in next(iter(placed.values())):
            typer.echo(f"{one.way}, a learner's rank: {memory(one)}")
    if any(one.simulated < 1 for ways in placed.values() for one in ways):
        typer.echo("* a part of the groups and engines was simulated; the slowest of all was worked out")
    typer.echo(f"simulated in {seconds:.1f} s; errors against measured runs: docs/results/planner.md")


def memory(one: Placed) -> str:
    """A rank's memory, by part."""
    listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in one.learner_parts.items())
    return f"{listed} -> {one.learner_bytes / 2**30:.1f} GiB at {one.micro_batch_tokens:,} tokens" + (
        ", layers run twice" if one.recompute else ""
    )


def table(rows: Sequence[Placed]) -> Table:
    """One line a way."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    names = (
        "GPUs", "way", "engines", "learner", "GiB", "step s", "wait", "learn", "sampling", "learning", "lag", "tok/s",
    )  # fmt: skip
    for name in names:
        shown.add_column(name, justify="left" if name in ("way", "engines", "learner") else "right", no_wrap=True)
    for one in rows:
        out = one.outcome
        engines = f"{one.engines}" + (f"×{one.split}" if one.split > 1 else "")
        both = f"{one.learner_bytes / 2**30:.0f}" + (f", {one.engine_bytes / 2**30:.0f}" if one.engine_bytes else "")
        shown.add_row(
            f"{one.devices}", one.way + ("*" if one.simulated < 1 else ""), engines, f"{one.strategy}×{one.ranks}",
            both, f"{out.step:.3g}", f"{out.wait:.3g}", f"{out.learn:.3g}",
            f"{out.engine_busy:.0%}", f"{out.learner_busy:.0%}", f"{out.lag:.1f}",
            f"{out.sampled:,.0f}",
        )  # fmt: skip
    return shown
