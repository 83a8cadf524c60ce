"""Runs a study: from a plan and an objective to a folder with trials, summary and plots."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from arborl.errors import ConfigError, disk_errors
from arborl.tune.backends import Backend, OnTrialEnd, find_backend
from arborl.tune.space import ChoiceDomain, Domain
from arborl.tune.trial import HPOSummary, Objective, StudyPlan, Trial, summarize_study, write_json
from arborl.view.curve import HELD_OUT, REWARD, STYLE, SUCCESS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

SPACE = "search_space.json"
LOCK = ".lock"
MAX_DIFFERENCES = 5


async def search(
    plan: StudyPlan,
    objective: Objective,
    backend: str | Backend = "optuna",
    about: Mapping[str, Any] | None = None,
    tell: OnTrialEnd = lambda trial: None,
    metric: str = "reward",
) -> HPOSummary:
    """Run trials until the plan's number is reached. An existing study in the plan's folder is resumed."""
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    open_study_folder(plan, {"metric": metric} | dict(about or {}))
    summary = summarize_study(plan, await chosen.run(plan, objective, tell))
    write_json(plan.folder / "summary.json", {"metric": metric} | summary.as_dict())
    draw(plan, summary, metric)
    return summary


class FolderInUse(ConfigError):
    """The folder holds another study or other files."""


def open_study_folder(plan: StudyPlan, about: Mapping[str, Any]) -> None:
    """Create the study's folder, or check that it holds this study."""
    space = {name: domain.as_dict() for name, domain in plan.space.items()}
    wanted = {"direction": plan.direction, **about, "space": space}
    path = plan.folder / SPACE
    with disk_errors(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and (inside := sorted(found.name for found in plan.folder.iterdir() if found.name != LOCK)):
        some = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        raise FolderInUse(f"{plan.folder} holds other files: {some}. Use a new or an empty folder.")
    with FileLock(plan.folder / LOCK):  # another process may start the same study
        if path.exists():
            _same(path, json.loads(json.dumps(wanted)))
        else:
            write_json(path, wanted)


def _same(path: Path, wanted: dict[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not the file of a study ({error}). Use another folder.") from error
    lines = [f"  {line}" for line in _differences(before, wanted)]
    if lines:
        more = [f"  … and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
        difference_lines = "\n".join([*lines[:MAX_DIFFERENCES], *more])
        raise FolderInUse(
            f"{path.parent} holds another study, whose trials cannot be compared:\n{difference_lines}\n"
            "Resume with the same settings, or use another folder."
        )


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict) and "type" not in before and "type" not in now:
        for key in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    else:
        there, here = ("nothing" if value is None else json.dumps(value) for value in (before, now))
        yield f"{where}: {there} there, {here} here"


class KeepBestCheckpoint:
    """Deletes the checkpoints of finished trials, except those of the best so far."""

    def __init__(self, plan: StudyPlan):
        self.plan = plan
        self.best: Trial | None = None

    def __call__(self, trial: Trial) -> None:
        worse: Trial | None = trial
        if trial.state == "done" and trial.value is not None:
            previous = self.best
            if previous is None or previous.value is None or self.plan.better(trial.value, previous.value):
                self.best, worse = trial, previous
        if worse is not None:
            self._drop(worse)

    def finish(self, summary: HPOSummary) -> None:
        """Delete the checkpoints of all but the best trial, including those of other processes."""
        for trial in summary.trials:
            if trial.number != summary.best.number and trial.state != "running":
                self._drop(trial)

    def _drop(self, trial: Trial) -> None:
        shutil.rmtree((self.plan.trial_folder(trial.number) / "checkpoints").resolve(), ignore_errors=True)


# ------------------------------------------------------------------------------------------------ plots

NUM_COLUMNS = 3


def draw(plan: StudyPlan, summary: HPOSummary, metric: str) -> None:
    """Write history.png and parameters.png; a plot that fails is logged."""
    import matplotlib

    for name, picture in (("history", _history), ("parameters", _slices)):
        try:
            with matplotlib.rc_context(STYLE):
                picture(plan, summary, metric).savefig(plan.folder / f"{name}.png", format="png")
        except Exception:
            log.exception("the study is complete, but %s.png could not be drawn", name)


def _history(plan: StudyPlan, summary: HPOSummary, metric: str) -> Figure:
    """Value of every trial in order, the best so far, and the unchanged settings."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    done, pruned = (_points(summary.trials, state) for state in ("done", "pruned"))
    failed = [trial.number for trial in summary.trials if trial.state in ("failed", "lost")]
    axes.plot([trial.number for trial, _ in done], [value for _, value in done], "o", color=REWARD, label="trial")
    if pruned:
        at = [trial.number for trial, _ in pruned], [value for _, value in pruned]
        axes.plot(*at, "o", color=REWARD, fillstyle="none", label="stopped early")
    for number in failed:
        axes.axvline(number, color="#c9cdd2", linewidth=1, linestyle=":")
    best: list[float] = []
    for _, value in done:
        best.append(value if not best or plan.better(value, best[-1]) else best[-1])
    numbers = [trial.number for trial, _ in done]
    axes.step(numbers, best, where="post", color=SUCCESS, linewidth=2.4, label="best so far")
    _draw_default(axes, summary)
    axes.set(xlabel="trial (dotted: failed)" if failed else "trial", ylabel=metric)
    axes.set_title(f"{metric} of {len(summary.trials)} trials")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")
    return figure


def _slices(plan: StudyPlan, summary: HPOSummary, metric: str) -> Figure:
    """Value of the trials against each parameter."""
    from matplotlib.figure import Figure

    rows, across = -(-len(plan.space) // NUM_COLUMNS), min(len(plan.space), NUM_COLUMNS)
    figure = Figure(figsize=(4.2 * across, 3.6 * rows), dpi=120, layout="constrained")
    grid = list(figure.subplots(rows, across, squeeze=False).flat)
    for axes, (name, domain) in zip(grid, plan.space.items(), strict=False):
        _slice(axes, summary, name, domain)
        axes.set_ylabel(metric)
    for axes in grid[len(plan.space) :]:
        axes.set_axis_off()
    return figure


def _slice(axes: Axes, summary: HPOSummary, name: str, domain: Domain) -> None:
    if isinstance(domain, ChoiceDomain):
        axes.set_xticks(range(len(domain.choices)), [str(value) for value in domain.choices])
        axes.set_xlim(-0.5, len(domain.choices) - 0.5)
    elif domain.log:
        axes.set_xscale("log")
    for trial, value in _points(summary.trials, "done") + _points(summary.trials, "pruned"):
        place: Any = trial.params.get(name)
        if not domain.contains(place):
            continue
        place = domain.index(place) if isinstance(domain, ChoiceDomain) else place
        colour, fill = SUCCESS if trial == summary.best else REWARD, "none" if trial.state == "pruned" else "full"
        axes.plot(place, value, "o", color=colour, fillstyle=fill)
    _draw_default(axes, summary)
    axes.set_title(name, fontsize=11)


def _draw_default(axes: Axes, summary: HPOSummary) -> None:
    if summary.default_reward is not None:
        axes.axhline(summary.default_reward, color=HELD_OUT, linestyle="--", linewidth=1.2, label="unchanged settings")


def _points(trials: Sequence[Trial], state: str) -> list[tuple[Trial, float]]:
    return [(trial, trial.value) for trial in trials if trial.state == state and trial.value is not None]
