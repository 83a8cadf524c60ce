"""Tables and a figure of runs of several algorithms on several environments (`benchmarks/compare_algorithms.py`).

Scores are success rates, from 0 to 1, without further normalisation. `after` is the success on held-out tasks after
training; `area` is the mean success of the training episodes over all steps, the area under the training curve divided
by the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from score_statistics import Estimate, improvement_estimate, iqm_estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
MEASURES = {"after": "held-out success", "area": "area under the curve"}
MISSING = "–"
WIDTH, PANEL_HEIGHT = 9.0, 2.6
"""Size of the figure in inches: its width and the height of a row of panels."""
IMPROVEMENT_RANGE = (-0.05, 1.05)
MIN_RANGE = 0.1
"""Smallest range of scores on an axis, so that small differences do not look large."""


@dataclass(frozen=True, slots=True)
class AlgorithmResult:
    """Statistics of one algorithm; None where runs are missing."""

    overall: dict[str, Estimate | None]
    """Interquartile mean over the runs of all environments, by measure."""
    improvement: dict[str, Estimate | None]
    """Probability that a run has a higher score than one of the baseline, by measure."""
    by_environment: dict[str, dict[str, Estimate]]
    """Interquartile mean by environment and measure."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of several algorithms."""

    title: str
    environments: dict[str, str]
    """Titles by name."""
    algorithms: tuple[str, ...]
    baseline: str
    rows: list[Row]
    """Finished runs."""

    def scores(self, algorithm: str, measure: str) -> dict[str, list[float]]:
        """Scores of an algorithm by environment, in the order of the seeds."""
        rows = sorted((row for row in self.rows if row["algorithm"] == algorithm), key=lambda row: row["seed"])
        found = {name: [row[measure] for row in rows if row["environment"] == name] for name in self.environments}
        return {name: scores for name, scores in found.items() if scores}

    def mean(self, algorithm: str, measure: str, environment: str | None = None) -> float | None:
        values = [
            row[measure]
            for row in self.rows
            if row["algorithm"] == algorithm and environment in (None, row["environment"])
        ]
        values = [value for value in values if value is not None]
        return fmean(values) if values else None

    def result(self, algorithm: str) -> AlgorithmResult:
        overall: dict[str, Estimate | None] = {}
        improvement: dict[str, Estimate | None] = {}
        by_environment: dict[str, dict[str, Estimate]] = {}
        for measure in MEASURES:
            scores, baseline = self.scores(algorithm, measure), self.scores(self.baseline, measure)
            is_complete = scores.keys() == self.environments.keys()
            overall[measure] = iqm_estimate(scores) if is_complete else None
            is_comparable = is_complete and algorithm != self.baseline and scores.keys() == baseline.keys()
            improvement[measure] = improvement_estimate(scores, baseline) if is_comparable else None
            for name, runs in scores.items():
                by_environment.setdefault(name, {})[measure] = iqm_estimate({name: runs})
        return AlgorithmResult(overall, improvement, by_environment)


# ------------------------------------------------------------------------------------------------ tables


def tables(comparison: Comparison, results: Mapping[str, AlgorithmResult]) -> str:
    """The results as Markdown."""
    parts = [overall_table(comparison, results), environment_table(comparison, results)]
    if any(row.get("shared_states") is not None for row in comparison.rows):
        parts.append(state_table(comparison))
    return "\n".join(parts)


