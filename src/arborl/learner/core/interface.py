"""The interface that a learner in one process and a learner on several ranks share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from arborl.algorithms.recipe import Algorithm, AlgorithmNeeds
from arborl.config.run_config import LearnerConfig
from arborl.errors import ArborError
from arborl.learner.core.packing import Trees
from arborl.learner.core.update_metrics import TermLog
from arborl.models.lora import export_merged, has_lora
from arborl.types import Ints, Metrics, Terms

if TYPE_CHECKING:
    from arborl.learner.core.checkpoint_files import ShardedSnapshot, Snapshot


class UpdateInterrupted(ArborError):
    """An update was given up before its first optimizer step: the learner is as before it."""


class BaseLearner(ABC):
    """Trains a policy on token trees and terms."""

    model: PreTrainedModel  # the policy whose weights an engine shares
    config: LearnerConfig
    lr: float  # learning rate of the policy before the schedule
    interrupt: threading.Event | None = None
    """If set during `score_terms` or before the first optimizer step of `update`, a learner of one process raises
    `UpdateInterrupted` after the current micro-batch. Ranks go on: giving up would need their agreement at every
    micro-batch."""
    term_log: TermLog | None = None  # collects per-token results of updates; None where they are not recorded

    @abstractmethod
    def check_paths(self) -> None:
        """Select and check the execution paths now instead of in the first update."""

    @abstractmethod
    def score_terms(self, trees: Trees, terms: Terms, needs: AlgorithmNeeds, cut: Ints | None = None) -> Terms:
        """The terms with the columns that `needs` names, computed before the update. `cut` are the rows of the last
        terms of truncated episodes; the critic also scores the state after them."""

    @abstractmethod
    def logprobs(self, trees: Trees, terms: Terms) -> Tensor:
        """Log-probability of every term under the current weights."""

    @abstractmethod
    def update(self, trees: Trees, terms: Terms, algorithm: Algorithm, names: Sequence[str] = ()) -> Metrics:
        """Train on the batch: `epochs` passes of `minibatches` optimizer steps, each over whole trees; the loss of a
        step is the mean over its mini-batch. Groups with non-finite numbers are dropped, and named by the episodes'
        ids in `names`. If no term remains, the weights stay as they are and the metrics give the reason."""

    @abstractmethod
    def backward(self, trees: Trees, terms: Terms, algorithm: Algorithm) -> Metrics:
        """Compute the gradients of one batch without a step; return the loss and the means of the logged quantities."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """The full gradients that `backward` computed, by parameter name."""

    @abstractmethod
    def update_reference(self) -> None:
        """Set the reference model to the current policy."""

    @abstractmethod
    def scale_lr(self, multiplier: float) -> None:
        """Multiply all learning rates of later updates, on top of the schedule; not part of a checkpoint."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The current weights of `model`: the tensors themselves, not copies."""

    @abstractmethod
    def reserve(self) -> Callable[[], object]:
        """Return a function that allocates the memory of a snapshot; it may run in another thread."""

    @abstractmethod
    def snapshot(self) -> Snapshot | ShardedSnapshot:
        """Copy the state of a checkpoint. One snapshot is valid at a time: the next one reuses its memory."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load a checkpoint; training continues bit for bit."""

    @abstractmethod
    def close(self) -> None:
        """Stop further ranks."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint: the model in Hugging Face format (with LoRA the adapter alone), and the training
        state."""
        self.snapshot().write(folder)

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model, with LoRA weights merged."""
        self.weights()
        if has_lora(self.model):
            export_merged(self.model, folder)
        else:
            self.model.save_pretrained(folder)
