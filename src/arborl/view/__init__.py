"""The view of a finished run: replays, curves, one HTML page. It reads run folders and never trains or samples.

Start with `report.py` (the page), then `gif.py` (an episode as a moving picture), `curve.py` (the learning curve),
`health.py` (what one looks at when it does not rise), `problems.py` (failures by cause, steps that taught nothing),
`sources.py` (what a mixed run was trained on) and `context_length.py` (how long an agent's context was).
"""

from arborl.view.context_length import context_length
from arborl.view.curve import compare, learning_curve
from arborl.view.gif import Frame, replay, save_gif
from arborl.view.report import write_report
from arborl.view.sources import composition

__all__ = ["Frame", "compare", "composition", "context_length", "learning_curve", "replay", "save_gif", "write_report"]
