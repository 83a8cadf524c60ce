"""A line of an episode file as a row of the index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from arborl.types import NOT_SAMPLED

TEXT = 20_000
"""Characters of an episode that can be searched."""
COLUMNS = (
    "source", "agent", "env", "reward", "success", "stop", "failure", "turns", "calls", "sampled", "context",
    "branches", "version", "seconds", "weight",
)  # fmt: skip
"""What episodes are found by: short, so that all of them are looked through in a moment."""
NAMES = ("episode", "task", "preview")
"""What is shown of those that were found."""


def row_of(line: bytes) -> tuple[dict[str, Any], str] | None:
    """The columns of an episode and the text that is searched; None where the line is none.

    The JSON is looked at as it is: making an `Episode` of each of 100,000 lines would take ten times as long.
    """
    try:
        found = json.loads(line.decode("utf-8", "surrogatepass"))
        return _columns(found), "\n".join(_said(found))[:TEXT].encode("utf-8", "replace").decode()
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return None


def _columns(found: Mapping[str, Any]) -> dict[str, Any]:
    task, calls, failure = found["task"], found["calls"], found["failure"]
    lengths = [call["prompt"][1] + len(call["prompt"][2]) + len(call["tokens"]) for call in calls]
    versions = [min(call.get("versions") or [call["version"]]) for call in calls if call["tokens"]]
    sampled = [version for version in versions if version != NOT_SAMPLED]
    rewards = [float(value) for value in found["rewards"].values()]
    return {
        "episode": _text(found["id"], 400),
        "task": _text(task["id"], 400),
        "source": _text(task.get("source") or "", 200),
        "agent": _text(task.get("agent") or "", 200),
        "env": _text(task.get("env") or "", 200),
        "reward": _finite(math.fsum(rewards)) if failure is None and all(map(math.isfinite, rewards)) else None,
        "success": _finite(found["metrics"].get("success")),
        "stop": _text(found["stop"], 60),
        "failure": _text(f"{failure['where']}: {failure['kind']}", 300) if failure else "",
        "turns": len(found["turns"]),
        "calls": len(calls),
        "sampled": sum(len(call["tokens"]) for call in calls),
        "context": max(lengths, default=0),
        "branches": sum(1 for earlier, later in zip([None, *calls], calls, strict=False) if _begins(earlier, later)),
        "version": min(sampled, default=None),
        "seconds": _finite(found["seconds"]),
        "weight": _finite(found.get("weight", 1.0)),
        "preview": _text(next(iter(_last(found)), ""), 160),
    }


def _begins(earlier: Mapping[str, Any] | None, later: Mapping[str, Any]) -> bool:
    """Whether a call does not go on from the one before it: a new branch. (Exact branches are the episode's page's.)"""
    if earlier is None:
        return True
    _, repeated, _ = later["prompt"]
    return bool(repeated < earlier["prompt"][1] + len(earlier["prompt"][2]) + len(earlier["tokens"]))


def _last(found: Mapping[str, Any]) -> Iterator[str]:
    """What the agent said last."""
    for turn in reversed(found["turns"]):
        yield str(turn["message"]["content"])
    for call in reversed(found["calls"]):
        if call.get("reply"):
            yield str(call["reply"]["content"])


def _said(found: Mapping[str, Any]) -> Iterator[str]:
    """Everything that was said: by whom does not matter here."""
    yield str(found["id"])
    for message in (*found["task"]["messages"], *found["opening"]):
        yield from _words(message)
    for turn in found["turns"]:
        yield from _words(turn["message"])
        for message in turn["observation"]:
            yield from _words(message)
    for call in found["calls"]:
        for message in call.get("messages", (0, 0, ()))[2]:
            if message["role"] == "tool":
                yield from _words(message)
    if found["failure"]:
        yield f"{found['failure']['where']} {found['failure']['kind']} {found['failure']['message']}"


def _words(message: Mapping[str, Any]) -> Iterator[str]:
    yield str(message["content"])
    for call in message.get("tool_calls", ()):
        yield f"{call['name']} {call['arguments']}"


def _text(value: Any, most: int) -> str:
    return str(value)[:most].encode("utf-8", "replace").decode()


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
