"""Weights on their way to servers: one folder a version, in Hugging Face form, that they read."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from weakref import finalize

from safetensors.torch import save_file
from transformers import PreTrainedModel

from arborl.engines.copies import whole
from arborl.engines.engine import Weights
from arborl.errors import EngineError, disk_refusal
from arborl.models.lora import export_merged, has_lora


class WeightFiles:
    """The newest weights.

    Args:
        model: whose they are.
        root: where folders are made; without one, in the temporary folder.
    """

    def __init__(self, model: PreTrainedModel, root: Path | None):
        self.model = model
        try:
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
            self.home = Path(tempfile.mkdtemp(prefix="arborl-weights-", dir=root))
            self.home.chmod(0o755)  # a server may run as somebody else
        except OSError as error:
            raise EngineError(f"engine.weights_dir={root}: cannot be written: {error.strerror}") from error
        self.close = finalize(self, shutil.rmtree, self.home, ignore_errors=True)  # at the latest when Python ends
        self.folder: Path | None = None
        self.written = 0

    def write(self, weights: Weights, version: int) -> Path:
        """The folder of these weights. The one before goes once nobody needs it: see `only`."""
        self.written += 1  # one version may be asked for twice
        folder = self.home / f"{self.written:06}-version-{version}"
        try:
            if has_lora(self.model):
                export_merged(self.model, folder)
            else:
                folder.mkdir()
                self.model.config.save_pretrained(folder)
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in whole(weights).items()}
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except Exception as error:
            if (reason := disk_refusal(error)) is None:
                raise
            raise EngineError(f"weights for the servers cannot be written to {folder}: {reason}") from error
        self.folder = folder
        return folder

    def only(self, folder: Path) -> None:
        """Drop all others."""
        for other in self.home.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
