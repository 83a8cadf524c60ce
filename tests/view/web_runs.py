"""Run folders for the viewer: small, with hostile words, made of the embedded model's own tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from arborl.chat.tokenizer import FileTokenizer
from arborl.models.model_files import resolve
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.term_store import VALUE_COLUMNS, TermStore
from arborl.types import (
    Call,
    Completion,
    Episode,
    Failure,
    FinishReason,
    Group,
    Message,
    StopReason,
    Task,
    ToolCall,
    Turn,
)

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>"
CONTROL = "bell\x07 turned \u202eround\u202c nul\x00"
MOVES = ("Left", "Right", "Up", "Down")


def tokenizer() -> FileTokenizer:
    return FileTokenizer(resolve("seedling"))


def made_call(words: FileTokenizer, prompt: list[int], reply: str, turn: int, version: int) -> Call:
    tokens = tuple(words.encode(reply))
    logprobs = tuple(-0.1 - 0.2 * (at % 5) for at in range(len(tokens)))
    top_logprobs = tuple(((words.encode("Jump")[0], -1.5), (words.encode("Down")[0], -2.5)) for _ in tokens)
    return Call(tuple(prompt), Completion(tokens, logprobs, FinishReason.STOP, version, 0.01), turn, True, (),
                Message("assistant", reply, sampled=True), top_logprobs=top_logprobs)  # fmt: skip


def made_group(words: FileTokenizer, step: int, number: int, size: int, version: int) -> Group:
    """Episodes of two turns that share their opening and part at their first move; the last deletes its history."""
    task = Task(f"lake/{step:03}-{number}", source="lake" if number % 2 == 0 else "shop", env="lake")
    opening = (Message("system", "Cross the lake."), Message("user", f"map {number}"))
    prompt = words.encode(f"system Cross the lake. user map {number} assistant ")
    episodes = []
    for member in range(size):
        move = MOVES[member % len(MOVES)]
        first = made_call(words, prompt, f"<answer>{move}</answer>", 0, version)
        seen = [*prompt, *first.completion.tokens, *words.encode(f" user moved {move} assistant ")]
        second = made_call(
            words, prompt[:5] if member == size - 1 else seen, f"<answer>{move}</answer> done", 1, version
        )
        tool = Message("assistant", f"<answer>{move}</answer>", (ToolCall("1", "look", {"where": EVIL}),), sampled=True)
        turns = [
            Turn(tool, (Message("tool", f"moved {move} {EVIL}", name="look"),), 0.0, "s"),
            Turn(Message("assistant", f"{move} zebra{step} {CONTROL}", sampled=True), (), float(member % 2)),
        ]
        episode = Episode(f"{task.id}#{member}", task, member, opening, turns, [first, second],
                          StopReason.DONE if member % 2 else StopReason.MAX_TURNS,
                          {"env": float(member % 2), "brief": 0.25},
                          {"success": float(member % 2)}, seconds=0.5)  # fmt: skip
        if member == 2 and number == 1:
            episode.failure, episode.stop = Failure(f"tool {EVIL}", "ValueError", EVIL, "Traceback …"), StopReason.ERROR
            episode.rewards.clear()
        episodes.append(episode)
    return Group(task, episodes)


def write_step(folder: Path, step: int, groups: int = 2, size: int = 4, kind: str = "") -> list[Group]:
    words = tokenizer()
    made = [made_group(words, step, number, size, max(0, step - 1 - step % 3)) for number in range(groups)]
    EpisodeStore(folder / "episodes" / kind).write(step, made)
    return made


def write_terms(folder: Path, step: int, groups: list[Group]) -> None:
    rows = [
        (line, call, index, logprob, 1.0 if episode.reward > 0.5 else -1.0)
        for line, episode in enumerate(episode for group in groups for episode in group.episodes)
        for call, made in enumerate(episode.calls)
        for index, logprob in enumerate(made.completion.logprobs)
        if episode.failure is None
    ]
    episode, call, index, logprob, advantage = (np.asarray(column) for column in zip(*rows, strict=True))
    numbers = {name: np.full(len(rows), 0.5) for name in VALUE_COLUMNS}
    numbers |= {"logprob": logprob, "advantage": advantage, "ratio": np.ones(len(rows)), "pull": -0.01 * advantage}
    TermStore(folder / "terms").write(step, {"episode": episode, "call": call, "index": index} | numbers, 10_000)


def add_metrics(folder: Path, step: int, **more: float) -> None:
    row = {
        "step": step,
        "reward/mean": step / 10,
        "episode/success": step / 12,
        "time/step": 2.0,
        "policy/entropy": 1.0,
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | more) + "\n")


def made_run(folder: Path, steps: int = 3, seed: int = 7, lr: float = 0.001) -> Path:
    folder.mkdir(parents=True)
    config = f"name: {folder.name}\nseed: {seed}\nmodel: {{name: seedling}}\nalgorithm: grpo\nlearner: {{lr: {lr}}}\n"
    (folder / "config.yaml").write_text(config + "trainer: {steps: 9}\nsampling: {max_context: 64}\nenv: lake\n")
    for step in range(1, steps + 1):
        write_terms(folder, step, write_step(folder, step))
        add_metrics(folder, step, **({"evaluation/success": 0.4} if step == steps else {}))
    write_step(folder, steps, kind="evaluation")
    return folder
