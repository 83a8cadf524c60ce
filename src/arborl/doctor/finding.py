"""What was looked at, how it stands, what to do, and where to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]
"""`fail`: it does not work, or what it computes is wrong. `warn`: look at it."""
WORST = ("fail", "warn", "ok")


@dataclass(frozen=True, slots=True)
class Evidence:
    """An episode that shows it, as `episodes/step-N.jsonl` has it."""

    step: int
    task: str
    episode: str
    why: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, episode {self.episode}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, how it stands, and what to do about it."""

    name: str
    state: State
    detail: str
    advice: str = ""
    evidence: tuple[Evidence, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(questions: Iterable[Callable[[], Finding]], advice: str) -> list[Finding]:
    """Ask each question; one that breaks is a failed row.

    Args:
        questions: named as their rows.
        advice: what to do about one that breaks.
    """
    found = []
    for question in questions:
        try:
            found.append(question())
        except Exception as error:
            name = getattr(question, "__name__", str(question)).replace("_", " ")
            found.append(Finding(name, "fail", f"{type(error).__name__}: {error}", advice))
    return found


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: WORST.index(finding.state))
