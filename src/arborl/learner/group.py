"""A learner in several processes that looks like one: whoever trains, credits or samples need not know.

Rank 0 is the process that drives. Its `LearnerGroup` has the surface of a `Learner`; for each call it gives every rank
its part of the batch, all do the same method of their own `Learner`, and the answers are put together. The weights that
an engine shares with the learner are, where a strategy takes weights apart, brought up to date when they are asked for.

The other ranks run `serve_rank`. They are started in one of three ways, and know nothing of it:

    by `launch.Processes`, on this machine: what `arborl train learner.ranks=2` does
    by torchrun or Accelerate, which start the whole command several times: `Meeting.around` finds the others
    by anything else that can call a function elsewhere, such as a Ray actor:

        meeting, info = Meeting.host(count, address="10.0.0.7")      # in the driver, rank 0; `info` holds a secret
        for rank in range(1, count):                                 # each a call that lasts as long as the run
            actors[rank].call.remote(serve_rank, rank, count, info, device="cuda:0")
        learner = LearnerGroup(meeting, blueprint, model, launcher)  # waits for them

    where `launcher` (a `Launcher`) says which of them have ended, and ends them when the run does.
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
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Algorithm, Needs
from arborl.errors import ConfigError, LearnerRankLost
from arborl.learner.balance import owners, share
from arborl.learner.blueprint import Blueprint
from arborl.learner.files import Snapshot
from arborl.learner.micro_batches import costs_of
from arborl.learner.rank_connections import close_connections_to
from arborl.learner.rank_worker import LOST, Rank, say
from arborl.learner.rendezvous import Launcher, Meeting, Nobody, Watch
from arborl.learner.sharded_files import ShardedSnapshot
from arborl.learner.strategies import strategy_of
from arborl.learner.teacher import Teacher
from arborl.learner.term_log import TermLog
from arborl.models.lora import export_merged, has_lora
from arborl.models.scalar import Origin
from arborl.types import Ints, Metrics, Terms, TokenTree

T = TypeVar("T")

LET_GO = 60.0
"""Seconds without any movement after which rank 0, with a rank lost and all others ended, counts as waiting on a line
that nothing can cut. While it computes it moves, and notices at its next meeting."""


class LearnerGroup:
    """Rank 0, and with it all others.

    Args:
        meeting: where they come to.
        blueprint: what each makes its learner of.
        model: the policy that an engine shares with the learner.
        launcher: what has started the others.
        origin, teacher: as of a `Learner`, where they have been read already.
    """

    log: TermLog | None = None
    """As of a `Learner`: of the terms of all ranks."""

    def __init__(
        self,
        meeting: Meeting,
        blueprint: Blueprint,
        model: PreTrainedModel,
        launcher: Launcher | None = None,
        origin: Origin | None = None,
        teacher: Teacher | None = None,
    ):
        self.meeting, self.model, self.config = meeting, model, blueprint.config
        self.launcher = launcher or Nobody()
        self.lost: LearnerRankLost | None = None
        self.caller: int | None = None
        """The thread in which a call is under way, where one is."""
        self.closed, self.fresh, self.snapshots = False, True, 0
        self.torn = False
        """Whether a call has ended in the middle: then nobody knows what the others wait for, and they are not told."""
        self.watch = Watch(meeting, list(range(1, meeting.count)), self._gone, self.launcher)
        try:
            self._guard(lambda: self._begin(blueprint, origin, teacher))
        except BaseException:
            self.close()
            raise

    def _begin(self, blueprint: Blueprint, origin: Origin | None, teacher: Teacher | None) -> None:
        self.meeting.begin(self.model.device, self._look)
        self._tell([cloudpickle.dumps(blueprint)] * self.meeting.count)
        strategy = strategy_of(blueprint.config, self.meeting.peers())
        strategy.check(self.model)
        own = copy.deepcopy(self.model) if strategy.apart else self.model
        self.costs = costs_of(self.model)
        self.rank = Rank(blueprint.build(own, origin, teacher, strategy))
        self.learner = self.rank.learner
        self.ready()

    def ready(self) -> None:
        """Wait until every rank has its learner; who could not make one has said why."""
        troubles = [trouble for trouble in self.meeting.peers().gather("") if trouble]
        if troubles:
            raise ConfigError(troubles[0])

    # -------------------------------------------------------------------------------------------- the surface

    @property
    def steps(self) -> int:
        """Optimiser steps an update."""
        return self.learner.steps

    @property
    def lr(self) -> float:
        """The policy's rate before its schedule."""
        return self.learner.lr

    @property
    def done(self) -> int:
        """Optimiser steps that the run has come past."""
        return self.learner.done

    def check_paths(self) -> None:
        """Every rank has chosen its execution paths before its model was sharded."""

    def look(self, trees: Sequence[TokenTree], terms: Terms, needs: Needs, cut: Ints | None = None) -> Terms:
        """As `Learner.look`."""
        parts = self._parts(trees, terms)
        cuts = [None if cut is None else np.flatnonzero(np.isin(rows, cut)) for *_, rows in parts]
        given = [(trees, terms, needs, cut) for (trees, terms, _), cut in zip(parts, cuts, strict=True)]
        said = self._call("look", given)
        found = {name: getattr(terms, name).copy() for name in ("proximal", "value", "reference", "teacher", "after")}
        for (*_, rows), part in zip(parts, said, strict=True):
            for name, column in found.items():
                column[rows] = getattr(part, name)
        return dataclasses.replace(terms, **found)

    def logprobs(self, trees: Sequence[TokenTree], terms: Terms) -> Tensor:
        """As `Learner.logprobs`."""
        parts, found = self._parts(trees, terms), np.zeros(len(terms))
        said = self._call("logprobs", [(trees, terms) for trees, terms, _ in parts])
        for (*_, rows), part in zip(parts, said, strict=True):
            found[rows] = part.numpy()
        return torch.from_numpy(found)

    def update(
        self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm, names: Sequence[str] = ()
    ) -> Metrics:
        """As `Learner.update`; in the metrics, how much more the rank with most had to do than the mean."""
        self.fresh = False
        parts, sent = self._parts(trees, terms), cloudpickle.dumps(algorithm)
        said = self._call("update", [(trees, terms, sent, names, self.log) for trees, terms, _ in parts])
        for _, log in said[1:]:
            if self.log is not None:
                self.log.take(log)
        return said[0][0] | {"learner/ranks": float(self.meeting.count), "learner/imbalance": self.imbalance}

    def backward(self, trees: Sequence[TokenTree], terms: Terms, algorithm: Algorithm) -> Metrics:
        """As `Learner.backward`."""
        sent = cloudpickle.dumps(algorithm)
        return self._call("backward", [(trees, terms, sent) for trees, terms, _ in self._parts(trees, terms)])[0]

    def gradients(self) -> dict[str, Tensor]:
        """As `Learner.gradients`."""
        found = self._everywhere("gradients")[0]
        assert found is not None
        return found

    def renew_reference(self) -> None:
        """As `Learner.renew_reference`."""
        self._everywhere("renew_reference")

    def weights(self) -> dict[str, Tensor]:
        """The parameters that the engine shares, as the learner has them now."""
        self._publish()
        return dict(self.model.state_dict())

    def reserve(self) -> Callable[[], object]:
        """As `Learner.reserve`."""
        return (lambda: None) if self.learner.strategy.apart else self.learner.reserve()

    def snapshot(self) -> Snapshot | ShardedSnapshot:
        """As `Learner.snapshot`."""
        if not self.learner.strategy.apart:
            return self.learner.snapshot()
        self._publish()
        self.snapshots += 1
        self._everywhere("stage", self.snapshots)
        return self.rank.shelf.snapshot(self.model)

    def save(self, folder: Path) -> None:
        """As `Learner.save`."""
        self.snapshot().write(folder)

    def load(self, folder: Path) -> None:
        """As `Learner.load`; whatever strategy, on however many ranks, has saved it."""
        self._everywhere("load", str(folder))
        self.fresh = False
        self._publish()

    def export(self, folder: Path) -> None:
        """As `Learner.export`."""
        self._publish()
        if has_lora(self.model):
            export_merged(self.model, folder)
        else:
            self.model.save_pretrained(folder)

    def close(self) -> None:
        """Let all ranks go."""
        if self.closed:
            return
        self.closed = True
        try:
            if self.lost is None and not self.torn and dist.is_initialized() and hasattr(self, "rank"):
                self.rank.shelf.close()
                self._tell([cloudpickle.dumps(None)] * self.meeting.count)
        except Exception:  # then somebody is gone by now: there is nobody to be told
            pass
        finally:
            self.watch.close()
            say(self.meeting, 0, "the run has ended")
            self.launcher.stop()
            if dist.is_initialized():
                dist.destroy_process_group()
            self.meeting.close()

    # -------------------------------------------------------------------------------------------- to all ranks

    def _publish(self) -> None:
        if self.learner.strategy.apart and not self.fresh:
            self._guard(lambda: self._tell(self._orders("publish", [()] * self.meeting.count)))
            self._guard(lambda: self.rank.publish(self.model))
        self.fresh = True

    def _parts(self, trees: Sequence[TokenTree], terms: Terms) -> list[tuple[Sequence[TokenTree], Terms, Ints]]:
        """What each rank is given."""
        count = self.meeting.count
        if not self.learner.strategy.spreads:
            self.imbalance = 0.0
            return [(trees, terms, np.arange(len(terms)))] * count
        owner = owners(trees, terms, count, self.learner.minibatches_of(trees), self.costs)
        self.imbalance = unevenness(trees, terms, owner, count, self.costs)
        return [share(trees, terms, owner, rank) for rank in range(count)]

    def _everywhere(self, name: str, *given: Any) -> list[Any]:
        return self._call(name, [given] * self.meeting.count)

    def _call(self, name: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Every rank does this, each with what is given to it; what each says."""

        def call() -> list[Any]:
            self._tell(self._orders(name, given))
            return self.meeting.peers().collect(getattr(self.rank, name)(*given[0]))

        return self._guard(call)

    def _orders(self, name: str, given: Sequence[tuple[Any, ...]]) -> list[bytes]:
        return [b"", *(cloudpickle.dumps((name, one)) for one in given[1:])]

    def _tell(self, orders: Sequence[bytes]) -> None:
        if self.meeting.count > 1:
            dist.scatter_object_list([None], list(orders), src=0)

    def _guard(self, work: Callable[[], T]) -> T:
        """Do it, or say who is gone."""
        self._look()
        self.caller = threading.get_ident()
        try:
            return work()
        except (RuntimeError, dist.DistError) as error:
            if self.meeting.count > 1 and not isinstance(error, torch.OutOfMemoryError):
                self._wait_for_why()
            self.torn = True
            if self.lost is not None:
                raise self.lost from error
            raise
        except BaseException:
            self.torn = True
            raise
        finally:
            self.caller = None

    def _look(self) -> None:
        if self.lost is not None:
            raise self.lost

    def _wait_for_why(self) -> None:
        """A line that breaks is seen before the reason for it."""
        until = time.monotonic() + 2.0
        while self.lost is None and time.monotonic() < until:
            time.sleep(0.05)

    def _gone(self, rank: int, why: str) -> None:
        """In the thread that watches: this learner is over. What waits for the lost rank is let go by ending all
        others."""
        mine = not isinstance(self.launcher, Nobody)
        self.lost = LearnerRankLost(f"learner rank {rank} of {self.meeting.count} {why}", again=mine)
        if self.closed:
            return
        self.launcher.stop()
        there = json.loads(self.watch.store.get(f"hello/{rank}")) if self.watch.store.check([f"hello/{rank}"]) else {}
        if (address := there.get("address")) not in (None, "", self.meeting.store.local_address):
            close_connections_to(address)
        if self._hangs():
            sys.stderr.write(f"{self.lost}\n")
            sys.stderr.flush()
            os._exit(LOST)

    def _hangs(self) -> bool:
        """Wait until the call that is under way has noticed; whether it never will."""
        seen, since = None, time.monotonic()
        while self.caller is not None:
            frame = sys._current_frames().get(self.caller)
            place = (id(frame), frame.f_lasti) if frame is not None else None
            if place != seen:
                seen, since = place, time.monotonic()
            elif time.monotonic() - since > LET_GO:
                return True
            time.sleep(0.1)
        return False


def unevenness(trees: Sequence[TokenTree], terms: Terms, owner: Ints, count: int, costs: Any) -> float:
    """How much more than the mean the rank with most has to do."""
    from arborl.learner.balance import work_of

    load = np.bincount(owner, work_of(trees, terms, costs), minlength=count)
    return float(load.max() / load.mean() - 1) if load.sum() > 0 else 0.0
