"""Weights on their way to servers: one folder a version, in Hugging Face form, that they read."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from weakref import finalize

from filelock import FileLock, Timeout
from safetensors.torch import save_file
from transformers import PreTrainedModel

from arborl.engines.copies import whole
from arborl.engines.engine import Weights
from arborl.errors import EngineError, disk_error_reason
from arborl.models.lora import export_merged, has_lora

NAME = "arborl-weights-"
HELD = f".held-{socket.gethostname()}"
"""Locked for as long as the folder's process lives. Only its own host can tell: some shared file systems keep the locks
of each host to itself."""


class WeightFiles:
    """The newest weights. What runs that were killed have left in the same place goes first.

    Args:
        model: whose they are.
        root: where folders are made; without one, in the temporary folder.
    """

    def __init__(self, model: PreTrainedModel, root: Path | None):
        self.model = model
        try:
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
            _sweep(root or Path(tempfile.gettempdir()))
            self.home, self.held = _home(root)
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
            if (reason := disk_error_reason(error)) is None:
                raise
            raise EngineError(f"weights for the servers cannot be written to {folder}: {reason}") from error
        self.folder = folder
        return folder

    def only(self, folder: Path) -> None:
        """Drop all others."""
        for other in self.home.glob("*-version-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


def _home(root: Path | None) -> tuple[Path, FileLock]:
    """A new folder; it has its name only once it is held, so nobody takes it for a dead one's."""
    made = Path(tempfile.mkdtemp(prefix=f".{NAME}", dir=root))
    made.chmod(0o755)  # a server may run as somebody else
    held = FileLock(made / HELD)
    try:
        held.acquire(timeout=0)
    except (NotImplementedError, Timeout):  # a file system without locks: what is left there is not known to be dead
        (made / HELD).unlink(missing_ok=True)
    return made.rename(made.with_name(made.name[1:])), held


def _sweep(root: Path) -> None:
    """Remove the folders here that are this user's, of this host, and that nobody holds any more."""
    for left in root.glob(f"{NAME}*"):
        try:
            held = left / HELD
            if left.is_symlink() or left.stat().st_uid != os.getuid() or not held.exists():
                continue  # a stranger's may hold a link to anything, and a lock writes to its file
            with FileLock(held, timeout=0, mode=0o644):
                shutil.rmtree(left, ignore_errors=True)
        except (OSError, NotImplementedError, Timeout):  # alive, or gone meanwhile
            continue
