"""Plots of a run: learning curve, health, sources, context length; several runs in one plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from arborl.track.folder_files import read_json, replace_file
from arborl.track.jsonl import read_metrics
from arborl.types import Episode
from arborl.view.web.folders import read_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUCCESS, REWARD, HELD_OUT = "#2a9d5c", "#2f6fdb", "#d1495b"
COLOURS = [SUCCESS, REWARD, HELD_OUT, "#e0a030", "#7d5ba6", "#4aa3a2", "#8c564b", "#5f6368", "#d667a8", "#9a9b25"]
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a6",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "xtick.color": "#4a4f57",
    "ytick.color": "#4a4f57",
    "text.parse_math": False,
}
LEGEND: dict[str, Any] = {"frameon": True, "framealpha": 0.9, "edgecolor": "none"}
MAX_TITLE = 200
"""Characters of a title."""
MAX_VALUE = 1e30
"""Largest plotted number."""
MEASURED = ("perplexity", "accuracy")
"""Held-out metrics of demonstrations and preferences besides the loss."""
Series = list[tuple[int, float]]
Point = tuple[int, float, float, float]
"""Step, held-out value and its interval."""


@contextmanager
def drawing(
    out: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, title: str = ""
) -> Iterator[list[Axes]]:
    """The axes of a new figure, which is then written to `out` as PNG; a link there is refused. Margins are fixed:
    matplotlib's layout engines measure all texts and take longer than drawing."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=120)
        figure.subplots_adjust(**_margins(size, rows, columns, bool(title)))
        yield list(figure.subplots(rows, columns, squeeze=False).flat)
        if title:
            figure.suptitle(title[:MAX_TITLE], x=0.014, ha="left", fontsize=13)
        drawn = BytesIO()
        figure.savefig(drawn, format="png")
        replace_file(out, drawn.getvalue())


def _margins(size: tuple[float, float], rows: int, columns: int, has_title: bool) -> dict[str, float]:
    """Arguments of `subplots_adjust` for margins of fixed size in inches."""
    (width, height), (left, right, bottom) = size, (0.65, 0.2, 0.6)
    top, between_columns, between_rows = 0.8 if has_title else 0.4, 0.75, 0.85
    panel_width = (width - left - right - (columns - 1) * between_columns) / columns
    panel_height = (height - top - bottom - (rows - 1) * between_rows) / rows
    return {
        "left": left / width, "right": 1 - right / width, "bottom": bottom / height, "top": 1 - top / height,
        "wspace": between_columns / panel_width, "hspace": between_rows / panel_height,
    }  # fmt: skip


def learning_curve(
    metrics_file: Path, out: Path, title: str, before: float | None = None, after: float | None = None
) -> Path:
    """Plot success and reward of the training episodes and held-out success; without success, reward and held-out
    reward; for demonstrations, the loss.

    `before` and `after` are the held-out success of a run whose metrics have no evaluations.
    """
    rows = list(read_metrics(metrics_file))
    success, reward = series_of(rows, "episode/success"), series_of(rows, "reward/mean")
    loss, imitation_loss = series_of(rows, "policy/loss"), series_of(rows, "sft/loss")
    if not success and not reward and not loss:
        raise ValueError(f"{metrics_file}: no step has 'episode/success' or 'reward/mean', nothing to plot")
    if reward and not success and not evaluations(rows) and before is None and after is None:
        return _reward_curve(rows, out, title)
    with drawing(out, (11, 4.2), 1, 2, title) as (left, right):
        if success or reward:
            _plot(left, success, SUCCESS, "Success of training episodes")
            last = success[-1][0] if success else 1
            ends: list[Point] = [(at, end, end, end) for at, end in ((0, before), (last, after)) if end is not None]
            _plot_evaluations(left, evaluations(rows) or ends)
            _show_shares(left)
            second = "Loss of imitation" if imitation_loss else "Reward of training episodes"
            _plot(right, imitation_loss or reward, REWARD, second)
            if imitation_loss and success and success[0][0] > imitation_loss[0][0]:
                left.axvspan(imitation_loss[0][0] - 1, success[0][0] - 1, color="#eef1f4", zorder=0)
                left.text(imitation_loss[0][0], 0.98, "imitation", color="#6a7078", fontsize=9, va="top")
        else:
            _plot(left, loss, REWARD, "Loss")
            _plot_evaluations(left, evaluations(rows, "loss"), "{:.3f}")
            name = next((name for name in MEASURED if series_of(rows, f"evaluation/{name}")), MEASURED[0])
            _plot(right, series_of(rows, f"evaluation/{name}"), HELD_OUT, f"Held-out {name}")
        for axes in (left, right):
            _show_integers(axes)
    return out


def _reward_curve(rows: Sequence[dict[str, Any]], out: Path, title: str) -> Path:
    """The reward of training episodes and on held-out tasks, and the loss of imitation if there was any."""
    imitation_loss = series_of(rows, "sft/loss")
    columns = 2 if imitation_loss else 1
    with drawing(out, (5.5 * columns, 4.2), 1, columns, title) as panels:
        _plot(panels[0], series_of(rows, "reward/mean"), REWARD, "Reward of training episodes")
        _plot_evaluations(panels[0], evaluations(rows, "reward"), "{:.3f}")
        if imitation_loss:
            _plot(panels[1], imitation_loss, REWARD, "Loss of imitation")
        for axes in panels:
            _show_integers(axes)
    return out


