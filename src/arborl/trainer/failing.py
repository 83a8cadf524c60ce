"""Ends a run that cannot work: where nearly every episode fails, going on costs hours and teaches nothing.

One bad episode costs itself. A batch of them at the very start, or several batches in a row later on, is the run's
setting: it stops, says why once, and says how to go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from arborl.errors import RunStopped
from arborl.failures import BEGINS as FRAMES
from arborl.failures import Failures, printable, trim_traceback
from arborl.types import Episode

HOPELESS = 0.9
"""Share of failed episodes from which on a batch counts as failed."""
FEW = 4
"""Fewer failures than this may be bad luck at any share; they count only in a row."""
PATIENCE = 3
"""Failed batches in a row that end a run which once worked."""
CAUSES = 5
"""Causes that are listed."""


def hopeless(played: int, failed: int) -> bool:
    """Whether nearly all of a batch failed."""
    return played > 0 and failed >= HOPELESS * played


class FailureWatch:
    """Counts a run's failures by cause, and raises `RunStopped` where there is no point in going on.

    Example:
        watch.look("step", 3, groups_episodes, played=256)
    """

    def __init__(self) -> None:
        self.failures = Failures()
        self.seen: Counter[str] = Counter()
        self.in_a_row: Counter[str] = Counter()

    def look(self, kind: str, step: int, episodes: Iterable[Episode], played: int | None = None) -> None:
        """A batch was played.

        Args:
            kind: `step` or `evaluation`; each is counted by itself.
            step: of the run.
            episodes: of the batch; at least those that failed.
            played: how many there were, where not all are given.
        """
        batch = list(episodes)
        failed = [episode for episode in batch if episode.failure is not None]
        played = len(batch) if played is None else played
        when = f"step {step}" if kind == "step" else f"the {kind} at step {step}"
        self.failures.add(failed, when)
        if played == 0:
            return
        self.seen[kind] += 1
        self.in_a_row[kind] = self.in_a_row[kind] + 1 if hopeless(played, len(failed)) else 0
        at_once = self.seen[kind] == 1 and len(failed) >= FEW
        if self.in_a_row[kind] and (at_once or self.in_a_row[kind] >= PATIENCE):
            raise RunStopped(explain(failed, played, when, self.in_a_row[kind]))


def explain(failed: list[Episode], played: int, when: str, in_a_row: int) -> str:
    """Count, causes, one traceback, and what to do."""
    causes = Failures()
    causes.add(failed, when)
    first, *_ = causes
    again = f", and nearly all of the {in_a_row - 1} before" if in_a_row > 1 else ""
    listed = [f"  {cause}" for cause in causes][:CAUSES]
    more = [f"  … and {len(causes) - CAUSES} other causes"] if len(causes) > CAUSES else []
    trace = trim_traceback(first.failure.traceback)
    shown = ["", printable(trace)] if FRAMES in trace else []  # a deadline that passed has no lines
    return "\n".join(
        [f"Stopped: {len(failed)} of {played} episodes of {when} failed{again}.", *listed, *more, *shown, "", HOW]
    )


HOW = (
    "Mend that, then start the run again. `arborl env check NAME` tries an environment alone; `arborl rollout` plays "
    "one episode of a configuration and shows it."
)
