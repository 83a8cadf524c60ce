"""A trained agent, served: does it answer as evaluation says?

    python benchmarks/served_agent.py runs/statelm-001 --tasks 50 --json

Held-out documents of a run are asked twice, each time taking the likeliest token: by the run's own evaluation, and by a
client of `arborl serve` that opens a session for each document, sends it and asks its question. Counted are right
answers on both sides, and equal ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import httpx

from arborl.envs.games.documents_env import FIELD, is_right
from arborl.envs.wrapper import inner_attribute
from arborl.training_run.build import RunParts, build
from arborl.training_run.run_folder import locate_model
from arborl.types import Task


@contextmanager
def served(path: str) -> Iterator[str]:
    """The address of a server at work."""
    command = [str(Path(sys.executable).parent / "arborl"), "serve", path, "--port", "0", "--quiet"]
    made = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert made.stderr is not None
        line = made.stderr.readline()
        found = re.search(r"http://[\d.:]+", line)
        if found is None:
            raise SystemExit(line + made.stderr.read())
        yield found[0]
    finally:
        made.terminate()
        made.wait(60)


async def problem(parts: RunParts, task: Task) -> tuple[str, str, str]:
    """Document, question and right answer of a task."""
    env = parts.cast.env(task)
    observation = await env.reset(task, 0)
    return str(inner_attribute(env, "document")), observation.messages[-1].content, str(env.oracle())


async def evaluated(parts: RunParts, tasks: list[Task]) -> list[str]:
    groups = await parts.rollout.collect(tasks, 0, 1, {"temperature": 0.0})
    return [group.episodes[0].answer for group in groups]


async def asked(address: str, agent: str, problems: list[tuple[str, str, str]], at_once: int) -> list[str]:
    """The answers of sessions over HTTP."""
    slots = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=f"{address}/v1/agents/{agent}", timeout=600) as client:

        async def one(document: str, question: str) -> str:
            async with slots:
                begun = await client.post("/sessions", json={"fields": {FIELD: document}, "temperature": 0})
                at = f"/sessions/{begun.raise_for_status().json()['id']}"
                told = (await client.post(f"{at}/messages", json={"content": question})).raise_for_status().json()
                await client.delete(at)
                return told["content"]

        return await asyncio.gather(*(one(document, question) for document, question, _ in problems))


async def measured(path: str, count: int, at_once: int) -> dict:
    found = locate_model(path, trust=True)
    config = found.config
    parts = build(config.model_copy(update={"model": config.model.model_copy(update={"name": str(found.model)})}))
    tasks = parts.source.evaluation(count)
    problems = [await problem(parts, task) for task in tasks]
    plain = await evaluated(parts, tasks)
    sizes = [len(parts.renderer.tokenizer.encode(document)) for document, _, _ in problems]
    await parts.close()
    with served(path) as address:
        began = time.perf_counter()
        answers = await asked(address, config.agent.name, problems, at_once)
        seconds = time.perf_counter() - began
    rights = [right for _, _, right in problems]
    return {
        "run": Path(path).name, "step": found.step, "tasks": len(tasks), "window": config.sampling.max_context,
        "document_tokens": [min(sizes), max(sizes)],
        "evaluated": sum(is_right(a, b, False) for a, b in zip(plain, rights, strict=True)) / len(tasks),
        "served": sum(is_right(a, b, False) for a, b in zip(answers, rights, strict=True)) / len(tasks),
        "same": sum(a == b for a, b in zip(plain, answers, strict=True)) / len(tasks), "seconds": round(seconds, 1),
        "cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
        "torch": version("torch"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run of recipes/statelm, or one of its checkpoints")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args()
    row = asyncio.run(measured(asked.run, asked.tasks, asked.at_once))
    if asked.json:
        print(json.dumps(row))
    else:
        print(f"evaluated {row['evaluated']:.0%}, served {row['served']:.0%}, same answers {row['same']:.0%}")


if __name__ == "__main__":
    main()
