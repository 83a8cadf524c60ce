"""Plot of the context length over an episode's calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from arborl.types import Episode
from arborl.view.curve import COLOURS, HELD_OUT, STYLE, save_figure


def lengths(episode: Episode) -> list[int]:
    """Tokens of prompt and completion of each call."""
    return [len(call.prompt) + len(call.completion.tokens) for call in episode.calls]


def edits_itself(episode: Episode) -> bool:
    """Whether the context ever became shorter."""
    tokens = lengths(episode)
    return any(later < earlier for earlier, later in pairwise(tokens))


def context_length(episodes: Sequence[Episode], out: Path, title: str, window: int | None = None) -> Path:
    """Plot the context length over the calls of episodes, one line each; `window` is the context limit."""
    if not episodes:
        raise ValueError("no episodes, nothing to plot")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
        axes = figure.subplots()
        for colour, episode in zip(COLOURS * len(episodes), episodes, strict=False):
            tokens = lengths(episode)
            label = f"reward {episode.reward:g}, {len(tokens)} calls"
            axes.plot(
                range(1, len(tokens) + 1), tokens, color=colour, linewidth=2, marker="o", markersize=4, label=label
            )
        if window is not None:
            axes.axhline(window, color=HELD_OUT, linestyle="--", linewidth=1.4)
            axes.text(1, window, f"window, {window:,} tokens", color=HELD_OUT, va="bottom", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="call", ylabel="tokens of prompt and reply", title=title)
        axes.set_ylim(0, 1.12 * max(window or 0, *(max(lengths(it), default=0) for it in episodes)))
        axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none")
        return save_figure(figure, out)
