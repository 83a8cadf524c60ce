"""Runs an optimizer step of a run again from the files of its folder, and compares the result with the recorded step.

Used are the nearest checkpoint before the step (or the initial model), the episode files, the demonstrations beside
them, and the number of threads and the size of micro-batches in `metrics.jsonl`. Updates between the checkpoint and the
step are run again. No environment, engine, tool or reward is made. In float32 on a CPU the numbers are equal bit for
bit.

    with StepReplayer(Path("runs/lake-001"), step=12) as replayer:
        result = replayer.replay()          # result.equal, result.differences
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from arborl import checkpoint
from arborl.chat.json_schema import SchemaCompiler
from arborl.config.run_config import RunConfig
from arborl.config.trust import load_run_config
from arborl.diagnosis.run_files import ALARMS_FILE
from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.training_run.alarm_recovery import lr_factor, read_rollbacks
from arborl.training_run.build import LearnerParts, build_learner, count_steps
from arborl.types import Call, Group, Metrics

if TYPE_CHECKING:  # needs torch
    from torch import Tensor

    from arborl.learner.core.update_metrics import TermLog
    from arborl.trainer.training_batch import TrainingBatch

log = logging.getLogger(__name__)

T = TypeVar("T")
FORMER_CONFIG = re.compile(r"config\.before-step-(\d{1,12})\.yaml", re.ASCII)
BUILT_SECTIONS = ("algorithm", "model", "learner")
"""Sections of the configuration whose parts are used."""
NOT_COMPARED = ("learner/threads", "learner/fallbacks", "learner/memory_gib")
"""Metrics of the update that describe the machine."""


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The files of a run that its updates can be run again from."""

    run: Path
    metrics: dict[int, dict[str, Any]]
    """The recorded metrics by step."""

    @classmethod
    def of(cls, run: Path) -> StepFiles:
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"{run}: contains no run. Write arborl replay RUN: a folder with config.yaml.")
        if not (run / "metrics.jsonl").is_file():
            raise ConfigError(f"{run}: has no metrics.jsonl, so there is nothing to compare with.")
        return cls(run, {row["step"]: row for row in read_metrics(run / "metrics.jsonl")})

    def check_step(self, step: int) -> None:
        trained = [number for number, row in self.metrics.items() if number > 0 and "learner/terms" in row]
        if not trained:
            raise ConfigError(f"{self.run}: metrics.jsonl has no optimizer step.")
        if step not in trained:
            raise ConfigError(
                f"--step {step}: metrics.jsonl has no such step. Write a step from {min(trained)} to {max(trained)}."
            )

    def config_file(self, step: int) -> Path:
        """The file with the settings of this step: a resumed run may have changed them."""
        found = ((FORMER_CONFIG.fullmatch(path.name), path) for path in self.run.iterdir())
        former = sorted((int(match[1]), path) for match, path in found if match is not None)
        return next((path for last, path in former if step <= last), self.run / "config.yaml")

    def checkpoint(self, step: int) -> Path | None:
        """The newest whole checkpoint at or before this step; None for the initial model."""
        root = self.run / "checkpoints"
        for folder in reversed(checkpoint.complete_checkpoints(root)):
            if _step_of(folder) <= step:
                try:
                    return checkpoint.find(root, str(_step_of(folder)))
                except checkpoint.DamagedCheckpoint as error:
                    log.warning("%s", error)
        return None

    def checkpoint_of(self, step: int) -> Path | None:
        """The checkpoint after this step, if there is one."""
        found = self.checkpoint(step)
        return found if found is not None and _step_of(found) == step else None

    def check_episodes(self, start: int, step: int) -> None:
        """Raise ConfigError unless the episodes of all steps after `start` up to `step` are there."""
        missing = [number for number in range(start + 1, step + 1) if not self._episodes.path(number).is_file()]
        if not missing:
            return
        path = self._episodes.path(missing[0])
        if missing[0] == step:
            raise ConfigError(
                f"{path}: no such file, and step {step} is replayed from it. Write track.episodes=true in the next run."
            )
        first = f"the checkpoint of step {start}" if start else "the initial model"
        raise ConfigError(
            f"{path}: no such file. The replay of step {step} starts from {first} and needs the episodes of all steps "
            f"after it. Write track.episodes=true, or trainer.save_every=1 and trainer.keep={step}, in the next run."
        )

    def groups(self, step: int) -> list[Group]:
        return self._episodes.read_groups(self._episodes.path(step))

    def demonstrations(self, step: int) -> list[Group]:
        from arborl.trainer.hooks import DEMONSTRATIONS

        store = EpisodeStore(self.run / "episodes" / DEMONSTRATIONS)
        return store.read_groups(store.path(step)) if store.path(step).is_file() else []

    @property
    def _episodes(self) -> EpisodeStore:
        return EpisodeStore(self.run / "episodes")


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


