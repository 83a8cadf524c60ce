"""Run folders written by hand: one that is well, and what is written into it to make it ill."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from arborl.rollout.episode_store import EpisodeStore
from arborl.types import Call, Completion, Episode, FinishReason, Group, Message, Task, Turn

STEPS, TASKS, MEMBERS = 30, 4, 4
Row = dict[str, Any]
PROMPT = (1, 7, 9, 4, 4, 8, 2)


def well(step: int) -> Row:
    """A step of a run that learns."""
    rng, done = random.Random(step), step / STEPS
    success = 0.2 + 0.5 * done + rng.uniform(-0.08, 0.08)
    return {
        "step": step, "episode/count": 16.0, "episode/failed": 0.0, "episode/calls": 2.0, "episode/turns": 2.0,
        "episode/sampled": 20.0 + rng.uniform(-2, 2), "episode/success": success, "episode/valid": 0.95,
        "group/zero_variance": 0.25, "call/cut_off": 0.02, "stop/done": 0.9, "stop/truncated": 0.1,
        "stop/max_turns": 0.0, "stop/context_full": 0.0, "reward/mean": success, "reward/std": 0.4,
        "learner/terms": 320.0,
        "learner/groups": 4.0, "learner/grad_norm": 0.4 + rng.uniform(0, 0.6), "learner/skipped": 0.0,
        "learner/skipped/gradient": 0.0, "policy/entropy": 0.4 - 0.2 * done + rng.uniform(0, 0.05),
        "policy/logprob_diff": 1e-6 * rng.uniform(1, 2), "policy/clipped": 0.05, "policy/kl": 0.02 * done,
        "policy/loss": rng.uniform(-0.1, 0.1), "batch/lag_mean": 0.0, "rollout/filtered": 0.0,
        "rollout/missing": 0.0, "rollout/threads_stuck": 0.0, "rollout/dropped_stale": 0.0,
        "dropped/reward_not_finite": 0.0,
    }  # fmt: skip


def episode(step: int, task: int, member: int, replies: Sequence[str] = (), ids: Sequence[int] = ()) -> Episode:
    """An episode of two turns that differs from all others."""
    rng = random.Random(f"{step} {task} {member}")
    texts = list(replies) or [f"Go {rng.choice(['left', 'right', 'up', 'down'])}." for _ in range(2)]
    good = float(rng.random() < 0.5)
    name = f"t-{step}-{task}"
    made = Episode(f"{name}#{member}", Task(name, seed=1000 * step + task, env="lake"), seed=member)
    prompt: tuple[int, ...] = PROMPT
    for number, text in enumerate(texts):
        tokens = tuple(ids) or tuple(10 + ord(letter) for letter in text)
        reply = Message("assistant", text, sampled=True)
        done = Completion((*tokens, 2), (-0.1,) * (len(tokens) + 1), FinishReason.STOP, step - 1)
        made.calls.append(Call(prompt, done, number, messages=(Message("user", "Go."),), reply=reply))
        seen = Message("user", f"You are at {rng.randrange(99)}.")
        made.turns.append(Turn(reply, (seen,), reward=good * (number + 1 == len(texts))))
        prompt = (*prompt, *done.tokens, 5, 6, 7)
    made.rewards, made.metrics = {"environment": good}, {"success": good, "valid": 1.0}
    return made


Change = Callable[[Row], Row]
Make = Callable[[int, int, int], Episode]


def write(folder: Path, change: Change = dict, make: Make = episode, held_out: Make | None = None) -> Path:
    """A whole run folder."""
    folder.mkdir(parents=True)
    measured = {
        0: {"evaluation/success": 0.2, "evaluation/success_low": 0.1, "evaluation/success_high": 0.35},
        STEPS: {"evaluation/success": 0.7, "evaluation/success_low": 0.55, "evaluation/success_high": 0.8},
    }
    rows = [{"step": 0} | measured[0], *(well(step) | measured.get(step, {}) for step in range(1, STEPS + 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | change(row)) + "\n" for row in rows))
    (folder / "config.yaml").write_text(f"name: hand\ntrainer: {{steps: {STEPS}}}\nagent: {{name: tool}}\n")
    (folder / "summary.json").write_text(json.dumps({"steps": STEPS, "failures": []}))
    for step in (1, 2, STEPS - 2, STEPS - 1, STEPS):
        groups = [
            Group(Task(f"t-{step}-{task}"), [make(step, task, member) for member in range(MEMBERS)])
            for task in range(TASKS)
        ]
        EpisodeStore(folder / "episodes").write(step, groups)
    held = [Group(Task(f"h-{task}"), [(held_out or _apart)(STEPS, task, 0)]) for task in range(8)]
    EpisodeStore(folder / "episodes" / "evaluation").write(STEPS, held)
    return folder


def _apart(step: int, task: int, member: int) -> Episode:
    return episode(10**6 + step, task, member)


def since(step: int, change: Change) -> Change:
    """From this step on."""
    return lambda row: change(row) if row["step"] >= step else {}


def always(metrics: Row) -> Change:
    return lambda row: metrics if row["step"] else {}


def grows(name: str, first: float, last: float) -> Change:
    """A metric that goes from one number to the other, times over times."""
    return lambda row: {name: first * (last / first) ** (row["step"] / STEPS)} if row["step"] else {}


def both(*changes: Change) -> Change:
    return lambda row: {name: value for change in changes for name, value in change(row).items()}
