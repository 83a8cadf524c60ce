"""Scripts of TRL's trainers become runs that train, or are refused with what to write; no keyword is lost."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.config_base import validate
from arborl.config.load_config import load
from arborl.config.run_config import RunConfig
from arborl.convert import Draft, convert
from arborl.convert.trl_keys import TABLE
from arborl.errors import ConfigError
from arborl.training_run import train

HEAD = """
from datasets import load_dataset
from peft import LoraConfig
from trl import *
def reward(completions, **columns):
    return [0.0 for _ in completions]
rows = load_dataset("json", data_files="rows.jsonl", split="train")
"""
GRPO = (
    HEAD
    + """
trainer = GRPOTrainer("seedling", reward, GRPOConfig({}), rows)
trainer.train()
"""
)
SFT = HEAD + "SFTTrainer('seedling', args=SFTConfig({}), train_dataset=rows).train()\n"
DPO = HEAD + "DPOTrainer('seedling', args=DPOConfig({}), train_dataset=rows).train()\n"


def converted(tmp_path: Path, text: str, *more: Path, **uses: str) -> Draft:
    (tmp_path / "script.py").write_text(text)
    return convert("trl", [tmp_path / "script.py", *more], uses)


def config_of(draft: Draft) -> RunConfig:
    return validate(RunConfig, draft.tree())


def refused(tmp_path: Path, text: str, *more: Path) -> str:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, text, *more)
    return str(error.value)


def lines(draft: Draft, key: str) -> list[str]:
    return [line.why for line in draft.lines if line.key == key]


# ------------------------------------------------------------------------------------------------ whole scripts

TRAINED = {
    "grpo": '''
import re
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

TAG = re.compile(r"<answer>(.*?)</answer>")
STEPS = 2 * 2


def inside(text):
    found = TAG.search(text)
    return found.group(1) if found else ""


def correct(prompts, completions, answer, **columns):
    """Compares whole groups."""
    assert len(prompts) == len(completions) == len(answer) == 2
    return [float(inside(completion[0]["content"]) == right) for completion, right in zip(completions, answer)]


async def brief(completion_ids, log_metric, **columns):
    log_metric("length", 1.0)
    return [None if len(ids) > 99 else 1.0 for ids in completion_ids]


def as_prompt(row):
    return {"prompt": [{"role": "user", "content": row["question"]}]}


dataset = load_dataset("json", data_files="rows.jsonl", split="train").filter(lambda row: row["answer"] != "3")
dataset = dataset.map(as_prompt)
config = GRPOConfig(
    "out", max_steps=STEPS // 4, num_generations=2, per_device_train_batch_size=4, max_completion_length=8,
    reward_weights=[1.0, 0.5], bf16=False, learning_rate=1e-4,
)
trainer = GRPOTrainer("seedling", reward_funcs=[correct, brief], args=config, train_dataset=dataset)
trainer.train()
''',
    "sft": """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

if __name__ == "__main__":
    args = SFTConfig(output_dir="out", max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    args.bf16 = False
    trainer = SFTTrainer(model="seedling", args=args, train_dataset=Dataset.from_json("rows.jsonl"))
    trainer.train()
""",
    "dpo": """
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer


def main(name="seedling", steps=1):
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    config = dict(output_dir="out", bf16=False)
    args = DPOConfig(max_steps=steps, beta=0.2, per_device_train_batch_size=3, **config)
    rows = load_dataset("json", data_files={"train": "rows.jsonl"})["train"]
    trainer = DPOTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()


main()
""",
}
ROWS = [
    {
        "question": f"What is {n} + 1?", "answer": str(n + 1), "prompt": f"What is {n} + 1?",
        "chosen": f"<answer>{n + 1}</answer>", "rejected": "No.", "completion": f"<answer>{n + 1}</answer>",
    }
    for n in range(12)
]  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_a_script_is_converted_and_trained(name, tmp_path, monkeypatch):
    """The script itself never runs: neither `trl` nor a trainer is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, f"{name}_parts", raising=False)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path(f"{name}.py").write_text(TRAINED[name])
    done = CliRunner().invoke(app, ["convert", "trl", f"{name}.py", "--out", "run.yaml"])
    assert done.exit_code == 0, done.output
    config = load(Path("run.yaml"), ["track.tensorboard=false"])
    assert config.algorithm.name == name
    assert config.trainer.steps == 1
    run = train(config)
    assert run.summary["steps"] == 1
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    if name == "grpo":
        assert 0.5 <= row["reward/mean"] <= 1.5
        assert row["reward/brief"] == 0.5
        assert "GRPOTrainer" not in Path("grpo_parts.py").read_text()
    else:
        assert row["policy/loss"] > 0
        assert not Path(f"{name}_parts.py").exists()