# ------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    recorded: float | None
    replayed: float | None


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """Weights and optimizer state after the step against those of its checkpoint."""

    checkpoint: Path
    tensors: int
    different: list[str] = field(default_factory=list)
    largest: float = 0.0
    """Largest absolute difference."""


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step that was run again, and how it compares with the recorded one."""

    run: Path
    step: int
    start: int
    """Step of the checkpoint from which it was computed; 0 for the initial model."""
    checkpoint: Path | None
    metrics: Metrics
    compared: int
    differences: list[Difference]
    earlier: list[int]
    """Steps between the checkpoint and this one that came out differently."""
    weights: WeightComparison | None
    notes: list[str]

    @property
    def equal(self) -> bool:
        return not self.differences and not (self.weights is not None and self.weights.different)

    def as_json(self) -> dict[str, Any]:
        weights = self.weights
        return {
            "run": str(self.run),
            "step": self.step,
            "equal": self.equal,
            "from": {"step": self.start, "checkpoint": str(self.checkpoint) if self.checkpoint else None},
            "compared": self.compared,
            "differences": [
                {"name": one.name, "recorded": one.recorded, "replayed": one.replayed} for one in self.differences
            ],
            "earlier_differences": self.earlier,
            "weights": None
            if weights is None
            else {
                "checkpoint": str(weights.checkpoint),
                "tensors": weights.tensors,
                "different": weights.different,
                "largest": weights.largest,
            },
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
            "notes": self.notes,
        }


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def compare_metrics(recorded: Mapping[str, Any], replayed: Metrics) -> tuple[int, list[Difference]]:
    """The number of metrics of the update that both have, and those that differ."""
    names = [name for name in replayed if name in recorded and name not in NOT_COMPARED]
    pairs = ((name, recorded[name], finite(replayed[name])) for name in names)
    return len(names), [Difference(*one) for one in pairs if one[1] != one[2]]


# ------------------------------------------------------------------------------------------------ replay


@dataclass(frozen=True, slots=True)
class ReplayedUpdate:
    groups: list[Group]
    """All groups of the step with its demonstrations, also those without a gradient."""
    batch: TrainingBatch
    log: TermLog | None
    metrics: Metrics


class StepReplayer:
    """Runs one step of a run again. It holds the learner, and on disk the state before the step.

    Args:
        run: the run folder.
        step: number of the update, from 1.
        overrides: settings as on the command line that replace those of the run.
        objects: Python objects of parts, by their names in the configuration.
        trust: import parts that an unsigned run folder names.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        overrides: Sequence[str] = (),
        objects: Mapping[str, Any] | None = None,
        trust: bool = False,
    ):
        self.files, self.step = StepFiles.of(run), step
        self.overrides, self.objects, self.trust = list(overrides), objects or {}, trust
        self.files.check_step(step)
        self.checkpoint = self.files.checkpoint(step - 1)
        self.start = _step_of(self.checkpoint) if self.checkpoint is not None else 0
        self.files.check_episodes(self.start, step)
        self.rollbacks = read_rollbacks(self.files.run / ALARMS_FILE)
        self.notes: list[str] = []
        self.config_file = Path()
        self.temporary = TemporaryDirectory(prefix="arborl-replay-")
        self.pool: ThreadPoolExecutor | None = None
        self.parts = self._build(self.start + 1)
        self.before: dict[str, Any] = {}
        """State of the algorithm before the step."""

    def __enter__(self) -> StepReplayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.temporary.cleanup()

    def replay(self) -> StepReplay:
        """Run the steps from the checkpoint up to this one, and compare it with what the run recorded."""
        if self.checkpoint is not None:
            self.parts.learner.load(self.checkpoint)
            self.parts.algorithm.load_state(checkpoint.load_state(self.checkpoint)["algorithm"])
        earlier = []
        for step in range(self.start + 1, self.step):
            self._use_settings_of(step)
            done = self._update(step)
            if compare_metrics(self.files.metrics.get(step, {}), done.metrics)[1]:
                earlier.append(step)
            self._after(step)
        self._use_settings_of(self.step)
        self._save()
        self.done = self._update(self.step)
        self._after(self.step)
        compared, differences = compare_metrics(self.files.metrics[self.step], self.done.metrics)
        return StepReplay(
            self.files.run, self.step, self.start, self.checkpoint, self.done.metrics, compared, differences, earlier,
            self._compare_weights(), self.notes,
        )  # fmt: skip

    def restore(self) -> None:
        """Return to the state before the step."""
        self.parts.learner.load(Path(self.temporary.name) / "state")
        self.parts.algorithm.load_state(json.loads(json.dumps(self.before)))

    def update_without(self, episodes: Sequence[str]) -> ReplayedUpdate:
        """The step without these episodes, from the state before it."""
        self.restore()
        return self._update(self.step, without=episodes)

    def run_in_thread(self, function: Callable[[], T], step: int | None = None) -> T:
        """Call it as this step of the run did: with as many threads, and with denormal numbers flushed to zero."""
        import torch

        self.pool = self.pool or ThreadPoolExecutor(1, "arborl-learner", torch.set_flush_denormal, (True,))
        row = self.files.metrics.get(self.step if step is None else step, {})
        threads = int(row.get("learner/threads") or torch.get_num_threads())

        def run() -> T:
            torch.set_num_threads(threads)  # of this thread
            return function()

        return self.pool.submit(run).result()

    # -------------------------------------------------------------------------------------------- one update

    def batch(self, groups: Sequence[Group], step: int) -> TrainingBatch:
        from arborl.trainer.training_batch import credited_batch

        parts = self.parts
        schemas, stop = SchemaCompiler(parts.renderer.tokenizer), parts.sampling.stop or parts.renderer.stop

        def schema_masks(call: Call) -> Iterator[bytes]:
            return schemas.masks(call.schema, stop, call.completion.tokens)

        return credited_batch(parts.algorithm, parts.learner, parts.config, groups, step - 1, schema_masks)

    def _update(self, step: int, without: Sequence[str] = ()) -> ReplayedUpdate:
        from arborl.learner.core.update_metrics import TermLog
        from arborl.trainer.step_metrics import SKIPPED_COUNTERS, episode_metrics

        row, learner = self.files.metrics.get(step, {}), self.parts.learner
        self.notes += [note for note in self._rounding_notes(row) if note not in self.notes]
        if row.get("learner/micro_batch_tokens"):
            learner.micro_batcher.budget = int(row["learner/micro_batch_tokens"])
        learner.scale_lr(lr_factor(self.rollbacks, step))
        groups = without_episodes(self.files.groups(step), without)
        everything = [*groups, *without_episodes(self.files.demonstrations(step), without)]

        def run() -> ReplayedUpdate:
            batch = self.batch(everything, step)
            place = batch.terms.place
            learner.term_log = TermLog(1 + int(place.max())) if place is not None and len(place) else None
            metrics = episode_metrics(groups) | batch.metrics | SKIPPED_COUNTERS
            metrics |= learner.update(batch.forest.trees, batch.terms, self.parts.algorithm, batch.episode_ids)
            term_log, learner.term_log = learner.term_log, None
            return ReplayedUpdate(everything, batch, term_log, metrics)

        return self.run_in_thread(run, step)

    def _after(self, step: int) -> None:
        """What a run does to the learner after a step."""
        if step == self.parts.config.demonstrations.steps:
            self.parts.learner.update_reference()

    def _rounding_notes(self, row: Metrics) -> Iterator[str]:
        """Why numbers may differ although the step is the same."""
        if "learner/threads" not in row:
            yield "metrics.jsonl has no learner/threads (an older run): rounding may differ with their number"
        if (ranks := self.parts.config.learner.ranks) > 1:
            yield f"the run had {ranks} learner ranks, and a replay has one: sums are rounded in another order"
        if self.parts.learner.model.device.type == "cuda":
            yield "sums on a GPU are not always rounded in the same order"

    # -------------------------------------------------------------------------------------------- settings and state

    def _build(self, step: int) -> LearnerParts:
        self.config_file = self.files.config_file(step)
        config = load_run_config(self.config_file, self.overrides, self.trust, sections=BUILT_SECTIONS)
        return build_learner(config, self.objects, self._count_steps(config))

    def _count_steps(self, config: RunConfig) -> int:
        """The length of the run, which the schedule of the learning rate needs. With `trainer.epochs` the rows are
        counted."""
        return config.trainer.steps or count_steps(config, self.objects)

    def _use_settings_of(self, step: int) -> None:
        """Rebuild the learner if the run was resumed with other settings before this step."""
        if self.files.config_file(step) == self.config_file:
            return
        self._save()
        self.parts = self._build(step)
        self.restore()

    def _save(self) -> None:
        self.before = json.loads(json.dumps(self.parts.algorithm.state()))
        folder = Path(self.temporary.name) / "state"
        folder.mkdir(exist_ok=True)
        self.parts.learner.snapshot().write(folder)

    def _compare_weights(self) -> WeightComparison | None:
        folder = self.files.checkpoint_of(self.step)
        if folder is None:
            return None
        recorded, now = _checkpoint_tensors(self.parts, folder), _learner_tensors(self.parts)
        names = [name for name in now if name in recorded]
        gaps = {name: _gap(recorded[name], now[name]) for name in names}
        return WeightComparison(
            folder, len(names), [name for name, gap in gaps.items() if gap], max(gaps.values(), default=0.0)
        )


