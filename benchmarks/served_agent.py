"""Success rate of a trained agent behind `arborl serve`, compared with its evaluation.

    python benchmarks/served_agent.py runs/statelm-001 --tasks 50 --json

The questions about held-out documents of a run are answered twice with greedy decoding: by the run's own evaluation,
and through `arborl serve` by a client that opens one session per document. Reported are the shares of correct answers
in both cases (`evaluated`, `served`) and the share of equal answers (`same`).
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
def start_server(path: str) -> Iterator[str]:
    """Run a server process; yields its address."""
    command = [str(Path(sys.executable).parent / "arborl"), "serve", path, "--port", "0", "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://[\d.:]+", line)
        if found is None:
            raise SystemExit(line + process.stderr.read())
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


async def load_problem(parts: RunParts, task: Task) -> tuple[str, str, str]:
    """Document, question and expected answer of a task."""
    env = parts.episode_factories.env(task)
    observation = await env.reset(task, 0)
    return str(inner_attribute(env, "document")), observation.messages[-1].content, str(env.oracle())


async def evaluate(parts: RunParts, tasks: list[Task]) -> list[str]:
    groups = await parts.rollout.collect(tasks, 0, 1, {"temperature": 0.0})
    return [group.episodes[0].answer for group in groups]


async def query_server(address: str, agent: str, problems: list[tuple[str, str, str]], at_once: int) -> list[str]:
    """Answers over HTTP, one session per problem."""
    slots = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=f"{address}/v1/agents/{agent}", timeout=600) as client:

        async def answer(document: str, question: str) -> str:
            async with slots:
                session = await client.post("/sessions", json={"fields": {FIELD: document}, "temperature": 0})
                path = f"/sessions/{session.raise_for_status().json()['id']}"
                reply = (await client.post(f"{path}/messages", json={"content": question})).raise_for_status().json()
                await client.delete(path)
                return reply["content"]

        return await asyncio.gather(*(answer(document, question) for document, question, _ in problems))


async def measure(path: str, count: int, at_once: int) -> dict:
    found = locate_model(path, trust=True)
    config = found.config
    parts = build(config.model_copy(update={"model": config.model.model_copy(update={"name": str(found.model)})}))
    tasks = parts.source.evaluation(count)
    problems = [await load_problem(parts, task) for task in tasks]
    evaluation_answers = await evaluate(parts, tasks)
    sizes = [len(parts.renderer.tokenizer.encode(document)) for document, _, _ in problems]
    await parts.close()
    with start_server(path) as address:
        began = time.perf_counter()
        served_answers = await query_server(address, config.agent.name, problems, at_once)
        seconds = time.perf_counter() - began
    expected = [expected_answer for _, _, expected_answer in problems]
    return {
        "run": Path(path).name, "step": found.step, "tasks": len(tasks), "window": config.sampling.max_context,
        "document_tokens": [min(sizes), max(sizes)],
        "evaluated": sum(is_right(a, b, False) for a, b in zip(evaluation_answers, expected, strict=True)) / len(tasks),
        "served": sum(is_right(a, b, False) for a, b in zip(served_answers, expected, strict=True)) / len(tasks),
        "same": sum(a == b for a, b in zip(evaluation_answers, served_answers, strict=True)) / len(tasks),
        "seconds": round(seconds, 1),
        "cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
        "torch": version("torch"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="a run of recipes/statelm, or one of its checkpoints")
    parser.add_argument("--tasks", type=int, default=50, help="number of held-out tasks")
    parser.add_argument("--at-once", type=int, default=16, help="number of concurrent sessions")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    row = asyncio.run(measure(args.run, args.tasks, args.at_once))
    if args.json:
        print(json.dumps(row))
    else:
        print(f"evaluated {row['evaluated']:.0%}, served {row['served']:.0%}, same answers {row['same']:.0%}")


if __name__ == "__main__":
    main()
