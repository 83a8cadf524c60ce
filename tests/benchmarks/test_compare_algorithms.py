"""The comparison of algorithms: order of the runs, results of partial comparisons, tables, figure, resumption."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


Compare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def compare(monkeypatch, capsys) -> Compare:
    """Call the benchmark with arguments in this process."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        from compare_algorithms import main

        monkeypatch.setattr(sys, "argv", ["compare_algorithms.py", *map(str, arguments)])
        code: object
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        printed, errors = capsys.readouterr()
        if isinstance(code, str):  # as the interpreter does
            code, errors = 1, errors + code
        return subprocess.CompletedProcess(list(map(str, arguments)), int(str(code)), printed, errors)

    return call


def make_result(environment: str, algorithm: str, seed: int, after: float, **more: object) -> dict:
    return {
        "environment": environment, "algorithm": algorithm, "seed": seed, "settings": ["", "trainer.steps=2"],
        "before": 0.25, "after": after, "area": after / 2, "sampled_tokens": 1000 * (seed + 1), "train_seconds": 10.0,
        "shared_states": 0.5, "zero_variance": 0.25, "turns": 4.0, "machine": {"commit": "abc"}, **more,
    }  # fmt: skip


def write_results(path: Path, rows: list[dict], suite: str = "algorithms") -> Path:
    path.write_text(json.dumps({"suite": suite, "rows": rows}))
    return path


def full_results(seeds: int = 5) -> list[dict]:
    rng = np.random.default_rng(0)
    gain = {"grpo": 0.0, "rloo": 0.01, "gigpo": 0.1}
    return [
        make_result(environment, algorithm, seed, float(rng.normal(0.6 + more, 0.01)))
        for environment in ("frozen_lake", "sokoban", "calculator")
        for algorithm, more in gain.items()
        for seed in range(seeds)
    ]


def test_runs_start_seed_by_seed_and_the_longest_first():
    from compare_algorithms import SUITES, make_jobs

    suite = SUITES["algorithms"]
    keys = [(e, a, seed) for seed in (1, 0) for a in suite.algorithms for e in suite.environments]
    ordered = list(make_jobs("algorithms", keys, Path("out"), []))
    assert sorted(ordered) == sorted(keys)
    assert [seed for _, _, seed in ordered] == [0] * 18 + [1] * 18
    assert ordered[0] == ("sokoban", "ppo", 0)
    assert [environment for environment, _, _ in ordered[12:18]] == ["calculator"] * 6


def test_settings_are_for_all_environments_or_for_one():
    from compare_algorithms import make_jobs, settings_for

    extra = ["trainer.steps=3", "sokoban:trainer.steps=4", "env.args.url=http://x"]
    assert settings_for("sokoban", extra) == ["trainer.steps=3", "trainer.steps=4", "env.args.url=http://x"]
    assert settings_for("calculator", extra) == ["trainer.steps=3", "env.args.url=http://x"]
    (job,) = make_jobs("algorithms", [("sokoban", "rloo", 3)], Path("out"), extra).values()
    assert job.settings[:2] == ("algorithm.name=rloo", "seed=3")
    assert job.settings[-3:] == ("trainer.steps=3", "trainer.steps=4", "env.args.url=http://x")  # the last one counts
    assert job.folder == Path("out/sokoban/rloo-3")


def test_jobs_of_every_suite_have_valid_settings():
    from compare_algorithms import SUITES, make_jobs
    from learning import ROOT

    from arborl.config.load_config import load

    for name, suite in SUITES.items():
        keys = [(environment, algorithm, 0) for environment in suite.environments for algorithm in suite.algorithms]
        for key, job in make_jobs(name, keys, Path("out"), []).items():
            config = load(ROOT / "recipes" / job.recipe / "run.yaml" if job.recipe else None, job.settings)
            assert config.algorithm.name == key[1]
            assert not config.evaluation.greedy


def test_tables_and_figure_are_made_from_results_without_training(tmp_path, compare):
    file = write_results(tmp_path / "results.json", full_results())
    process = compare("--from", file, "--report", tmp_path / "report")
    assert process.returncode == 0, process.stderr
    lines = (tmp_path / "report" / "tables.md").read_text().splitlines()
    grpo, rloo, gigpo = (next(line for line in lines if line.startswith(f"| `{n}`")) for n in ("grpo", "rloo", "gigpo"))
    assert grpo.split(" | ")[1] == "15"
    assert grpo.split(" | ")[4] == "–"  # the baseline is not compared with itself
    assert gigpo.split(" | ")[4] == "1.000 [1.000, 1.000]"
    assert gigpo.split(" | ")[6] == "3,000"
    assert 0.5 < float(rloo.split(" | ")[4].split()[0]) < 1
    assert (tmp_path / "report" / "compare-algorithms.png").stat().st_size > 10_000
    assert "abc" in process.stdout