def without_episodes(groups: Sequence[Group], ids: Sequence[str]) -> list[Group]:
    """The groups without the episodes of these ids."""
    kept = [[episode for episode in group.episodes if episode.id not in ids] for group in groups]
    return [Group(group.task, episodes, group.greedy) for group, episodes in zip(groups, kept, strict=True)]


def _learner_tensors(parts: LearnerParts) -> dict[str, Tensor]:
    from arborl.learner.core.checkpoint_files import checkpoint_tensors

    content = checkpoint_tensors(parts.learner)
    return dict(_flat({name: content[name] for name in ("model", "state")}))


def _checkpoint_tensors(parts: LearnerParts, folder: Path) -> dict[str, Tensor]:
    from arborl.learner.core.checkpoint_files import OPTIMIZER_FILE, read_optimizer_state, read_weights

    content: dict[str, Any] = {"model": read_weights(parts.learner.model, folder / "model")}
    if (folder / OPTIMIZER_FILE).is_file():  # not in a sharded checkpoint
        content["state"] = read_optimizer_state(folder)
    return dict(_flat(content))


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    import torch

    if isinstance(tree, torch.Tensor):
        yield name, tree.detach().cpu()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _flat(value, f"{name}.{number}")


def _gap(recorded: Tensor, now: Tensor) -> float:
    """The largest absolute difference; infinity for other shapes or types."""
    import torch

    if recorded.shape != now.shape or recorded.dtype != now.dtype:
        return math.inf
    if torch.equal(recorded, now):
        return 0.0
    return float((recorded.double() - now.double()).abs().max().nan_to_num(math.inf)) or math.inf
