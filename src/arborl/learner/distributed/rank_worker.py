"""What each rank of a learner group runs: its part of the batch with its own learner, called by rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.checkpoint_files import ShardedCheckpointer
from arborl.learner.core.learner import Learner
from arborl.learner.core.optimizer import NO_INITIAL_UPDATES, InitialUpdates
from arborl.learner.core.packing import Trees
from arborl.learner.core.teacher import Teacher
from arborl.learner.core.update_metrics import TermLog
from arborl.learner.distributed.rendezvous import RankHeartbeatMonitor, Rendezvous
from arborl.learner.distributed.run_store import JoinInfo
from arborl.learner.distributed.sharding import make_strategy
from arborl.learner.distributed.strategy import Strategy
from arborl.models.output_heads import CriticInit
from arborl.types import Metrics, Sampling, Terms

EXIT_LOST = 1  # exit code of a process whose learner is lost
RUN_ENDED = "the run has ended"


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """From which every rank creates its learner. Functions are pickled by name if they can be imported."""

    config: LearnerConfig
    sampling: Sampling
    needs: AlgorithmNeeds
    total_steps: int
    seed: int
    model: Callable[[str], PreTrainedModel]  # loads the policy on a device
    origin: Callable[[PreTrainedModel], CriticInit | None] = lambda model: None
    teacher: Callable[[], Teacher | None] = lambda: None
    deterministic: bool = False
    threads: int = 0
    first: InitialUpdates = NO_INITIAL_UPDATES

    def build(
        self,
        model: PreTrainedModel,
        origin: CriticInit | None = None,
        teacher: Teacher | None = None,
        strategy: Strategy | None = None,
    ) -> Learner:
        return Learner(
            model, self.config, self.sampling, self.needs, self.total_steps, self.seed, origin, teacher, strategy,
            self.first,
        )  # fmt: skip


class RankWorker:
    """The learner of one rank, with the methods that rank 0 calls on all ranks."""

    def __init__(self, learner: Learner):
        self.learner, self.checkpointer = learner, ShardedCheckpointer(learner)

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Call a method of this object, or else of the learner."""
        return getattr(self if hasattr(self, name) else self.learner, name)(*args)

    def update(
        self, trees: Trees, terms: Terms, algorithm: Algorithm, names: Sequence[str], log: TermLog | None
    ) -> tuple[Metrics, TermLog | None]:
        self.learner.term_log = log
        return self.learner.update(trees, terms, algorithm, names), log

    def gradients(self) -> dict[str, Tensor] | None:
        gradients = self.learner.gradients()
        return gradients if dist.get_rank() == 0 else None

    def stage(self, number: int) -> None:
        self.checkpointer.stage(number)

    def publish(self, into: PreTrainedModel | None = None) -> None:
        """Gather the trained parameters one by one; rank 0 copies them into its engine's model."""
        targets = dict(into.named_parameters()) if into is not None else {}
        trained = [(name, p) for name, p in self.learner.model.named_parameters() if p.requires_grad]
        with torch.no_grad():
            for name, parameter in trained:
                whole = self.learner.strategy.full_tensor(parameter)
                if into is not None:
                    targets[name].copy_(whole)


def serve_rank(rank: int, count: int, where: JoinInfo | Rendezvous, device: str = "cpu") -> None:
    """Serve as a rank other than 0 until the run ends."""
    rendezvous = where if isinstance(where, Rendezvous) else Rendezvous.join(rank, count, where)

    def exit_process(_: int, why: str) -> None:
        os._exit(0 if why == RUN_ENDED else EXIT_LOST)

    monitor = RankHeartbeatMonitor(rendezvous, [0], exit_process)
    try:
        _serve(rendezvous, device)
    except BaseException as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        report_end(rendezvous, rank, f"failed ({type(error).__name__}: {first_line})")
        raise
    finally:
        monitor.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        rendezvous.close()


def _serve(rendezvous: Rendezvous, device: str) -> None:
    rendezvous.start(torch.device(device))
    ranks = rendezvous.rank_group()
    spec: LearnerSpec = _receive()
    if spec.threads:
        torch.set_num_threads(spec.threads)
    torch.set_flush_denormal(True)  # as on rank 0, whose updates run in their own thread
    torch.use_deterministic_algorithms(spec.deterministic)
    torch.manual_seed(spec.seed)
    try:
        model = spec.model(device)
        strategy = make_strategy(spec.config, ranks)
        worker = RankWorker(spec.build(model, spec.origin(model), spec.teacher(), strategy))
    except ConfigError as error:
        ranks.all_gather(str(error))
        raise
    ranks.all_gather("")
    while (call := _receive()) is not None:
        name, args = call
        result = worker.call(name, args)
        if name != "publish":
            ranks.gather(result)
    worker.checkpointer.close()


def _receive() -> Any:
    received: list[Any] = [None]
    dist.scatter_object_list(received, None, src=0)
    return cloudpickle.loads(received[0])


def report_end(rendezvous: Rendezvous, rank: int, reason: str) -> None:
    """Store why a rank ends, for the monitors of other ranks."""
    with suppress(Exception):  # the store may be gone
        rendezvous.store.set(f"died/{rank}", reason)
