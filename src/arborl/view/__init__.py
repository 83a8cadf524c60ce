"""The view of a finished run: replays, curves, one HTML page. It reads run folders and never trains or samples.

Start with `report.py` (the page), then `gif.py` (an episode as a moving picture) and `curve.py` (the learning curve).
"""

from arborl.view.curve import compare, learning_curve
from arborl.view.gif import Frame, replay, save_gif
from arborl.view.report import write_report

__all__ = ["Frame", "compare", "learning_curve", "replay", "save_gif", "write_report"]
