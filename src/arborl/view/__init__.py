"""Views of runs: plots, GIFs, HTML report, comparison page and web viewer. Reads run folders; never trains or samples.

report.py          The HTML report of a run
comparison.py      Comparison page of several runs, with intervals
web/               The viewer: a local web application for run folders
transcript.py      An episode as HTML
curve.py           Plots of a run: learning curve, health, sources, context length
policy_table.py    Evaluation results as JSON, CSV, HTML and JSONL
gif.py             An episode as a GIF
"""

from arborl.view.curve import context_length, learning_curve, plot_runs, plot_sources
from arborl.view.gif import Frame, replay, save_gif
from arborl.view.report import write_report

__all__ = [
    "Frame", "context_length", "learning_curve", "plot_runs", "plot_sources", "replay", "save_gif", "write_report",
]  # fmt: skip
