"""What a run with several sources was trained on, and how each of them went, as a picture."""

from __future__ import annotations

from pathlib import Path

from arborl.track.jsonl import read_metrics
from arborl.view.curve import COLOURS, LONGEST, STYLE, save_figure, series_of, smooth
from arborl.view.web.folders import read_summary

MOST_SOURCES = 40
SHARE = ("data/", "/share")


def sources_of(metrics_file: Path) -> list[str]:
    """The sources that a run's metrics name, in their order."""
    rows = read_metrics(metrics_file) if metrics_file.exists() else iter(())
    return next((names for row in rows if (names := _named(row))), [])


def _named(row: dict[str, float]) -> list[str]:
    """The sources whose share a step has; an evaluation alone has none."""
    start, end = SHARE
    names = [key[len(start) : -len(end)] for key in row if key.startswith(start) and key.endswith(end)]
    return names[:MOST_SOURCES]


def composition(run: Path, out: Path, title: str) -> Path:
    """Draw each batch's shares by source, and beside them the success of each source's training episodes.

    Example:
        composition(Path("runs/mixed"), Path("mixed.png"), "three agents in one run")

    Args:
        run: its folder, with `metrics.jsonl`, and `summary.json` for the held-out success before and after.
        out: the PNG to write.
        title: a line above the plots.
    """
    names = sources_of(run / "metrics.jsonl")
    if not names:
        raise ValueError(f"{run}: no step has the share of a source, so there is nothing to draw")
    rows = [row for row in read_metrics(run / "metrics.jsonl") if _named(row)]
    places = [row["step"] for row in rows]
    summary = read_summary(run)

    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import PercentFormatter

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12))
        left, right = figure.subplots(1, 2)
        below = [0.0] * len(rows)
        for colour, name in zip(COLOURS * len(names), names, strict=False):
            drawn = dict(series_of(rows, f"data/{name}/share"))
            shares = [drawn.get(place, 0.0) for place in places]
            left.bar(places, shares, 1.0, bottom=below, color=colour, linewidth=0, label=name)
            below = [low + share for low, share in zip(below, shares, strict=True)]
            success = series_of(rows, f"data/{name}/success")
            steps, values = zip(*success, strict=True) if success else ((), ())
            held = [(summary.get(when) or {}).get(f"success/{name}") for when in ("before", "after")]
            label = name if None in held else f"{name}: {held[0]:.0%} to {held[1]:.0%} held out"
            right.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            right.plot(steps, smooth(values), color=colour, linewidth=2.4, label=label)
            if None not in held:
                right.plot([0, places[-1]], held, "D", color=colour, markersize=7, clip_on=False, zorder=5)
        left.set(xlabel="step", ylim=(0, 1), xlim=(places[0] - 0.5, places[-1] + 0.5))
        left.set_title("Share of each batch", fontsize=11)
        right.set(xlabel="step", ylim=(-0.03, 1.05))
        right.set_title("Success of training episodes", fontsize=11)
        for axes, place in ((left, "upper right"), (right, "lower right")):
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
            axes.legend(loc=place, frameon=True, framealpha=0.9, edgecolor="none")
        figure.suptitle(title[:LONGEST], x=0.014, ha="left", fontsize=13)
        return save_figure(figure, out)
