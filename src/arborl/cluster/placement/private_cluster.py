"""A Ray cluster that a run starts for itself: loopback interface, token authentication, private folder.

By default Ray listens on all interfaces, keeps its token in a file that other users can read, and its sockets in a
folder that they can write to. Here the folder has mode 0700 and the token's file mode 0600; both are removed with the
cluster. After the start, address and authentication mode are checked.
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

MIN_RAY = (2, 54)
"""First release whose token authentication covers every port; before, a node's agent accepted jobs without a token."""
LOOPBACK = "127.0.0.1"
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray assumes a single-node cluster and uses the loopback interface."""
MAX_PATH = 107 - len("/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Bytes of the folder's path: the path of a socket below it has at most 107."""


class PrivateCluster:
    """Sets environment variables and folder of the cluster; `close` restores them."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="arborl-ray-")
        if len(os.fsencode(self.folder)) > MAX_PATH:
            os.rmdir(self.folder)
            self.folder = tempfile.mkdtemp(prefix="arborl-ray-", dir="/tmp")
        token = Path(self.folder, "token")
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), LOOPBACK_VARIABLE: "0"}
        self.before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_TOKEN")}
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the file
        os.environ.update(variables)
        self.options: dict[str, Any] = {"_node_ip_address": LOOPBACK, "_temp_dir": os.path.join(self.folder, "r")}
        reread_environment()

    def check(self, ray: Any) -> None:
        """ConfigError unless Ray uses the loopback interface and a token."""
        if tuple(map(int, ray.__version__.split(".")[:2])) < MIN_RAY:
            raise ConfigError(
                f"placement=ray: Ray {ray.__version__} accepts jobs without a token. Install "
                f"{'.'.join(map(str, MIN_RAY))} or newer."
            )
        here = ray.util.get_node_ip_address()
        if here != LOOPBACK or not uses_token():
            raise ConfigError(
                f"placement=ray: Ray {ray.__version__} started at {here}, {'with' if uses_token() else 'without'} "
                "token authentication. A private cluster must use the loopback interface and a token. "
                "Install another release of Ray, or start a cluster yourself and write placement.address."
            )

    def close(self) -> None:
        """Restore the environment and remove the folder, after the cluster was stopped."""
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        reread_environment()
        shutil.rmtree(self.folder, ignore_errors=True)


def reread_environment() -> None:
    """Make an imported Ray read its environment again, by its internals; `PrivateCluster.check` detects a failure."""
    if "ray" not in sys.modules:
        return
    with suppress(ImportError, AttributeError):
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(LOOPBACK_VARIABLE, "1") != "0"
    with suppress(ImportError, AttributeError):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def uses_token() -> bool:
    try:
        raylet: Any = importlib.import_module("ray._raylet")
        return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
    except (ImportError, AttributeError):
        return False
