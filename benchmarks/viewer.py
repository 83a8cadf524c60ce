"""How long the viewer takes to show a page of a large run, and to filter it.

    python benchmarks/viewer.py --json

A run folder of so many episodes is made (several turns each, shaped like FrozenLake's: some kilobytes a line). Then the
application is asked over HTTP, as a browser asks it: the first page of a folder that was never looked at, the first
page once the index is there (in a new process's state), and each filter, in the median of some requests, with the time
that the processor spent on it beside it. The index is made in the background; what it took is told too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sqlite3
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from arborl.rollout.episode_store import episode_to_json, json_line
from arborl.types import Call, Completion, Episode, FinishReason, Message, StopReason, Task, Turn
from arborl.view.web.app import Viewer

FILTERS = {
    "step": {"step_from": 3, "step_to": 4},
    "reward": {"reward_from": 0.75},
    "stop": {"stop": "max_turns"},
    "source": {"source": "lake2"},
    "failure": {"failure": "any"},
    "stale": {"lag_from": 1},
    "rare_word": {"text": "needle42"},
    "common_word": {"text": "answer"},
    "half_word": {"text": "rig"},
    "common_word_by_reward": {"text": "answer", "order": "-reward", "reward_from": 0.5},
    "order_by_reward": {"order": "-reward"},
    "order_by_tokens": {"order": "-sampled"},
    "last_page": {"order": "step"},
}
MOVES = ("Left", "Right", "Up", "Down")


def one_episode(chance: np.random.Generator, step: int, number: int, turns: int) -> Episode:
    """Turns of a map and a move."""
    task = Task(f"lake/{step:06}-{number // 8:04}", source=f"lake{number % 4}", env="lake")
    calls, said, context = list[Call](), list[Turn](), chance.integers(0, 500, 80).tolist()
    for turn in range(int(chance.integers(1, turns * 2))):
        tokens = chance.integers(0, 500, 5).tolist()
        logprobs = chance.normal(-1, 0.5, 5).clip(max=0).tolist()
        completion = Completion(tuple(tokens), tuple(logprobs), FinishReason.STOP, max(0, step - 1 - number % 2))
        calls.append(Call(tuple(context), completion, turn))
        context = [*context, *tokens, *chance.integers(0, 500, 24).tolist()]
        move = MOVES[int(chance.integers(4))]
        board = "\n".join("".join(chance.choice(list("_OPG"), 4)) for _ in range(4))
        reply = Message("assistant", f"<answer>{move}</answer>", sampled=True)
        said.append(Turn(reply, (Message("user", board),), 0.0, board))
    rare = f" needle{number % 1000}"
    opening = (Message("system", "Cross the frozen lake from P to G."), Message("user", f"the map{rare}"))
    stop = StopReason.DONE if chance.random() < 0.7 else StopReason.MAX_TURNS
    return Episode(f"{task.id}#{number % 8}", task, number, opening, said, calls, stop, {"env": float(chance.random())})


def make(folder: Path, episodes: int, steps: int, turns: int) -> int:
    """A run folder; how many bytes its episode files have."""
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: large\nmodel: {name: seedling}\n")
    chance = np.random.default_rng(0)
    known = [episode_to_json(one_episode(chance, 1, number, turns)) for number in range(500)]
    size = 0
    for step in range(1, steps + 1):
        lines = []
        for number in range(episodes // steps):
            row = known[int(chance.integers(len(known)))]
            task = row["task"] | {"id": f"lake/{step:06}-{number // 8:04}"}
            rewards = {"env": round(float(chance.random()), 3)}
            lines.append(json_line(row | {"id": f"{task['id']}#{number % 8}", "task": task, "rewards": rewards}))
        text = "\n".join(lines) + "\n"
        (folder / "episodes" / f"step-{step:06}.jsonl").write_text(text)
        size += len(text)
    return size


def served(root: Path) -> tuple[str, Viewer]:
    """The application, answering."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    viewer = Viewer(root, port)
    threading.Thread(target=viewer.run, daemon=True).start()
    while not viewer.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{port}", viewer


def timed(client: httpx.Client, **params: object) -> tuple[float, dict]:
    began = time.perf_counter()
    answer = client.get("/api/episodes", params={"run": "large", **params})
    return time.perf_counter() - began, answer.raise_for_status().json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5, help="of an episode, on average")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        size = make(Path(root) / "large", args.episodes, args.steps, args.turns)
        address, viewer = served(Path(root))
        with httpx.Client(base_url=address, timeout=600) as client:
            began = time.perf_counter()
            cold, found = timed(client, facets="1")
            rows = len(found["rows"])
            while found["indexed"] < 1:
                time.sleep(0.2)
                found = timed(client)[1]
            built = time.perf_counter() - began
        viewer.should_exit = True
        address, viewer = served(Path(root))
        with httpx.Client(base_url=address, timeout=600) as client:
            first, found = timed(client, facets="1")
            filters, work = {}, {}
            for name, asked in FILTERS.items():
                wall, spent = [], []
                for _ in range(args.repeats):
                    began = time.process_time()  # the server is in this process: on an idle machine both are the same
                    wall.append(timed(client, **asked, **_far(name, args.episodes))[0])
                    spent.append(time.process_time() - began)
                filters[name] = round(1e3 * statistics.median(wall), 1)
                work[name] = round(1e3 * statistics.median(spent), 1)
        viewer.should_exit = True
        index = sum(path.stat().st_size for path in Path(cache).rglob("*.sqlite3*"))
    row = {
        "case": "viewer", "episodes": found["total"], "files_mb": round(size / 1e6, 1),
        "index_mb": round(index / 1e6, 1),
        "first_page_cold_s": round(cold, 3), "rows_cold": rows, "index_s": round(built, 1),
        "first_page_s": round(first, 3), "filter_ms_max": max(filters.values()), "filter_ms": filters,
        "filter_cpu_ms_max": max(work.values()), "filter_cpu_ms": work,
        "machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(), "sqlite": sqlite3.sqlite_version,
    }  # fmt: skip
    print(
        json.dumps(row) if args.json else "\n".join(f"{name:>18}  {value}" for name, value in row.items()), flush=True
    )


def _far(name: str, episodes: int) -> dict[str, int]:
    return {"first": max(0, episodes - 50)} if name == "last_page" else {}


if __name__ == "__main__":
    main()
