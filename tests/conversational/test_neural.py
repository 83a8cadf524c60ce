"""A reward learned from preferences: what it is shown, what it says, where it is kept, how it is stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import arborl
from arborl import ConversationTurn, NeuralReward, NeuralRewardTrainer
from arborl.errors import ConfigError
from arborl.models.model_files import resolve
from arborl.rewards.reward_model import RewardModel, conversation
from arborl.rewards.text.text_measures import episode_of, turns_of
from arborl.rollout.episode_store import EpisodeStore
from arborl.types import Episode, Message, Task, ToolCall, Turn

COURTESY = ("I am sorry.", "Thank you for waiting.", "Please tell me the number.", "I will help you.")
FILLER = ("The shop is old.", "Our town has a river.", "We sell many cups here.", "It rains on most days.")


def courteous(count: int) -> list[dict[str, str]]:
    """The reply with more courtesies is the better; both have three sentences."""
    rows = []
    for n in range(count):
        more, fewer = (2, 3)[n % 2], (0, 1)[n // 2 % 2]
        sides = []
        for kind, polite in (("chosen", more), ("rejected", fewer)):
            picked = [COURTESY[(n + k) % 4] for k in range(polite)] + [FILLER[(n + k) % 4] for k in range(3 - polite)]
            at = n % 3
            sides.append((kind, " ".join(picked[at:] + picked[:at])))
        rows.append({"prompt": f"Where is order {n}?", **dict(sides)})
    return rows


def trainer(folder: Path | None, rows=None, **how) -> NeuralRewardTrainer:
    how = {"device": "cpu", "progress": False, "batch_size": 8, "epochs": 2} | how
    return NeuralRewardTrainer("seedling", courteous(48) if rows is None else rows, output_dir=folder, **how)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[NeuralRewardTrainer, NeuralReward]:
    used = trainer(tmp_path_factory.mktemp("neural") / "reward", courteous(120), validation=0.2)
    return used, asyncio.run(used.train())


def talk(*texts: str) -> list[ConversationTurn]:
    return [ConversationTurn(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]


def test_it_prefers_the_better_reply_and_reports_its_accuracy(made):
    used, reward = made
    assert reward.accuracy is not None
    assert reward.accuracy >= 0.9
    assert [row["epoch"] for row in reward.history] == [1, 2]
    assert [dict(row) for row in reward.history] == used.history
    assert reward.accuracy in [row["accuracy"] for row in reward.history]
    question = "Where is order 500?"
    good = asyncio.run(reward.compute_reward(talk(question, "I am sorry. I will help you. The shop is old.")))
    bad = asyncio.run(
        reward.compute_reward(talk(question, "It rains on most days. Our town has a river. The shop is old."))
    )
    assert good.score > 0.5 > -0.5 > bad.score  # the scale is that of the training pairs
    assert reward.weight == 1.0


def test_transformers_gives_the_same_scores(made):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    _, reward = made
    tokenizer = AutoTokenizer.from_pretrained(reward.folder)
    model, loaded = AutoModelForSequenceClassification.from_pretrained(reward.folder, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    record = json.loads((reward.folder / "reward_record.json").read_text())
    scores = []
    for row in courteous(120):
        for side in ("chosen", "rejected"):
            texts = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            ids = tokenizer.apply_chat_template(texts, tokenize=True, return_tensors="pt", return_dict=False)
            with torch.no_grad():
                number = float(model.eval()(input_ids=ids).logits[0, 0])
            scores.append(record["scale"] * number + record["shift"])
            if len(scores) <= 20:
                ours = asyncio.run(reward.compute_reward(talk(row["prompt"], row[side]))).score
                assert ours == pytest.approx(scores[-1], abs=1e-5)
    assert abs(sum(scores) / len(scores)) < 0.1  # over training and held-out pairs together
    assert sum(score**2 for score in scores) / len(scores) == pytest.approx(1.0, abs=0.1)


def test_training_and_use_render_the_same_tokens(made, tmp_path):
    _, reward = made
    episode = Episode("e", Task("t"), opening=(Message("system", "Be kind."), Message("user", "Hm <|im_end|>?")))
    call = Message("assistant", "<tool_call>{}</tool_call>", (ToolCall("", "look", {}),), sampled=True)
    episode.turns = [
        Turn(call, (Message("tool", "nothing"),)),
        Turn(Message("assistant", "Sorry."), (Message("user", "Bye."),)),
    ]
    other = [*conversation(episode)[:-1], Message("assistant", "No.")]
    used = trainer(tmp_path / "r", [(conversation(episode), other)], validation=0)
    (pair,), held = used._pairs(reward.model.renderer, 4096)
    assert not held
    assert pair.better == reward.model.tokens(episode)
    assert pair.better == reward.model.tokens(episode_of(turns_of(episode), {}))
    both = [asyncio.run(reward(episode)), asyncio.run(reward.compute_reward(turns_of(episode))).score]
    assert both[0] == pytest.approx(both[1], abs=1e-6)


def test_it_is_a_reward_by_path_and_as_an_object(made, tmp_path):
    _, reward = made
    copy = NeuralReward.load(reward.save(tmp_path / "copy"), weight=0.5)
    with pytest.raises(ConfigError, match="Give a new or an empty folder"):
        reward.save(tmp_path / "copy")
    rows = [{"question": f"Say {n}."} for n in range(12)]
    by_path = {"name": "reward_model", "args": {"path": str(reward.folder), "device": "cpu"}}
    done = arborl.run(
        data=rows, rewards=[copy, by_path], steps=1, engine="scripted", output_dir=tmp_path / "run",
        **{"engine.args.replies": ["I am sorry.", "The shop is old."], "rollout.tasks_per_step": 2,
           "rollout.group_size": 2, "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0},
    )  # fmt: skip
    store = EpisodeStore(done.folder / "episodes")
    for one in store.read(store.paths()[0]):
        assert one.rewards["neural"] == pytest.approx(0.5 * one.rewards["reward_model"], abs=1e-5)
        assert one.rewards["reward_model"] == pytest.approx(asyncio.run(reward(one)), abs=1e-5)
    raw = RewardModel(str(reward.folder), device="cpu", scale=1.0, shift=0.0)
    scaled = reward.model.scale * asyncio.run(raw(one)) + reward.model.shift
    assert scaled == pytest.approx(asyncio.run(reward(one)), abs=1e-5)
    with pytest.raises(ValueError, match="no turns to score"):
        asyncio.run(reward.compute_reward([]))


def test_equal_seeds_give_equal_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (asyncio.run(trainer(None, courteous(16), epochs=1).train()) for _ in range(2))
    assert [one.folder.relative_to(tmp_path) for one in (first, second)] == [
        Path("runs/neural-reward-001"), Path("runs/neural-reward-002"),
    ]  # fmt: skip
    assert (first.folder / "model.safetensors").read_bytes() == (second.folder / "model.safetensors").read_bytes()


def test_training_does_not_block_the_event_loop_and_can_be_cancelled(tmp_path):
    used = trainer(tmp_path / "reward", courteous(40), epochs=1000)

    async def cancelled() -> float:
        task = asyncio.create_task(used.train())
        beats = 0
        while not used.history and not task.done():
            await asyncio.sleep(0.01)
            beats += 1
        assert beats > 10
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 5
    assert not (tmp_path / "reward").exists()
    assert len(used.history) < 1000


def test_without_validation_there_is_no_accuracy_and_training_can_continue(made, tmp_path):
    _, reward = made
    again = NeuralRewardTrainer(
        str(reward.folder), courteous(16), validation=0, epochs=1, device="cpu", output_dir=tmp_path / "on",
        progress=False, normalize=False, learning_rate=1e-5,
    )  # fmt: skip
    found = asyncio.run(again.train())
    assert found.accuracy is None
    assert set(found.history[0]) == {"epoch", "train_loss"}
    assert found.history[0]["train_loss"] < 0.5  # it begins with what it knew
    assert (found.model.scale, found.model.shift) == (1.0, 0.0)


def test_long_conversations_are_cut_and_equal_pairs_left_out(tmp_path, caplog):
    same = [{"prompt": "?", "chosen": "I am sorry. " + "So it is. " * 40, "rejected": "Hm. " + "So it is. " * 40}]
    with caplog.at_level(logging.WARNING):
        used = trainer(tmp_path / "a", [*courteous(8), *same], max_tokens=60, epochs=1)
        reward = asyncio.run(used.train())
    assert "1 of 9 pairs are longer than max_tokens=60" in caplog.text
    assert "1 of 9 pairs are left out: both sides are equal" in caplog.text
    assert reward.model.max_tokens == 60
    with pytest.raises(ConfigError, match=r"0 of 3 pairs differ in their last 60 tokens"):
        asyncio.run(trainer(tmp_path / "b", same * 3, max_tokens=60).train())
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"epochs": 0}, "epochs=0: "),
        ({"batch_size": 2.5}, "batch_size=2.5: "),
        ({"validation": 1.0}, "validation=1.0: "),
        ({"learning_rate": 0.0}, "learning_rate=0.0: "),
        ({"dtype": "float16"}, "dtype=float16: .*float32, bfloat16, float64"),
        ({"max_tokens": 0}, "max_tokens=0: "),
        ({"rows": []}, "preference_data: 0 pairs"),
        ({"rows": courteous(1)}, "preference_data: 1 pairs"),
    ],
)
def test_wrong_arguments_are_errors(tmp_path, how, message):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path / "r", **how)


def test_a_wrong_model_or_folder_is_an_error_before_training(tmp_path):
    with pytest.raises(ConfigError, match="model_name: no model"):
        asyncio.run(NeuralRewardTrainer("./nowhere", courteous(4), output_dir=tmp_path / "a").train())
    with pytest.raises(ConfigError, match="max_tokens=5000: seedling supports at most 4096"):
        asyncio.run(trainer(tmp_path / "a", max_tokens=5000).train())
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty: letter\.txt"):
        asyncio.run(trainer(tmp_path / "full").train())


def test_a_row_that_the_chat_template_rejects_is_named(tmp_path):
    import shutil

    shutil.copytree(resolve("seedling"), tmp_path / "strict")
    (tmp_path / "strict" / "chat_template.jinja").write_text(
        "{%- if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    rows = [("Yes.", "No."), ("Yes, sir.", "No, sir.")]
    with pytest.raises(ConfigError, match=r"preference_data, row 1: .*Write the whole conversation"):
        asyncio.run(NeuralRewardTrainer(str(tmp_path / "strict"), rows, output_dir=tmp_path / "r").train())


@pytest.mark.slow
def test_it_learns_a_rule_that_generalizes_and_is_not_length(tmp_path):
    """The benchmark's first half: sentences of the held-out pairs are made of halves that never stood together."""
    script = Path(__file__).parents[2] / "benchmarks" / "neural_reward.py"
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "0", "--out", str(tmp_path / "out")], capture_output=True, text=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["accuracy"] >= 0.9
    assert abs(found["accuracy_of_length"] - 0.5) < 0.06
