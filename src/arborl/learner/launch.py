"""From a configuration to a learner: in this process alone, or with ranks that are started, or found, beside it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import torch
from transformers import PreTrainedModel

from arborl.algorithms.algorithm import Algorithm
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.blueprint import Blueprint
from arborl.learner.group import LearnerGroup
from arborl.learner.launched_secret import SECRET
from arborl.learner.learner import Learner
from arborl.learner.rank_worker import serve_rank
from arborl.learner.rendezvous import Meeting, Starter
from arborl.learner.run_store import JoinInfo
from arborl.learner.teacher import Teacher
from arborl.models.load import device_of
from arborl.models.scalar import Origin

log = logging.getLogger(__name__)


def launched() -> tuple[int, int] | None:
    """Which rank of how many this process is, where torchrun or Accelerate have started it."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None


def check_ranks(
    config: LearnerConfig, device: str, algorithm: Algorithm | None = None, elsewhere: bool = False
) -> None:
    """ConfigError where there are not so many ranks to be had, or they could not do what is asked.

    Args:
        config, device, algorithm: of the run.
        elsewhere: whether further ranks are on a cluster, whose GPUs are counted once it is joined.
    """
    around = launched()
    if around is not None and around[1] > 1:
        if config.strategy == "single":
            raise ConfigError(f"{around[1]} processes were launched, and learner.strategy=single. Write ddp or fsdp2.")
        if config.ranks not in (1, around[1]):
            raise ConfigError(f"learner.ranks={config.ranks}: {around[1]} processes were launched. Leave it out.")
        if elsewhere and config.ranks > 1:
            raise ConfigError(
                f"placement=ray starts learner.ranks={config.ranks} itself, and {around[1]} processes were launched. "
                "Start arborl train alone, or leave learner.ranks out."
            )
    elif not elsewhere and device_of(device).type == "cuda" and config.ranks > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"learner.ranks={config.ranks}: this machine has {count} GPU{'s' * (count != 1)}, and each rank takes one. "
            f"Write learner.ranks={count}."
        )
    elif not elsewhere and config.ranks > 2 * (os.cpu_count() or 1):
        log.warning("learner.ranks=%d and this machine has %d cores: ranks take turns", config.ranks, os.cpu_count())
    if algorithm is not None and algorithm.trust_region is not None and config.strategy not in ("single", "ddp"):
        raise ConfigError(
            f"learner.strategy={config.strategy}: a trust region looks at all weights at once. Write "
            "learner.strategy=ddp, or another algorithm."
        )


def make_learner(
    blueprint: Blueprint,
    model: PreTrainedModel,
    origin: Origin | None = None,
    teacher: Teacher | None = None,
    elsewhere: Starter | None = None,
) -> Learner | LearnerGroup:
    """The learner of a run; other ranks are started, here or elsewhere, or have been."""
    config, around = blueprint.config, launched()
    if config.strategy == "single":
        return blueprint.build(model, origin, teacher)
    if around is not None and around[1] > 1:
        meeting = Meeting.around()
        assert meeting is not None
        return LearnerGroup(meeting, blueprint, model, None, origin, teacher)
    if elsewhere is not None:
        meeting, info = Meeting.host(config.ranks, elsewhere.host)
        elsewhere.start(info)
        return LearnerGroup(meeting, blueprint, model, elsewhere, origin, teacher)
    meeting, info = Meeting.host(config.ranks)
    others = Processes(config.ranks, info, model.device.type, blueprint.threads)
    return LearnerGroup(meeting, blueprint, model, others, origin, teacher)


def serve_launched(config: LearnerConfig, device: str) -> bool:
    """Where torchrun or Accelerate have started this process as another rank than the first: be that rank until the
    run has ended. Whether it was."""
    around = launched()
    if around is None or around[0] == 0 or config.strategy == "single":
        return False
    check_ranks(config, device)
    place = device_of(device).type
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if place == "cuda" else place
    meeting = Meeting.around()
    assert meeting is not None
    serve_rank(*around, meeting, own)
    return True


class Processes:
    """The other ranks as processes of this machine; they end when this process does, however that ends.

    Args:
        count: of all ranks.
        info: what they need to join.
        device: `cpu` or `cuda`; then each has a GPU of its own.
        threads: of each; 0 deals out the machine's cores.
    """

    def __init__(self, count: int, info: JoinInfo, device: str, threads: int = 0):
        here = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        here |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        cores = max(1, (os.cpu_count() or 1) // count)
        here["OMP_NUM_THREADS"] = str(threads or os.environ.get("OMP_NUM_THREADS") or cores)
        here[SECRET] = info.secret  # not on the command line, which other users can read
        self.stopped = False
        self.all = {
            rank: subprocess.Popen(
                [sys.executable, "-m", "arborl.learner.rank", str(rank), str(count), info.address, _own(device, rank)],
                env=here, stdin=subprocess.PIPE, start_new_session=True,
            )
            for rank in range(1, count)
        }  # fmt: skip

    def lost(self) -> dict[int, str]:
        """Ranks whose processes have ended, and how."""
        if self.stopped:
            return {}
        ended = {rank: process.poll() for rank, process in self.all.items()}
        return {rank: _ending(code) for rank, code in ended.items() if code is not None}

    def stop(self) -> None:
        """End them; those that have been told to end have a moment for it."""
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


def _own(device: str, rank: int) -> str:
    return f"cuda:{rank}" if device.startswith("cuda") else device


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
