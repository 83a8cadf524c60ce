"""One episode as JSON: conversation, calls and tokens with their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from arborl.rollout.episode_store import episode_errors, episode_from_json
from arborl.rollout.term_store import VALUE_COLUMNS, Columns, gradient_norms
from arborl.tokens import Tokens
from arborl.track.folder_files import parse_json
from arborl.types import NOT_SAMPLED, Call, Episode
from arborl.view.web.conversation import conversation
from arborl.view.web.token_text import Decode, pieces

MAX_CALLS = 2000
MAX_REPEATED = 2**27
"""Size of an episode's expanded prompts."""


def parsed(line: bytes, where: str) -> Episode:
    """The episode of a line, if it is small enough for a page."""
    row = parse_json(line, where)
    with episode_errors(where):
        calls = row["calls"]
        repeated = sum(int(call["prompt"][1]) for call in calls)
        repeated += 1000 * sum(int(call["messages"][1]) for call in calls if "messages" in call)
        if len(calls) > MAX_CALLS or repeated > MAX_REPEATED:
            raise ValueError(f"it has {len(calls):,} calls and {repeated:,} repeated ids, too many for a page")
        return episode_from_json(row)


def episode_as_dict(episode: Episode) -> dict[str, Any]:
    failure = episode.failure
    return {
        "id": episode.id,
        "task": {
            "id": episode.task.id, "source": episode.task.source, "agent": episode.task.agent, "env": episode.task.env,
            "seed": episode.task.seed, "fields": dict(episode.task.fields),
        },
        "seed": episode.seed,
        "stop": episode.stop.value,
        "reward": None if failure else episode.reward,
        "rewards": dict(episode.rewards),
        "metrics": dict(episode.metrics),
        "failure": None if failure is None else {
            "where": failure.where, "kind": failure.kind, "message": failure.message, "traceback": failure.traceback,
        },
        "seconds": episode.seconds,
        "weight": episode.weight,
        "conversation": conversation(episode),
        "turns": len(episode.turns),
        "lengths": [len(call.prompt) + len(call.completion.tokens) for call in episode.calls],
    }  # fmt: skip


def calls_of(episode: Episode, decode: Decode | None, terms: Columns | None, line: int) -> list[dict[str, Any]]:
    """Each model call of the episode at `line`: repeated prefix, new prompt tokens, sampled tokens and their terms."""
    seen: list[Tokens] = []
    rows: Any = [] if terms is None else np.flatnonzero(terms["episode"] == line)
    found = []
    for number, (call, branch) in enumerate(zip(episode.calls, episode.branches, strict=True)):
        prompt = Tokens(call.prompt)
        shared = [prompt.common(earlier) for earlier in seen]
        repeated = max(shared, default=0)
        origin = max(at for at, common in enumerate(shared) if common == repeated) if repeated else -1
        fresh = list(prompt[repeated:])
        found.append(
            {
                "number": number,
                "turn": call.turn,
                "branch": branch,
                "trained": call.trained,
                "finish": call.completion.finish.value,
                "seconds": call.completion.seconds,
                "drawn": None if call.drawn is None else call.drawn._asdict(),
                "prompt": len(prompt),
                "repeats": [origin, repeated],
                "goes_on": bool(origin >= 0 and repeated == len(seen[origin])),
                "read": {"ids": fresh, "text": pieces(fresh, decode)},
                "sampled": _sampled(call, number, decode, terms, rows),
            }
        )
        seen.append(call.whole)
    return found


def _sampled(call: Call, number: int, decode: Decode | None, terms: Columns | None, rows: Any) -> Mapping[str, Any]:
    """Columns over the sampled tokens, with the loss terms if stored."""
    completion = call.completion
    count = len(completion.tokens)
    given = completion.version == NOT_SAMPLED
    columns: dict[str, Any] = {
        "ids": list(completion.tokens),
        "text": pieces(completion.tokens, decode),
        "logprob": [None] * count if given else list(completion.logprobs),
        "version": list(completion.versions) or [completion.version] * count,
    }
    if call.top_logprobs:
        columns["against"] = [
            [{"text": pieces([token], decode)[0], "logprob": logprob} for token, logprob in others]
            for others in call.top_logprobs
        ]
    if terms is None:
        return columns
    own = rows[terms["call"][rows] == number]
    at = terms["index"][own].astype(np.int64)
    own, at = own[at < count], at[at < count]
    if not len(own):
        return columns
    kept = {name if name != "logprob" else "now": terms[name][own] for name in VALUE_COLUMNS}
    kept["push"] = gradient_norms(terms["pull"][own], terms["logprob"][own])
    for name, values in kept.items():
        column: list[float | None] = [None] * count
        for place, value in zip(at.tolist(), values.tolist(), strict=True):
            column[place] = value
        columns[name] = column
    return columns
