"""Further ranks of the learner on a Ray cluster; the first rank is the driver.

Ray starts the ranks, spread over the nodes, and ends them. They communicate directly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arborl.cluster.placement.actors import ClusterActor
from arborl.cluster.placement.ray_cluster import Actor, GpuSlot, RayCluster, gpus_of
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from arborl.learner.distributed.run_store import JoinInfo

GRACE = 1.0
"""Seconds for ranks to end by themselves."""


class RankActor(ClusterActor):
    """One rank, until the run ends."""

    async def serve(self, rank: int, count: int, info: JoinInfo, device: str) -> None:
        """Run `serve_rank` in a thread; the event loop keeps answering Ray."""
        from arborl.learner.distributed.rank_worker import serve_rank

        await asyncio.to_thread(serve_rank, rank, count, info, device)


class RankActors:
    def __init__(self, cluster: RayCluster, gpus: Sequence[GpuSlot | None]):
        self.cluster, self.gpus = cluster, gpus
        self.host: str = cluster.ray.util.get_node_ip_address()
        """Address of the driver."""
        self.all: dict[int, Actor] = {}
        self.serving: dict[int, Any] = {}
        self.stopped = False

    def start(self, info: JoinInfo) -> None:
        """Start all ranks. Ray sends them the rendezvous and its secret."""
        count = 1 + len(self.gpus)
        for rank, gpu in enumerate(self.gpus, 1):
            actor = self.all[rank] = self.cluster.start(RankActor, cpus=1, gpu=gpu)
            self.serving[rank] = actor.serve.remote(rank, count, info, "cpu" if gpu is None else "cuda:0")

    def lost(self) -> dict[int, str]:
        """Ranks whose processes have ended, and the cause."""
        if self.stopped:
            return {}
        ended, _ = self.cluster.ray.wait(list(self.serving.values()), num_returns=len(self.serving), timeout=0)
        return {rank: self._cause(call) for rank, call in self.serving.items() if call in ended}

    def _cause(self, call: Any) -> str:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            self.cluster.ray.get(call)
        except RayTaskError as error:
            lines = str(error.cause).strip().splitlines() or [""]
            return f"failed ({type(error.cause).__name__}: {lines[0]})"
        except RayActorError as error:  # the cause is one of several lines
            lines = [line.strip() for line in str(error).splitlines() if "died" in line or "because" in line]
            return f"was lost on the cluster ({(lines or [type(error).__name__])[-1].partition('. ')[0]})"
        except Exception as error:
            return f"was lost on the cluster ({type(error).__name__})"
        return "ended before the run"

    def stop(self) -> None:
        """End the ranks, after `GRACE` seconds by force."""
        if self.stopped:
            return
        self.stopped = True
        until, calls = time.monotonic() + GRACE, list(self.serving.values())
        with suppress(Exception):
            self.cluster.ray.wait(calls, num_returns=len(calls), timeout=max(0.0, until - time.monotonic()))
        for actor in self.all.values():
            self.cluster.stop(actor)


def rank_launcher(cluster: RayCluster | None, model: PreTrainedModel) -> RankActors | None:
    """Launcher of the further ranks; None without a cluster or with one rank."""
    if cluster is None or not cluster.ranks:
        return None
    gpu = (model.device.index or 0) if model.device.type == "cuda" else None
    return RankActors(cluster, rank_gpus(cluster, cluster.ranks, gpu))


def rank_gpus(cluster: RayCluster, count: int, learner_gpu: int | None) -> list[GpuSlot | None]:
    """The GPU of each further rank; None on the CPU. Ranks do not share GPUs with engines."""
    if learner_gpu is None:
        return [None] * count
    gpus, engines = gpus_of(cluster.nodes), cluster.engine_gpus(learner_gpu)
    free = [gpu for number, gpu in enumerate(gpus) if number != learner_gpu and gpu not in engines]
    if count > len(free):
        raise ConfigError(
            f"learner.ranks={count + 1}: each needs a GPU, and besides the engines' the cluster has {len(free) + 1}. "
            f"Write learner.ranks={len(free) + 1}, or fewer engines."
        )
    return list(free[:count])
