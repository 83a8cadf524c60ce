"""A reward model says what transformers' own forward pass says, however episodes come to it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch

import arborl
from arborl.errors import ConfigError
from arborl.models.model_files import read_model_config, resolve
from arborl.registry import call_checked
from arborl.rewards import Rewards
from arborl.rewards.reward_model import RewardModel, RewardModelRecord, conversation
from arborl.rollout.episode_store import EpisodeStore
from arborl.types import Episode, Group, Message, Task, Turn


def classifier(folder: Path, labels: int = 1, pad: int | None = 0) -> Path:
    """A random model of a few thousand parameters that reads seedling's tokens."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=read_model_config(resolve("seedling"))["vocab_size"], hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        num_labels=labels, pad_token_id=pad,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (resolve("seedling") / name).exists():
            shutil.copyfile(resolve("seedling") / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return classifier(tmp_path_factory.mktemp("judge") / "model")


def episode(number: int, turns: int = 1) -> Episode:
    output = [
        Turn(Message("assistant", f"go {'on ' * (number + t)}"), (Message("user", "and then?"),)) for t in range(turns)
    ]
    opening = (Message("system", "Be brief."), Message("user", f"Where to, {number}?"))
    return Episode(f"e{number}", Task("t"), opening=opening, turns=output)


def theirs(folder: Path, one: Episode) -> float:
    """By transformers alone, each conversation by itself."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    messages = [{"role": message.role, "content": message.content} for message in conversation(one)]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return float(model(input_ids=ids).logits[0, 0])


@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("batch", [1, 3])
def test_scores_are_transformers_own_in_batches_of_any_size(folder, tmp_path, batch, pad):
    folder = folder if pad == 0 else classifier(tmp_path / "unpadded", pad=None)
    judge = RewardModel(str(folder), device="cpu", batch=batch, scale=2.0, shift=1.0)
    episodes = [episode(n, turns=1 + n % 3) for n in range(5)]

    async def ask() -> list[float]:
        return await asyncio.gather(*(judge(one) for one in episodes))

    expected = [2.0 * theirs(folder, one) + 1.0 for one in episodes]
    assert asyncio.run(ask()) == pytest.approx(expected, abs=1e-5)
    assert asyncio.run(ask()) == pytest.approx(expected, abs=1e-5)  # in a second event loop, too
    assert len({round(score, 5) for score in expected}) == 5
    assert judge.waiting == []


def test_the_conversation_ends_with_the_agents_last_message_and_keeps_its_end_when_it_is_long(folder):
    one = episode(2, turns=2)
    assert [message.role for message in conversation(one)] == ["system", "user", "assistant", "user", "assistant"]
    whole = RewardModel(str(folder), device="cpu").tokens(one)
    assert RewardModel(str(folder), device="cpu", max_tokens=9).tokens(one) == whole[-9:]
    requests = Episode("e", Task("t", messages=(Message("user", "hm?"),)))
    assert [message.content for message in conversation(requests)] == ["hm?"]


def test_one_that_gives_up_and_a_model_that_fails_cost_no_one_else(folder, monkeypatch):
    judge = RewardModel(str(folder), device="cpu", batch=2)

    async def some() -> list[object]:
        tasks = [asyncio.create_task(judge(episode(n))) for n in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(some())
    assert isinstance(found[1], asyncio.CancelledError)
    assert [found[n] for n in (0, 2, 3)] == pytest.approx([theirs(folder, episode(n)) for n in (0, 2, 3)], abs=1e-5)

    real = judge._scorer

    def broken(sequences):
        if any(len(tokens) == len(judge.tokens(episode(0))) for tokens in sequences):
            raise ValueError("no memory")
        return real(sequences)

    judge._scorer, judge.batch = broken, 1
    group = Group(Task("t"), [episode(0), episode(5)])
    asyncio.run(Rewards([("reward_model", judge, 1.0)], seconds=30).score([group]))
    first, second = group.episodes
    assert first.failure is not None
    assert "the reward model failed: no memory" in str(first.failure)
    assert second.rewards["reward_model"] == pytest.approx(theirs(folder, episode(5)), abs=1e-5)


def test_what_is_no_reward_model_is_refused_before_anything_is_read(folder, tmp_path):
    two = classifier(tmp_path / "two", labels=3)
    for given, output in (
        ({"path": str(two)}, "is a LlamaForSequenceClassification, not a sequence classifier with one label"),
        ({"path": str(resolve("seedling"))}, "is a LlamaForCausalLM, not a sequence classifier"),
        ({"path": "./nowhere"}, "path=./nowhere: no such folder. Give the folder of a reward model, or a Hugging Face"),
        ({"path": "org/nowhere"}, "no such folder exists, and the Hugging Face hub cannot be reached"),
        ({"path": str(tmp_path)}, "has no config.json"),
        ({"path": str(folder), "batch": 0}, "give 1 or more"),
        ({"path": str(folder), "dtype": "int8"}, "give float32"),
        ({"path": str(folder), "bach": 2}, "Did you mean 'batch'?"),
    ):
        with pytest.raises(ConfigError, match=output.replace("?", r"\?")):
            call_checked(RewardModel, given, "rewards.0.args")


def test_a_hugging_face_id_is_read_from_the_cache(folder, tmp_path, monkeypatch):
    """The tests have no network: a model that is not in the cache is an error, see above."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--judge"
    shutil.copytree(folder, cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    judge = call_checked(RewardModel, {"path": "org/judge", "device": "cpu"}, "rewards.0.args")
    assert judge.folder == cached / "snapshots" / "0123abcd"
    assert asyncio.run(judge(episode(2))) == pytest.approx(theirs(folder, episode(2)), abs=1e-5)


def test_what_the_folder_says_of_itself_holds_unless_it_is_stated_otherwise(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    RewardModelRecord(scale=2.0, shift=1.0, max_tokens=9).write(tmp_path / "model")
    judge = RewardModel(str(tmp_path / "model"), device="cpu")
    assert (judge.scale, judge.shift, judge.max_tokens) == (2.0, 1.0, 9)
    assert len(judge.tokens(episode(2))) == 9
    judge = RewardModel(str(tmp_path / "model"), device="cpu", scale=1.0, shift=0.0, max_tokens=4096)
    assert asyncio.run(judge(episode(2))) == pytest.approx(theirs(folder, episode(2)), abs=1e-5)
    for broken in ("{", "[1]", '{"scale": "2"}', '{"scale": NaN}', '{"max_tokens": 0}', '{"skale": 1}'):
        (tmp_path / "model" / "reward_record.json").write_text(broken)
        with pytest.raises(ValueError, match=r"reward_record\.json: not a record of a reward model"):
            RewardModel(str(tmp_path / "model"), device="cpu")


def test_a_run_learns_from_it(folder, tmp_path):
    rows = [{"question": f"Say {n}.", "answer": "yes"} for n in range(12)]
    done = arborl.run(
        data=rows, rewards=[{"name": "reward_model", "args": {"path": str(folder), "device": "cpu"}}], steps=1,
        engine="scripted", output_dir=tmp_path / "run",
        **{"engine.args.replies": ["Yes.", "No, never."], "rollout.tasks_per_step": 2, "rollout.group_size": 3,
           "evaluation.tasks": 0, "track.tensorboard": False, "track.gifs": 0},
    )  # fmt: skip
    store = EpisodeStore(done.folder / "episodes")
    for one in store.read(store.paths()[0]):
        assert one.rewards["reward_model"] == pytest.approx(theirs(folder, one), abs=1e-5)
    assert json.loads((done.folder / "summary.json").read_text())["steps"] == 1