def plot_runs(runs: Sequence[Path], out: Path, title: str) -> Path:
    """Plot the success of several finished runs, with held-out success at the ends."""
    with drawing(out, (8, 4.2)) as (axes,):
        for colour, run in zip(COLOURS * len(runs), runs, strict=False):
            summary = read_json(run / "summary.json")
            series = series_of(list(read_metrics(run / "metrics.jsonl")), "episode/success")
            held_out = [summary[when].get("success") for when in ("before", "after")]
            _plot_success(axes, series, colour, run.name, held_out, series[-1][0] if series else 1)
        axes.set(xlabel="step", title=title)
        _show_shares(axes)
        axes.legend(loc="lower right", **LEGEND)
    return out


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average over a tenth of the curve, narrower at the ends."""
    half = len(values) // 20 or int(len(values) >= 4)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def series_of(rows: Sequence[dict[str, Any]], name: str) -> Series:
    found = [(row["step"], row.get(name)) for row in rows]
    return [(int(step), value) for step, value in found if step is not None and _is_number(value)]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < MAX_VALUE


def evaluations(rows: Sequence[dict[str, float | None]], name: str = "success") -> list[Point]:
    found = []
    for step, value in series_of(rows, f"evaluation/{name}"):
        row = next(row for row in rows if row["step"] == step)
        low, high = (row.get(f"evaluation/{name}_{end}") for end in ("low", "high"))
        found.append((step, value, value if low is None else low, value if high is None else high))
    return found


def _show_shares(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.03, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def _show_integers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _plot_line(axes: Axes, series: Series, colour: str, label: str = "") -> None:
    """The values, faint, and their moving average."""
    steps, values = zip(*series, strict=True)
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1.2, marker="." if len(steps) < 4 else None)
    axes.plot(steps, smooth(values), color=colour, linewidth=2.4, label=label)


def _plot(axes: Axes, series: Series, colour: str, title: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    if series:
        _plot_line(axes, series, colour)
    else:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="#9aa0a6")


def _plot_success(axes: Axes, success: Series, colour: str, name: str, held_out: Sequence[Any], last: int) -> None:
    """The success of training episodes, and held-out success before and after training, at steps 0 and `last`."""
    is_measured = None not in held_out
    label = f"{name}: {held_out[0]:.0%} to {held_out[1]:.0%} held out" if is_measured else name
    if success:
        _plot_line(axes, success, colour, label)
    if is_measured:
        axes.plot([0, last], held_out, "D", color=colour, markersize=7, clip_on=False, zorder=5)


def _plot_evaluations(axes: Axes, points: Sequence[Point], shown: str = "{:.0%}") -> None:
    if not points:
        return
    steps, values, low, high = (list(column) for column in zip(*points, strict=True))
    label = f"held out: {shown.format(values[0])}" + (f" to {shown.format(values[-1])}" if len(values) > 1 else "")
    down = [value - end for value, end in zip(values, low, strict=True)]
    up = [end - value for value, end in zip(values, high, strict=True)]
    line = ":" if len(points) > 2 else "none"
    axes.errorbar(
        steps, values, (down, up), fmt="D", markersize=7, color=HELD_OUT, linestyle=line, linewidth=1.2, capsize=3,
        clip_on=False, zorder=5, label=label,
    )  # fmt: skip
    axes.legend(loc="best", labelcolor=HELD_OUT, handletextpad=0.4, **LEGEND)


# ------------------------------------------------------------------------------------------------ health

TOOLS = "episode/tool/"
MAX_LINES, MAX_LABEL = 16, 60
"""Lines of a panel; characters of a label."""
COUNTS = ("calls", "used", "offered", "failed")


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: title, metrics by label, and whether they are shares."""

    title: str
    lines: dict[str, str]
    share: bool = True


PANELS = (
    Panel("Zero-variance groups", {"zero variance": "group/zero_variance"}),
    Panel("Entropy, nats per token", {"entropy": "policy/entropy"}, share=False),
    Panel("Replies", {"valid": "episode/valid", "cut off": "call/cut_off"}),
    Panel("Failed episodes", {"failed": "episode/failed"}, share=False),
)


