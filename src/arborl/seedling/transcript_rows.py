"""The mixture of transcripts that seedling is trained on, and transcripts as rows for imitation.

A writer takes a NumPy generator and returns one conversation. To teach a new format, add a writer to `WRITERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.random import Generator

from arborl.envs import ENVS
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import call_checked
from arborl.seedling.document_transcripts import documents
from arborl.seedling.game_transcripts import frozen_lake, play_game, rooms, shop, sokoban
from arborl.seedling.problem_transcripts import search, small_talk, use_calculator, worked_sum, write_code
from arborl.seedling.transcript_base import Transcript
from arborl.seeds import generator
from arborl.types import Message

Row = dict[str, Any]
WORKED_SUMS = "worked_sums"
WRITERS: dict[str, tuple[float, Callable[[Generator], Transcript | list[Transcript]]]] = {
    "frozen_lake": (0.35, frozen_lake),
    "sokoban": (0.28, sokoban),
    "rooms": (0.03, rooms),
    "shop": (0.12, shop),
    "calculator": (0.05, use_calculator),
    "code": (0.05, write_code),
    "search": (0.04, search),
    "documents": (0.07, documents),
    "small_talk": (0.01, small_talk),
}
"""Name -> share of the draws, writer. An episode over a document gives one transcript per context."""


def write(rng: Generator) -> list[Transcript]:
    shares = [share for share, _ in WRITERS.values()]
    return _write(rng, list(WRITERS)[int(rng.choice(len(shares), p=shares))])


def transcripts(
    count: int = 1000, seed: int = 0, kind: str = "all", skill: float | None = None, args: dict[str, Any] | None = None
) -> dict[str, list[Row]]:
    """Conversations of scripted players: columns `messages` and, where there are any, `tools`.

    Args:
        count: number of rows.
        seed: of all rows.
        kind: a key of `WRITERS`, `all` for the mixture, `worked_sums` (sums of `reasoning_gym` with their working), or
            the name of an environment that has an oracle.
        skill: probability that an environment's player takes the oracle's action instead of a random one.
        args: of the environment; of `worked_sums`, the config of `chain_sum`.
    """
    rng = generator(seed, "transcripts", kind)
    rows: list[Row] = []
    while len(rows) < count:
        rows += [as_row(one) for one in _write(rng, kind, skill, args)]
    return {"transcripts.jsonl": rows[:count]}


def transcript_rows(
    count: int = 1000, seed: int = 0, kind: str = "all", skill: float | None = None, args: dict[str, Any] | None = None
) -> list[Row]:
    """The rows of `transcripts`, for `demonstrations.rows`."""
    return transcripts(count, seed, kind, skill, args)["transcripts.jsonl"]


def mixed_transcript_rows(parts: Sequence[Mapping[str, Any]], seed: int = 0) -> list[Row]:
    """Rows of several kinds, for `demonstrations.rows`. Each part holds arguments of `transcript_rows`."""
    return [row for part in parts for row in call_checked(transcript_rows, {"seed": seed, **part}, "parts")]


def _write(
    rng: Generator, kind: str, skill: float | None = None, args: Mapping[str, Any] | None = None
) -> list[Transcript]:
    if kind == "all" and skill is None and args is None:
        return write(rng)
    if kind in WRITERS and skill is None and args is None:
        written = WRITERS[kind][1](rng)
        return written if isinstance(written, list) else [written]
    if kind == WORKED_SUMS and skill is None:
        return [worked_sum(rng, args)]
    if kind not in ENVS.table:
        known = ["all", *WRITERS, WORKED_SUMS, *ENVS.table]
        raise ConfigError(f"kind={kind}: unknown.{did_you_mean(kind, known)} Known: {', '.join(known)}.")
    env = call_checked(ENVS[kind], dict(args or {}), "args")

    def next_action() -> str:
        best = env.oracle() if rng.random() < (0.5 if skill is None else skill) else None
        action = best or env.random(rng)
        if action is None:
            raise ConfigError(f"kind={kind}: the environment lists no actions. Write another kind.")
        return action

    return [play_game(env, next_action, rng, invalid_share=0.0)]


def as_row(transcript: Transcript) -> Row:
    """A row in OpenAI's format. Assistant messages before `train_from` have `train: false`."""
    messages = [_message(one, number >= transcript.train_from) for number, one in enumerate(transcript.messages)]
    row: Row = {"messages": messages}
    if transcript.tools:
        specs = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in transcript.tools]
        row["tools"] = [{"type": "function", "function": spec} for spec in specs]
    return row


def _message(message: Message, trained: bool) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.tool_calls and not message.sampled:
        functions = [(one.id, {"name": one.name, "arguments": json.dumps(one.arguments)}) for one in message.tool_calls]
        row["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in functions]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            row[key] = getattr(message, key)
    return row if trained or message.role != "assistant" else row | {"train": False}
