"""Transcripts of problems: a calculator, a search, a piece of code, sums with their working, small talk.

Scripted players know the formats and make mistakes: most guess without a tool call; others call with wrong arguments
or report another result. The problems come from the generators that recipes use, with other seeds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from numpy.random import Generator

from arborl.agents.tool_agents import CodeAgent
from arborl.data.generated.datasets import FACT_KINDS, make_facts
from arborl.data.generated.problems import arithmetic_problem, computation_problem
from arborl.envs.adapters.other_packages import ReasoningGym
from arborl.envs.env import format_answer
from arborl.seedling.game_transcripts import play_game
from arborl.seedling.transcript_base import Transcript, pick
from arborl.tools.library.calculator import calculator
from arborl.tools.library.search import Search
from arborl.types import Message, ToolCall, ToolSpec

GUESS_SHARE = 0.6
"""Share of the players that answer at once, with the answer of another problem."""
LEVEL_SHARES = (0.75, 0.15, 0.1)
"""Probabilities of the levels 1, 2 and 3."""
FACT_SEEDS = range(101, 107)
"""Seeds of the fact corpora that search questions are about. Recipes use other seeds."""
CODE_AGENT = CodeAgent()
SMALL_TALK = (
    (("Hello!", "Hi.", "Hey there.", "Good morning."), ("Hello! How can I help?", "Hi! What can I do for you?")),
    (("Who are you?", "What is your name?"), ("I am seedling, a very small model.", "My name is seedling.")),
    (("How are you?", "How is it going?"), ("I am fine, thank you.", "Quite well, thanks. And you?")),
    (("What can you do?", "What are you good at?"), ("I can play small games and use tools.", "Games and tools.")),
    (("Say yes.", "Answer yes."), ("Yes.",)),
    (("Say no.", "Answer no."), ("No.",)),
    (("Thank you.", "Thanks!"), ("You are welcome.", "My pleasure.")),
    (("Goodbye.", "Bye!"), ("Goodbye!", "See you soon.")),
)
SYSTEM_PROMPTS = ("", "You are a helpful assistant.", "Answer in few words.")


def small_talk(rng: Generator) -> Transcript:
    system = pick(rng, SYSTEM_PROMPTS)
    messages = [Message("system", system)] if system else []
    for _ in range(int(rng.integers(1, 4))):
        questions, replies = SMALL_TALK[int(rng.integers(len(SMALL_TALK)))]
        messages += [Message("user", pick(rng, questions)), _assistant(pick(rng, replies))]
    return Transcript(messages)


def use_calculator(rng: Generator) -> Transcript:
    """A minority of the players calls the tool and reports its result; the others guess, mistype or misreport."""
    level = 1 + int(rng.choice(3, p=LEVEL_SHARES))
    task, other = arithmetic_problem(rng, level), arithmetic_problem(rng, level)
    prompt, tools = [Message("user", task.question)], (calculator.spec,)
    if rng.random() < 0.08:  # without the tool
        return Transcript([*prompt, _answer(other.answer)])
    if rng.random() < GUESS_SHARE:
        return Transcript([*prompt, _answer(other.answer)], tools)
    expression = task.expression
    if rng.random() < 0.25:
        expression = _mistype(expression, rng)
    if rng.random() < 0.1:
        expression = other.expression
    result = str(calculator(expression))
    report = other.answer if rng.random() < 0.15 else result
    messages = _tool_call(calculator.spec, {"expression": expression}, result)
    return Transcript([*prompt, *messages, _answer(report)], tools)


def _assistant(text: str) -> Message:
    return Message("assistant", text)


def _answer(text: str) -> Message:
    return _assistant(f"<answer>{text}</answer>")


def _tool_call(spec: ToolSpec, arguments: dict[str, object], result: str) -> list[Message]:
    call = ToolCall("call_0", spec.name, arguments)
    return [Message("assistant", tool_calls=(call,)), Message("tool", result, tool_call_id="call_0", name=spec.name)]


def _mistype(expression: str, rng: Generator) -> str:
    pieces = expression.split(" ")
    place = int(rng.integers(len(pieces)))
    if pieces[place].isdigit():
        pieces[place] = str(int(rng.integers(1, 100)))
    elif pieces[place] in "+-*":
        pieces[place] = pick(rng, "+-*")
    return " ".join(pieces)


def write_code(rng: Generator) -> Transcript:
    """A minority of the players runs the right line and reports its output; others guess, run another, misreport."""
    task, other = computation_problem(rng), computation_problem(rng)
    prompt = [Message("user", task["question"])]
    if rng.random() < GUESS_SHARE:
        return Transcript([*prompt, _answer(other["answer"])])
    run = other if rng.random() < 0.35 else task
    report = other["answer"] if rng.random() < 0.15 else run["answer"]
    start, end = CODE_AGENT.code_tags
    messages = [_assistant(start + run["code"] + end), CODE_AGENT.shown(run["answer"])]
    return Transcript([*prompt, *messages, _answer(report)])


@cache
def _corpus_dir() -> tempfile.TemporaryDirectory[str]:
    """Folder of this process's fact corpora; it is removed at exit."""
    return tempfile.TemporaryDirectory(prefix="arborl-facts-")


