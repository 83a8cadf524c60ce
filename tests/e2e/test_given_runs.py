"""Runs that learn from given data: transcripts, pairs, labels; demonstrations before and during reinforcement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import invoke, settled, weights

from arborl.config.load_config import load
from arborl.errors import ConfigError
from arborl.rollout.runner import Rollout
from arborl.training_run import MeasureOptions, measure, train

QUIET = [
    "track.gifs=0", "track.tensorboard=false", "deterministic=true", "threads=1", "model.device=cpu",
    "trainer.save_every=1", "trainer.keep=9",
]  # fmt: skip
GIVEN = [*QUIET, "rollout.tasks_per_step=4", "trainer.steps=3"]
DEMONSTRATED = [
    *QUIET, "rollout.tasks_per_step=2", "rollout.group_size=3", "env.args.size=3", "env.args.max_steps=3",
    "trainer.steps=4", "evaluation.tasks=1", "evaluation.greedy=false", "algorithm.skip_zero_variance=false",
    "algorithm.kl.coef=0.01", "demonstrations.steps=2", "demonstrations.batch=3", "demonstrations.weight=0.2",
]  # fmt: skip
CHAT = (("Hello!", "Hi! What can I do for you?"), ("Say yes.", "Yes."), ("Who are you?", "My name is seedling."))


def rows(kind: str) -> list[dict]:
    requested = [(f"{question} {number}", answer) for number in range(7) for question, answer in CHAT]
    if kind == "sft":
        return [{"prompt": question, "completion": answer} for question, answer in requested]
    if kind == "kto":
        return [
            {"prompt": question, "completion": answer if number % 2 else "No.", "label": bool(number % 2)}
            for number, (question, answer) in enumerate(requested)
        ]
    return [{"prompt": question, "chosen": answer, "rejected": "No, no."} for question, answer in requested]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for kind in ("sft", "dpo", "ipo", "kto"):
        (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows(kind))))
    return folder


@pytest.fixture(autouse=True)
def nothing_is_sampled(request, monkeypatch):
    """Where rows are given, nothing plays."""
    if "given" in request.node.name:

        async def no_playing(self, *args):
            raise AssertionError("given rows are not played")

        monkeypatch.setattr(Rollout, "play", no_playing)

    async def no_pictures(parts, home, episodes, step):
        return {}

    if "[sft]" not in request.node.name:  # drawing takes longer than training here
        monkeypatch.setattr("arborl.training_run.run_session.write_artifacts", no_pictures)


SLOW = pytest.mark.slow
AT_FIRST = {"dpo": 0.693147, "ipo": 25.0, "kto": 0.5}
"""Losses where policy and reference are one: log 2, 1 / (4 beta^2), one half."""


@pytest.mark.parametrize("name", ["sft", "dpo", pytest.param("ipo", marks=SLOW), pytest.param("kto", marks=SLOW)])
def test_a_run_on_given_rows_lowers_the_held_out_loss_and_goes_on_exactly(name, files, tmp_path):
    settings = [*GIVEN, f"algorithm={name}", f"data.path={files / name}.jsonl", "evaluation.every=2"]
    run = train(load(None, [*settings, f"output_dir={tmp_path / 'whole'}"]))
    before, after = run.summary["before"], run.summary["after"]
    assert after["loss"] < before["loss"]
    assert after["tasks"] > 0
    if name == "sft":
        assert after["perplexity"] < before["perplexity"]
    else:
        assert after["accuracy"] > before["accuracy"] == 0.5
        assert before["loss"] == pytest.approx(AT_FIRST[name], rel=1e-5)
    metrics = settled(tmp_path / "whole")
    steps = [row for row in metrics if "policy/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert name == "sft" or steps[0]["policy/loss"] == pytest.approx(AT_FIRST[name], rel=1e-5)
    assert not any(key.startswith(("reward/", "group/", "policy/logprob_diff")) for row in steps for key in row)
    first, final = weights(tmp_path / "whole"), settled(tmp_path / "whole")
    train(load(None, [*settings, f"output_dir={tmp_path / 'whole'}"]), resume="2")
    again = weights(tmp_path / "whole")
    assert all((first[key] == again[key]).all() for key in first)
    assert settled(tmp_path / "whole") == final
    assert name != "sft" or (tmp_path / "whole" / "curve.png").exists()


@pytest.mark.slow
def test_demonstrations_come_first_then_beside_and_both_phases_go_on_exactly(files, tmp_path):
    home, path = tmp_path / "whole", f"demonstrations.path={files / 'sft'}.jsonl"
    settings = [*DEMONSTRATED, path, f"output_dir={home}"]
    train(load(None, settings))
    steps = [row for row in settled(home) if "policy/loss" in row]
    alone, mixed = steps[:2], steps[2:]
    assert [row["sft/loss"] for row in alone] == pytest.approx([row["policy/loss"] for row in alone])
    assert not any("reward/mean" in row or "policy/ratio" in row for row in alone)
    assert all("reward/mean" in row and row["sft/loss"] > 0 for row in mixed)
    assert mixed[0]["policy/kl"] == pytest.approx(0, abs=1e-6)  # to the policy that imitation has made
    assert mixed[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert mixed[0]["policy/loss"] == pytest.approx(0.2 * mixed[0]["sft/loss"], abs=1e-4)  # at ratio 1 GRPO's is 0
    assert [row["step"] for row in settled(home) if "evaluation/reward" in row] == [0, 2, 4]  # and between the phases
    rates = [row["learner/lr"] for row in steps]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4  # one schedule over both phases
    first, whole = weights(home), settled(home)
    for step in ("3", "1"):
        train(load(None, settings), resume=step)
        again = weights(home)
        assert all((first[key] == again[key]).all() for key in first)
        assert settled(home) == whole
    with pytest.raises(ConfigError, match=r"demonstrations.steps=1: the checkpoint was made with 2"):
        train(load(None, [*settings, "demonstrations.steps=1"]), resume="3")


def test_demonstrations_may_come_from_a_function_and_have_a_learning_rate_of_their_own(tmp_path):
    rows = (
        "demonstrations.rows={name: 'arborl.seedling.transcript_rows:transcript_rows', "
        "args: {kind: frozen_lake, count: 12}}"
    )
    own = [rows, "demonstrations.rows.args.skill=0.5", "demonstrations.imitation_lr=3e-3", "learner.lr=1e-4"]
    train(load(None, [*DEMONSTRATED, *own, f"output_dir={tmp_path / 'run'}"]))
    steps = [row for row in settled(tmp_path / "run") if "policy/loss" in row]
    assert [row["learner/lr"] for row in steps] == pytest.approx([3e-3, 3e-3, 1e-4, 5e-5])
    assert [row.get("data/demonstrations/unseen") for row in steps[:2]] == [9, 6]


def test_measuring_a_run_does_not_make_its_demonstrations_again():
    requested = "demonstrations={rows: 'no_such_package:rows', steps: 2}"
    (played,) = measure(["seedling"], MeasureOptions([*QUIET, requested, "evaluation.tasks=1"], [1.0]))
    assert played.metrics["tasks"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demonstrations={path: FILE, rows: a:b, steps: 3}"], "transcripts come from one of them"),
        (["demonstrations={path: FILE, weight: 0.1, imitation_lr: 1e-3}"], "Write steps=20 too"),
        (["algorithm=sft", "data.path=FILE", "rollout.group_size=4"], "rollout.group_size: not read in an offline run"),
        (["algorithm=sft", "data.path=FILE", "engine=local"], "engine=local: an offline run samples nothing"),
        (["algorithm=sft", "data.path=FILE", "tools=[calculator]"], "tools: not read in an offline run"),
        (["data.offline=true", "data.path=FILE"], "algorithm.loss=ppo: offline runs have one of the losses"),
        (["algorithm=sft", "data.offline=true"], "data.offline: a source has no rows. Write data.path=FILE"),
        (["algorithm=kto", "data.path=FILE", "rollout.tasks_per_step=1"], "Write rollout.tasks_per_step=2 or more"),
        (["engine=none"], "engine=none samples nothing, and this run is not offline"),
        (["demonstrations.path=FILE"], "Write steps=20, or weight=0.1"),
        (["demonstrations.steps=3"], "steps or weight is set, but there are no demonstrations. Write path=FILE"),
        (["demonstrations={path: FILE, steps: 30}"], "no step is left for reinforcement learning"),
        (["algorithm=distill"], "there is no teacher. Write algorithm.args.teacher=MODEL"),
        (["algorithm.args.teacher=seedling"], "algorithm.args.teacher: is not read with"),
        (
            ["algorithm=distill", "algorithm.args.teacher=http://x", "sampling.top_p=0.9"],
            "at temperature 1 over all tokens",
        ),
    ],
)
def test_unused_or_contradictory_settings_are_refused(words, says):
    done = invoke("train", "--print", *words)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_rows_of_questions_are_still_played_where_rewards_judge_them():
    config = load(None, ["algorithm=sft", "data.path=questions.json", "rewards=[exact]"])
    assert not config.data.offline
    assert config.engine.name == "local"


def test_a_bad_row_ends_the_run_before_anything_is_written(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "6*7?"}]}\n')
    done = invoke("train", "algorithm=sft", f"data.path={tmp_path / 'rows.jsonl'}", f"output_dir={tmp_path / 'out'}")
    assert done.exit_code == 2
    assert "rows.jsonl, line 1, messages: there is no assistant message" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()
