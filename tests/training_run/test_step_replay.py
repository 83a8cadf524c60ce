"""A step runs again from the files of its run, with equal numbers, and its tokens and episodes can be questioned."""

import json
import shutil

import numpy as np
import pytest
from small_runs import invoke

import arborl
from arborl.errors import ConfigError
from arborl.rollout.episode_store import EpisodeStore
from arborl.training_run import run_folder
from arborl.training_run.build import build
from arborl.training_run.step_analysis import (
    TokenExplainer,
    cosine,
    dot,
    mean_advantages,
    policy_gradient,
    step_without,
)
from arborl.training_run.step_replay import StepFiles, StepReplayer

SMALL = {
    "rollout.tasks_per_step": 2, "rollout.group_size": 3, "evaluation.tasks": 0, "track.tensorboard": False,
    "env.args.size": 3, "env.args.max_steps": 4, "track.timeline": 0, "track.gifs": 0, "model.device": "cpu",
    "trainer.save_every": 2, "trainer.keep": 10, "trainer.steps": 2,
}  # fmt: skip
EVERY_GROUP = {"algorithm.skip_zero_variance": False}
KINDS = {
    "grpo": EVERY_GROUP | {"learner.epochs": 2, "learner.minibatches": 2},
    "ppo with a critic": {"algorithm": "ppo"},
    "reference KL, adapted to a target": {
        "algorithm": "reinforce_plus_plus", "algorithm.kl": {"coef": 0.1, "where": "reward", "target": 0.1},
    },
    "pipelined": EVERY_GROUP | {"rollout.max_lag": 1, "threads": 2},
    "greedy baseline": {"algorithm": "remax"},
    "adapters with dropout": EVERY_GROUP | {"model.lora.rank": 4, "model.lora.dropout": 0.1, "algorithm.kl.coef": 0.1},
}  # fmt: skip


def train(folder, **more) -> None:
    arborl.run(**{**SMALL, **more}, output_dir=folder)


def check_equal(folder, step, start):
    result = arborl.replay(folder, step)
    assert result.differences == []
    assert result.earlier == []
    assert result.start == start
    assert {"policy/loss", "learner/grad_norm", "learner/advantage_abs"} <= result.metrics.keys()
    assert result.compared > 20
    assert not result.notes
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "run"
    train(folder, **EVERY_GROUP, **{"trainer.steps": 3, "trainer.save_every": 1})
    return folder


def varied_group(run):
    """A step after the first, and the place of a group in it whose rewards differ."""
    for step in (2, 3):
        for number, group in enumerate(EpisodeStore.read_groups(run / "episodes" / f"step-{step:06}.jsonl")):
            if len({episode.reward for episode in group.episodes}) > 1:
                return step, number
    raise AssertionError("no group has an advantage: change the seed of the run")


SLOW_KINDS = ("greedy baseline", "adapters with dropout")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW_KINDS)) for kind in KINDS]
)
def test_a_step_is_bit_equal(tmp_path, kind):
    train(tmp_path / "run", **KINDS[kind])
    result = check_equal(tmp_path / "run", step=2, start=0)  # both updates again, from the initial model
    assert result.weights.tensors > 10
    assert result.weights.different == []


def test_the_steps_of_a_resumed_run_have_their_own_settings(tmp_path):
    folder = tmp_path / "run"
    train(folder, **EVERY_GROUP, **{"trainer.steps": 1, "learner.decay": "linear"})
    more = {"trainer.steps": 2, "learner.lr": 3e-3}
    arborl.run(**{**SMALL, **EVERY_GROUP, **more}, output_dir=folder, resume="latest")
    check_equal(folder, step=2, start=1)
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    result = check_equal(folder, step=2, start=0)  # across the change of settings
    assert result.weights.different == []
    assert StepFiles.of(folder).config_file(1).name == "config.before-step-000001.yaml"
    run_folder.remove_later_configs(folder, 0)  # as a run that is resumed before them
    assert StepFiles.of(folder).config_file(1).name == "config.yaml"


