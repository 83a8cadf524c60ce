"""What every process on the cluster has in common: its name, where it is, its versions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from arborl.errors import EngineError

COMPARED = ("arborl", "torch", "transformers", "numpy")
"""Libraries that must be the same everywhere: tokens, weights and episodes pass between them."""


def versions() -> dict[str, str]:
    """Of Python and of the libraries that must agree."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in COMPARED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def check_versions(ours: Mapping[str, str], theirs: Mapping[str, str], whose: str) -> None:
    """EngineError where a process of the cluster has other versions than the driver."""
    other = [
        f"{name} {theirs.get(name, 'none')} (here {ours[name]})" for name in ours if theirs.get(name) != ours[name]
    ]
    if other:
        raise OtherVersions(
            f"{whose} has {', '.join(other)}: what passes between processes would not be the same. Install the same "
            "versions on every node"
        )


class OtherVersions(EngineError):
    """A node is not installed as the driver is; no waiting will mend it."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a process says of itself when it is ready."""

    versions: Mapping[str, str]
    pid: int
    address: str
    node: str
    """The node's id."""


class Host:
    """Base of the processes.

    Args:
        paths: where the driver finds modules; a user's own are found there too, as far as they exist on the node.
        allow_unsafe: as `sandbox.allow_unsafe`.
    """

    def __init__(self, paths: Sequence[str], allow_unsafe: bool):
        from arborl import sandbox

        sys.path.extend(path for path in paths if path not in sys.path)
        sandbox.allow_unsafe(allow_unsafe)

    async def told(self) -> Told:
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Told(versions(), os.getpid(), ray.util.get_node_ip_address(), node)

    async def present(self) -> bool:
        """Answered unless the event loop is stuck; asked by `Pulse`, in another one."""
        return True
