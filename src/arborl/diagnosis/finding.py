"""Findings: one row of a report, with state, advice and the episodes that show it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]
"""`fail`: something does not work or computes wrong numbers. `warn`: worth a look."""
SEVERITY = ("fail", "warn", "ok")
RULE_TEXTS: dict[str, Any] = tomllib.loads(files("arborl.diagnosis").joinpath("rules.toml").read_text(encoding="utf-8"))
"""Summary, advice and state of each rule."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """An episode of `episodes/step-N.jsonl` that shows the finding."""

    step: int
    task: str
    episode: str
    why: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, episode {self.episode}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    detail: str
    advice: str = ""
    evidence: tuple[Evidence, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_checks(checks: Iterable[Callable[..., Finding]], advice: str, *args: Any) -> list[Finding]:
    """Call each check with `args`. A check that raises becomes a failed finding with `advice`."""
    findings = []
    for check in checks:
        try:
            findings.append(check(*args))
        except Exception as error:
            name = getattr(check, "__name__", str(check)).replace("_", " ")
            findings.append(Finding(name, "fail", f"{type(error).__name__}: {error}", advice))
    return findings


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITY.index(finding.state))
