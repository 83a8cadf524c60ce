"""What a conversion keeps account of: the new configuration, and what became of every key of the old one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One key of theirs."""

    key: str
    value: Any
    what: str
    """`learner.lr=5e-07`; or why there is no counterpart."""


@dataclass(slots=True)
class Draft:
    """A configuration in the making."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Ours, dotted."""
    given: dict[str, Any] = field(default_factory=dict)
    """Theirs, dotted, with everything a rule may want to look up."""
    mapped: list[Line] = field(default_factory=list)
    dropped: list[Line] = field(default_factory=list)

    def set(self, key: str, value: Any, path: str, ours: Any) -> None:
        """Their `key` is our `path`."""
        self.settings[path] = ours
        self.mapped.append(Line(key, value, f"{path}={ours}"))

    def drop(self, key: str, value: Any, why: str) -> None:
        """Their `key` has no counterpart."""
        self.dropped.append(Line(key, value, why))

    def tree(self) -> dict[str, Any]:
        """The configuration, nested."""
        out: dict[str, Any] = {}
        for path, value in self.settings.items():
            *above, last = path.split(".")
            node = out
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
        return out

    def report(self) -> str:
        """What was mapped, what was not, and why."""
        lines = [f"{len(self.mapped)} settings mapped:"]
        lines += [f"  {line.key}={_short(line.value)}  ->  {line.what}" for line in self.mapped]
        if self.dropped:
            lines.append(f"{len(self.dropped)} without a counterpart:")
            lines += [f"  {line.key}={_short(line.value)}: {line.what}" for line in self.dropped]
        return "\n".join(lines)


Rule = Callable[[Draft, str, Any], None]
"""What to do with one key of theirs: (draft, key, value)."""


def to(path: str, change: Callable[[Any], Any] | Mapping[Any, Any] | None = None) -> Rule:
    """The key is ours at `path`, its value changed by a function or looked up in a table.

    Example:
        {"actor_rollout_ref.rollout.n": to("rollout.group_size", int)}
    """

    def rule(draft: Draft, key: str, value: Any) -> None:
        if isinstance(change, Mapping):
            if value not in change:
                draft.drop(key, value, f"no counterpart of {value!r} for {path}. Known: {', '.join(map(str, change))}")
                return
            draft.set(key, value, path, change[value])
        else:
            draft.set(key, value, path, change(value) if change else value)

    return rule


def no(why: str) -> Rule:
    """The key has no counterpart."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        draft.drop(key, value, why)

    return rule


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
