"""The troubleshooting page quotes existing messages."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from arborl.diagnosis.step_rules import STEP_RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES, SYMPTOMS = PAGE.split("## By symptom")
QUOTED = re.findall(r"^\| `(.+?)` \| ", MESSAGES, re.MULTILINE)


@cache
def sentences() -> tuple[str, ...]:
    """Every text of the source, values filled in being `…`."""
    found = []
    for path in (ROOT / "src" / "arborl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]", "…", node.value))
    return tuple(found)


def output(message: str) -> bool:
    """Whether the fixed parts of a message stand in one text of the source, in this order."""
    parts = [part.strip() for part in message.split("…") if part.strip(" .,")]
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(sentence) for sentence in sentences())


def test_there_are_as_many_messages_as_a_newcomer_meets():
    assert len(QUOTED) >= 25


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_source(message):
    assert output(message)


def test_a_message_that_does_not_exist_is_detected():
    assert not output("…: unknown key, sorry. …")


def test_every_diagnosis_of_a_step_is_on_the_page():
    assert [one.summary for one in STEP_RULES if one.summary not in SYMPTOMS] == []
