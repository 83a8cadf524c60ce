"""Creates the trackers that a configuration names; errors are raised before anything is written."""

from __future__ import annotations

import inspect
import netrc
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from arborl.config.part_config import PartConfig
from arborl.config.training_config import TrackConfig
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import Registry, short_name, unique_name
from arborl.track.tracker import Tracker

TRACKERS = Registry(
    "tracker", {"wandb": "arborl.track.wandb_run:WandbTracker", "mlflow": "arborl.track.mlflow_run:MlflowTracker"}
)
Makers = dict[str, Callable[[], Tracker]]


def make_trackers(config: TrackConfig, objects: Mapping[str, Any]) -> Makers:
    """Functions that create the trackers, by name. They are called when the run starts.

    Args:
        objects: trackers passed from Python, by their names in the configuration.
    """
    makers: Makers = {}
    for number, part in enumerate(config.trackers):
        where = f"track.trackers.{number}"
        makers[unique_name(short_name(part.name), makers)] = _tracker(part, objects, where)
        if part.name in ("wandb", "mlflow") and find_spec(part.name) is None:
            raise ConfigError(
                f"{where}={part.name} needs a package that is not installed. Write pip install 'arborl[{part.name}]'."
            )
        if part.name == "wandb" and (part.args.get("mode") or os.environ.get("WANDB_MODE", "online")) == "online":
            _require_login(where)
    return makers


def _tracker(part: PartConfig, objects: Mapping[str, Any], where: str) -> Callable[[], Tracker]:
    found = objects[part.name] if part.name in objects else TRACKERS[part.name]
    if not callable(getattr(found, "log", None)) or not callable(getattr(found, "close", None)):
        raise ConfigError(
            f"{where}={part.name}: a tracker must have log(metrics, step) and close(); see docs/tracking.md."
        )
    if not inspect.isclass(found):
        if part.args:
            raise ConfigError(f"{where}.args: {part.name!r} is an object and takes no arguments.")
        return lambda: found  # type: ignore[no-any-return]
    signature = inspect.signature(found)
    try:
        signature.bind(**part.args)
    except TypeError as error:
        near = "".join(did_you_mean(key, signature.parameters) for key in part.args if key not in signature.parameters)
        raise ConfigError(f"{where}.args: {error}.{near}") from error
    make: Any = found
    return partial(make, **part.args)


def _require_login(where: str) -> None:
    """Without a key, wandb would prompt at the keyboard or end the process."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    server = os.environ.get("WANDB_BASE_URL", "wandb").partition("://")[2].partition("/")[0].partition(":")[0]
    with suppress(OSError, netrc.NetrcParseError):
        if any((server or "wandb") in host for host in netrc.netrc(os.environ.get("NETRC")).hosts):
            return
    raise ConfigError(
        f"{where}=wandb: there is no key of Weights & Biases. Run `wandb login` or set WANDB_API_KEY, or write "
        "{name: wandb, args: {mode: offline}}."
    )
