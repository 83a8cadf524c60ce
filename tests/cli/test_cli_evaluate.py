"""`arborl evaluate`: several policies, your own prompts, and a served model."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from arborl.cli.main import app

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from fake_server import FakeServer

SMALL = ["env.args.size=3", "env.args.max_steps=2", "sampling.max_tokens=8", "sampling.max_context=512", "threads=1"]


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["evaluate", *words])


def test_metrics_as_json_and_in_the_format_of_the_file_name(here: Path) -> None:
    files = ["--output", "all.jsonl", "--output", "numbers.csv", "--output", "page.html", "--output", "numbers.json"]
    done = call("seedling", "--episodes", "3", "--attempts", "2", "--temperature", "0.7", "--json", *files, *SMALL)
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    assert (result["way"], result["tasks"], result["episodes"]) == ("t=0.7", 3, 6)
    assert set(result["scores"]) == {"success", "reward", "pass@2", "pass^2"}
    assert json.loads((here / "numbers.json").read_text()) == json.loads(done.stdout)
    rows = list(csv.DictReader((here / "numbers.csv").open()))
    assert [row["metric"] for row in rows] == list(result["scores"])
    assert len((here / "all.jsonl").read_text().splitlines()) == 6
    assert "pass@2" in (here / "page.html").read_text()


def test_two_policies_are_compared_by_task() -> None:
    copy = Path("copy.yaml")
    copy.write_text("sampling: {max_tokens: 4, max_context: 512}\nenv: {args: {size: 3, max_steps: 2}}\n")
    done = call(str(copy), "seedling", "--episodes", "3", "--temperature", "0", "threads=1")
    assert done.exit_code == 0, done.output
    assert "copy.yaml minus seedling, greedy: success" in done.stdout
    assert "over 3 tasks" in done.stdout


def test_prompts_are_answered_in_order_and_scored_if_they_have_answers(here: Path) -> None:
    (here / "prompts.json").write_text(json.dumps(["Say one.", "Say two."]))
    done = call("seedling", "--input", "prompts.json", "--output", "out.jsonl", *SMALL[2:])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert [row["fields"]["question"] for row in rows] == ["Say one.", "Say two."]
    assert all("reward" not in row and isinstance(row["reply"], str) for row in rows)
    assert "success" not in done.stdout
    done = call("--checkpoint", "seedling", "--input", "prompts.json", *SMALL[2:])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> Say one.", "> Say two."]
    assert rows[0]["reply"].splitlines()[0] in lines
    (here / "tasks.jsonl").write_text('{"prompt": "Say one.", "answer": "1"}\n')
    done = call("seedling", "--input", "tasks.jsonl", "--json", "rewards=[exact]", *SMALL[2:])
    assert done.exit_code == 0, done.output
    assert "reward" in json.loads(done.stdout)[0]


def test_a_message_is_answered_on_standard_output() -> None:
    words = ["engine=scripted", "engine.args.replies=[Five.]"]
    done = call("seedling", "--message", "What is 2 + 3?", *words, *SMALL[2:])
    assert done.exit_code == 0, done.output
    assert done.stdout == "Five.\n"
    done = call("seedling", "--message", "word " * 600, *words, *SMALL[2:])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "leave no room for a reply" in done.stderr


def test_a_served_model_is_evaluated_with_a_local_one(seedling) -> None:
    server = FakeServer(seedling[0], "chat", renderer=seedling[1], context=512, name="theirs/x:free")
    try:
        words = ["--model", "openai:theirs/x:free", "--base-url", f"{server.url}/v1", "--episodes", "2"]
        done = call("seedling", *words, "--temperature", "0", "--json", *SMALL)
    finally:
        server.kill()
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["model"] for one in found["results"]] == ["seedling", "openai:theirs/x:free"]
    assert found["comparisons"][0]["tasks"] == 2
    assert {json.loads(body)["model"] for what, body in server.log if what == "chat"} == {"theirs/x:free"}


def test_exit_code_1_if_every_episode_failed(seedling) -> None:
    server = FakeServer(seedling[0], "vllm", renderer=seedling[1], context=512)  # it has no address to chat at
    try:
        done = call("openai:policy", "--base-url", server.url, "--episodes", "2", *SMALL)
    finally:
        server.kill()
    assert done.exit_code == 1, done.output
    assert "answers 404" in done.stderr
