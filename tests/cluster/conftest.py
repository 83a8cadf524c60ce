"""A Ray cluster of two nodes on this machine, once for all tests of a file; nothing of it leaves the machine."""

from __future__ import annotations

import os

import pytest

from arborl.cluster.placement.ray_cluster import SETTINGS

for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no key is left in the home of who runs tests
STORE = 100 * 2**20


def patient(start, times=3):
    """Ray gives a node half a minute to start, which a busy machine may not do."""
    for left in reversed(range(times)):
        try:
            return start()
        except Exception as error:
            if not left or "timed out" not in str(error):
                raise


class TwoNodes:
    """The nodes; the driver's is the head."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        about = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster = patient(lambda: Cluster(initialize_head=True, head_node_args=about))
        self.second = self.add()

    def add(self):
        return patient(lambda: self.cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=STORE))

    @property
    def address(self) -> str:
        return self.cluster.address


@pytest.fixture(scope="module")
def two_nodes():
    """This process is connected to them."""
    import logging

    import ray

    from arborl.cluster.placement.ray_cluster import keep_signal_handlers, relay_output

    nodes = TwoNodes()
    relay_output()
    try:
        with keep_signal_handlers():
            ray.init(address=nodes.address, logging_level=logging.ERROR)
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