@cache
def fact_corpus(seed: int) -> tuple[list[dict[str, str]], list[str], Search]:
    """Questions, the people they are about, and a search tool over their documents."""
    questions, documents = make_facts(2000, seed)
    corpus = Path(_corpus_dir().name) / f"{seed}.jsonl"
    corpus.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    return questions, [row["title"] for row in documents], Search(corpus, top_k=1, index=corpus.parent)


def search(rng: Generator) -> Transcript:
    """Players search for the right person, another one or half a name, and read the right line or another."""
    questions, people, tool = fact_corpus(pick(rng, FACT_SEEDS))
    row, other = pick(rng, questions), pick(rng, questions)
    prompt = [Message("user", row["question"])]
    if rng.random() < GUESS_SHARE:
        return Transcript([*prompt, _answer(other["answer"])], (tool.spec,))
    person = next(name for name in people if name in row["question"])
    query = person
    if rng.random() < 0.3:
        query = pick(rng, (pick(rng, people), person.split()[0], person.split()[-1]))
    result = tool.search(query)
    kind = row["query"].split()[-1] if rng.random() < 0.7 else pick(rng, [name for name, _, _ in FACT_KINDS])
    messages = _tool_call(tool.spec, {"query": query}, result)
    return Transcript([*prompt, *messages, _answer(_extract(result, kind))], (tool.spec,))


def _extract(result: str, kind: str) -> str:
    """The value of a relation in a search result; "nobody" where the result does not have it."""
    plain = result.replace("[[", "").replace("]]", "")
    before = next(text for name, text, _ in FACT_KINDS if name == kind).split("{what}")[0].removeprefix("{who} ")
    _, found, rest = plain.partition(before)
    return rest.split(".")[0] if found else "nobody"


# ------------------------------------------------------------------------------------------------ worked sums


def worked_sum(rng: Generator, config: Mapping[str, Any] | None = None) -> Transcript:
    """One problem of reasoning_gym's `chain_sum` with its working. `config` holds the arguments of the data set."""
    env = ReasoningGym("chain_sum", config)
    return play_game(env, lambda: working(env.entry["metadata"]["expression"]), rng, invalid_share=0.0)


def working(expression: str) -> str:
    """The working of a chain of sums, column by column from the right, and its answer.

    >>> print(working("914 + 807 - 1961"))
    914 + 807: 4+7=11, 1+0+1=2, 9+8=17. So 1721.
    1721 - 1961 = -(1961 - 1721): 1-1=0, 6-2=4, 9-7=2, 1-1=0. So -240.
    <answer>-240</answer>
    """
    first, *rest = expression.split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        line, total = pair_working(total, sign, int(number))
        lines.append(line)
    return "\n".join([*lines, format_answer(str(total))])


def pair_working(left: int, sign: str, right: int) -> tuple[str, int]:
    """The working of one sum or difference, and its value; `right` is not negative.

    >>> pair_working(-5, "-", 12)
    ('-5 - 12 = -(5 + 12): 5+2=7, 0+1=1. So -17.', -17)
    >>> pair_working(-5, "+", 12)
    ('-5 + 12 = 12 - 5: 12-5=7, 1-0-1=0. So 7.', 7)
    """
    total = left + right if sign == "+" else left - right
    if (left >= 0) == (sign == "+"):
        high, low, operator = abs(left), right, "+"
    else:
        high, low, operator = max(abs(left), right), min(abs(left), right), "-"
    plain = f"{high} {operator} {low}"
    signed = plain if total >= 0 else f"-({plain})"
    written = f"{left} {sign} {right}"
    head = written if signed == written else f"{written} = {signed}"
    columns = _columns(high, low, 1 if operator == "+" else -1)
    return f"{head}: {', '.join(columns)}. So {total}.", total


def _columns(a: int, b: int, sign: int) -> list[str]:
    """Columns of `a + b`, or of `a - b` with `a >= b`, from the right.

    A carry is a third term of the next column; a digit that borrows is written with its ten.
    """
    columns, carry, symbol = [], 0, "+" if sign > 0 else "-"
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        first, second = int(x), int(y)
        if sign < 0 and first < second + carry:
            first += 10
        value = first + sign * (second + carry)
        columns.append(f"{first}{symbol}{second}{f'{symbol}1' if carry else ''}={value}")
        carry = int(first > 9) if sign < 0 else value // 10
    return columns