def plot_health(metrics_file: Path, out: Path) -> Path | None:
    """Plot zero-variance groups, entropy, valid messages, failures, stop reasons and tool failures by kind."""
    rows = [row for row in read_metrics(metrics_file) if "episode/count" in row] if metrics_file.exists() else []
    stops = Panel("How episodes end", _nonzero_metrics(rows, "stop/"))
    kinds = {kind: name for kind, name in _nonzero_metrics(rows, TOOLS).items() if kind not in COUNTS}
    tools = Panel("Failed tool calls per episode", kinds, share=False)
    panels = [panel for panel in (*PANELS, stops, tools) if any(series_of(rows, name) for name in panel.lines.values())]
    if not panels:
        return None
    wide, high = min(len(panels), 3), -(-len(panels) // 3)
    with drawing(out, (11 / 3 * wide, 2.8 * high), high, wide) as all_axes:
        for axes, panel in zip(all_axes, panels, strict=False):
            _draw_panel(axes, rows, panel)
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
    return out


def _nonzero_metrics(rows: Sequence[dict[str, Any]], start: str) -> dict[str, str]:
    """Metrics with this prefix that are ever above 0, by the rest of their names."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if name.startswith(start) and value)
    return {name.removeprefix(start)[:MAX_LABEL]: name for name in list(names)[:MAX_LINES]}


def _draw_panel(axes: Axes, rows: Sequence[dict[str, Any]], panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=11)
    for colour, (label, name) in zip(COLOURS * len(panel.lines), panel.lines.items(), strict=False):
        if series := series_of(rows, name):
            _plot_line(axes, series, colour, label.replace("_", " "))
    _show_integers(axes)
    if panel.share:
        _show_shares(axes)
    else:
        axes.set_ylim(bottom=0)
    if len(panel.lines) > 1:
        axes.legend(loc="best", fontsize=9, **LEGEND)


# ------------------------------------------------------------------------------------------------ sources

MAX_SOURCES = 40
SHARE = ("data/", "/share")


def sources_of(metrics_file: Path) -> list[str]:
    rows = read_metrics(metrics_file) if metrics_file.exists() else iter(())
    return next((names for row in rows if (names := _sources_in_row(row))), [])


def _sources_in_row(row: dict[str, float]) -> list[str]:
    start, end = SHARE
    names = [key[len(start) : -len(end)] for key in row if key.startswith(start) and key.endswith(end)]
    return names[:MAX_SOURCES]


def plot_sources(run: Path, out: Path, title: str) -> Path:
    """Plot the share of each source in the batches, and the success of its training episodes."""
    names = sources_of(run / "metrics.jsonl")
    if not names:
        raise ValueError(f"{run}: no step has the share of a source, nothing to plot")
    rows = [row for row in read_metrics(run / "metrics.jsonl") if _sources_in_row(row)]
    steps, summary = [row["step"] for row in rows], read_summary(run)
    with drawing(out, (11, 4.2), 1, 2, title) as (left, right):
        below = [0.0] * len(rows)
        for colour, name in zip(COLOURS * len(names), names, strict=False):
            drawn = dict(series_of(rows, f"data/{name}/share"))
            shares = [drawn.get(step, 0.0) for step in steps]
            left.bar(steps, shares, 1.0, bottom=below, color=colour, linewidth=0, label=name)
            below = [low + share for low, share in zip(below, shares, strict=True)]
            held_out = [(summary.get(when) or {}).get(f"success/{name}") for when in ("before", "after")]
            _plot_success(right, series_of(rows, f"data/{name}/success"), colour, name, held_out, steps[-1])
        left.set_title("Share of each batch", fontsize=11)
        right.set_title("Success of training episodes", fontsize=11)
        for axes in (left, right):
            axes.set_xlabel("step")
            _show_shares(axes)
        left.legend(loc="upper right", **LEGEND)
        right.legend(loc="lower right", **LEGEND)
        left.set(ylim=(0, 1), xlim=(steps[0] - 0.5, steps[-1] + 0.5))
    return out


# ------------------------------------------------------------------------------------------------ context length


def lengths(episode: Episode) -> list[int]:
    """Tokens of prompt and completion of each call."""
    return [len(call.prompt) + len(call.completion.tokens) for call in episode.calls]


def edits_itself(episode: Episode) -> bool:
    """Whether the context ever became shorter."""
    return any(later < earlier for earlier, later in pairwise(lengths(episode)))


def context_length(episodes: Sequence[Episode], out: Path, title: str, window: int | None = None) -> Path:
    """Plot the context length over the calls of episodes, one line each; `window` is the context limit."""
    if not episodes:
        raise ValueError("no episodes, nothing to plot")
    with drawing(out, (8, 4.2)) as (axes,):
        for colour, episode in zip(COLOURS * len(episodes), episodes, strict=False):
            tokens = lengths(episode)
            style: Any = {"color": colour, "linewidth": 2, "marker": "o", "markersize": 4}
            label = f"reward {episode.reward:g}, {len(tokens)} calls"
            axes.plot(range(1, len(tokens) + 1), tokens, label=label, **style)
        if window is not None:
            axes.axhline(window, color=HELD_OUT, linestyle="--", linewidth=1.4)
            axes.text(1, window, f"window, {window:,} tokens", color=HELD_OUT, va="bottom", fontsize=9)
        _show_integers(axes)
        axes.set(xlabel="call", ylabel="tokens of prompt and reply", title=title)
        axes.set_ylim(0, 1.12 * max(window or 0, *(max(lengths(it), default=0) for it in episodes)))
        axes.legend(loc="lower right", **LEGEND)
    return out
