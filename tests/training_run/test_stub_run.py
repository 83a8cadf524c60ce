"""`--stub` runs a configuration of another machine: what is missing here is replaced, and mistakes stay errors."""

import json
import logging
import sys

import pytest
import yaml
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.training_run import train

RUN = {
    "name": "elsewhere",
    "model": {"name": "seedling"},
    "data": {"path": "/nowhere/train.parquet", "evaluation_path": "/nowhere/test.parquet", "max_prompt_tokens": 512},
    "rewards": [{"name": "data_source"}],
    "rollout": {"tasks_per_step": 1024, "group_size": 16},
    "sampling": {"max_tokens": 2048, "max_context": 32768},
    "trainer": {"epochs": 15},
    "track": {"trackers": [{"name": "wandb", "args": {"project": "theirs"}}]},
    "placement": {"name": "ray", "engines": 4, "device_mapping": {"engines": [4, 5, 6, 7]}},
    "learner": {"strategy": "fsdp2", "ranks": 4, "minibatches": 4},
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    def write(**more):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(RUN | more))
        return path

    return write


def check(path, *settings):
    return train(load(path, ["trainer.steps=1", *settings], unset="stub"), stub=True)


def episodes(done):
    return [json.loads(line) for path in (done.folder / "episodes").glob("step-*") for line in path.open()]


def metrics(done):
    return [json.loads(line) for line in (done.folder / "metrics.jsonl").open()]


def test_a_run_of_another_machine_runs_without_its_rows_its_gpus_and_its_tracker(file, caplog):
    with caplog.at_level(logging.WARNING):
        assert check(file()).summary["steps"] == 1
    assert "--stub replaces track.trackers.wandb, sampling.max_context by 4096, data.path" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_replaced_on_a_cpu_where_it_takes_minutes(file, dtype, caplog):
    master = "none" if dtype == "bfloat16" else "float32"
    model = {"name": "seedling", "dtype": dtype, "device": "cpu"}
    path = file(model=model, learner={"master": master}, placement={"name": "local"})
    with caplog.at_level(logging.WARNING):
        done = check(path)
    assert yaml.safe_load((done.folder / "config.yaml").read_text())["model"]["dtype"] == "float32"
    assert "model.dtype by auto" in caplog.text


def test_rows_by_a_column_are_replaced_with_rows_of_every_source(file):
    sources = {"taco": {"ratio": 0.5}, "nq": {"ratio": 0.5, "rewards": [{"name": "short_answer"}]}}
    done = check(file(data={"path": "rows.parquet", "by": "data_source", "sources": sources}, rewards=["equal"]))
    assert {episode["task"]["id"].partition("/")[0] for episode in episodes(done)} == {"taco", "nq"}


@pytest.mark.parametrize(
    "rewards",
    [
        [{"name": "judge", "args": {"fallback": "exact"}}],
        [{"name": "reward_model", "args": {"path": "/nowhere/model"}}],
        [{"name": "score_function", "args": {"function": "not_here:compute_score"}}],
        [{"name": "choice", "args": {"open": {"name": "judge", "args": {"fallback": "exact"}}}}],
    ],
)
def test_rewards_that_need_a_server_weights_or_a_package_are_replaced(file, rewards):
    played = episodes(check(file(rewards=rewards)))
    assert {value for episode in played for value in episode["rewards"].values()} == {0.0, 1.0}


def test_rows_for_letters_and_for_instructions_have_them(file):
    played = episodes(check(file(rewards=["choice", "ifeval"])))
    assert all(episode["failure"] is None for episode in played)
    assert {episode["task"]["fields"]["answer"] for episode in played} == {"B"}


