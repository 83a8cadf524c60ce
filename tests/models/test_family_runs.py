"""Other families in whole runs: GPT-2 from a folder of its own shape, adapters, coarse precision."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt2_folder import make
from model_families import family, plain_logits
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.run_config import LearnerConfig, LoraConfig
from arborl.engines.local import LocalEngine
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.models.lora import add_lora, export_merged
from arborl.models.path_check import check_tree_support
from arborl.rollout.episode_store import EpisodeStore
from arborl.rollout.token_trees import build_token_trees
from arborl.track.jsonl import read_metrics
from arborl.types import Call, Episode, Group, Sampling, Task

RUN = [
    "evaluation.tasks=1", "track.gifs=0", "track.tensorboard=false",
    "threads=1", "model.device=cpu", "sampling.max_tokens=12", "sampling.max_context=512",
]  # fmt: skip


LAKE = ["env.args.size=3", "env.args.max_steps=6"]
ONE_STEP = [
    "rollout.tasks_per_step=1", "rollout.group_size=2", "trainer.steps=1", "algorithm.skip_zero_variance=false",
]  # fmt: skip


def train(*words: str):
    done = CliRunner().invoke(app, ["train", *RUN, *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def episodes(run: Path) -> list[Episode]:
    folder = run / "episodes"
    return list(EpisodeStore(folder).read(folder / "step-000001.jsonl"))


def column(run: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(run / "metrics.jsonl") if name in row]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mistral", "qwen3-moe"])
def test_a_family_passes_the_check_that_comes_before_a_run(name):
    check_tree_support(family(name), name, 128)


def test_a_gpt2_folder_without_chat_template_plays_and_its_export_is_a_whole_model(tmp_path):
    make(tmp_path)
    small = [
        "rollout.tasks_per_step=1",
        "rollout.group_size=2",
        "trainer.steps=1",
        "algorithm.skip_zero_variance=false",
    ]
    train(f"model={tmp_path}", f"output_dir={tmp_path / 'run'}", *small)
    (episode, *_) = episodes(tmp_path / "run")
    assert episode.calls
    gap = [
        row["policy/logprob_diff_max"]
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "policy/logprob_diff_max" in row
    ]
    assert gap
    assert max(gap) < 1e-3
    (model,) = (tmp_path / "run" / "checkpoints").glob("step-*/model")
    assert "Assistant:" in (model / "chat_template.jinja").read_text()
    assert AutoModelForCausalLM.from_pretrained(model).config.model_type == "gpt2"


@pytest.mark.slow
def test_a_gpt2_learns_frozen_lake(tmp_path):
    make(tmp_path, steps=250)
    play = ["rollout.tasks_per_step=8", "rollout.group_size=8", "trainer.steps=40", "learner.lr=1e-3"]
    train(f"model={tmp_path}", f"output_dir={tmp_path / 'run'}", *LAKE, *play)
    rewards = column(tmp_path / "run", "reward/mean")
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.05  # measured 0.13, with a standard error of 0.02


@pytest.mark.parametrize("name", ["gpt2", "qwen3-moe"])
def test_adapters_go_into_other_families_and_engine_learner_and_merged_export_agree(name, tmp_path):
    pytest.importorskip("peft")
    model = copy.deepcopy(family(name))
    add_lora(model, LoraConfig(rank=2, alpha=4))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3)
    prompt = list(range(1, 20))
    assert float((plain_logits(model, prompt) - plain_logits(family(name), prompt)).detach().abs().max()) > 1e-2
    engine = LocalEngine(model, max_context=64, kv_tokens=128)
    done = asyncio.run(engine.generate(prompt, Sampling(6, seed=3), session="s"))
    made = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=[Call(tuple(prompt), done, 0)])])])
    scored = Learner(model, LearnerConfig(), Sampling()).logprobs(made.trees, made.terms)
    np.testing.assert_allclose(scored.numpy(), done.logprobs, atol=1e-4)
    export_merged(model, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain_logits(merged, prompt), plain_logits(model, prompt), rtol=1e-3, atol=1e-4)


def test_layers_of_gpt2_are_named_where_a_target_does_not_exist():
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"c_attn.*c_fc.*c_proj"):
        add_lora(copy.deepcopy(family("gpt2")), LoraConfig(rank=2, target=("q_proj",)))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_in_float16_the_engine_says_what_the_learner_says(name):
    model = copy.deepcopy(family(name)).half()
    engine, prompt = LocalEngine(model, max_context=64, kv_tokens=128), list(range(1, 20))
    done = asyncio.run(engine.generate(prompt, Sampling(6, seed=3), session="s"))
    made = build_token_trees([Group(Task("t"), [Episode("e", Task("t"), calls=[Call(tuple(prompt), done, 0)])])])
    scored = Learner(model, LearnerConfig(), Sampling()).logprobs(made.trees, made.terms).numpy()
    assert np.abs(scored - done.logprobs).mean() < 0.05


def test_tools_are_in_the_recorded_prompts_of_a_model_whose_template_has_no_place_for_them(tmp_path):
    """As that of smollm2, whose prompts never named them."""
    from arborl.chat import Renderer
    from arborl.models.model_files import SEEDLING_DIR
    from arborl.models.smollm2 import TEMPLATE

    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"What is {n} + 2?", "answer": str(n + 2)}) + "\n" for n in range(4))
    )
    template = tmp_path / "smollm2.jinja"
    template.write_text(TEMPLATE)
    train(
        f"model.chat_template={template}", f"data.path={rows}", "agent=tool", "tools=[calculator]", "rewards=[exact]",
        f"output_dir={tmp_path / 'run'}", *ONE_STEP,
    )  # fmt: skip
    renderer = Renderer.from_folder(SEEDLING_DIR)
    for episode in episodes(tmp_path / "run"):
        shown = renderer.tokenizer.decode(episode.calls[0].prompt)
        assert '"name": "calculator"' in shown
        assert "<tool_call>" in shown