def test_a_replay_of_a_run_with_several_ranks_says_why_numbers_may_differ(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    config = (folder / "config.yaml").read_text()
    assert "  ranks: 1\n" in config
    (folder / "config.yaml").write_text(
        config.replace("  ranks: 1\n", "  ranks: 2\n").replace("  strategy: single\n", "  strategy: ddp\n")
    )
    assert ["2 learner ranks" in note for note in arborl.replay(folder, 2).notes] == [True]


def test_demonstrations_beside_the_episodes_are_part_of_the_files(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
        for word in ("yes", "no", "left", "right")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"path": str(tmp_path / "rows.jsonl"), "batch": 2, "steps": 1, "weight": 0.5}  # then a new reference
    train(tmp_path / "run", **EVERY_GROUP, **{"demonstrations": more, "algorithm.kl.coef": 0.1})
    (tmp_path / "rows.jsonl").unlink()
    assert "sft/loss" in check_equal(tmp_path / "run", step=2, start=0).metrics


def test_a_changed_reward_is_a_difference(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    path = folder / "episodes" / "step-000003.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["rewards"] = {"env": 5.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = arborl.replay(folder, 3)
    assert not result.equal
    assert "learner/grad_norm" in {one.name for one in result.differences}
    assert result.weights.different
    assert result.weights.largest > 0
    done = invoke("replay", str(folder), "--step", "3", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["equal"] is False


def test_files_that_are_missing_are_named_with_what_to_write(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--step 9: .* from 1 to 3"):
        arborl.replay(folder, 9)
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    (folder / "episodes" / "step-000001.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"step-000001.jsonl.*initial model.*trainer.save_every=1"):
        arborl.replay(folder, 2)
    shutil.rmtree(folder / "episodes")
    with pytest.raises(ConfigError, match=r"step-000003.jsonl.*track.episodes=true"):
        arborl.replay(folder, 3)
    with pytest.raises(ConfigError, match="contains no run"):
        arborl.replay(tmp_path, 3)


def test_a_damaged_checkpoint_is_passed_over(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    weights = folder / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    check_equal(folder, step=3, start=1)


def test_the_groups_of_a_file_are_those_that_were_written(run, tmp_path):
    groups = EpisodeStore.read_groups(run / "episodes" / "step-000001.jsonl")
    assert [len(group.episodes) for group in groups] == [3, 3]
    groups[0].greedy, groups[0].episodes = 0.25, groups[1].episodes[:1]  # two groups of one task
    path = EpisodeStore(tmp_path).write(1, [groups[0], groups[1], type(groups[0])(groups[0].task, [])])
    found = EpisodeStore.read_groups(path)
    assert [len(group.episodes) for group in found] == [1, 3, 0]
    assert found[0].greedy == 0.25


@arborl.reward
def equal_in_the_first_group(episode) -> float:
    return 1.0 if episode.task.id.endswith("-000") else float(episode.id[-1])


def test_a_token_that_was_not_trained_has_the_reason_of_the_accounting(tmp_path):
    train(tmp_path / "run", rewards=[equal_in_the_first_group], **{"trainer.steps": 1})
    with StepReplayer(tmp_path / "run", 1) as replayer:
        replayer.replay()
        explainer = TokenExplainer(replayer)
        reasons = {
            place.episode.id[-5:-2]: explainer.token(place.episode.id, 0, 0).not_trained for place in explainer.places
        }
    assert reasons == {"000": "dropped by the algorithm: zero_variance", "001": ""}


def test_a_token_is_explained_by_numbers_that_can_be_computed_otherwise(run):
    step, number = varied_group(run)
    group = EpisodeStore.read_groups(run / "episodes" / f"step-{step:06}.jsonl")[number]
    rewards = np.array([one.reward for one in group.episodes])
    episode = group.episodes[int(np.argmax(rewards))]
    with StepReplayer(run, step) as replayer:
        replayer.replay()
        explainer = TokenExplainer(replayer)
        rows = [row for place in explainer.places for row in explainer.tokens(place.episode.id)]
        found = explainer.token(episode.id, 0, 1)
        replayer.restore()
        whole = policy_gradient(replayer, replayer.done.batch)
    call, advantage = episode.calls[0], (rewards.max() - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    sampled = call.completion
    logprob, gradient = logprob_and_gradient(run, step - 1, [*call.prompt, sampled.tokens[0]], sampled.tokens[1])
    row = found.row
    assert row.sampling_logprob == sampled.logprobs[1]
    assert row.logprob == pytest.approx(logprob, abs=1e-4)
    assert row.advantage == pytest.approx(advantage, rel=1e-3)
    assert advantage > 0.5
    assert row.ratio == pytest.approx(np.exp(row.logprob - sampled.logprobs[1]), rel=1e-5)
    assert row.clipped is False
    assert row.pull == pytest.approx(-row.ratio * advantage * row.weight, rel=1e-3)
    assert found.advantage["group_mean"] == pytest.approx(rewards.mean())
    assert found.advantage["group_rewards"] == {one.id: one.reward for one in group.episodes}
    assert found.context.endswith("<answer>")
    assert row.address == f"{episode.id}:0:1"
    own = {name: row.pull * value for name, value in gradient.items()}
    assert found.gradient_norm == pytest.approx(np.sqrt(dot(own, own)), rel=1e-3)
    assert found.gradient_norm > 1e-4
    assert found.gradient_share == pytest.approx(dot(own, whole) / dot(whole, whole), rel=1e-2)
    assert np.sqrt(dot(whole, whole)) == pytest.approx(replayer.done.metrics["learner/grad_norm"], rel=1e-5)
    assert sum(row.logit_share for row in rows) == pytest.approx(1.0)


def logprob_and_gradient(run, step, prompt, token):
    """With transformers alone, from the weights after a step."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step-{step:06}" / "model")
    logprob = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)[token]
    logprob.backward()
    return float(logprob.detach()), {f"model.{name}": p.grad for name, p in model.named_parameters()}


def test_a_step_without_an_episode_is_that_of_the_smaller_batch(run):
    step, number = varied_group(run)
    groups = EpisodeStore.read_groups(run / "episodes" / f"step-{step:06}.jsonl")
    best = int(np.argmax([episode.reward for episode in groups[number].episodes]))
    removed = groups[number].episodes[best].id
    with StepReplayer(run, step) as replayer:
        replayer.replay()
        found = step_without(replayer, [removed])
        replayer.restore()
        base = replayer.batch(groups, step)
        old, gradient = mean_advantages(base), policy_gradient(replayer, base)
        groups[number].episodes.pop(best)
        smaller = replayer.batch(groups, step)
        expected = cosine(gradient, policy_gradient(replayer, smaller))
        metrics = replayer.parts.learner.update(
            smaller.forest.trees, smaller.terms, replayer.parts.algorithm, smaller.episode_ids
        )
    assert found.numbers["loss"][1] == pytest.approx(metrics["policy/loss"], abs=1e-7)
    assert found.numbers["grad_norm"][1] == pytest.approx(metrics["learner/grad_norm"], rel=1e-5)
    assert found.gradient_cosine == pytest.approx(expected, abs=1e-6)
    assert found.gradient_cosine < 0.99999
    assert found.numbers["update_norm"][0] > 0
    assert abs(found.update_cosine) < 0.99999
    new = mean_advantages(smaller)
    others = {one.episode: (one.recorded, one.without) for one in found.advantages}
    assert others == {one.id: (old[one.id], new.get(one.id)) for one in groups[number].episodes}


def test_the_command_prints_and_refuses(run):
    episode = EpisodeStore.read_groups(run / "episodes" / "step-000003.jsonl")[0].episodes[0].id
    done = invoke("replay", str(run), "--step", "3", "--explain", f"{episode}:0:0", "--without", episode)
    assert done.exit_code == 0
    assert "equal: all" in done.stdout
    assert "share of the step's gradient" in done.stdout
    assert "cosine of the gradients" in done.stdout
    tree = json.loads(invoke("replay", str(run), "--step", "3", "--explain", episode, "--json").stdout)
    assert tree["tokens"][0]["address"] == f"{episode}:0:0"
    assert tree["weights"]["different"] == []
    wrong = invoke("replay", str(run), "--step", "3", "--explain", f"{episode}:0:9999")
    assert wrong.exit_code == 2
    assert "call 0 sampled" in wrong.stderr
    unknown = invoke("replay", str(run), "--step", "3", "--without", "nobody")
    assert unknown.exit_code == 2
    assert "no such episode" in unknown.stderr


def test_replay_makes_no_environment_engine_or_reward(run, monkeypatch):
    from arborl.training_run import part_factory

    for name in ("episode_factories", "rewards", "engine", "rollout", "tools"):
        monkeypatch.delattr(part_factory.RunPartFactory, name)
    check_equal(run, step=3, start=2)
    with pytest.raises(AttributeError):
        build(replay_config(run))


def replay_config(run):
    from arborl.config.load_config import load

    return load(run / "config.yaml")
