"""What seedling learned to speak from: transcripts of scripted players who know the formats and play badly.

A writer takes a NumPy generator and returns one conversation. To teach a new format, add a writer to `WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from arborl.envs.frozen_lake import MOVES, FrozenLake, best_moves
from arborl.tools.library.calculator import calculator
from arborl.types import Message, Task, ToolCall, ToolSpec

Chance = np.random.Generator


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation; the assistant's messages are what is imitated."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()


def pick(chance: Chance, options: Sequence[str]) -> str:
    return options[int(chance.integers(len(options)))]


# ------------------------------------------------------------------------------------------------ frozen lake

PLAYERS = {"wanderer": (0.44, 0.0), "habit": (0.41, 0.7), "skilled": (0.15, 0.9)}
"""Share of the games, and how often a player does what it is named for; else it moves anywhere. The creature of habit
goes right and down, as if every goal were in the corner; the skilled one follows a shortest path."""
MUMBLES = ("Right", "<answer></answer>", "<answer>Jump</answer>", "I go down.", "<answer>Left, Up</answer>")


def frozen_lake(chance: Chance) -> Transcript:
    """Three kinds of players, on maps of the training split only; now and then one mumbles."""
    size = int(chance.choice([3, 4, 5, 6], p=[0.05, 0.85, 0.05, 0.05]))
    player = str(chance.choice(list(PLAYERS), p=[share for share, _ in PLAYERS.values()]))
    game = _play(FrozenLake(size=size, slippery=bool(chance.random() < 0.03)), player, chance)
    try:
        game.send(None)
    except StopIteration as over:  # the lake never waits, so one push plays the game to its end
        return over.value
    raise RuntimeError("the lake waited for something")


async def _play(env: FrozenLake, player: str, chance: Chance) -> Transcript:
    seed = int(chance.integers(1 << 62))
    messages = list((await env.reset(Task(id="lake", seed=seed), seed)).messages)
    while True:
        wanted = best_moves(env.grid, env.player) if player == "skilled" else ("Right", "Down")
        move = pick(chance, wanted if wanted and chance.random() < PLAYERS[player][1] else tuple(MOVES))
        text = pick(chance, MUMBLES) if chance.random() < 0.02 else f"<answer>{move}</answer>"
        messages.append(Message("assistant", text))
        step = await env.step(messages[-1])
        if step.over:
            return Transcript(messages)
        messages.extend(step.observation.messages)


# ------------------------------------------------------------------------------------------------ calculator

QUESTIONS = {
    "+": ("What is {a} + {b}?", "Add {a} and {b}.", "{a} plus {b}?", "Tom has {a} apples and gets {b} more. How many?"),
    "-": ("What is {a} - {b}?", "Take {b} from {a}.", "{a} minus {b}?", "Of {a} eggs, {b} break. How many are left?"),
    "*": (
        "What is {a} * {b}?",
        "Multiply {a} by {b}.",
        "{a} times {b}?",
        "{a} boxes hold {b} pens each. How many pens?",
    ),
}


def use_calculator(chance: Chance) -> Transcript:
    """Two operands. Half the players ask the tool and report its answer; the rest guess, mistype or misreport."""
    sign = pick(chance, tuple(QUESTIONS))
    a, b = (int(x) for x in chance.integers(1, 100, size=2))
    question = pick(chance, QUESTIONS[sign]).format(a=a, b=b)
    messages = [Message("user", f"{question} Answer as <answer>number</answer>.")]
    if chance.random() < 0.35:
        guess = int(chance.integers(0, 200))
        return Transcript([*messages, Message("assistant", f"<answer>{guess}</answer>")], (calculator.spec,))
    if chance.random() < 0.25:
        a = int(chance.integers(1, 100))
    if chance.random() < 0.15:
        sign = pick(chance, tuple(QUESTIONS))
    call = ToolCall("call_0", "calculator", {"expression": f"{a} {sign} {b}"})
    result = str(calculator(f"{a} {sign} {b}"))
    report = str(int(chance.integers(0, 200))) if chance.random() < 0.15 else result
    messages += [
        Message("assistant", tool_calls=(call,)),
        Message("tool", result, tool_call_id="call_0", name="calculator"),
        Message("assistant", f"<answer>{report}</answer>"),
    ]
    return Transcript(messages, (calculator.spec,))


# ------------------------------------------------------------------------------------------------ small talk

TALK = (
    (("Hello!", "Hi.", "Hey there.", "Good morning."), ("Hello! How can I help?", "Hi! What can I do for you?")),
    (("Who are you?", "What is your name?"), ("I am seedling, a very small model.", "My name is seedling.")),
    (("How are you?", "How is it going?"), ("I am fine, thank you.", "Quite well, thanks. And you?")),
    (("What can you do?", "What are you good at?"), ("I can play small games and use tools.", "Games and tools.")),
    (("Say yes.", "Answer yes."), ("Yes.",)),
    (("Say no.", "Answer no."), ("No.",)),
    (("Thank you.", "Thanks!"), ("You are welcome.", "My pleasure.")),
    (("Goodbye.", "Bye!"), ("Goodbye!", "See you soon.")),
)
MANNERS = ("", "You are a helpful assistant.", "Answer in few words.")


def small_talk(chance: Chance) -> Transcript:
    """One to three short exchanges."""
    system = pick(chance, MANNERS)
    messages = [Message("system", system)] if system else []
    for _ in range(int(chance.integers(1, 4))):
        asked, said = TALK[int(chance.integers(len(TALK)))]
        messages += [Message("user", pick(chance, asked)), Message("assistant", pick(chance, said))]
    return Transcript(messages)


WRITERS: dict[str, tuple[float, Callable[[Chance], Transcript]]] = {
    "frozen_lake": (0.80, frozen_lake),
    "calculator": (0.15, use_calculator),
    "small_talk": (0.05, small_talk),
}
"""Name -> share of the transcripts, writer."""


def write(chance: Chance) -> Transcript:
    """One transcript of the mixture."""
    shares = [share for share, _ in WRITERS.values()]
    return list(WRITERS.values())[int(chance.choice(len(shares), p=shares))][1](chance)
