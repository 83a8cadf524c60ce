"""Transcripts of questions that tools answer: a calculator, a search, a piece of code.

Players know the formats and are careless: they guess without asking, ask the wrong thing, or misreport what they got.
Problems come from where recipes take theirs, under seeds of their own.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from arborl.agents.tool_agents import CodeAgent
from arborl.data.generated.datasets import FACT_KINDS, make_facts
from arborl.data.generated.problems import arithmetic_problem, computation_problem
from arborl.seedling.transcript import Chance, Transcript, pick
from arborl.tools.library.calculator import calculator
from arborl.tools.library.search import Search
from arborl.types import Message, ToolCall, ToolSpec

LEVELS = (0.75, 0.15, 0.1)
"""How often a problem is of level 1, 2, 3."""
SEEDS = range(101, 107)
"""Of the worlds that questions to search for are about; recipes take others."""


def said(text: str) -> Message:
    return Message("assistant", text)


def asked(spec: ToolSpec, arguments: dict[str, object], result: str) -> list[Message]:
    """A call and what came back."""
    call = ToolCall("call_0", spec.name, arguments)
    return [Message("assistant", tool_calls=(call,)), Message("tool", result, tool_call_id="call_0", name=spec.name)]


# ------------------------------------------------------------------------------------------------ calculator


def use_calculator(chance: Chance) -> Transcript:
    """Half the players ask the tool and report its answer; the rest guess, mistype or misreport."""
    level = 1 + int(chance.choice(3, p=LEVELS))
    given, other = arithmetic_problem(chance, level), arithmetic_problem(chance, level)
    opening, tools = [Message("user", given.question)], (calculator.spec,)
    if chance.random() < 0.08:  # nobody offers the tool
        return Transcript([*opening, said(f"<answer>{other.answer}</answer>")])
    if chance.random() < 0.35:
        return Transcript([*opening, said(f"<answer>{other.answer}</answer>")], tools)
    expression = given.expression
    if chance.random() < 0.25:
        expression = _mistyped(expression, chance)
    if chance.random() < 0.1:
        expression = other.expression
    result = str(calculator(expression))
    report = other.answer if chance.random() < 0.15 else result
    messages = asked(calculator.spec, {"expression": expression}, result)
    return Transcript([*opening, *messages, said(f"<answer>{report}</answer>")], tools)


def _mistyped(expression: str, chance: Chance) -> str:
    """With another number, or another sign."""
    pieces = expression.split(" ")
    place = int(chance.integers(len(pieces)))
    if pieces[place].isdigit():
        pieces[place] = str(int(chance.integers(1, 100)))
    elif pieces[place] in "+-*":
        pieces[place] = pick(chance, "+-*")
    return " ".join(pieces)


# ------------------------------------------------------------------------------------------------ code


CODER = CodeAgent()


def write_code(chance: Chance) -> Transcript:
    """Half the players run the right line and report what it printed; others guess, run another line or misreport."""
    given, other = computation_problem(chance), computation_problem(chance)
    opening = [Message("user", given["question"])]
    if chance.random() < 0.35:
        return Transcript([*opening, said(f"<answer>{other['answer']}</answer>")])
    ran = other if chance.random() < 0.35 else given
    report = other["answer"] if chance.random() < 0.15 else ran["answer"]
    start, end = CODER.code
    ran_it = [said(start + ran["code"] + end), CODER.shown(ran["answer"])]
    return Transcript([*opening, *ran_it, said(f"<answer>{report}</answer>")])


# ------------------------------------------------------------------------------------------------ search


@cache
def shelf() -> tempfile.TemporaryDirectory[str]:
    """A folder for the worlds of this process, gone with it."""
    return tempfile.TemporaryDirectory(prefix="arborl-worlds-")


@cache
def world(seed: int) -> tuple[list[dict[str, str]], list[str], Search]:
    """Questions, the people they are about, and the tool that finds these."""
    questions, documents = make_facts(2000, seed)
    corpus = Path(shelf().name) / f"{seed}.jsonl"
    corpus.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    return questions, [row["title"] for row in documents], Search(corpus, top_k=1, index=corpus.parent)


def search(chance: Chance) -> Transcript:
    """Players search for the right one, another one or half a name, and read the right line or another."""
    questions, people, tool = world(pick(chance, SEEDS))
    row, other = pick(chance, questions), pick(chance, questions)
    opening = [Message("user", row["question"])]
    if chance.random() < 0.3:
        return Transcript([*opening, said(f"<answer>{other['answer']}</answer>")], (tool.spec,))
    who = next(name for name in people if name in row["question"])
    query = who
    if chance.random() < 0.3:
        query = pick(chance, (pick(chance, people), who.split()[0], who.split()[-1]))
    result = tool.search(query)
    kind = row["query"].split()[-1] if chance.random() < 0.7 else pick(chance, [name for name, _, _ in FACT_KINDS])
    messages = asked(tool.spec, {"query": query}, result)
    return Transcript([*opening, *messages, said(f"<answer>{_read(result, kind)}</answer>")], (tool.spec,))


def _read(result: str, kind: str) -> str:
    """What a result says of this kind."""
    plain = result.replace("[[", "").replace("]]", "")
    before = next(say for name, say, _ in FACT_KINDS if name == kind).split("{what}")[0].removeprefix("{who} ")
    _, found, rest = plain.partition(before)
    return rest.split(".")[0] if found else "nobody"
