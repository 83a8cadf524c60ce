"""Accounting of training episodes: each one that starts is trained once, dropped for a named reason, or pending.

Episodes of evaluations and greedy baselines are not counted. Offline rows, demonstrations and replayed episodes start
when their batch is read; rows of weight 0 are not counted.

The account of step N is the state at the end of step N: it is in the metrics of that step and in its checkpoint. A run
that resumes from step N continues it. Episodes that were pending then are dropped as `restarted`; their groups are
collected again, as new episodes. What a killed or stopped process did after step N is not counted, as its metrics are
removed too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arborl.errors import ArborError
from arborl.failures import MODEL_COMPONENTS, component
from arborl.types import Episode, Failure, Group, Metrics

EpisodeKey = tuple[str, int]
"""Id and seed of an episode. A row has the same ids in every pass over the data; the seed differs."""
GroupPlace = tuple[int, int]
"""Batch of a group and index of its task in the batch; a negative index if the group was not sampled."""

TRAINED = ""
"""Outcome of an episode that an update trains on; other outcomes are reasons."""
FILTERED, STALE, REDUNDANT, GROUP_TIMEOUT = "filtered", "stale", "redundant", "group_timeout"
NOT_SELECTED, NO_TERMS, NOT_FINITE, UPDATE_SKIPPED = "not_selected", "no_terms", "not_finite", "update_skipped"
RESTARTED, RUN_ENDED = "restarted", "run_ended"
MAX_NAMED = 10
"""Episodes that an error message names."""


class AccountingError(ArborError):
    """The sum of trained, dropped and pending episodes is not the number of started ones, or one is trained twice. It
    is a defect of the framework, never of a configuration."""

    def __init__(self, problem: str, ids: Iterable[str]):
        named = list(ids)
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        super().__init__(f"Episode accounting: {problem}: {', '.join(named[:MAX_NAMED])}{more}.")


@dataclass(slots=True)
class PendingEpisode:
    """An episode that runs, or is finished and waits for an update."""

    key: EpisodeKey
    episode: Episode | None = None
    """Set when it has ended."""


def episode_key(episode: Episode) -> EpisodeKey:
    return episode.id, episode.seed


def failure_reason(failure: Failure) -> str:
    """`failed/environment` for a failure of `environment 'lake'`; `not_finite` for a log-probability or a value."""
    where = component(failure)
    is_not_finite = failure.kind == ArithmeticError.__name__ and where in MODEL_COMPONENTS
    return NOT_FINITE if is_not_finite else f"failed/{where}"


class EpisodeAccounting:
    """Counts of a run, and its pending episodes. Used in the thread of the event loop only.

    Example:
        accounting.start(batch=0, at=3, key=("lake/train/000001-003#0", 17))
        accounting.end(0, 3, episode)
        accounting.settle({("lake/train/000001-003#0", 17): TRAINED}, metrics)      # the update is done
        accounting.check(pipeline.open_places())
    """

    def __init__(self) -> None:
        self.started = self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.pending: dict[GroupPlace, dict[EpisodeKey, PendingEpisode]] = {}
        self.first_open_batch = 0
        """All groups of earlier batches are trained or dropped: no episode of them may start."""
        self.trained_places: dict[int, set[int]] = {}
        """Trained groups of the other batches, by batch."""
        self.finished: list[Episode] = []
        """Sampled episodes that were trained, or dropped after their end, since `take_finished`."""
        self._at_step_end = self._counts()

    # ------------------------------------------------------------------------------------------ events

    def start(self, batch: int, at: int, key: EpisodeKey) -> None:
        group = self.pending.setdefault((batch, at), {})
        if key in group:
            raise AccountingError("an episode is started twice", [key[0]])
        if batch < self.first_open_batch or at in self.trained_places.get(batch, ()):
            raise AccountingError(f"an episode of batch {batch} is started after its group was trained", [key[0]])
        group[key] = PendingEpisode(key)
        self.started += 1

    def end(self, batch: int, at: int, episode: Episode) -> None:
        """The episode has ended, perhaps with a failure. One that was dropped meanwhile is ignored."""
        if pending := self.pending.get((batch, at), {}).get(episode_key(episode)):
            pending.episode = episode

    def complete(self, batch: int, at: int, kept: Sequence[Episode], why: str) -> None:
        """A group has the episodes `kept`; its others are dropped."""
        group = self.pending.get((batch, at), {})
        for key in group.keys() - {episode_key(episode) for episode in kept}:
            self._drop(group.pop(key), why)

    def drop(self, batch: int, at: int, why: str) -> int:
        """Drop the pending episodes of a group; returns how many. Failed ones count as failed."""
        group = self.pending.pop((batch, at), {})
        for pending in group.values():
            self._drop(pending, why)
        return len(group)

    def add(self, batch: int, groups: Sequence[Group]) -> None:
        """Start the episodes of a batch that were read instead of sampled; others are pending already."""
        known = {key for group in self.pending.values() for key in group}
        for number, group in enumerate(groups):
            for episode in group.episodes:
                if episode.weight > 0 and episode_key(episode) not in known:
                    self.start(batch, -1 - number, episode_key(episode))

    def settle(self, outcomes: Mapping[EpisodeKey, str], update_metrics: Metrics) -> None:
        """An update is done: each of its episodes was trained (`TRAINED`) or left out for a reason. Groups that the
        learner left out because their loss or gradient is not finite are only known by their number of episodes."""
        places = {key: place for place, group in self.pending.items() for key in group}
        if unknown := [key[0] for key in outcomes if key not in places]:
            raise AccountingError("episodes of an update are not pending: trained twice, or never started", unknown)
        num_trained = 0
        for key, why in outcomes.items():
            place = places[key]
            pending = self.pending[place].pop(key)
            if not self.pending[place]:
                del self.pending[place]
            if why:
                self._drop(pending, why)
                continue
            self.finished += [pending.episode] if pending.episode is not None else []
            num_trained += 1
            if place[1] >= 0:
                self.trained_places.setdefault(place[0], set()).add(place[1])
        not_finite = min(int(update_metrics.get("dropped/not_finite", 0)), num_trained)
        skipped = num_trained - not_finite if update_metrics.get("learner/steps", 1.0) == 0 else 0
        self.trained += num_trained - not_finite - skipped
        self.dropped += Counter({NOT_FINITE: not_finite, UPDATE_SKIPPED: skipped})

    def close_batches(self, before: int) -> None:
        """No group of these batches is left."""
        self.first_open_batch = max(self.first_open_batch, before)
        self.trained_places = {
            batch: places for batch, places in self.trained_places.items() if batch >= self.first_open_batch
        }

    def end_run(self) -> None:
        """Drop what is pending. The state for checkpoints stays that of the last step."""
        for batch, at in list(self.pending):
            self.drop(batch, at, RUN_ENDED)

    def take_finished(self) -> list[Episode]:
        finished, self.finished = self.finished, []
        return finished

    def _drop(self, pending: PendingEpisode, why: str) -> None:
        failure = pending.episode.failure if pending.episode is not None else None
        self.finished += [pending.episode] if pending.episode is not None else []
        self.dropped[why if failure is None else failure_reason(failure)] += 1

    # ------------------------------------------------------------------------------------------ sums

    def check(self, open_places: Collection[GroupPlace]) -> None:
        """At the end of a step: `AccountingError` if a pending episode belongs to no group that is still collected or
        waits for an update, or if the sum is wrong."""
        lost = [key[0] for place, group in self.pending.items() if place not in open_places for key in group]
        if lost:
            raise AccountingError("episodes are neither trained nor dropped, and their groups are gone", lost)
        known = self.trained + self.dropped.total() + self.num_pending
        if self.started != known:
            sums = f"{self.trained} trained + {self.dropped.total()} dropped + {self.num_pending} pending"
            ids = [key[0] for group in self.pending.values() for key in group] or ["none is pending"]
            raise AccountingError(f"{self.started} started, but {sums}; pending", ids)
        self._at_step_end = self._counts()

    @property
    def num_pending(self) -> int:
        return sum(map(len, self.pending.values()))

    def metrics(self) -> Metrics:
        """Totals since the start of the run; reasons that have occurred."""
        totals = {"started": self.started, "trained": self.trained, "pending": self.num_pending}
        totals |= {"dropped": self.dropped.total()} | {f"dropped/{why}": self.dropped[why] for why in self._reasons()}
        return {f"episodes/{name}": float(count) for name, count in totals.items()}

    def summary(self) -> dict[str, Any]:
        """The table in `summary.json`."""
        dropped = {why: self.dropped[why] for why in self._reasons()}
        return {"started": self.started, "trained": self.trained, "pending": self.num_pending, "dropped": dropped}

    def _reasons(self) -> list[str]:
        return sorted(why for why, count in self.dropped.items() if count)

    # ------------------------------------------------------------------------------------------ checkpoint state

    def _counts(self) -> dict[str, Any]:
        places = {str(batch): sorted(places) for batch, places in sorted(self.trained_places.items())}
        return self.summary() | {"first_open_batch": self.first_open_batch, "trained_places": places}

    def state(self) -> dict[str, Any]:
        """The account at the end of the last step."""
        return self._at_step_end

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue an account; from zero for a checkpoint of an older version, which has none."""
        self.pending, self.finished = {}, []
        self.started, self.trained = int(state.get("started", 0)), int(state.get("trained", 0))
        self.dropped = Counter({str(why): int(count) for why, count in state.get("dropped", {}).items()})
        if pending := int(state.get("pending", 0)):
            self.dropped[RESTARTED] += pending
        self.first_open_batch = int(state.get("first_open_batch", 0))
        self.trained_places = {
            int(batch): {int(at) for at in places} for batch, places in state.get("trained_places", {}).items()
        }
        if self.started != self.trained + self.dropped.total():
            raise ValueError(f"accounting: {dict(state)} does not sum up")
        self._at_step_end = self._counts()
