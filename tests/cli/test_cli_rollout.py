"""`arborl rollout` prints one episode token by token."""

from __future__ import annotations

from typer.testing import CliRunner

from arborl.cli.main import app

QUICK = ["--stub", "model.device=cpu", "threads=1"]


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, ["rollout", *words, *QUICK], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_a_stub_needs_no_engine():
    assert "rewards" in shown("engine=http", "engine.args.urls=[http://127.0.0.1:9]")


def test_tokens_masks_and_rewards_are_printed():
    text = shown("--env", "frozen_lake", "--agent", "chat")
    assert "turn 1  call 1  prompt" in text
    assert "mask  0 x " in text
    assert "1 x 4 sampled" in text
    assert "reward +0" in text
    assert "each one loss term" in text
    assert text.count("<|im_start|>system") == 1  # what was seen before is not shown again


def test_new_branches_are_marked():
    text = shown("--agent", "step", "agent.args.history_length=0", "env.args.frozen=1.0", "env.args.size=8")
    assert "(a new branch)" in text
    assert text.count("<|im_start|>system") > 1


def test_the_episode_is_the_one_of_training():
    first, again, other = (shown("--task", task, "--seed", "5") for task in ("1", "1", "2"))
    assert first.splitlines()[0] == again.splitlines()[0]
    assert first.splitlines()[0] != other.splitlines()[0]
    assert "train/000001-001" in first.splitlines()[0]
    assert "held_out" in shown("--held-out").splitlines()[0]


def test_ids_prints_token_ids():
    assert "[2]" in shown("--ids")


def test_a_failed_episode_is_printed_with_exit_code_1(tmp_path, monkeypatch):
    (tmp_path / "breaking_lake.py").write_text(
        "from arborl.envs.games.frozen_lake import FrozenLake\n"
        "class Breaking(FrozenLake):\n"
        "    async def step(self, action):\n"
        "        raise RuntimeError('the ice broke')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(app, ["rollout", "--env", "breaking_lake:Breaking", *QUICK])
    assert done.exit_code == 1
    assert "the ice broke" in done.output
