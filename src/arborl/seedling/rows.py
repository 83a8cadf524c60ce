"""Transcripts as rows of a file: what `arborl data make transcripts` writes, to imitate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from arborl.envs import ENVS
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import call_checked
from arborl.seedling.corpus import WRITERS, write
from arborl.seedling.game_transcripts import play
from arborl.seedling.sum_transcripts import worked_sum
from arborl.seedling.transcript import Chance, Transcript
from arborl.seeds import generator
from arborl.types import Message

Row = dict[str, Any]
WORKED_SUMS = "worked_sums"


def transcripts(
    count: int = 1000, seed: int = 0, kind: str = "all", skill: float | None = None, args: dict[str, Any] | None = None
) -> dict[str, list[Row]]:
    """Conversations of scripted players, in the column `messages`, and where there are any `tools`.

    Args:
        count: rows.
        seed: decides all of them.
        kind: a format that seedling was taught (`all` is the mixture it was made from), `worked_sums` (sums of
            `reasoning_gym` with their working), or the name of an environment that knows its own solution.
        skill: of an environment's player: how often it does the best thing, and else anything.
        args: of the environment; of `worked_sums`, the config of `chain_sum`.
    """
    chance = generator(seed, "transcripts", kind)
    made: list[Row] = []
    while len(made) < count:
        made += [as_row(one) for one in _write(chance, kind, skill, args)]
    return {"transcripts.jsonl": made[:count]}


def transcript_rows(
    count: int = 1000, seed: int = 0, kind: str = "all", skill: float | None = None, args: dict[str, Any] | None = None
) -> list[Row]:
    """The rows that `transcripts` writes, for `demonstrations.rows`."""
    return transcripts(count, seed, kind, skill, args)["transcripts.jsonl"]


def mixed_transcript_rows(parts: Sequence[Mapping[str, Any]], seed: int = 0) -> list[Row]:
    """Rows of several kinds, each part with the arguments of `transcript_rows`, for `demonstrations.rows`."""
    return [row for part in parts for row in call_checked(transcript_rows, {"seed": seed, **part}, "parts")]


def _write(chance: Chance, kind: str, skill: float | None, args: Mapping[str, Any] | None) -> list[Transcript]:
    writers = {name: writer for name, (_, writer) in WRITERS.items()} | {"all": write}
    if kind in writers and skill is None and args is None:
        written = writers[kind](chance)
        return written if isinstance(written, list) else [written]
    if kind == WORKED_SUMS and skill is None:
        return [worked_sum(chance, args)]
    if kind not in ENVS.table:
        known = [*writers, WORKED_SUMS, *ENVS.table]
        raise ConfigError(f"kind={kind}: nobody plays that.{did_you_mean(kind, known)} Known: {', '.join(known)}.")
    env = call_checked(ENVS[kind], dict(args or {}), "args")

    def say() -> str:
        best = env.oracle() if chance.random() < (0.5 if skill is None else skill) else None
        said = best or env.random(chance)
        if said is None:
            raise ConfigError(f"kind={kind}: the environment does not say what one could do in it. Take another.")
        return said

    return [play(env, say, chance, mumbling=0.0)]


def as_row(transcript: Transcript) -> Row:
    """In OpenAI's shape; what was said when the context was another is seen and not imitated."""
    messages = [_message(message, number >= transcript.since) for number, message in enumerate(transcript.messages)]
    row: Row = {"messages": messages}
    if transcript.tools:
        specs = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in transcript.tools]
        row["tools"] = [{"type": "function", "function": spec} for spec in specs]
    return row


def _message(message: Message, imitated: bool) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.tool_calls and not message.sampled:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            row[key] = getattr(message, key)
    return row if imitated or message.role != "assistant" else row | {"train": False}