def test_nothing_of_a_script_runs_and_no_library_is_imported(tmp_path):
    text = f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n" + GRPO.format("'out'")
    (tmp_path / "script.py").write_text(text)
    code = (
        "import sys; from pathlib import Path; from arborl.convert import convert; "
        "convert('trl', [Path(sys.argv[1])]); "
        "assert not {'torch', 'trl', 'datasets', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "script.py")], check=True)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------------ keywords


def fields(package: str, file: str) -> dict[str, dict[str, str]]:
    """Fields of the dataclasses of an installed module with the text of their defaults; it is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse((Path(spec.origin).parent / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            own = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
            found[node.name] = {one.target.id: _default(one.value) for one in own if not one.target.id.startswith("_")}
    return found


def _default(node: ast.expr | None) -> str:
    """The text of a constant default; else empty."""
    given = [one.value for one in getattr(node, "keywords", []) if one.arg == "default"]
    value = given[0] if given else node
    return ast.unparse(value) if isinstance(value, ast.Constant | ast.UnaryOp) else ""


def arguments(name: str) -> dict[str, str]:
    """Training arguments of a trainer of the installed TRL."""
    known = fields("transformers", "training_args.py")["TrainingArguments"]
    known |= fields("trl", "trainer/base_config.py")["_BaseConfig"]
    return known | fields("trl", f"trainer/{name.lower()}_config.py")[f"{name}Config"]


@pytest.mark.parametrize("name", ["GRPO", "SFT", "DPO", "KTO"])
def test_every_training_argument_of_the_installed_trl_has_a_rule(name):
    assert not [key for key in arguments(name) if f"args.{key}" not in TABLE]
    model = fields("trl", "trainer/model_config.py")["ModelConfig"]
    assert not [key for key in model if f"model_config.{key}" not in TABLE]


@pytest.mark.parametrize("name", ["GRPO", "SFT", "DPO", "KTO"])
def test_keywords_at_their_defaults_change_nothing_and_are_all_in_the_report(name, tmp_path):
    script = SFT.replace("SFT", name) if name != "GRPO" else GRPO
    known = {key: default for key, default in arguments(name).items() if default}
    draft = converted(tmp_path, script.format(", ".join(f"{key}={default}" for key, default in known.items())))
    assert {f"args.{key}" for key in known} <= draft.accounted()
    without = {"engine": True, "learner": {"recompute"}}
    plain = config_of(converted(tmp_path, script.format("")))
    assert config_of(draft).model_dump(exclude=without) == plain.model_dump(exclude=without)
    assert len(known) > 100


def test_a_keyword_of_any_value_is_in_the_report_or_refused(tmp_path):
    values = ("unknown()", "'text'", "[1, 'a']", "{'a': {'b': 1}}", "3", "-1.5", "0")
    for key, value in zip(arguments("GRPO"), itertools.cycle(values), strict=False):
        try:
            found = converted(tmp_path, GRPO.format(f"{key}={value}")).accounted()
        except ConfigError:
            continue
        assert any(one.startswith(f"args.{key}") for one in found), (key, value)


def test_unknown_keywords_and_those_of_older_versions_are_in_the_report(tmp_path):
    draft = converted(
        tmp_path, SFT.format("my_flag=3, max_seq_length=77").replace("train_dataset", "packing=True, train_dataset")
    )
    assert lines(draft, "args.my_flag") == ["unknown key"]
    assert "larger rollout.tasks_per_step" in lines(draft, "args.packing")[0]
    assert config_of(draft).sampling.max_context == 77


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("", "1e-3 / 2"), ("LR = 5e-4", "LR"), ("base = {'lr': 5e-4}", "base['lr']"), ("x = 1\nx += 1", "0.001 / x"),
        ("class C:\n    lr: float = 5e-4", "C.lr"), ("def f(n=2):\n    return n / 4000", "f()"),
        ("from dataclasses import dataclass, field\n@dataclass\nclass A:\n    lr: float = field(default=5e-4)\na = A()",
         "a.lr"),
        ("many = False\nif many:\n    lr = 1\nelse:\n    lr = 5e-4", "lr"), ("lr = None", "lr or 5e-4"),
        ("lr = 0\nfor one in [1, 2]:\n    lr = one / 4000", "lr"), ("a, b = 1, 5e-4", "b"), ("", "float('5e-4')"),
        ("try:\n    lr = 5e-4\nexcept ValueError:\n    lr = 1", "lr"),
    ],
)  # fmt: skip
def test_constants_are_evaluated(before, value, tmp_path):
    draft = converted(tmp_path, f"{before}\n" + GRPO.format(f"learning_rate={value}"))
    assert config_of(draft).learner.lr == 5e-4


@pytest.mark.parametrize(
    ("before", "value"),
    [
        ("import os", "float(os.environ['LR'])"), ("import os", "os.environ.get('LR', 1e-5)"),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\na = p.parse_args()", "a.lr"),
        ("from mine import find", "find(3)"), ("import torch\nlr = 1\nif torch.cuda.is_available():\n    lr = 2", "lr"),
        ("def f(n):\n    while n:\n        return 3\n    return 2", "f(1)"), ("", "9 ** 9 ** 9"), ("", "undefined"),
    ],
)  # fmt: skip
def test_a_value_that_is_only_known_at_run_time_is_refused(before, value, tmp_path):
    assert "is only known when the script runs: write it" in refused(
        tmp_path, f"{before}\n" + GRPO.format(f"learning_rate={value}")
    )


def test_an_unknown_name_of_the_run_is_no_reason_to_refuse(tmp_path):
    draft = converted(tmp_path, "import os\n" + GRPO.format("output_dir=os.environ['OUT'], logging_steps=int(os.X)"))
    assert config_of(draft).output_dir is None
    assert {"args.output_dir", "args.logging_steps"} <= draft.accounted()


# ------------------------------------------------------------------------------------------------ command lines

PARSED = '''
"""
A script that isn't run.

```
accelerate launch --num_processes 2 somewhere/script.py \\
    --model_name_or_path Qwen/Qwen3-0.6B \\
    --dataset_name my/rows --learning_rate 3e-5 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" \\
    --no_shuffle_dataset --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' --lr_scheduler_type cosine_with_min_lr
```
python script.py --model_name_or_path other
"""
from dataclasses import dataclass
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward

@dataclass
class Mine(ScriptArguments):
    kind: str = "main"

def change(row):
    return row

def main(script_args, training_args, model_args):
    training_args.chat_template_kwargs = {"enable_thinking": False}
    training_args.model_init_kwargs = dict(dtype=model_args.dtype, revision=model_args.model_revision)
    dataset = load_dataset(script_args.dataset_name, name=script_args.kind)
    dataset = dataset.map(change)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=[think_format_reward], args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()

if __name__ == "__main__":
    parser = TrlParser((Mine, GRPOConfig, ModelConfig))
    script_args, training_args, model_args, _ = parser.parse_args_and_config(return_remaining_strings=True)
    main(script_args, training_args, model_args)
'''


def test_the_command_of_the_docstring_fills_the_dataclasses(tmp_path):
    draft = converted(tmp_path, PARSED)
    config = config_of(draft)
    assert (config.model.name, config.learner.lr, config.data.shuffle) == ("Qwen/Qwen3-0.6B", 3e-5, False)
    assert (config.model.lora.rank, config.model.lora.target) == (16, ("q_proj", "v_proj"))
    assert (config.learner.decay, config.learner.min_lr) == ("cosine", pytest.approx(3e-6))
    assert config.rollout.tasks_per_step == 2  # 8 completions of each of two processes, in groups of 8
    assert config.model.chat_args == {"enable_thinking": False}
    assert config.model.dtype == "bfloat16"
    rows = draft.files["script_parts.py"]
    assert "load_dataset('my/rows', name='main')" in rows
    assert "return dataset['train']" in rows
    assert "Trainer" not in rows
    assert "number 1 of 2" in str(draft.source["command"])
    assert set(draft.source) <= draft.accounted()


def test_a_second_file_is_the_command_line(tmp_path):
    (tmp_path / "run.sh").write_text("M=Qwen/Qwen3-4B\npython script.py --config more.yaml --model_name_or_path $M\n")
    (tmp_path / "more.yaml").write_text("learning_rate: 1e-4\ndataset_name: their/rows\nmodel_name_or_path: x\n")
    config = config_of(converted(tmp_path, PARSED, tmp_path / "run.sh"))
    assert (config.model.name, config.learner.lr, config.model.lora.rank) == ("Qwen/Qwen3-4B", 1e-4, 0)
    (tmp_path / "other.yaml").write_text("{model_name_or_path: a/b, dataset_name: c/d}")
    assert config_of(converted(tmp_path, PARSED, tmp_path / "other.yaml")).model.name == "a/b"
    (tmp_path / "none.sh").write_text("echo\n")
    assert "no command starts script.py" in refused(tmp_path, PARSED, tmp_path / "none.sh")
    without = PARSED.replace("my/rows", "my/rows --config missing.yaml")
    assert "--config missing.yaml: no such file near" in refused(tmp_path, without)


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("made", "ours"),
    [
        ("load_dataset('json', data_files='a.jsonl', split='train')", {"path": "a.jsonl"}),
        ("load_dataset('json', data_files=['a.jsonl', 'b.jsonl'])['train']", {"path": ["a.jsonl", "b.jsonl"]}),
        ("load_dataset('csv', data_files={'train': 'a.csv', 'test': 'b.csv'})['train']", {"path": "a.csv"}),
        ("Dataset.from_json('a.json').shuffle(seed=3)", {"path": "a.json"}),
        ("load_dataset('openai/gsm8k', 'main', split='train')", {"hub": "openai/gsm8k:main:train"}),
        ("load_dataset('trl-lib/tldr')['validation']", {"hub": "trl-lib/tldr::validation"}),
        ("load_from_disk('folder')", {"hub": "folder"}),
        ("load_dataset('a/b', split='train[:5%]')", {"rows": "script_parts:train_rows"}),
        ("load_dataset('json', data_files='https://a/b.json')['train']", {"rows": "script_parts:train_rows"}),
        ("Dataset.from_list([{'prompt': 'a'}])", {"rows": "script_parts:train_rows"}),
        ("load_dataset('a/b')['train'].select(range(9))", {"rows": "script_parts:train_rows"}),
    ],
)  # fmt: skip
def test_rows_are_named_or_made_by_the_scripts_own_statements(made, ours, tmp_path):
    text = f"from datasets import Dataset, load_from_disk\n{HEAD}\nrows = {made}\n" + SFT.removeprefix(HEAD).format("")
    draft = converted(tmp_path, text)
    found = {key: draft.settings[f"data.{key}"] for key in ("path", "hub", "rows") if f"data.{key}" in draft.settings}
    assert found == ours
    if "rows" in ours:
        exec(compile(ast.parse(draft.files["script_parts.py"]), "parts", "exec"), names := {})
        assert callable(names["train_rows"])


def test_changes_of_rows_that_cannot_be_copied_are_lost_with_advice(tmp_path):
    text = (
        HEAD
        + """
import os
def build(data):
    data = data.map(lambda row: {"n": os.environ["N"]}).filter(keep)
    return GRPOTrainer("seedling", reward, train_dataset=data)
build(load_dataset("a/b", split="train")).train()
"""
    )
    draft = converted(tmp_path, text)
    assert draft.settings["data.hub"] == "a/b::train"
    for name in ("map", "filter"):
        (why,) = lines(draft, f"train_dataset.{name}")
        assert why.startswith("lost: ")
        assert "data.rows=package.module:function" in why


def test_held_out_rows_are_used_if_the_script_evaluates(tmp_path):
    held = "load_dataset('a/b', 'c', split='test')"
    text = SFT.replace("train_dataset=rows", f"train_dataset=rows, eval_dataset={held}")
    draft = converted(tmp_path, text.format("eval_strategy='steps', eval_steps=20"))
    config = config_of(draft)
    assert (config.evaluation.every, config.evaluation.before) == (20, False)
    assert config.data.evaluation_rows.name == "script_parts:evaluation_rows"
    assert held in draft.files["script_parts.py"]
    enumerated = "from transformers import IntervalStrategy as I\n" + text.format("eval_strategy=I.STEPS, eval_steps=7")
    assert config_of(converted(tmp_path, enumerated)).evaluation.every == 7
    off = config_of(converted(tmp_path, text.format("eval_strategy=False")))
    assert (off.evaluation.tasks, off.data.evaluation_rows, off.data.evaluation_share) == (0, None, 1e-6)


# ------------------------------------------------------------------------------------------------ rewards and tools


def test_rewards_of_every_kind(tmp_path):
    text = """
import functools
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, think_format_reward
from trl.rewards import get_soft_overlong_punishment as overlong, get_repetition_penalty_reward
from mine.rewards import careful
from datasets import load_dataset
def by(scale, completions, **columns):
    return [scale for _ in completions]
repeated = get_repetition_penalty_reward(ngram_size=3)
functions = ["some/reward-model", accuracy_reward, think_format_reward, careful, repeated]
functions += [functools.partial(by, 2), overlong(100, soft_punish_cache=20), lambda completions, **c: [0]]
config = GRPOConfig(reward_weights=[1, 1, 0.5, 1, 1, 1, 0.3, 1])
GRPOTrainer("seedling", functions, config, load_dataset("a/b")["train"]).train()
"""
    draft = converted(tmp_path, text)
    config = config_of(draft)
    made = [(one.name, one.args.get("function") or one.args.get("path"), one.weight) for one in config.rewards]
    assert made == [
        ("reward_model", "some/reward-model", 1), ("equal", None, 1), ("format", None, 0.5),
        ("trl_function", "mine.rewards:careful", 1), ("trl_function", "script_parts:reward_4", 1),
        ("trl_function", "script_parts:reward_5", 1), ("trl_function", "script_parts:reward_7", 1),
    ]  # fmt: skip
    assert (config.algorithm.overlong.max_tokens, config.algorithm.overlong.buffer) == (100, 20)
    assert config.algorithm.overlong.penalty == 0.3
    module = draft.files["script_parts.py"]
    assert "def by(scale, completions, **columns):" in module
    assert "reward_5 = functools.partial(by, 2)" in module
    used = converted(tmp_path, text, **{"careful": "our.rewards:careful", "accuracy_reward": "none"})
    assert [one.name for one in config_of(used).rewards][:3] == ["reward_model", "format", "our.rewards:careful"]


def test_a_reward_that_reads_the_trainer_is_refused(tmp_path):
    text = GRPO.format("'out'").replace("return [0.0 for", "return [trainer.state for")
    why = refused(tmp_path, text)
    assert "reads trainer, which is only known when the script runs" in why
    assert "--use reward=package.module:function" in why
    weights = GRPO.format("reward_weights=[1, 2]")
    assert "there are 1 reward functions" in refused(tmp_path, weights)


def test_tools_are_copied_and_adapters_are_taken_over(tmp_path):
    text = (
        HEAD
        + '''
TABLE = {"a": 1}
TABLE["b"] = 2
def look(name: str) -> int:
    """Looks a name up."""
    return TABLE[name]
GRPOTrainer(
    "seedling", reward, GRPOConfig(max_tool_calling_iterations=3), rows, tools=[look],
    peft_config=LoraConfig(r=16, lora_alpha=8, use_rslora=True, task_type="CAUSAL_LM", use_dora=True),
).train()
'''
    )
    draft = converted(tmp_path, text)
    config = config_of(draft)
    assert (config.agent.name, config.agent.args, config.tools[0].name) == (
        "tool", {"max_tool_rounds": 3}, "script_parts:look",
    )  # fmt: skip
    exec(compile(ast.parse(draft.files["script_parts.py"]), "parts", "exec"), names := {})
    assert names["look"]("b") == 2
    assert (config.model.lora.rank, config.model.lora.alpha) == (16, 32.0)  # 8 / sqrt(16) of rslora is 32 / 16
    assert config.model.lora.target == ("q_proj", "v_proj")
    assert lines(draft, "peft_config.use_dora") == ["adapters are LoRA's"]


# ------------------------------------------------------------------------------------------------ batches and losses


@pytest.mark.parametrize(
    ("given", "tasks", "minibatches", "epochs", "steps"),
    [
        ("max_steps=10", 1, 1, 1, 10),
        ("max_steps=10, per_device_train_batch_size=16, num_generations=4", 4, 1, 1, 10),
        ("max_steps=10, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=8", 4, 1, 1, 10),
        ("max_steps=10, gradient_accumulation_steps=2, steps_per_generation=8", 8, 4, 1, 3),
        ("max_steps=10, generation_batch_size=64, num_iterations=2", 8, 8, 2, 1),
        ("max_steps=10, gradient_accumulation_steps=4, steps_per_generation=1", 4, 1, 1, 10),
        ("max_steps=10, per_device_train_batch_size=1, num_generations=8", 1, 1, 1, 10),  # eight processes
    ],
)
def test_a_step_is_a_batch_of_completions(given, tasks, minibatches, epochs, steps, tmp_path):
    config = config_of(converted(tmp_path, GRPO.format(given)))
    found = (config.rollout.tasks_per_step, config.learner.minibatches, config.learner.epochs, config.trainer.steps)
    assert found == (tasks, minibatches, epochs, steps)


@pytest.mark.parametrize(
    ("given", "loss", "aggregation", "clips"),
    [
        ("", "ppo", "token", (0.2, 0.2)),
        ("loss_type='grpo', epsilon=0.1", "ppo", "episode", (0.1, 0.1)),
        ("loss_type='bnpo', epsilon_high=0.3", "ppo", "token", (0.2, 0.3)),
        ("loss_type='dr_grpo', scale_rewards=False", "ppo", "fixed", (0.2, 0.2)),
        ("loss_type='grpo', importance_sampling_level='sequence'", "gspo", "episode", (0.2, 0.2)),
        ("loss_type='cispo', epsilon_high=5.0", "cispo", "token", (0.2, 4.0)),
        ("loss_type='sapo', sapo_temperature_neg=1.5", "sapo", "episode", (0.2, 0.2)),
    ],
)
def test_losses_of_grpo(given, loss, aggregation, clips, tmp_path):
    algorithm = config_of(converted(tmp_path, GRPO.format(given))).algorithm
    assert (algorithm.loss, algorithm.aggregation) == (loss, aggregation)
    assert (algorithm.clip_low, algorithm.clip_high) == clips
    assert (algorithm.std, algorithm.anchor) == ("none" if "scale" in given else "group", "proximal")
    assert algorithm.skip_zero_variance is False
    if aggregation == "fixed":
        assert algorithm.args["fixed_length"] == 512
    if loss == "sapo":
        assert algorithm.args["tau_negative"] == 1.5


def test_defaults_of_trl_are_written(tmp_path):
    config = config_of(converted(tmp_path, GRPO.format("")))
    assert (config.learner.lr, config.learner.betas, config.learner.decay) == (1e-6, (0.9, 0.999), "linear")
    assert (config.rollout.group_size, config.sampling.max_tokens, config.sampling.temperature) == (8, 512, 1.0)
    assert (config.trainer.epochs, config.seed, config.model.dtype, config.algorithm.kl.coef) == (3, 42, "bfloat16", 0)
    sft = config_of(converted(tmp_path, SFT.format("")))
    assert (sft.learner.lr, sft.algorithm.aggregation, sft.sampling.max_context) == (2e-5, "token", 1024)
    assert (sft.rollout.tasks_per_step, sft.data.overlong, sft.data.offline) == (8, "cut", True)
    dpo = config_of(converted(tmp_path, DPO.format("loss_type=['ipo']")))
    assert (dpo.learner.lr, dpo.algorithm.loss, dpo.algorithm.args["beta"]) == (1e-6, "ipo", 0.1)
    plain = config_of(converted(tmp_path, SFT.replace("SFTConfig", "TrainingArguments").format("")))
    assert (plain.learner.lr, plain.model.dtype) == (5e-5, "float32")


def test_importance_weights_of_vllm(tmp_path):
    given = "use_vllm=True, vllm_gpu_memory_utilization=0.4, vllm_importance_sampling_mode='token_truncate'"
    config = config_of(converted(tmp_path, GRPO.format(given)))
    assert config.engine.name == "local"  # beside the learner, as every system's engine on one GPU
    weights = config.algorithm.importance_weights
    assert (weights.kind, weights.level, weights.high) == ("tis", "token", 3.0)
    weights = config_of(converted(tmp_path, GRPO.format("use_vllm=True"))).algorithm.importance_weights
    assert (weights.kind, weights.level, weights.high) == ("mis", "sequence", 3.0)
    assert config_of(converted(tmp_path, GRPO.format(""))).algorithm.importance_weights.kind == "none"


def test_a_command_without_options_of_the_script_counts_and_another_program_does_not(tmp_path):
    (tmp_path / "run.sh").write_text("accelerate launch --num_processes 2 script.py\n")
    assert config_of(converted(tmp_path, GRPO.format("max_steps=1"), tmp_path / "run.sh")).learner.ranks == 2
    (tmp_path / "run.sh").write_text("vim script.py\n")
    assert "no command starts script.py" in refused(tmp_path, GRPO.format("max_steps=1"), tmp_path / "run.sh")


def test_processes_of_accelerate_are_ranks_and_multiply_the_batch(tmp_path):
    (tmp_path / "zero.yaml").write_text("num_processes: 8\ndeepspeed_config: {zero_stage: 2}\nuse_cpu: false\n")
    text = f"'accelerate launch --config_file zero.yaml script.py --x 1'\n{SFT.format('')}"
    draft = converted(tmp_path, text)
    config = config_of(draft)
    assert (config.learner.ranks, config.learner.strategy, config.rollout.tasks_per_step) == (8, "zero2", 64)
    assert {"accelerate.num_processes", "accelerate.deepspeed_config.zero_stage", "accelerate.use_cpu"} <= set(
        draft.source
    )
    assert set(draft.source) <= draft.accounted()
    one = config_of(convert("trl", [tmp_path / "script.py"], gpus=1))
    assert (one.learner.ranks, one.learner.strategy, one.rollout.tasks_per_step) == (1, "single", 64)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "x = 1",
            "starts no training: none of GRPOTrainer, SFTTrainer, DPOTrainer, KTOTrainer is made at its top level",
        ),
        (GRPO.replace("trainer.train()", ""), "starts no training: GRPOTrainer.train is not called"),
        (GRPO + "trainer.train()", "starts several trainings (lines"),
        (GRPO.replace("trainer.train()", "for i in range(3):\n    trainer.train()"), "starts several trainings"),
        (SFT.replace("SFT", "PPO"), "PPOTrainer is not converted. Converted: GRPOTrainer"),
        ("from trl.experimental.orpo import ORPOTrainer as T\nT('m').train()", "ORPOTrainer is not converted"),
        ("from trl import SFTTrainer\nclass T(SFTTrainer):\n    pass\nT('m').train()", "T is a class of the script"),
        ("def f(:\n", "not a valid Python script"),
        (GRPO.replace("rows)", "None)"), "the trainer gets no rows"),
        (GRPO.replace("reward,", "None,"), "the trainer gets no reward"),
        (GRPO.replace('"seedling"', "make_model()"), "is only known when the script runs"),
        (GRPO.replace('"seedling"', "'Qwen/Qwen2.5-VL-3B'"), "Arbor trains text models only"),
        (GRPO.replace("GRPOConfig({})", "load_args()"), "is only known when the script runs"),
        (GRPO.replace("rows)", "rows, environment_factory=Env)"), "write an environment: env=package.module:Class"),
        (GRPO.format("loss_type='vespo'"), "there is no such loss here"),
        (GRPO.format("loss_type='cispo'"), "Write epsilon_high above 1"),
        (GRPO.format("optim='adafactor'"), "the optimizer here is AdamW"),
        (GRPO.format("lr_scheduler_type='polynomial'"), "Write one of linear, cosine"),
        (DPO.format("loss_type=['sigmoid', 'sft']"), "Write sigmoid or ipo"),
        (SFT.format("loss_type='dft'"), "the loss of SFT here is nll"),
        (GRPO.format("max_completion_length=None"), "Write a number of tokens"),
        (GRPO.format("**make()"), "args.**make()=make(): is only known when the script runs"),
        (GRPO.format("learning_rate='fast'"), "not a number"),
        (GRPO.format("num_generations=0"), "is not a whole number from 1 on"),
        (
            "'accelerate launch --num_processes 3 script.py --x 1'\n" + GRPO.format("num_generations=5"),
            "no multiple of num_generations",
        ),
    ],
    ids=lambda text: text[-40:],
)
def test_refusals_say_what_to_write(text, says, tmp_path):
    assert says in refused(tmp_path, text.replace("({})", "()"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.sh", b"python x.py", "not a Python script"),
        ("x.ipynb", b"{}", "not a Jupyter notebook"),
        ("x.ipynb", b"[", "not a Jupyter notebook"),
        ("x.py", b"\xff\xfe\x00", "is not a text file"),
        ("x.py", b"", "starts no training"),
        ("x.py", b"x = " + b"(" * 5000 + b")" * 5000, "not a valid Python script"),
        ("missing.py", None, "no such file"),
    ],
)  # fmt: skip
def test_files_that_are_no_scripts(name, content, says, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = CliRunner().invoke(app, ["convert", "trl", str(tmp_path / name)])
    assert done.exit_code == 2
    assert says in done.output


def test_a_notebook_is_its_code_cells(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["%pip install trl\n", "!nvidia-smi"]},
        {"cell_type": "code", "source": GRPO.format("learning_rate=1e-5").splitlines(keepends=True)},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    draft = convert("trl", [tmp_path / "n.ipynb"])
    assert config_of(draft).learner.lr == 1e-5
    assert "def reward(completions, **columns):" in draft.files["n_parts.py"]


def test_json_has_the_module_and_a_foreign_module_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(GRPO.format("learning_rate=1e-5"))
    done = CliRunner().invoke(app, ["convert", "trl", "script.py", "--json"])
    found = json.loads(done.stdout)
    assert "def reward" in found["written"]["script_parts.py"]
    assert found["config"]["learner"]["lr"] == 1e-5
    assert {"kind", "key", "value", "our_key", "our_value", "reason", "explicit"} == set(found["lines"][0])
    Path("script_parts.py").write_text("mine = 1\n")
    done = CliRunner().invoke(app, ["convert", "trl", "script.py", "--out", "run.yaml"])
    assert done.exit_code == 2
    assert "was not written by arborl convert" in done.output
    assert not Path("run.yaml").exists()
    Path("script_parts.py").unlink()
    for _ in range(2):  # its own module is written again
        assert CliRunner().invoke(app, ["convert", "trl", "script.py", "--out", "run.yaml"]).exit_code == 0
    assert yaml.safe_load(Path("run.yaml").read_text())["rewards"][0]["args"] == {"function": "script_parts:reward"}
