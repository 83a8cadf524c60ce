"""Which GPU of which node is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arborl.engines.remote.replicas import ReplicaUnavailable


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    cpus: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Seat:
    """One GPU."""

    node: Node
    index: int
    """On its node."""


def gpus_of(nodes: Sequence[Node]) -> list[Seat]:
    """All GPUs, in the order in which `placement.device_mapping` counts them.

    Example:
        gpus_of([Node("a", "10.0.0.1", 8, 2), Node("b", "10.0.0.2", 8, 1)])[2]     # GPU 0 of the second node
    """
    return [Seat(node, index) for node in nodes for index in range(node.gpus)]


def find_node(seat: Seat, alive: Sequence[Node]) -> Node:
    """The seat's node; where it has been started anew, the one at its address. Unreachable where there is none."""
    for node in alive:
        if node.id == seat.node.id:
            return node
    for node in alive:
        if node.address == seat.node.address and node.gpus > seat.index:
            return node
    raise ReplicaUnavailable(f"the node {seat.node.address} with its GPU {seat.index} is gone")
