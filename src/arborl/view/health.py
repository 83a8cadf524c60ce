"""How a run fared besides its reward, as a picture: what a person looks at when a curve does not rise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl.track.jsonl import read_metrics
from arborl.view.curve import COLOURS, STYLE, save_figure, series_of, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOOLS = "episode/tool/"
MOST_LINES, LONGEST = 16, 60
"""Of a plot; and characters of a line's name."""
COUNTS = ("calls", "used", "offered", "failed")


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot: its title, its lines by label, and whether they are shares."""

    title: str
    lines: dict[str, str]
    share: bool = True
    named: bool = True
    """Whether its lines need names; not, where there is one and the title says which."""


PANELS = (
    Panel("Flat groups", {"flat": "group/zero_variance"}, named=False),
    Panel("Entropy, nats a token", {"entropy": "policy/entropy"}, share=False, named=False),
    Panel("Replies", {"valid": "episode/valid", "cut off": "call/cut_off"}),
    Panel("Failed episodes", {"failed": "episode/failed"}, share=False, named=False),
)


def health(metrics_file: Path, out: Path) -> Path | None:
    """Draw flat groups, entropy, valid replies, failures, stop reasons and tool failures by kind; those that there are.

    Args:
        metrics_file: a run's `metrics.jsonl`.
        out: the PNG to write. Without any step nothing is written.
    """
    rows = [row for row in read_metrics(metrics_file) if "episode/count" in row] if metrics_file.exists() else []
    found = [panel for panel in (*PANELS, _stops(rows), _tools(rows)) if _drawn(rows, panel)]
    if not found:
        return None

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        wide, high = min(len(found), 3), -(-len(found) // 3)
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=(11 / 3 * wide, 2.8 * high), dpi=120, layout=layout)
        for axes, panel in zip(figure.subplots(high, wide, squeeze=False).flat, found, strict=False):
            _draw(axes, rows, panel)
        for axes in figure.axes[len(found) :]:
            axes.set_axis_off()
        return save_figure(figure, out)


def _stops(rows: Sequence[dict[str, Any]]) -> Panel:
    """How episodes end."""
    return Panel("How episodes end", _named(rows, "stop/"))


def _tools(rows: Sequence[dict[str, Any]]) -> Panel:
    """Failed tool calls an episode, by kind."""
    kinds = {kind: name for kind, name in _named(rows, TOOLS).items() if kind not in COUNTS}
    return Panel("Failed tool calls an episode", kinds, share=False)


def _named(rows: Sequence[dict[str, Any]], start: str) -> dict[str, str]:
    """Metrics that begin so and are ever above 0, by the rest of their names."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if name.startswith(start) and value)
    return {name.removeprefix(start)[:LONGEST]: name for name in list(names)[:MOST_LINES]}


def _drawn(rows: Sequence[dict[str, Any]], panel: Panel) -> bool:
    return any(series_of(rows, name) for name in panel.lines.values())


def _draw(axes: Axes, rows: Sequence[dict[str, Any]], panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_title(panel.title, fontsize=11)
    for colour, (label, name) in zip(COLOURS * len(panel.lines), panel.lines.items(), strict=False):
        series = series_of(rows, name)
        if not series:
            continue
        steps, values = zip(*series, strict=True)
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1, marker="." if len(steps) < 4 else None)
        axes.plot(steps, smooth(values), color=colour, linewidth=2.2, label=label.replace("_", " "))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if panel.share:
        axes.set_ylim(-0.04, 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    else:
        axes.set_ylim(bottom=0)
    if panel.named:
        axes.legend(loc="best", fontsize=9, frameon=True, framealpha=0.85, edgecolor="none")
