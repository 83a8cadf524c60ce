"""The view of runs: replays, curves, HTML pages, a web viewer. It reads run folders and never trains or samples.

In reading order:

    report.py          One static page about a run
    pushes.py          The tokens that moved the weights most in a run's last step, as HTML
    comparison.py      Several runs on one page, with intervals
    web/               The viewer: a local web application that reads run folders while they are written
    transcript.py      An episode as HTML: its messages by role, and how sure the model was of each token it sampled
    problems.py        What went wrong in a run
    health.py          How a run fared besides its reward
    curve.py           The learning curve of a run, as a picture
    sources.py         What a run with several sources was trained on, and how each of them went, as a picture
    context_length.py  How long an agent's context was over an episode
    standings.py       Policies side by side, as files: JSON, CSV, HTML, JSONL
    gif.py             An episode as a moving picture
"""

from arborl.view.context_length import context_length
from arborl.view.curve import plot_runs, learning_curve
from arborl.view.gif import Frame, replay, save_gif
from arborl.view.report import write_report
from arborl.view.sources import composition

__all__ = ["Frame", "plot_runs", "composition", "context_length", "learning_curve", "replay", "save_gif", "write_report"]
