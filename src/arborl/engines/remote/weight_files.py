"""Weights as files for servers: one folder per update, in Hugging Face format."""

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

from arborl.engines.engine import Weights
from arborl.engines.remote.weight_sync import base_weights
from arborl.errors import EngineError, disk_error_reason
from arborl.models.lora import export_merged, has_lora

FOLDER_PREFIX = "arborl-weights-"
LOCK_NAME = f".held-{socket.gethostname()}"
"""Locked while the folder's process lives. The host is in the name because some shared file systems keep locks
local."""


class WeightFiles:
    """The folder of the newest weights. Folders of killed runs in the same place are removed first."""

    def __init__(self, model: PreTrainedModel, root: Path | None):
        self.model = model
        try:
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(root or Path(tempfile.gettempdir()))
            self.home, self.lock = _make_folder(root)
        except OSError as error:
            raise EngineError(f"engine.weights_dir={root}: cannot be written: {error.strerror}") from error
        self.close = finalize(self, shutil.rmtree, self.home, ignore_errors=True)  # at the latest when Python ends
        self.folder: Path | None = None
        self.written = 0

    def write(self, weights: Weights, version: int) -> Path:
        """Write a folder with these weights. `remove_others` removes the one before it."""
        self.written += 1  # a version may be written twice
        folder = self.home / f"{self.written:06}-version-{version}"
        try:
            if has_lora(self.model):
                export_merged(self.model, folder)
            else:
                folder.mkdir()
                self.model.config.save_pretrained(folder)
                tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in base_weights(weights).items()}
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except Exception as error:
            if (reason := disk_error_reason(error)) is None:
                raise
            raise EngineError(f"weights for the servers cannot be written to {folder}: {reason}") from error
        self.folder = folder
        return folder

    def remove_others(self, folder: Path) -> None:
        for other in self.home.glob("*-version-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


def _make_folder(root: Path | None) -> tuple[Path, FileLock]:
    """A new folder. It gets its final name after it is locked, so no other run takes it for an abandoned one."""
    made = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}", dir=root))
    made.chmod(0o755)  # a server may run as another user
    lock = FileLock(made / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except (NotImplementedError, Timeout):  # a file system without locks: its folders never count as abandoned
        (made / LOCK_NAME).unlink(missing_ok=True)
    return made.rename(made.with_name(made.name[1:])), lock


def _remove_abandoned(root: Path) -> None:
    """Remove unlocked folders of this user and this host."""
    for folder in root.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = folder / LOCK_NAME
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not lock.exists():
                continue  # another user's folder may contain a link to anything, and a lock writes to its file
            with FileLock(lock, timeout=0, mode=0o644):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, NotImplementedError, Timeout):  # locked, or removed meanwhile
            continue
