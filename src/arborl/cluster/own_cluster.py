"""A Ray cluster that a run starts for itself: on the loopback interface, with a token and a folder of its own.

By default Ray listens on all interfaces, keeps its token in a file that other users can read, and its sockets in a
folder that they can write to. Here the folder has mode 0700 and the token's file in it mode 0600; both last as long as
the cluster. What Ray does with its environment is checked once it has started.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError

FIRST = (2, 54)
"""The first release of Ray whose token authentication covers all that listens: before, a node's agent took jobs without
a token."""
LOOPBACK = "127.0.0.1"
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0 Ray takes a machine for one that can have no other node, and uses the loopback interface."""
LONGEST = 107 - len("/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Bytes of the folder's path: Ray keeps sockets below it, whose paths have at most 107."""


class OwnCluster:
    """Prepares this process for such a cluster, and undoes it.

    Example:
        own = OwnCluster()
        ray.init(address="local", **own.options)
        own.check(ray)
        …
        ray.shutdown()
        own.close()
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="arborl-ray-")
        if len(os.fsencode(self.folder)) > LONGEST:
            os.rmdir(self.folder)
            self.folder = tempfile.mkdtemp(prefix="arborl-ray-", dir="/tmp")
        token = Path(self.folder, "token")
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), ON_LOOPBACK: "0"}
        self.before = {name: os.environ.get(name) for name in (*own, "RAY_AUTH_TOKEN")}
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would be taken before the file
        os.environ.update(own)
        self.options: dict[str, Any] = {"_node_ip_address": LOOPBACK, "_temp_dir": os.path.join(self.folder, "r")}
        reread_environment()

    def check(self, ray: Any) -> None:
        """ConfigError where Ray has not done as its environment says: a release may read it otherwise."""
        if tuple(map(int, ray.__version__.split(".")[:2])) < FIRST:
            raise ConfigError(
                f"placement=ray: Ray {ray.__version__} takes jobs without its token. Install "
                f"{'.'.join(map(str, FIRST))} or newer."
            )
        here = ray.util.get_node_ip_address()
        if here != LOOPBACK or not uses_token():
            raise ConfigError(
                f"placement=ray: Ray {ray.__version__} started at {here}, {'with' if uses_token() else 'without'} "
                "token authentication. A cluster of a run's own must be on the loopback interface and have a token. "
                "Install another release of Ray, or start a cluster yourself and write placement.address."
            )

    def close(self) -> None:
        """As it was before. The cluster has been stopped."""
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        reread_environment()
        shutil.rmtree(self.folder, ignore_errors=True)


def reread_environment() -> None:
    """Ray reads its environment when it is imported, which it may have been. It has no public way to read it again;
    where its own changes, `OwnCluster.check` tells."""
    if "ray" not in sys.modules:
        return
    with suppress(ImportError, AttributeError):
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(ON_LOOPBACK, "1") != "0"
    with suppress(ImportError, AttributeError):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def uses_token() -> bool:
    """Whether this process authenticates itself to the cluster, and the cluster to it."""
    try:
        raylet: Any = importlib.import_module("ray._raylet")
        return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
    except (ImportError, AttributeError):
        return False