def test_partial_results_are_compared_where_both_algorithms_have_runs(tmp_path, compare):
    rows = [row for row in full_results(2) if (row["algorithm"], row["environment"]) != ("gigpo", "sokoban")]
    rows = [row for row in rows if (row["algorithm"], row["environment"], row["seed"]) != ("rloo", "sokoban", 1)]
    process = compare("--from", write_results(tmp_path / "results.json", rows))
    assert process.returncode == 0, process.stderr
    lines = (tmp_path / "tables.md").read_text().splitlines()
    gigpo = next(line for line in lines if line.startswith("| `gigpo`")).split(" | ")
    assert gigpo[1:6] == ["4", "–", "–", "–", "–"]  # an interquartile mean without an environment is not comparable
    rloo = next(line for line in lines if line.startswith("| `rloo`")).split(" | ")
    assert rloo[1] == "5"
    assert "[" not in rloo[2]  # one run in an environment has no interval
    assert any(line.startswith("| Calculator | `gigpo` | 2") for line in lines)


def test_failed_runs_are_named_and_not_counted(tmp_path, compare):
    rows = full_results(2)
    rows[0] = {**{k: rows[0][k] for k in ("environment", "algorithm", "seed", "settings")}, "error": ["it broke"]}
    process = compare("--from", write_results(tmp_path / "results.json", rows))
    assert process.returncode == 1
    assert "frozen_lake grpo 0: it broke" in process.stdout
    assert "| `grpo` | 5 |" in (tmp_path / "tables.md").read_text()


def test_files_of_several_machines_are_merged(tmp_path, compare):
    rows = full_results(2)
    first = write_results(tmp_path / "a.json", rows[::2])
    second = write_results(tmp_path / "b.json", rows[1::2])
    process = compare("--from", first, second, "--report", tmp_path / "report")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "report" / "tables.md").read_text().count("| 6 |") == 3


def test_runs_with_different_settings_are_not_compared(tmp_path, compare):
    rows = [*full_results(1), make_result("sokoban", "grpo", 1, 0.5) | {"settings": ["", "trainer.steps=9"]}]
    process = compare("--from", write_results(tmp_path / "results.json", rows))
    assert process.returncode == 1
    assert (
        "sokoban: runs with different settings are not comparable: trainer.steps=2, trainer.steps=9" in process.stderr
    )


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"suite": "algorithms", "rows": [1]}', '{"suite": "x", "rows": []}']
)
def test_other_files_are_refused(tmp_path, compare, content):
    (tmp_path / "results.json").write_text(content)
    process = compare("--from", tmp_path / "results.json")
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert "results" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a suite, or --from"),
        (("algorithms", "--algorithms", "grpa"), "unknown grpa"),
        (("algorithms", "--environments", "rooms"), "unknown rooms"),
        (("algorithms", "--set", "seed=3"), "--seeds"),
        (("algorithms", "--set", "lake:trainer.steps=3"), "unknown environment"),
        (("algorithms", "--workers", "0"), "at least 1"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, compare):
    process = compare(*arguments)
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.slow
def test_finished_runs_are_not_trained_again_and_others_are(tmp_path, compare):
    small = ["trainer.steps=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "evaluation.tasks=4"]
    command = ["algorithms", "--environments", "calculator", "--algorithms", "grpo", "gigpo", "--seeds", 0,
               "--workers", 2, "--out", tmp_path, "--set", *small]  # fmt: skip
    none = compare(*command, "--time-limit", 0)
    assert none.returncode == 1
    assert "2 runs did not start" in none.stdout
    first = compare(*command)
    assert first.returncode == 0, first.stdout + first.stderr
    out = tmp_path / "algorithms"
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert {(row["algorithm"], row["steps"], row["tasks"]) for row in rows} == {("grpo", 1, 4.0), ("gigpo", 1, 4.0)}
    assert all(row["sampled_tokens"] > 0 and row["train_seconds"] > 0 for row in rows)
    (out / "results.json").unlink()
    (out / "calculator" / "gigpo-0" / "summary.json").write_text('{"before": {')  # it was killed
    kept = (out / "calculator" / "grpo-0" / "summary.json").stat().st_mtime_ns
    again = compare(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (out / "calculator" / "grpo-0" / "summary.json").stat().st_mtime_ns == kept
    assert json.loads((out / "calculator" / "gigpo-0" / "summary.json").read_text())["steps"] == 1
    refused = compare(*command, "sampling.max_tokens=40")
    assert refused.returncode == 1
    assert "not comparable: sampling.max_tokens=40" in refused.stderr
    (out / "results.json").unlink()
    other = compare(*command, "sampling.max_tokens=40")
    assert other.returncode == 1
    assert "was trained with other settings" in other.stdout
    final = compare(*command)  # the rows of the runs that were refused are no obstacle
    assert final.returncode == 0, final.stdout + final.stderr