def overall_table(comparison: Comparison, results: Mapping[str, AlgorithmResult]) -> str:
    baseline = comparison.baseline
    lines = [
        f"| algorithm | runs | IQM, held-out success | IQM, area under the curve | P(> {baseline}), held-out success "
        f"| P(> {baseline}), area | sampled tokens per run | training seconds per run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        runs = sum(row["algorithm"] == name for row in comparison.rows)
        cells = [_cell(result.overall[measure]) for measure in MEASURES]
        cells += [_cell(result.improvement[measure]) for measure in MEASURES]
        tokens, seconds = (comparison.mean(name, measure) for measure in ("sampled_tokens", "train_seconds"))
        cells += [MISSING if tokens is None else f"{tokens:,.0f}", MISSING if seconds is None else f"{seconds:.0f}"]
        lines.append(f"| `{name}` | {runs} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def environment_table(comparison: Comparison, results: Mapping[str, AlgorithmResult]) -> str:
    lines = [
        "| environment | algorithm | runs | before, mean | after, IQM | area, IQM | after, by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for environment, title in comparison.environments.items():
        for name, result in results.items():
            if environment not in result.by_environment:
                continue
            runs = comparison.scores(name, "after")[environment]
            before = comparison.mean(name, "before", environment)
            cells = [MISSING if before is None else f"{before:.3f}"]
            cells += [_cell(result.by_environment[environment][measure]) for measure in MEASURES]
            cells.append(" / ".join(f"{score:.3f}" for score in runs))
            lines.append(f"| {title} | `{name}` | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def state_table(comparison: Comparison) -> str:
    """How often states repeat within a group, and the length of the episodes."""
    lines = [
        "| environment | algorithm | shared states | turns per episode | zero-variance groups |",
        "|---|---|---|---|---|",
    ]
    for environment, title in comparison.environments.items():
        for name in comparison.algorithms:
            values = [comparison.mean(name, key, environment) for key in ("shared_states", "turns", "zero_variance")]
            if values[0] is not None:
                cells = [
                    MISSING if value is None else shown.format(value)
                    for value, shown in zip(values, ("{:.0%}", "{:.1f}", "{:.0%}"), strict=True)
                ]
                lines.append(f"| {title} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(estimate: Estimate | None) -> str:
    return MISSING if estimate is None else str(estimate)


# ------------------------------------------------------------------------------------------------ figure


def plot_comparison(comparison: Comparison, results: Mapping[str, AlgorithmResult], out: Path) -> Path:
    """Upper row: interquartile means over all environments and the probability of improvement. Lower row: the
    interquartile mean of held-out success in each environment."""
    from arborl.view.curve import drawing

    columns = max(3, len(comparison.environments))
    height = 0.8 + 2 * (PANEL_HEIGHT if len(results) > 3 else 0.7 * PANEL_HEIGHT)
    with drawing(out, (WIDTH, height), 2, columns, comparison.title) as panels:
        figure = panels[0].figure
        figure.subplots_adjust(left=1.6 / WIDTH, wspace=0.18, hspace=0.75, top=1 - 0.8 / height)
        for number, (measure, title) in enumerate(MEASURES.items()):
            estimates = {name: result.overall[measure] for name, result in results.items()}
            _plot_intervals(panels[number], estimates, f"IQM, {title}" if number == 0 else "IQM, area under curve")
        _plot_improvement(panels[2], comparison, results)
        for axes in panels[3:columns]:
            axes.set_axis_off()
        for axes, (environment, title) in zip(panels[columns:], comparison.environments.items(), strict=False):
            found = {name: result.by_environment.get(environment, {}).get("after") for name, result in results.items()}
            _plot_intervals(axes, found, title)
            axes.set_xlabel("IQM, held-out success", fontsize=9)
        for axes in panels[columns + len(comparison.environments) :]:
            axes.set_axis_off()
        for number, axes in enumerate(panels):
            _label_algorithms(axes, list(results), is_first=number % columns == 0)
    return out


def _plot_intervals(
    axes: Axes, estimates: Mapping[str, Estimate | None], title: str, marker: str = "o", shift: float = 0.0
) -> None:
    """One interval per algorithm, from top to bottom."""
    from arborl.view.curve import COLOURS

    axes.set_title(title, fontsize=10)
    for place, (colour, estimate) in enumerate(zip(COLOURS * len(estimates), estimates.values(), strict=False)):
        if estimate is not None:  # matplotlib draws no line for NaN
            axes.plot([estimate.low, estimate.high], [place + shift] * 2, color=colour, linewidth=6, alpha=0.35,
                      solid_capstyle="butt")  # fmt: skip
            axes.plot([estimate.value], [place + shift], marker, color=colour, markersize=6, zorder=5)
    low, high = axes.get_xlim()
    if (missing := MIN_RANGE - (high - low)) > 0:
        axes.set_xlim(low - missing / 2, high + missing / 2)


def _plot_improvement(axes: Axes, comparison: Comparison, results: Mapping[str, AlgorithmResult]) -> None:
    for measure, marker, shift in (("after", "o", -0.17), ("area", "D", 0.17)):
        estimates = {name: result.improvement[measure] for name, result in results.items()}
        _plot_intervals(axes, estimates, f"P(higher than {comparison.baseline})", marker, shift)
    axes.axvline(0.5, color="#4a4f57", linewidth=1, linestyle="--", zorder=1)
    axes.set_xlim(IMPROVEMENT_RANGE)
    axes.set_xticks([0, 0.5, 1])
    handles = [axes.plot([], [], marker, color="#4a4f57", label=label)[0]
               for marker, label in (("o", "held-out success"), ("D", "area under curve"))]  # fmt: skip
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=8, frameon=False, ncols=1)


def _label_algorithms(axes: Axes, names: Sequence[str], is_first: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names if is_first else [""] * len(names))
    if axes.get_xlim() != IMPROVEMENT_RANGE:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.tick_params(labelsize=9)
    axes.grid(visible=False, axis="y")
