"""Scripts that start a Ray cluster as a file of `arborl cluster`: variables of the mixed-training system, `ray start`.

The scripts are read, never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from arborl.cluster.launcher.cluster_spec import ClusterSpec
from arborl.config.config_base import validate
from arborl.config.secrets import is_secret
from arborl.convert.common_rules import UNSEEN
from arborl.convert.draft import Draft
from arborl.convert.reading.bash_scripts import ShellScript, read_shell
from arborl.convert.reading.training_scripts import inner_commands, plain, read_text
from arborl.errors import ConfigError

ENVIRONMENT = re.compile(
    r"WANDB_DIR|HF_\w+|NCCL_\w+|GLOO_\w+|(?:HTTPS?|NO)_PROXY|https?_proxy|no_proxy|WANDB_(?!API)\w+"
)
"""Variables of Ray's processes and of jobs."""
SIMPLE = {
    "MASTER_IP": "head", "RAY_TEMP_DIR": "temp", "RAY_DASHBOARD_PORT": "ports.dashboard", "RAY_PORT": "ports.gcs",
}  # fmt: skip
ACTIVATE = re.compile(r"/(?:bin/(?:activate|conda)|etc/profile\.d/conda\.sh|condabin/conda)/?$")
"""Ends of the path of conda's script; its folder is in front of it."""
RAY_START = re.compile(r"\bray\s+start\b")
HEAD_OPTIONS = {
    "port": "ports.gcs", "dashboard-port": "ports.dashboard", "dashboard-agent-listen-port": "ports.agent",
    "node-ip-address": "head", "temp-dir": "temp", "ray-client-server-port": "ports.client",
}  # fmt: skip


def convert_cluster(files: Sequence[Path]) -> Draft:
    """Read scripts that start a cluster; ConfigError where no head is named, or the file would be refused."""
    draft, scripts = Draft(), []
    variables: dict[str, Any] = {}
    for file in files:
        script = read_shell(read_text(file), str(file))
        scripts.append((file, script))
        variables |= {
            name: [plain(one) for one in value] if isinstance(value, list) else plain(value)
            for name, value in script.variables.items()
        }
    draft.source = dict(variables)
    _variables(draft, variables)
    for file, script in scripts:
        _commands(draft, script, str(file))
    if "head" not in draft.settings and "head.address" not in draft.settings:
        raise ConfigError(
            f"{files[0]}: names no head of a cluster. Looked for the variables MASTER_IP and WORKER_NODES, and for "
            "ray start --head --node-ip-address=ADDRESS."
        )
    if "head.address" in draft.settings and "head" in draft.settings:
        draft.settings.pop("head")
    validate(ClusterSpec, draft.tree())
    return draft


def _variables(draft: Draft, variables: Mapping[str, Any]) -> None:
    for name, value in variables.items():
        if UNSEEN.search(str(value)):
            draft.lose(name, value, "only known when the script runs: write it yourself")
        elif is_secret(name):
            names = draft.settings.setdefault("secrets", [])
            names.append(name)
            draft.set(name, value, "secrets", names, "its value is read from your environment, and written nowhere")
        elif name in SIMPLE:
            draft.set(name, value, SIMPLE[name], value)
        elif name == "WORKER_NODES":
            listed = value if isinstance(value, list) else str(value).split()
            draft.set(name, value, "workers", [str(one) for one in listed])
        elif ENVIRONMENT.fullmatch(name):
            draft.set(name, value, f"env.{name}", str(value))
        elif name not in ("CONDA_ENV", "CONDA_PATH") and name.isupper():
            draft.lose(name, value, "no such setting in a cluster's file: docs/scale-out.md lists them")
    _python(draft, variables)


def _python(draft: Draft, variables: Mapping[str, Any]) -> None:
    """The Python of a conda environment."""
    env, activate = variables.get("CONDA_ENV"), variables.get("CONDA_PATH")
    given = [name for name in ("CONDA_ENV", "CONDA_PATH") if name in variables and name not in draft.accounted()]
    if env is not None and str(env).startswith("/"):
        python = PurePosixPath(str(env)) / "bin" / "python"
    elif env is not None and activate is not None:
        root = PurePosixPath(ACTIVATE.sub("", str(activate)))
        python = root / "bin" / "python" if env == "base" else root / "envs" / str(env) / "bin" / "python"
    else:
        for name in given:
            why = "CONDA_ENV and CONDA_PATH together say where its Python is: write python=/PATH/envs/NAME/bin/python"
            draft.lose(name, variables[name], why)
        return
    if not python.is_absolute():
        for name in given:
            draft.lose(name, variables[name], "not a path on the hosts: write python=/PATH/envs/NAME/bin/python")
        return
    for name in given:
        draft.set(name, variables[name], "python", str(python), "arborl[ray] must be installed in it")


def _commands(draft: Draft, script: ShellScript, where: str) -> None:
    """`ray start --head …` and `ray start --address=…`; the settings of variables stay."""
    for command in inner_commands(script.commands, where, RAY_START):
        words = list(command.words)
        if "ray" not in words or words[words.index("ray") + 1 :][:1] != ["start"]:
            continue
        options = _options(words[words.index("ray") + 2 :])
        is_head = "head" in options
        where_from = f"ray start {'--head' if is_head else '--address'}"
        for name, value in options.items():
            _option(
                draft, f"{where_from} --{name}" if name not in ("head", "address") else where_from, name, value, is_head
            )


def _options(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
        found[name.replace("_", "-")] = plain(value if equals else following)
    return found


def _option(draft: Draft, key: str, name: str, value: Any, is_head: bool) -> None:
    if name == "head":
        return
    if UNSEEN.search(str(value)):
        draft.lose(key, value, "only known when the script runs: write it yourself")
    elif name == "address" and not is_head:
        host, _, port = str(value).partition(":")
        _once(draft, key, value, "head", host)
        if port.isdigit():
            _once(draft, key, value, "ports.gcs", int(port))
    elif name in HEAD_OPTIONS and is_head:
        _once(draft, key, value, HEAD_OPTIONS[name], value)
    elif name == "node-ip-address":
        workers = draft.settings.setdefault("workers", [])
        if value not in workers:
            workers.append(str(value))
        draft.set(key, value, "workers", workers)
    elif name in ("num-cpus", "num-gpus") and isinstance(value, int):
        path = name.replace("-", "_")
        if is_head and isinstance(draft.settings.get("head"), str):
            draft.settings["head.address"] = draft.settings.pop("head")
        _once(draft, key, value, f"head.{path}" if is_head and "head.address" in draft.settings else path, value)
    elif name == "dashboard-host":
        draft.lose(key, value, "the dashboard listens on the head only: `arborl cluster status` prints how to reach it")
    else:
        draft.lose(key, value, "no such option: docs/scale-out.md lists the keys of a cluster's file")


def _once(draft: Draft, key: str, value: Any, path: str, ours: Any) -> None:
    """Set our key unless a variable or an earlier command did."""
    if path == "head" and "head.address" in draft.settings:
        path = "head.address"
    if path in draft.settings and draft.settings[path] != ours:
        draft.lose(key, value, f"{path}={draft.settings[path]} is named before")
    else:
        draft.set(key, value, path, ours)
