"""verl's supervised trainers become `algorithm=sft` on rows as they are."""

from __future__ import annotations

import json

import pytest

from arborl.config.config_base import validate
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.convert import Draft, convert
from arborl.convert.conversion_report import as_yaml
from arborl.errors import ConfigError
from arborl.training_run import train

SFT = "torchrun --standalone --nnodes=1 --nproc_per_node={n} -m verl.trainer.fsdp_sft_trainer data.train_files=a.json "
ENGINE = "torchrun --nproc-per-node=1 -m verl.trainer.sft_trainer data.train_files=a.json model.path=some/model "


def converted(tmp_path, text: str, **more) -> Draft:
    (tmp_path / "run.sh").write_text(text)
    return convert("verl", [tmp_path / "run.sh"], **more)


def test_columns_inside_a_column_are_read_as_they_are(tmp_path):
    keys = "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question']"
    draft = converted(
        tmp_path, SFT.format(n=1) + f"{keys} +data.response_dict_keys=['answer'] model.partial_pretrain=m"
    )
    config = validate(RunConfig, draft.tree())
    assert config.data.fields == {"prompt": "extra_info.question", "completion": "extra_info.answer"}
    assert (config.algorithm.loss, config.algorithm.aggregation, config.data.offline) == ("sft", "token", True)
    assert (config.learner.lr, config.learner.betas, config.learner.weight_decay) == (1e-5, (0.9, 0.95), 0.01)
    assert (config.learner.warmup, config.learner.decay, config.learner.max_grad_norm) == (0.1, "cosine", 1.0)
    assert (config.rollout.tasks_per_step, config.sampling.max_context, config.data.overlong) == (256, 1024, "refuse")
    assert (config.trainer.epochs, config.seed, config.evaluation.before) == (4, 1, False)
    assert set(draft.source) <= draft.accounted()


def test_conversations_and_the_newer_trainer_have_their_own_columns_and_defaults(tmp_path):
    multi = "data.multiturn.enable=true data.multiturn.messages_key=talk model.partial_pretrain=m"
    config = validate(RunConfig, converted(tmp_path, SFT.format(n=1) + multi).tree())
    assert config.data.fields == {"messages": "talk"}
    config = validate(RunConfig, converted(tmp_path, ENGINE + "data.messages_key=talk optim.lr=2e-5").tree())
    assert config.data.fields == {"messages": "talk"}
    assert (config.learner.lr, config.learner.betas, config.learner.decay) == (2e-5, (0.9, 0.999), "none")
    assert config.evaluation.tasks == 0  # no rows are held out there


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("data.truncation=right", {"data.overlong": "cut"}),
        ("optim.lr_scheduler=constant optim.lr_warmup_steps_ratio=0",
         {"learner.decay": "none", "learner.warmup": None}),
        ("trainer.total_training_steps=7", {"trainer.steps": 7, "trainer.epochs": None}),
        ("model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear",
         {"model.lora.rank": 32, "model.lora.alpha": 16, "model.lora.target": ["all-linear"]}),
        ("model.fsdp_config.cpu_offload=True", {"learner.offload": "all"}),
        ("trainer.save_freq=5 trainer.test_freq=3 trainer.max_ckpt_to_keep=2",
         {"trainer.save_every": 5, "evaluation.every": 3, "trainer.keep": 2}),
        ("data.apply_chat_template_kwargs.enable_thinking=False", {"model.chat_args.enable_thinking": False}),
    ],
)  # fmt: skip
def test_a_key_of_supervised_training_means_the_same_here(overrides, expected, tmp_path):
    draft = converted(tmp_path, SFT.format(n=1) + "model.partial_pretrain=m " + overrides)
    assert {path: draft.settings.get(path) for path in expected} == expected
    validate(RunConfig, draft.tree())


def test_processes_of_torchrun_are_ranks_and_a_number_of_the_command_line_is_asked_for(tmp_path):
    draft = converted(tmp_path, SFT.format(n=4) + "model.partial_pretrain=m ulysses_sequence_parallel_size=2")
    assert (draft.settings["learner.ranks"], draft.settings["learner.strategy"]) == (4, "fsdp2")
    draft = converted(tmp_path, SFT.format(n="$1") + "model.partial_pretrain=m")
    assert [line.why for line in draft.lines if line.key == "--nproc_per_node"] == [
        "only known when the script runs: convert with --gpus N, or write learner.ranks"
    ]
    draft = converted(tmp_path, SFT.format(n="$1") + "model.partial_pretrain=m", gpus=2)
    assert draft.settings["learner.ranks"] == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ENGINE.replace("some/model", "Qwen/Qwen3-VL-2B-Instruct"), "models that see are not trained here"),
        (SFT.format(n=1), "model.partial_pretrain: names no model"),
        (SFT.format(n=1) + "model.partial_pretrain=m data.custom_cls.path=a.py", "data.rows=package.module:function"),
        (SFT.format(n=1) + "model.partial_pretrain=m optim.lr_scheduler=wsd", "there is no 'wsd' here"),
    ],
)
def test_what_has_no_counterpart_is_refused(text, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        converted(tmp_path, text)


def test_an_unknown_key_is_lost(tmp_path):
    keys = {
        f"{section}.odd"
        for section in ("data", "model", "optim", "trainer", "engine", "model.fsdp_config", "data.multiturn")
    }
    draft = converted(tmp_path, SFT.format(n=1) + "model.partial_pretrain=m " + " ".join(f"+{key}=1" for key in keys))
    assert {line.key for line in draft.lines if line.why == "unknown key" and line.kind == "lost"} == keys


def test_a_converted_script_learns_from_nested_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"extra_info": {"question": f"{n} + 1?", "answer": f"#### {n + 1}"}} for n in range(12)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    keys = "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=[question]"
    keys += (
        " data.response_dict_keys=[answer] data.val_files=a.json data.train_batch_size=4 trainer.total_training_steps=2"
    )
    draft = converted(tmp_path, SFT.format(n=1) + f"{keys} model.partial_pretrain=m")
    (tmp_path / "run.yaml").write_text(as_yaml(draft.tree()))
    config = load(tmp_path / "run.yaml", ["model=seedling", "model.dtype=float32", "output_dir=out"])
    assert train(config).summary["steps"] == 2
