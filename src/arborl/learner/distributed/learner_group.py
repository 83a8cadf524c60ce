"""A learner on several ranks behind the interface of a single learner.

Rank 0 is the driver process. For each call its `LearnerGroup` sends every rank its part of the batch, all ranks call
the same method of their own `Learner`, and the results are merged. If the strategy shards weights, the model that an
engine shares with the learner is updated when its weights are requested.

The other ranks run `serve_rank`. They are started in one of three ways:

    by `launch.RankProcesses` on this host: `arborl train learner.ranks=2`
    by torchrun or Accelerate, which start the whole command several times: `Rendezvous.from_launcher` finds the others
    by anything that can call a function elsewhere, such as a Ray actor:

        rendezvous, info = Rendezvous.create(count, address="10.0.0.7")  # in the driver, rank 0; `info` holds a secret
        for rank in range(1, count):                                     # each call lasts as long as the run
            actors[rank].call.remote(serve_rank, rank, count, info, device="cuda:0")
        learner = LearnerGroup(rendezvous, spec, model, launcher)        # waits for them

    where `launcher` (a `Launcher`) reports ranks that have ended, and stops them at the end of the run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds
from arborl.errors import ConfigError, LearnerRankLost
from arborl.learner.core.checkpoint_files import ShardedSnapshot, Snapshot
from arborl.learner.core.interface import BaseLearner
from arborl.learner.core.packing import ForwardCosts, Trees
from arborl.learner.core.teacher import Teacher
from arborl.learner.core.tree_forward import model_costs
from arborl.learner.distributed.rank_group import close_connections_to
from arborl.learner.distributed.rank_worker import EXIT_LOST, RUN_ENDED, LearnerSpec, RankWorker, report_end
from arborl.learner.distributed.rendezvous import Launcher, RankHeartbeatMonitor, Rendezvous, destroy_default_group
from arborl.learner.distributed.sharding import make_strategy
from arborl.models.output_heads import CriticInit
from arborl.types import Floats, Ints, Metrics, Terms, TokenTree

T = TypeVar("T")

HANG_SECONDS = 60.0
"""After a rank is lost and all others are stopped, rank 0 counts as hanging in a collective operation if its call makes
no progress for this long. While it computes it makes progress, and fails at its next collective operation."""


class LearnerGroup(BaseLearner):
    """The learner of rank 0, which calls all other ranks. `launcher` started them; `origin` and `teacher` as in
    `Learner`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        spec: LearnerSpec,
        model: PreTrainedModel,
        launcher: Launcher | None = None,
        origin: CriticInit | None = None,
        teacher: Teacher | None = None,
    ):
        self.rendezvous, self.model, self.config = rendezvous, model, spec.config
        self.launcher = launcher  # None: torchrun or Accelerate started the ranks, and ends them
        self.lost: LearnerRankLost | None = None
        self.caller: int | None = None  # the thread of the current call
        self.closed, self.fresh, self.snapshots, self.imbalance = False, True, 0, 0.0
        """`fresh`: `model` has the learner's current weights."""
        self.interrupted = False
        """Whether a call failed midway: the state of other ranks is unknown, and they are not called again."""
        self.monitor = RankHeartbeatMonitor(rendezvous, list(range(1, rendezvous.count)), self._on_loss, self.launcher)
        try:
            self._guard(lambda: self._start(spec, origin, teacher))
        except BaseException:
            self.close()
            raise

    def _start(self, spec: LearnerSpec, origin: CriticInit | None, teacher: Teacher | None) -> None:
        self.rendezvous.start(self.model.device, self._check_lost)
        self._send([spec] * self.rendezvous.count)
        strategy = make_strategy(spec.config, self.rendezvous.rank_group())
        strategy.check(self.model)
        own_model = copy.deepcopy(self.model) if strategy.shards_weights else self.model
        self.costs = model_costs(self.model)
        self.worker = RankWorker(spec.build(own_model, origin, teacher, strategy))
        self.learner = self.worker.learner
        # wait until every rank has created its learner; raise the error of one that could not
        errors = [error for error in self.rendezvous.rank_group().all_gather("") if error]
        if errors:
            raise ConfigError(errors[0])

    def check_paths(self) -> None:
        """Every rank has checked its execution paths before its model was sharded."""

    def score_terms(self, trees: Trees, terms: Terms, needs: AlgorithmNeeds, cut: Ints | None = None) -> Terms:
        parts = self._parts(trees, terms)
        cuts = [None if cut is None else np.flatnonzero(np.isin(rows, cut)) for *_, rows in parts]
        args = [(trees, terms, needs, cut) for (trees, terms, _), cut in zip(parts, cuts, strict=True)]
        results = self._call("score_terms", args)
        columns = {name: getattr(terms, name).copy() for name in ("proximal", "value", "reference", "teacher", "after")}
        for (*_, rows), part in zip(parts, results, strict=True):
            for name, column in columns.items():
                column[rows] = getattr(part, name)
        return dataclasses.replace(terms, **columns)

    def logprobs(self, trees: Trees, terms: Terms) -> Tensor:
        parts, logprob = self._parts(trees, terms), np.zeros(len(terms))
        results = self._call("logprobs", [(trees, terms) for trees, terms, _ in parts])
        for (*_, rows), part in zip(parts, results, strict=True):
            logprob[rows] = part.numpy()
        return torch.from_numpy(logprob)

    def update(self, trees: Trees, terms: Terms, algorithm: Algorithm, names: Sequence[str] = ()) -> Metrics:
        self.fresh = False
        parts = self._parts(trees, terms)
        results = self._call("update", [(trees, terms, algorithm, names, self.term_log) for trees, terms, _ in parts])
        for _, log in results[1:]:
            if self.term_log is not None:
                self.term_log.merge(log)
        return results[0][0] | {"learner/ranks": float(self.rendezvous.count), "learner/imbalance": self.imbalance}

    def backward(self, trees: Trees, terms: Terms, algorithm: Algorithm) -> Metrics:
        return self._call("backward", [(trees, terms, algorithm) for trees, terms, _ in self._parts(trees, terms)])[0]

    def gradients(self) -> dict[str, Tensor]:
        gradients = self._call_all("gradients")[0]
        assert gradients is not None
        return gradients

    @property
    def lr(self) -> float:  # type: ignore[override]
        return self.learner.lr

    def update_reference(self) -> None:
        self._call_all("update_reference")

    def scale_lr(self, multiplier: float) -> None:
        self._call_all("scale_lr", multiplier)

    def weights(self) -> dict[str, Tensor]:
        self._publish()
        return dict(self.model.state_dict())

    def reserve(self) -> Callable[[], object]:
        return (lambda: None) if self.learner.strategy.shards_weights else self.learner.reserve()

    def snapshot(self) -> Snapshot | ShardedSnapshot:
        if not self.learner.strategy.shards_weights:
            return self.learner.snapshot()
        self._publish()
        self.snapshots += 1
        self._call_all("stage", self.snapshots)
        return self.worker.checkpointer.snapshot(self.model)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that any strategy with any number of ranks has saved."""
        self._call_all("load", folder)
        self.fresh = False
        self._publish()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            if self.lost is None and not self.interrupted and dist.is_initialized() and hasattr(self, "worker"):
                self.worker.checkpointer.close()
                self._send([None] * self.rendezvous.count)
        except Exception:  # a rank is lost by now
            pass
        finally:
            with ExitStack() as steps:  # from the last to the first, also if one fails
                steps.callback(self.rendezvous.close)
                steps.callback(destroy_default_group)
                if self.launcher is not None:
                    steps.callback(self.launcher.stop)
                steps.callback(report_end, self.rendezvous, 0, RUN_ENDED)
                steps.callback(self.monitor.close)

    def _publish(self) -> None:
        if self.learner.strategy.shards_weights and not self.fresh:
            self._guard(lambda: self._send([("publish", ())] * self.rendezvous.count))
            self._guard(lambda: self.worker.publish(self.model))
        self.fresh = True

    def _parts(self, trees: Trees, terms: Terms) -> list[tuple[Trees, Terms, Ints]]:
        count = self.rendezvous.count
        if not self.learner.strategy.splits_batch:
            self.imbalance = 0.0
            return [(trees, terms, np.arange(len(terms)))] * count
        owner = tree_owners(trees, terms, count, self.learner.minibatches_of(trees), self.costs)
        self.imbalance = imbalance(trees, terms, owner, count, self.costs)
        return [rank_part(trees, terms, owner, rank) for rank in range(count)]

    def _call_all(self, name: str, *args: Any) -> list[Any]:
        return self._call(name, [args] * self.rendezvous.count)

    def _call(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `RankWorker` on every rank, each with its own arguments; the results in order of rank."""

        def call() -> list[Any]:
            self._send([(name, one) for one in args])
            return self.rendezvous.rank_group().gather(self.worker.call(name, args[0]))

        return self._guard(call)

    def _send(self, objects: Sequence[Any]) -> None:
        """Send each rank its object; that of rank 0 is ignored."""
        if self.rendezvous.count > 1:
            dist.scatter_object_list([None], [b"", *map(cloudpickle.dumps, objects[1:])], src=0)

    def _guard(self, work: Callable[[], T]) -> T:
        """Run `work`; if it fails because a rank is lost, raise `LearnerRankLost` with the reason."""
        self._check_lost()
        self.caller = threading.get_ident()
        try:
            return work()
        except (RuntimeError, dist.DistError) as error:
            is_connection = self.rendezvous.count > 1 and not isinstance(error, torch.OutOfMemoryError)
            until = time.monotonic() + 2.0  # a connection may break before the monitor knows why
            while is_connection and self.lost is None and time.monotonic() < until:
                time.sleep(0.05)
            self.interrupted = True
            if self.lost is not None:
                raise self.lost from error
            raise
        except BaseException:
            self.interrupted = True
            raise
        finally:
            self.caller = None

    def _check_lost(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _on_loss(self, rank: int, why: str) -> None:
        """Called in the monitor's thread: stop all other ranks, so that a call that waits for the lost rank fails."""
        restartable = self.launcher is not None
        self.lost = LearnerRankLost(f"learner rank {rank} of {self.rendezvous.count} {why}", again=restartable)
        if self.closed:
            return
        if self.launcher is not None:
            self.launcher.stop()
        store, key = self.monitor.store, f"hello/{rank}"
        address = json.loads(store.get(key)).get("address") if store.check([key]) else None
        if address not in (None, "", self.rendezvous.store.local_address):
            close_connections_to(address)
        if self._call_hangs():
            sys.stderr.write(f"{self.lost}\n")
            sys.stderr.flush()
            os._exit(EXIT_LOST)

    def _call_hangs(self) -> bool:
        """Wait until the current call has failed; True if it makes no progress for `HANG_SECONDS`."""
        seen, since = None, time.monotonic()
        while self.caller is not None:
            frame = sys._current_frames().get(self.caller)
            place = (id(frame), frame.f_lasti) if frame is not None else None
            if place != seen:
                seen, since = place, time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                return True
            time.sleep(0.1)
        return False


EMPTY_TREE = TokenTree(*[np.zeros(0, dtype=np.int64)] * 3)
"""Placeholder for trees of other ranks, so that tree numbers stay those of the batch."""


def tree_work(trees: Trees, terms: Terms, costs: ForwardCosts) -> Floats:
    """Multiplications per layer of each tree; 0 for a tree without terms, which is not run."""
    work = np.zeros(len(trees))
    for number in np.unique(terms.tree):
        tree = trees[number]
        work[number] = len(tree) * costs.token + float((tree.depth + 1).sum()) * costs.pair
    return work


def assign_balanced(work: Floats, ranks: int) -> Ints:
    """The rank of each item: largest first to the rank with the least work, then exchanges between the ranks with the
    most and the least."""
    owner, load = np.zeros(len(work), dtype=np.int64), np.zeros(ranks)
    for number in np.argsort(-work, kind="stable"):
        owner[number] = np.argmin(load)
        load[owner[number]] += work[number]
    for _ in range(4 * len(work)):
        most, least = int(np.argmax(load)), int(np.argmin(load))
        gap = load[most] - load[least]
        full, free = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        if gap <= 0 or not len(full):
            break
        moved = np.concatenate([work[full][:, None] - work[free][None, :], work[full][:, None]], axis=1)
        left = np.abs(gap - 2 * moved)  # the remaining gap after exchanging one item for another, or for none
        at, other = np.unravel_index(int(np.argmin(left)), left.shape)
        if left[at, other] >= gap * (1 - 1e-9):
            break
        owner[full[at]] = least
        if other < len(free):
            owner[free[other]] = most
        load[most] -= moved[at, other]
        load[least] += moved[at, other]
    return owner


def tree_owners(trees: Trees, terms: Terms, ranks: int, minibatches: Sequence[Ints], costs: ForwardCosts) -> Ints:
    """The rank of each tree, balanced within each mini-batch. A tree stays whole on its rank, which splits it if it is
    larger than a micro-batch: losses over whole groups are computed on one rank, and no episode is counted twice."""
    work, owner = tree_work(trees, terms, costs), np.zeros(len(trees), dtype=np.int64)
    for numbers in minibatches:
        owner[numbers] = assign_balanced(work[numbers], ranks)
    return owner


def rank_part(trees: Trees, terms: Terms, owner: Ints, rank: int) -> tuple[Trees, Terms, Ints]:
    """The trees and terms of one rank, and their rows among all terms."""
    rows = np.flatnonzero(owner[terms.tree] == rank)
    own = [tree if owner[number] == rank else EMPTY_TREE for number, tree in enumerate(trees)]
    return own, terms.pick(rows), rows


def imbalance(trees: Trees, terms: Terms, owner: Ints, ranks: int, costs: ForwardCosts) -> float:
    """The largest work of a rank relative to the mean, minus 1."""
    load = np.bincount(owner, tree_work(trees, terms, costs), minlength=ranks)
    return float(load.max() / load.mean() - 1) if load.sum() > 0 else 0.0
