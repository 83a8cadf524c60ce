"""Response times of the viewer for a large run: first page and filters.

    python benchmarks/viewer.py --json

Writes a run folder with `--episodes` episodes like those of FrozenLake (several turns, some kilobytes per line) and
sends the HTTP requests of a browser: the first page without an index, the first page with an index after a restart of
the server, and each filter (median of `--repeats` requests, wall time and CPU time). The index is built in the
background; `index_s` is the time until it is complete.
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


def make_episode(rng: np.random.Generator, step: int, number: int, turns: int) -> Episode:
    """An episode whose turns have a move and a map."""
    task = Task(f"lake/{step:06}-{number // 8:04}", source=f"lake{number % 4}", env="lake")
    calls, episode_turns, context = list[Call](), list[Turn](), rng.integers(0, 500, 80).tolist()
    for turn in range(int(rng.integers(1, turns * 2))):
        tokens = rng.integers(0, 500, 5).tolist()
        logprobs = rng.normal(-1, 0.5, 5).clip(max=0).tolist()
        completion = Completion(tuple(tokens), tuple(logprobs), FinishReason.STOP, max(0, step - 1 - number % 2))
        calls.append(Call(tuple(context), completion, turn))
        context = [*context, *tokens, *rng.integers(0, 500, 24).tolist()]
        move = MOVES[int(rng.integers(4))]
        board = "\n".join("".join(rng.choice(list("_OPG"), 4)) for _ in range(4))
        reply = Message("assistant", f"<answer>{move}</answer>", sampled=True)
        episode_turns.append(Turn(reply, (Message("user", board),), 0.0, board))
    rare = f" needle{number % 1000}"
    opening = (Message("system", "Cross the frozen lake from P to G."), Message("user", f"the map{rare}"))
    stop = StopReason.DONE if rng.random() < 0.7 else StopReason.MAX_TURNS
    return Episode(
        f"{task.id}#{number % 8}", task, number, opening, episode_turns, calls, stop, {"env": float(rng.random())}
    )


def write_run(folder: Path, episodes: int, steps: int, turns: int) -> int:
    """Write a run folder; returns the size of its episode files in bytes."""
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: large\nmodel: {name: seedling}\n")
    rng = np.random.default_rng(0)
    templates = [episode_to_json(make_episode(rng, 1, number, turns)) for number in range(500)]
    size = 0
    for step in range(1, steps + 1):
        lines = []
        for number in range(episodes // steps):
            row = templates[int(rng.integers(len(templates)))]
            task = row["task"] | {"id": f"lake/{step:06}-{number // 8:04}"}
            rewards = {"env": round(float(rng.random()), 3)}
            lines.append(json_line(row | {"id": f"{task['id']}#{number % 8}", "task": task, "rewards": rewards}))
        text = "\n".join(lines) + "\n"
        (folder / "episodes" / f"step-{step:06}.jsonl").write_text(text)
        size += len(text)
    return size


def start_viewer(root: Path) -> tuple[str, Viewer]:
    """Start the viewer in a thread; returns its address and the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    viewer = Viewer(root, port)
    threading.Thread(target=viewer.run, daemon=True).start()
    while not viewer.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{port}", viewer


def timed_query(client: httpx.Client, **params: object) -> tuple[float, dict]:
    began = time.perf_counter()
    answer = client.get("/api/episodes", params={"run": "large", **params})
    return time.perf_counter() - began, answer.raise_for_status().json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5, help="mean number of turns per episode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        size = write_run(Path(root) / "large", args.episodes, args.steps, args.turns)
        address, viewer = start_viewer(Path(root))
        with httpx.Client(base_url=address, timeout=600) as client:
            began = time.perf_counter()
            cold_seconds, found = timed_query(client, facets="1")
            rows = len(found["rows"])
            while found["indexed"] < 1:
                time.sleep(0.2)
                found = timed_query(client)[1]
            index_seconds = time.perf_counter() - began
        viewer.should_exit = True
        address, viewer = start_viewer(Path(root))
        with httpx.Client(base_url=address, timeout=600) as client:
            first_page_seconds, found = timed_query(client, facets="1")
            filters, filters_cpu = {}, {}
            for name, params in FILTERS.items():
                wall_seconds, cpu_seconds = [], []
                for _ in range(args.repeats):
                    began = time.process_time()  # includes the server, which runs in this process
                    wall_seconds.append(timed_query(client, **params, **_page_offset(name, args.episodes))[0])
                    cpu_seconds.append(time.process_time() - began)
                filters[name] = round(1e3 * statistics.median(wall_seconds), 1)
                filters_cpu[name] = round(1e3 * statistics.median(cpu_seconds), 1)
        viewer.should_exit = True
        index = sum(path.stat().st_size for path in Path(cache).rglob("*.sqlite3*"))
    row = {
        "case": "viewer", "episodes": found["total"], "files_mb": round(size / 1e6, 1),
        "index_mb": round(index / 1e6, 1),
        "first_page_cold_s": round(cold_seconds, 3), "rows_cold": rows, "index_s": round(index_seconds, 1),
        "first_page_s": round(first_page_seconds, 3), "filter_ms_max": max(filters.values()), "filter_ms": filters,
        "filter_cpu_ms_max": max(filters_cpu.values()), "filter_cpu_ms": filters_cpu,
        "machine": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(), "sqlite": sqlite3.sqlite_version,
    }  # fmt: skip
    print(
        json.dumps(row) if args.json else "\n".join(f"{name:>18}  {value}" for name, value in row.items()), flush=True
    )


def _page_offset(name: str, episodes: int) -> dict[str, int]:
    return {"first": max(0, episodes - 50)} if name == "last_page" else {}


if __name__ == "__main__":
    main()
