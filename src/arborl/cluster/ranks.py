"""Ranks of the learner on a Ray cluster, all but the first, which is the driver: `LearnerGroup` is told of their ends.

They talk with each other directly, as ranks everywhere do; Ray starts them, spread over the nodes, and ends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arborl.cluster.connection import Actor, Cluster
from arborl.cluster.host import Host
from arborl.cluster.seats import Seat, gpus_of
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from arborl.learner.distributed.run_store import JoinInfo

GRACE = 1.0
"""Seconds in which ranks that have been told to end may do so by themselves."""


class RankHost(Host):
    """The other side: is a rank until the run has ended."""

    async def serve(self, rank: int, count: int, info: JoinInfo, device: str) -> None:
        """As `serve_rank`; beside the event loop, which goes on answering Ray."""
        from arborl.learner.distributed.rank_worker import serve_rank

        await asyncio.to_thread(serve_rank, rank, count, info, device)


class RankActors:
    """Starts the ranks, and knows which have ended.

    Args:
        cluster: where they are.
        seats: the GPU of each but the first; None for one without.
    """

    def __init__(self, cluster: Cluster, seats: Sequence[Seat | None]):
        self.cluster, self.seats = cluster, seats
        self.host: str = cluster.ray.util.get_node_ip_address()
        """Where the driver can be reached by all of them."""
        self.all: dict[int, Actor] = {}
        self.serving: dict[int, Any] = {}
        self.stopped = False

    def start(self, info: JoinInfo) -> None:
        """All ranks; they come to the meeting there. Ray carries the secret to them."""
        count = 1 + len(self.seats)
        for rank, seat in enumerate(self.seats, 1):
            actor = self.all[rank] = self.cluster.start(RankHost, cpus=1, seat=seat)
            self.serving[rank] = actor.serve.remote(rank, count, info, "cpu" if seat is None else "cuda:0")

    def lost(self) -> dict[int, str]:
        """Ranks whose processes have ended, and how."""
        if self.stopped:
            return {}
        ended, _ = self.cluster.ray.wait(list(self.serving.values()), num_returns=len(self.serving), timeout=0)
        return {rank: self._ending(call) for rank, call in self.serving.items() if call in ended}

    def _ending(self, call: Any) -> str:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            self.cluster.ray.get(call)
        except RayTaskError as error:
            said = str(error.cause).strip().splitlines() or [""]
            return f"failed ({type(error.cause).__name__}: {said[0]})"
        except RayActorError as error:  # Ray's reason stands among lines of ids and addresses
            told = [line.strip() for line in str(error).splitlines() if "died" in line or "because" in line]
            return f"was lost on the cluster ({(told or [type(error).__name__])[-1].partition('. ')[0]})"
        except Exception as error:
            return f"was lost on the cluster ({type(error).__name__})"
        return "ended before the run"

    def stop(self) -> None:
        """End them; those that have been told to end have a moment for it."""
        if self.stopped:
            return
        self.stopped = True
        until, calls = time.monotonic() + GRACE, list(self.serving.values())
        with suppress(Exception):
            self.cluster.ray.wait(calls, num_returns=len(calls), timeout=max(0.0, until - time.monotonic()))
        for actor in self.all.values():
            self.cluster.stop(actor)


def ranks_on(cluster: Cluster | None, model: PreTrainedModel) -> RankActors | None:
    """What starts a learner's further ranks, where there is a cluster for them.

    Args:
        cluster: of the run.
        model: the first rank's policy.
    """
    if cluster is None or not cluster.ranks:
        return None
    own = (model.device.index or 0) if model.device.type == "cuda" else None
    return RankActors(cluster, rank_seats(cluster, cluster.ranks, own))


def rank_seats(cluster: Cluster, count: int, own: int | None) -> list[Seat | None]:
    """The GPU of each further rank; None for one without. GPUs of engines are theirs.

    Args:
        cluster: where.
        count: of ranks but the first.
        own: the first rank's GPU on the driver's node, where it has one.
    """
    if own is None:
        return [None] * count
    gpus, engines = gpus_of(cluster.nodes), cluster.seats(own)
    free = [seat for number, seat in enumerate(gpus) if number != own and seat not in engines]
    if count > len(free):
        raise ConfigError(
            f"learner.ranks={count + 1}: each takes a GPU, and beside the engines' the cluster has {len(free) + 1}. "
            f"Write learner.ranks={len(free) + 1}, or fewer engines."
        )
    return list(free[:count])
