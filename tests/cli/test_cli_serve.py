"""`arborl chat` and `arborl serve`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="the extra 'serve'")

from arborl.cli.main import app

AGENT = ["agent=tool", "tools=[calculator]", "--temperature", "1", "--seed", "8"]
"""With this seed the embedded model calls the tool; most often it guesses."""
QUESTION = "What is 12 + 30? Answer as <answer>number</answer>."


def run(*arguments, typed=None):
    return CliRunner().invoke(app, [*arguments], input=typed)


def test_message_prints_tool_calls_and_the_answer():
    done = run("chat", "seedling", *AGENT, "--message", QUESTION)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == ['  -> calculator {"expression": "12 + 30"}', "  <- 42", "<answer>42</answer>"]


def test_chat_commands(here):
    done = run("chat", "seedling", *AGENT, typed=f"/tools\n{QUESTION}\nHello\n/save talk.jsonl\n/reset\n/what\n/exit\n")
    assert done.exit_code == 0, done.output
    assert "calculator       Evaluate an arithmetic expression." in done.output
    assert "/save FILE" in done.output
    (episode,) = [json.loads(line) for line in (here / "talk.jsonl").read_text().splitlines()]
    assert [turn["message"]["role"] for turn in episode["turns"]] == ["assistant"]
    assert len(episode["calls"]) >= 3
