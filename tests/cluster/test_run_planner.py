"""The planner: parameter counts, memory forecasts, step times, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.cluster.planner.hardware import DEVICES, GIB, device_named
from arborl.cluster.planner.model_shape import KNOWN_CONFIGS, model_shape, shape_from_config
from arborl.cluster.planner.rank_memory import learner_plan
from arborl.cluster.planner.run_planner import RunPlanner
from arborl.cluster.planner.workload import workload_from_options, workload_from_run
from arborl.config.load_config import from_kwargs
from arborl.config.run_config import LoraConfig, ModelConfig
from arborl.learner.core.memory_plan import model_sizes
from arborl.models.attention import ATTENTION_NAME
from arborl.models.lora import add_lora

KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
SPEED = {
    "rollout.tasks_per_step": 16, "rollout.group_size": 8, "engine.kv_tokens": 131_072, "engine.max_requests": 128,
    "sampling.max_tokens": 48,
}  # fmt: skip
"""As `benchmarks/train_speed.py` has it."""
RUNNER = CliRunner()


def run_planner(model: str, gpu: str = "h200", work: dict | None = None, **settings) -> RunPlanner:
    config = from_kwargs(**{"model.name": model, "model.dtype": "bfloat16"} | settings)
    options = {"prompt": "200", "reply": "48", "observed": "40", "turns": 4} | (work or {})
    return RunPlanner.of(config, device_named(gpu), workload_from_options(config, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_model_counted_from_its_configuration_is_the_model_that_torch_counts(kind, rank):
    model, config = KINDS[kind]
    torch.manual_seed(0)
    made = model(
        config(
            vocab_size=100, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=kind == "qwen2",
        )
    )  # fmt: skip
    made.set_attn_implementation(ATTENTION_NAME)
    if rank:
        add_lora(made, LoraConfig(rank=rank))
    config = ModelConfig(name="x", dtype="float32", lora=LoraConfig(rank=rank))
    found, counted = shape_from_config("x", made.config.to_dict(), config).sizes, model_sizes(made)
    assert found == counted


@pytest.mark.parametrize(("name", "billions"), [("Qwen2.5-0.5B", 0.494), ("Qwen2.5-7B", 7.616), ("Qwen3-4B", 4.022),
                                                ("Llama-3.1-8B", 8.030), ("Qwen2.5-72B", 72.7)])  # fmt: skip
def test_known_names_have_as_many_parameters_as_their_makers_say(name, billions):
    found = model_shape(ModelConfig(name=f"hub/{name}-Instruct", dtype="bfloat16"))
    assert found.sizes.parameters / 1e9 == pytest.approx(billions, rel=0.001)
    assert set(KNOWN_CONFIGS[name]) >= {"hidden_size", "vocab_size"}


@pytest.mark.parametrize(("share", "forecast"), [(0.9, 122.9), (0.85, 104.9), (0.68, 94.5)])
def test_one_rank_is_planned_as_the_learner_plans_itself(share, forecast):
    """The plans are those of a run on an H200 (docs/results/first-step.md)."""
    made = run_planner("4b", **SPEED, **{"learner.memory_share": share})
    plan = learner_plan(made.shape, made.config, made.device, "single", 1, sampling=True)
    assert plan.forecast.total / GIB == pytest.approx(forecast, abs=0.1)
    assert (plan.tokens, plan.recompute) == (4_096 if share == 0.85 else 8_192, share < 0.7)


def test_sharding_strategies_divide_the_memory():
    made = run_planner("7b", **SPEED)

    def rank(strategy, ranks):
        return learner_plan(made.shape, made.config, made.device, strategy, ranks, sampling=False).forecast

    alone = rank("single", 1)
    assert rank("ddp", 8) == alone
    for strategy in ("fsdp2", "tensor"):
        totals = [rank(strategy, ranks).staying for ranks in (2, 4, 8)]
        assert totals == sorted(totals, reverse=True)
        assert totals[0] < alone.staying
    assert rank("fsdp2", 8).optimizer == -(-alone.optimizer // 8)


@pytest.mark.parametrize(
    ("learner", "planned"),
    [
        ({}, "ddp"),
        ({"strategy": "fsdp2"}, "fsdp2"),
        ({"strategy": "tensor"}, "tensor"),
        ({"strategy": "zero3"}, "fsdp2"),
        ({"strategy": "zero1"}, "ddp"),
    ],
)
def test_the_strategy_of_a_configuration_is_the_one_that_is_planned(learner, planned):
    made = run_planner("0.5b", **SPEED, **{f"learner.{key}": value for key, value in learner.items()})
    assert made.learner(2, sampling=False)[0] == planned


def test_memory_fit_of_one_gpu():
    fits = {fit.name: fit for fit in run_planner("7b").fits(1)}
    assert not fits["full"].fits
    assert fits["full"].gib > fits["full"].limit
    assert fits["LoRA"].fits
    assert fits["LoRA"].gib < 60
    assert fits["full with learner.offload=all"].fits
    assert {fit.name: fit.fits for fit in run_planner("7b").fits(4)}["full with fsdp2"]


def test_slow_tools_cost_a_synchronous_run_more():
    made = run_planner("0.5b", work={"tool": "0.5,8"}, **SPEED)
    sync, ahead = made.plans(2)
    assert (sync.mode, ahead.mode) == ("sync", "async")
    assert ahead.estimate.step < 0.7 * sync.estimate.step
    assert sync.estimate.lag_max == 0
    assert 0 < ahead.estimate.lag <= ahead.estimate.lag_max <= 1


def test_the_same_seed_gives_the_same_plan_and_more_gpus_never_a_longer_step():
    made = run_planner("1.5b", work={"reply": "40,48", "tool": "0.1,0.2"}, **SPEED)
    steps = [[one.estimate.step for one in made.plans(count)] for count in (1, 8, 4_096)]
    assert steps[1] == [one.estimate.step for one in made.plans(8)]
    for way in zip(*steps, strict=True):
        assert all(later <= 1.1 * before for before, later in pairwise(way))


def test_every_known_device_can_be_planned_for():
    for name in DEVICES:
        settings = SPEED | {"engine.kv_tokens": 16_384}
        placed = list(run_planner("0.5b", name, **settings).plans(8))
        assert all(0 < one.estimate.step < 1e5 for one in placed), name


def run_folder(path):
    """Two episodes of a step, as a run writes them."""
    calls = [
        {"prompt": [-1, 0, [1] * 100], "tokens": [2] * 20, "seconds": 0.2},
        {"prompt": [0, 120, [3] * 30], "tokens": [2] * 10, "seconds": 0.1},
    ]
    rows = [{"id": "a#0", "calls": calls, "seconds": 1.3}, {"id": "a#1", "calls": calls[:1], "seconds": 0.7}]
    (path / "episodes").mkdir(parents=True)
    text = "\n".join(map(json.dumps, rows))
    (path / "episodes/step-000001.jsonl").write_text(f'{text}\n{{"id": "torn')
    steps = [{"step": at, "time/step": 9.0 - at, "time/learn": 2.0} for at in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    return path


def test_lengths_and_latencies_are_those_of_an_earlier_run(tmp_path):
    workload = workload_from_run(run_folder(tmp_path / "run"))
    sample = workload.sample(count=2_000)
    assert sample.prompt == 100
    assert sample.turns == pytest.approx(1.5, abs=0.05)
    assert sample.outside.mean() == pytest.approx((1.0 + 0.5) / 2, abs=0.03)
    assert workload.measured == {"step": 6.5, "learn": 2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h2000"], "--gpu h2000: unknown. Did you mean 'h200'?"),
        (["--gpus", "0"], "--gpus 0: must be between 1 and 4,096."),
        (["--gpus", "5000"], "--gpus 5000: must be between"),
        (["model.name=Qwen/Qwen9-7B"], "model.name=Qwen/Qwen9-7B: its shape is unknown"),
        (["--tool-seconds", "8,0.5"], "--tool-seconds 8,0.5: must be MEDIAN or MEDIAN,P99"),
        (["--reply-tokens", "many"], "--reply-tokens many: must be"),
        (["--turns", "0"], "--turns 0: must be at least 1."),
        (["--lag", "0"], "--lag 0: must be at least 1"),
        (["--strategy", "fsdp"], "--strategy fsdp: must be one of auto, ddp, fsdp2, tensor"),
        (["--from", "nowhere"], "--from nowhere: not a run folder"),
        (["--from", "nowhere", "--turns", "2"], "--from sets lengths and latencies"),
    ],
)
def test_invalid_options_give_one_line(arguments, message):
    done = RUNNER.invoke(app, ["plan", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.output.replace("\n", " ")
    assert len(done.output.splitlines()) == 1


def test_text_and_json_output_agree(tmp_path):
    earlier = str(run_folder(tmp_path / "run"))
    arguments = ["plan", "model.name=0.5b", "model.dtype=bfloat16", "--gpus", "2", "--from", earlier]
    text = RUNNER.invoke(app, arguments)
    assert text.exit_code == 0, text.output
    assert "0.5b on 2×H200: full: fits" in text.output
    found = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).output)
    assert [one["mode"] for one in found["plans"]] == ["sync", "async"]
    assert found["measured"]["step"] == 6.5
    assert all(fit["fits"] for fit in found["fits"]["2"])


def test_planning_needs_no_torch():
    code = (
        "import sys; sys.argv = ['arborl', 'plan', 'model.name=0.5b', '--gpus', '1']\n"
        "from arborl.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
