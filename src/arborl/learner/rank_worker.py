"""What every rank of a learner group does: its part of the batch, by its own learner. All but one are told when."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Needs
from arborl.errors import ConfigError
from arborl.learner.blueprint import Blueprint
from arborl.learner.learner import Learner
from arborl.learner.rendezvous import Meeting, Watch
from arborl.learner.run_store import JoinInfo
from arborl.learner.sharded_files import Shelf
from arborl.learner.strategies import strategy_of
from arborl.learner.term_log import TermLog
from arborl.types import Ints, Metrics, Terms, TokenTree

LOST = 1
"""How a process ends whose learner is lost and that could not be told otherwise."""


class Rank:
    """One process' part: its learner, and what it is told to do with it."""

    def __init__(self, learner: Learner):
        self.learner, self.shelf = learner, Shelf(learner)

    def look(self, trees: Sequence[TokenTree], terms: Terms, needs: Needs, cut: Ints | None) -> Terms:
        return self.learner.look(trees, terms, needs, cut)

    def logprobs(self, trees: Sequence[TokenTree], terms: Terms) -> Tensor:
        return self.learner.logprobs(trees, terms)

    def update(
        self, trees: Sequence[TokenTree], terms: Terms, algorithm: bytes, names: Sequence[str], log: TermLog | None
    ) -> tuple[Metrics, TermLog | None]:
        self.learner.log = log
        return self.learner.update(trees, terms, cloudpickle.loads(algorithm), names), log

    def backward(self, trees: Sequence[TokenTree], terms: Terms, algorithm: bytes) -> Metrics:
        return self.learner.backward(trees, terms, cloudpickle.loads(algorithm))

    def gradients(self) -> dict[str, Tensor] | None:
        found = self.learner.gradients()
        return found if dist.get_rank() == 0 else None

    def renew_reference(self) -> None:
        self.learner.renew_reference()

    def load(self, folder: str) -> None:
        self.shelf.load(Path(folder))

    def stage(self, number: int) -> None:
        self.shelf.stage(number)

    def publish(self, into: PreTrainedModel | None = None) -> None:
        """Gather what learns, one parameter after the other; rank 0 keeps it."""
        places = dict(into.named_parameters()) if into is not None else {}
        with torch.no_grad():
            for name, parameter in self.learner.model.named_parameters():
                if parameter.requires_grad:
                    whole = self.learner.strategy.whole(parameter)
                    if into is not None:
                        places[name].copy_(whole)


def serve_rank(rank: int, count: int, where: JoinInfo | Meeting, device: str = "cpu") -> None:
    """Be a rank other than the first, until the run has ended. It says why on stderr where it ends otherwise.

    Args:
        rank: 1, 2, …
        count: of all ranks.
        where: what `Meeting.host` gave in rank 0; or the meeting itself.
        device: where this rank computes.
    """
    meeting = where if isinstance(where, Meeting) else Meeting.visit(rank, count, where)

    def alone(_: int, why: str) -> None:
        os._exit(0 if why == "the run has ended" else LOST)

    watch = Watch(meeting, [0], alone)
    try:
        _serve(meeting, device)
    except BaseException as error:
        say(meeting, rank, f"failed ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]})")
        raise
    finally:
        watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        meeting.close()


def _serve(meeting: Meeting, device: str) -> None:
    place = torch.device(device)
    meeting.begin(place)
    peers = meeting.peers()
    blueprint: Blueprint = _heard()
    if blueprint.threads:
        torch.set_num_threads(blueprint.threads)
    torch.set_flush_denormal(True)  # as in rank 0, whose updates have a thread of their own
    torch.use_deterministic_algorithms(blueprint.deterministic)
    torch.manual_seed(blueprint.seed)
    try:
        model = blueprint.model(device)
        strategy = strategy_of(blueprint.config, peers)
        served = Rank(blueprint.build(model, blueprint.origin(model), blueprint.teacher(), strategy))
    except ConfigError as error:
        peers.gather(str(error))
        raise
    peers.gather("")
    while (order := _heard()) is not None:
        name, given = order
        said = getattr(served, name)(*given)
        if name != "publish":
            peers.collect(said)
    served.shelf.close()


def _heard() -> Any:
    order: list[Any] = [None]
    dist.scatter_object_list(order, None, src=0)
    return cloudpickle.loads(order[0])


def say(meeting: Meeting, rank: int, words: str) -> None:
    """Last words, for whoever watches."""
    try:
        meeting.store.set(f"died/{rank}", words)
    except Exception:  # nobody hears them
        return