@pytest.mark.parametrize("reward", ["data_source", "equal", "exact", "choice", "short_answer"])
def test_some_replies_to_replaced_rows_are_correct_so_the_check_takes_an_optimizer_step(file, reward):
    done = check(file(rewards=[reward]), "rollout.group_size=4")
    values = {episode["rewards"][reward] for episode in episodes(done)}
    assert max(values) == 1.0
    assert min(values) <= 0.0
    assert [line["learner/steps"] for line in metrics(done) if "learner/steps" in line] == [1]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"rewards": [{"name": "judge", "args": {"fallbak": "exact"}}]}, r"rewards.0.args.fallbak: unknown argument"),
        ({"rewards": ["nothing_like_this"]}, "nothing_like_this"),
        ({"rewards": [{"name": "not_here:reward"}]}, "not_here"),
        ({"env": {"name": "frozen_lake", "args": {"sise": 4}}, "data": {}}, "sise"),
    ],
)
def test_a_mistake_in_the_file_stays_an_error(file, more, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check(file(**more))


def test_tools_on_a_server_or_without_their_corpus_are_replaced(file):
    code = [{"server": "http://localhost:1", "protocol": "execute"}]
    assert check(file(agent={"name": "code"}, tools=code)).summary["steps"] == 1
    tools = [{"server": "http://localhost:1"}, {"name": "search", "args": {"corpus": "not-here.jsonl"}}]
    assert check(file(agent={"name": "tool"}, tools=tools)).summary["steps"] == 1
    args = {"search": {"corpus": "not-here.jsonl"}}
    assert check(file(agent={"name": "tool", "tool_args": args}, tools=["search"])).summary["steps"] == 1


def test_a_folder_that_holds_a_run_gets_a_new_name(file, tmp_path):
    path = file(output_dir="out")
    folders = [check(path).folder for _ in range(3)]
    assert [folder.name for folder in folders] == ["out", "out-2", "out-3"]


def test_models_beside_the_policy_are_replaced_by_it(file):
    args = {"teacher": "Qwen/Qwen3-32B"}
    assert check(file(algorithm={"name": "distill", "args": args}, rewards=[])).summary["steps"] == 1


def test_an_environment_variable_that_is_not_set_is_an_error_only_without_stub(file, monkeypatch):
    monkeypatch.delenv("THEIR_FOLDER", raising=False)
    path = file(data={"path": "${oc.env:THEIR_FOLDER}/train.parquet"})
    done = CliRunner().invoke(app, ["train", str(path), "trainer.steps=1", "--stub"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["train", str(path), "trainer.steps=1"])
    assert done.exit_code == 2
    assert "THEIR_FOLDER" in done.output


def test_steps_of_the_command_line_replace_epochs_of_the_file_and_the_reverse(file):
    assert load(file(), ["trainer.steps=3"]).trainer.epochs is None
    config = load(file(trainer={"steps": 7}), ["trainer.epochs=2"])
    assert (config.trainer.steps, config.trainer.epochs) == (None, 2)
    with pytest.raises(ConfigError, match="both set the length"):
        load(file(), ["trainer.steps=3", "trainer.epochs=2"])


def test_a_stub_run_is_marked_in_its_files_and_its_output_and_can_be_resumed(file, capsys):
    done = check(file())
    assert "elsewhere: stub, scripted replies: seedling learns question" in capsys.readouterr().out
    assert done.summary["stub"] is True
    assert "\nstub: true\n" in (done.folder / "config.yaml").read_text()
    again = CliRunner().invoke(app, ["train", "--resume", str(done.folder), "trainer.steps=2"])
    assert again.exit_code == 0, again.output
    assert json.loads((done.folder / "summary.json").read_text())["steps"] == 2


def test_an_environment_whose_package_is_not_installed_is_replaced_and_named(file, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "alfworld", None)
    alone = {"env": {"name": "alfworld", "args": {"max_steps": 4}}, "rewards": [{"name": "env"}]}
    with caplog.at_level(logging.WARNING):
        run = check(file(**alone), "rollout.max_turns=2", "evaluation.tasks=1")
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["env"]["name"] == "rooms"
    assert "env.name=alfworld by rooms" in caplog.text
    assert "pip install 'arborl[alfworld]'" in caplog.text
    with pytest.raises(ConfigError, match=r"env\.args\.max_stepz: unknown argument"):
        check(file(**alone | {"env": {"name": "alfworld", "args": {"max_stepz": 4}}}))
