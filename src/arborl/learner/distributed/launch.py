"""Creates the learner of a run: in this process, or with further ranks that are started or have been launched."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import torch
from transformers import PreTrainedModel

from arborl.algorithms.recipe import Algorithm
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.learner.core.teacher import Teacher
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.learner.distributed.rank_process import ignore_stop_signals
from arborl.learner.distributed.rank_worker import LearnerSpec, serve_rank
from arborl.learner.distributed.rendezvous import SECRET_VARIABLE, RemoteLauncher, Rendezvous
from arborl.learner.distributed.run_store import JoinInfo
from arborl.models.model_loading import device_of
from arborl.models.output_heads import CriticInit

log = logging.getLogger(__name__)


def launched_rank() -> tuple[int, int] | None:
    """Rank and world size of a process that torchrun or Accelerate has started; None otherwise."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None


def check_ranks(
    config: LearnerConfig, device: str, algorithm: Algorithm | None = None, elsewhere: bool = False
) -> None:
    """Raise ConfigError if the ranks cannot be started, or cannot run the algorithm."""
    launched = launched_rank()
    if launched is not None and launched[1] > 1:
        count = launched[1]
        if config.strategy == "single":
            raise ConfigError(f"learner.strategy=single: {count} processes were launched. Write ddp or fsdp2.")
        if config.ranks not in (1, count):
            raise ConfigError(f"learner.ranks={config.ranks}: {count} processes were launched. Remove the setting.")
        if elsewhere and config.ranks > 1:
            raise ConfigError(
                f"learner.ranks={config.ranks}: placement=ray starts these ranks, and {count} processes were launched. "
                "Start arborl train alone, or remove learner.ranks."
            )
    elif not elsewhere and device_of(device).type == "cuda" and config.ranks > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"learner.ranks={config.ranks}: this host has {count} GPU{'s' * (count != 1)}, and each rank needs one. "
            f"Write learner.ranks={count}."
        )
    elif not elsewhere and config.ranks > 2 * (os.cpu_count() or 1):
        log.warning("learner.ranks=%d: this host has %d cores, so ranks run in turn", config.ranks, os.cpu_count())
    if algorithm is not None and algorithm.trust_region is not None and config.strategy not in ("single", "ddp"):
        raise ConfigError(
            f"learner.strategy={config.strategy}: a trust region needs all weights on every rank. Write "
            "learner.strategy=ddp, or another algorithm."
        )


def make_learner(
    spec: LearnerSpec,
    model: PreTrainedModel,
    origin: CriticInit | None = None,
    teacher: Teacher | None = None,
    elsewhere: RemoteLauncher | None = None,
) -> Learner | LearnerGroup:
    """The learner of a run. Further ranks are started on this host or by `elsewhere`, or have been launched."""
    config, launched = spec.config, launched_rank()
    if config.strategy == "single":
        return spec.build(model, origin, teacher)
    if launched is not None and launched[1] > 1:
        return LearnerGroup(Rendezvous.from_launcher(), spec, model, None, origin, teacher)
    rendezvous, info = Rendezvous.create(config.ranks, elsewhere.host if elsewhere is not None else "")
    if elsewhere is not None:
        elsewhere.start(info)
    launcher = elsewhere or RankProcesses(config.ranks, info, model.device.type, spec.threads)
    return LearnerGroup(rendezvous, spec, model, launcher, origin, teacher)


def serve_launched_rank(config: LearnerConfig, device: str) -> bool:
    """If torchrun or Accelerate has started this process as a rank other than 0, serve as that rank until the run ends.
    Returns whether it did."""
    launched = launched_rank()
    if launched is None or launched[0] == 0 or config.strategy == "single":
        return False
    check_ranks(config, device)
    if threading.current_thread() is threading.main_thread():
        ignore_stop_signals()
    kind = device_of(device).type
    serve_rank(
        *launched, Rendezvous.from_launcher(), f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else kind
    )
    return True


class RankProcesses:
    def __init__(self, count: int, info: JoinInfo, device: str, threads: int = 0):
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        cores = max(1, (os.cpu_count() or 1) // count)
        environment["OMP_NUM_THREADS"] = str(threads or os.environ.get("OMP_NUM_THREADS") or cores)
        environment[SECRET_VARIABLE] = info.secret  # not on the command line, which other users can read
        module, cuda = "arborl.learner.distributed.rank_process", device.startswith("cuda")
        self.stopped = False
        self.all = {
            rank: subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(count), info.address, f"cuda:{rank}" if cuda else device],
                env=environment, stdin=subprocess.PIPE, start_new_session=True,
            )
            for rank in range(1, count)
        }  # fmt: skip

    def lost(self) -> dict[int, str]:
        if self.stopped:
            return {}
        codes = {rank: process.poll() for rank, process in self.all.items()}
        return {
            rank: f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            for rank, code in codes.items()
            if code is not None
        }

    def stop(self) -> None:
        self.stopped = True
        until = time.monotonic() + 1.0
        while time.monotonic() < until and any(process.poll() is None for process in self.all.values()):
            time.sleep(0.02)
        for process in self.all.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
