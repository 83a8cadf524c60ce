"""Plots of a study: values by trial, and values by parameter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.tune.space import ChoiceDomain, Domain
from arborl.tune.trial import HPOSummary, StudyPlan, Trial
from arborl.view.curve import HELD_OUT, REWARD, STYLE, SUCCESS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

NUM_COLUMNS = 3


def draw(plan: StudyPlan, summary: HPOSummary, metric: str) -> dict[str, Path]:
    """Write both plots; a plot that fails is logged."""
    drawn = {}
    for name, picture in (("history", history), ("parameters", slices)):
        try:
            drawn[name] = picture(plan, summary, metric, plan.folder / f"{name}.png")
        except Exception:
            log.exception("the study is complete, but %s.png could not be drawn", name)
    return drawn


def history(plan: StudyPlan, summary: HPOSummary, metric: str, out: Path) -> Path:
    """Value of every trial in order, the best so far, and the unchanged settings."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
        axes = figure.subplots()
        done, pruned = (_of(summary.trials, state) for state in ("done", "pruned"))
        axes.plot([t.number for t in done], _values(done), "o", color=REWARD, label="trial")
        if pruned:
            at = [t.number for t in pruned], _values(pruned)
            axes.plot(*at, "o", color=REWARD, fillstyle="none", label="stopped early")
        for trial in _failed(summary.trials):
            axes.axvline(trial.number, color="#c9cdd2", linewidth=1, linestyle=":")
        best: list[float] = []
        for value in _values(done):
            best.append(value if not best or plan.better(value, best[-1]) else best[-1])
        axes.step([t.number for t in done], best, where="post", color=SUCCESS, linewidth=2.4, label="best so far")
        _default(axes, summary)
        axes.set(xlabel="trial (dotted: failed)" if _failed(summary.trials) else "trial", ylabel=metric)
        axes.set_title(f"{metric} of {len(summary.trials)} trials")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")
        figure.savefig(out, format="png")
    return out


def slices(plan: StudyPlan, summary: HPOSummary, metric: str, out: Path) -> Path:
    """Value of the trials against each parameter."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        rows, across = -(-len(plan.space) // NUM_COLUMNS), min(len(plan.space), NUM_COLUMNS)
        figure = Figure(figsize=(4.2 * across, 3.6 * rows), dpi=120, layout="constrained")
        grid = list(figure.subplots(rows, across, squeeze=False).flat)
        for axes, (name, domain) in zip(grid, plan.space.items(), strict=False):
            _slice(axes, summary, name, domain)
            axes.set_ylabel(metric)
        for axes in grid[len(plan.space) :]:
            axes.set_axis_off()
        figure.savefig(out, format="png")
    return out


def _slice(axes: Axes, summary: HPOSummary, name: str, domain: Domain) -> None:
    shown = _of(summary.trials, "done") + _of(summary.trials, "pruned")
    known = [trial for trial in shown if domain.contains(trial.params.get(name))]
    places: list[Any] = [trial.params[name] for trial in known]
    if isinstance(domain, ChoiceDomain):
        places = [domain.index(value) for value in places]
        axes.set_xticks(range(len(domain.choices)), [str(value) for value in domain.choices])
        axes.set_xlim(-0.5, len(domain.choices) - 0.5)
    elif domain.log:
        axes.set_xscale("log")
    for place, trial, value in zip(places, known, _values(known), strict=True):
        colour = SUCCESS if trial == summary.best else REWARD
        axes.plot(place, value, "o", color=colour, fillstyle="none" if trial.state == "pruned" else "full")
    _default(axes, summary)
    axes.set_title(name, fontsize=11)


def _default(axes: Axes, summary: HPOSummary) -> None:
    if summary.default_reward is not None:
        axes.axhline(summary.default_reward, color=HELD_OUT, linestyle="--", linewidth=1.2, label="unchanged settings")


def _of(trials: Sequence[Trial], state: str) -> list[Trial]:
    return [trial for trial in trials if trial.state == state and trial.value is not None]


def _values(trials: Sequence[Trial]) -> list[float]:
    return [trial.value for trial in trials if trial.value is not None]


def _failed(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.state in ("failed", "lost")]
