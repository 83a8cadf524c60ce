"""TRL's trainer on our agents: what it is given, what it makes of it, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from contextlib import contextmanager

import pytest
import torch

from arborl import (
    AgentConfig,
    Environment,
    EnvironmentState,
    MultiTurnAgent,
    TrainingConfig,
    TRLGRPOTrainerWrapper,
    reward_function,
    train,
)
from arborl.conversational import trl_trainer as wrapper_module
from arborl.conversational.agent_training import run_config
from arborl.conversational.trl_trainer import episode_tokens, fail_branched, rollout_batch, rollout_config
from arborl.conversational.trl_trainer import trl_arguments as trl_settings
from arborl.errors import ConfigError, EpisodeError, RunStopped
from arborl.models.model_loading import read_weights, resolve
from arborl.rollout.episode_store import EpisodeStore
from arborl.training_run.build import build
from arborl.types import Call, Completion, Episode, FinishReason, Task

pytest.importorskip("trl")
from trl import GRPOConfig

QUESTION = ("Hello!", "Who are you?", "Good morning. How is it going?", "What can you do?", "Thank you.", "Goodbye.")


class Talk(Environment):
    """Two questions, of different lengths from scenario to scenario."""

    scenarios = [{"id": f"{a}-{b}", "first": a, "second": b} for a in QUESTION[:3] for b in QUESTION[3:]]

    async def reset(self, scenario=None):
        texts = [{"role": "user", "content": scenario["first"]}]
        return EnvironmentState(texts, {"turn": 0, "second": scenario["second"]})

    async def step(self, state, action):
        turn = state.metadata["turn"]
        return EnvironmentState((), {**state.metadata, "turn": turn + 1}), state.metadata["second"], 0.0, turn == 1


@reward_function
def short(turns, context=None):
    """The fewer characters the better."""
    return 1.0 - min(sum(len(turn.content) for turn in turns if turn.role == "assistant") / 60, 1.0)


def settings(folder, **more):
    usual = {"num_episodes": 2, "num_generations": 4, "gradient_accumulation_steps": 2, "warmup_ratio": 0.0}
    return TrainingConfig(**usual | {"output_dir": folder, "eval_num_generations": 2, "logging_steps": 1} | more)


def agent(**more):
    return MultiTurnAgent(AgentConfig(max_new_tokens=12, **more))


def rows(trained, step=1):
    """Episodes of a step as they are on disk."""
    return list(EpisodeStore.read(trained.run_folder / "episodes" / f"step-{step:06}.jsonl"))


def texts(episodes):
    return [[list(call.completion.tokens) for call in episode.calls] for episode in episodes]


@contextmanager
def watching():
    """Every batch that TRL makes of what it is given, and by how much its model, at that time, and our engine disagree
    about the likelihood of what was sampled."""
    from trl import GRPOTrainer

    honest, seen, gaps = GRPOTrainer._generate_and_score_completions, [], []

    def watched(trainer, inputs):
        batch = honest(trainer, inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        there = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            size = batch["completion_ids"].shape[1]
            theirs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, there, size)[0]
        trained_on = batch["completion_mask"] * batch["tool_mask"]
        seen.append({name: value.clone() for name, value in batch.items()})
        gaps.append(((theirs - batch["sampling_per_token_logps"]) * trained_on).abs().max().item())
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
        yield seen, gaps


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of two updates, and what TRL made of it."""
    chosen = settings(tmp_path_factory.mktemp("trl") / "run", num_episodes=4, lr_scheduler="none")
    with watching() as (seen, gaps):
        trained = asyncio.run(TRLGRPOTrainerWrapper(agent(), Talk(), short, chosen).train())
    return trained, seen, gaps


def test_the_batch_contains_the_recorded_ids(done):
    trained, seen, _ = done
    assert len(seen) == 2
    for step, batch in enumerate(seen, 1):
        episodes = rows(trained, step)
        assert len(episodes) == len(batch["prompt_ids"]) == 8
        assert batch["prompt_mask"].all()  # nothing is padded on the left
        for number, episode in enumerate(episodes):
            real = batch["completion_mask"][number].bool()
            ids = [*batch["prompt_ids"][number].tolist(), *batch["completion_ids"][number][real].tolist()]
            last = episode.calls[-1]
            assert ids == [*last.prompt, *last.completion.tokens]
            trained_on = batch["completion_ids"][number][real & batch["tool_mask"][number].bool()].tolist()
            assert trained_on == [token for call in episode.calls for token in call.completion.tokens]


def test_loss_and_gradient_are_those_of_the_formula(done):
    """GRPO as published: advantages of the group, the mean over a conversation's sampled tokens, then over all."""
    trained, *_ = done
    episodes = rows(trained)
    rewards = torch.tensor([episode.reward for episode in episodes]).view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    model = read_weights(resolve("seedling"), dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    loss = torch.zeros(())
    for episode, advantage in zip(episodes, advantages.flatten(), strict=True):
        last = episode.calls[-1]
        ids = torch.tensor([[*last.prompt, *last.completion.tokens]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        places = [len(c.prompt) + at - 1 for c in episode.calls for at in range(len(c.completion.tokens))]
        sampled = logprobs[places]
        loss = loss - advantage * (sampled - sampled.detach()).exp().mean() / len(episodes)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    first = json.loads((trained.run_folder / "metrics.jsonl").read_text().splitlines()[1])
    assert first["trl/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert first["trl/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert norm > 0.05


def test_the_first_conversations_equal_those_of_arborl_train(done, tmp_path):
    trained, *_ = done
    ours = asyncio.run(train(agent(), Talk(), short, config=settings(tmp_path / "ours")))
    assert texts(rows(trained)) == texts(rows(ours))
    assert trained.summary["before"] == ours.summary["before"]  # measured the same way


def test_the_second_step_is_sampled_from_the_updated_weights(done):
    trained, _, gaps = done
    assert {call.completion.version for episode in rows(trained, 2) for call in episode.calls} == {1}
    assert max(gaps) < 1e-4
    assert len(gaps) == 2


@pytest.mark.slow
def test_a_model_with_learned_positions_and_dropout(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "n_positions": 256, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=2)).save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(resolve("seedling") / name, tmp_path / "gpt2" / name)
    speaker = MultiTurnAgent(AgentConfig(model_name=str(tmp_path / "gpt2"), max_new_tokens=6))
    chosen = settings(tmp_path / "run", num_episodes=4, learning_rate=1e-2, eval_share=0)
    with watching() as (seen, gaps):
        asyncio.run(TRLGRPOTrainerWrapper(speaker, Talk(), short, chosen).train())
    assert any(not batch["tool_mask"][:, 0].all() for batch in seen)  # prompts of different lengths were in a batch
    assert max(gaps) < 1e-4


def test_the_trained_agent_has_new_weights_and_the_original_the_old(done):
    trained, *_ = done
    assert isinstance(trained, MultiTurnAgent)
    assert set(trained.summary) >= {"before", "after", "steps"}
    assert trained.summary["steps"] == 2
    old = read_weights(resolve("seedling"), dtype=torch.float32).state_dict()
    new = read_weights(resolve(trained.config.model_name), dtype=torch.float32).state_dict()
    assert any(not torch.equal(old[name], new[name]) for name in old)
    reply = asyncio.run(trained.generate_response([{"role": "user", "content": "Hello!"}]))
    assert isinstance(reply, str)


@pytest.mark.slow
def test_adapters_are_trained_and_saved_merged(tmp_path):
    chosen = settings(tmp_path / "run", use_lora=True, lora_r=4, kl_penalty=0.1, learning_rate=1e-2, bf16=True)
    trained = asyncio.run(TRLGRPOTrainerWrapper(agent(), Talk(), short, chosen).train())
    arguments = json.loads((tmp_path / "run" / "trl.json").read_text())
    assert arguments["beta"] == 0.1
    assert arguments["bf16"]
    folder = resolve(trained.config.model_name)
    assert not (folder / "adapter_config.json").exists()
    old = read_weights(resolve("seedling"), dtype=torch.float32).state_dict()
    new = read_weights(folder, dtype=torch.float32).state_dict()
    moved = {name.rpartition(".weight")[0].rpartition(".")[2] for name in old if not torch.equal(old[name], new[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_every_setting_reaches_trl(tmp_path):
    chosen = settings(
        tmp_path / "run", num_episodes=6, num_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=3,
        algorithm="dapo", clip_range_left=0.1, clip_range_right=0.3, learning_rate=2e-4, adam_beta1=0.8,
        adam_beta2=0.9, weight_decay=0.01, max_grad_norm=0.5, warmup_ratio=0.5, lr_scheduler="linear",
        entropy_coef=0.01, temperature=0.7, save_steps=7, save_total_limit=3, logging_steps=5, seed=11,
    )  # fmt: skip
    run, objects = run_config(agent(), Talk(), [short], chosen)
    arguments = GRPOConfig(**trl_settings(run, chosen, build(rollout_config(run), objects), tmp_path)).to_dict()
    assert {name: arguments[name] for name in EXPECTED} == EXPECTED


EXPECTED = {
    "max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "num_generations": 4,
    "loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.3, "learning_rate": 2e-4, "adam_beta1": 0.8,
    "adam_beta2": 0.9, "weight_decay": 0.01, "max_grad_norm": 0.5, "warmup_steps": 1, "lr_scheduler_type": "linear",
    "entropy_coef": 0.01, "temperature": 0.7, "save_steps": 7, "save_total_limit": 3, "logging_steps": 5, "seed": 11,
    "beta": 0.0, "bf16": False,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is handed over


def call(prompt, tokens, trained=True):
    return Call(tuple(prompt), Completion(tuple(tokens), (-1.0,) * len(tokens), FinishReason.STOP), 0, trained=trained)


def episode(*calls, name="one"):
    return Episode(name, Task(name), calls=list(calls))


def test_prompt_tokens_are_masked():
    ids, mask, logprobs = episode_tokens(
        episode(call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6]), call([*range(1, 8)], [8]))
    )
    assert ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert mask == [0, 0, 1, 1, 0, 1, 0, 1]
    assert logprobs == [0.0, 0.0, -1.0, -1.0, 0.0, -1.0, 0.0, -1.0]


def test_untrained_calls_are_masked():
    assert episode_tokens(episode(call([1], [2], trained=False), call([1, 2, 3], [4])))[1] == [0, 0, 0, 1]


def test_prompts_are_cut_to_the_shortest():
    batch = rollout_batch([episode(call([1, 2], [3])), episode(call([1, 5, 6, 7], [8, 9]))], pad_token=0)
    assert batch["prompt_ids"] == [[1, 2], [1, 5]]
    assert batch["completion_ids"] == [[3], [6, 7, 8, 9]]
    assert batch["env_mask"] == [[1], [0, 0, 1, 1]]


def test_a_failed_episode_has_no_reward_and_no_tokens():
    broken = episode(call([1], [2]), name="broken")
    broken.fail(EpisodeError("environment", ValueError("no")))
    batch = rollout_batch([episode(call([1, 2, 3], [4])), broken], pad_token=9)
    assert batch["episode_reward"] == [0.0, None]
    assert batch["prompt_ids"][1] == [9, 9, 9]
    assert batch["env_mask"][1] == [0]
    assert rollout_batch([broken], pad_token=9)["completion_ids"] == [[9]]


def test_a_conversation_with_branches_fails_with_a_reason():
    branched, grown = episode(call([1, 2], [3]), call([1, 2, 4], [5])), episode(call([1], [2]), call([1, 2, 3], [4]))
    assert fail_branched(branched)
    assert "arborl.train" in branched.failure.message
    assert not fail_branched(grown)
    assert grown.failure is None


# ------------------------------------------------------------------------------------------------ what goes wrong


class Fickle(MultiTurnAgent):
    """Asks twice, and keeps one answer."""

    async def generate_response(self, conversation_history):
        await super().generate_response(conversation_history)
        return await super().generate_response(conversation_history)


@pytest.mark.slow
def test_an_agent_with_several_branches_stops_the_run_with_advice(tmp_path):
    fickle = Fickle(AgentConfig(max_new_tokens=4))
    with pytest.raises(RunStopped, match=r"8 of 8 .*\n.*only append to its history"):
        asyncio.run(TRLGRPOTrainerWrapper(fickle, Talk(), short, settings(tmp_path / "run")).train())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"num_generations": 1}, "num_generations=1"),
        ({"algorithm": "ppo"}, "algorithm=ppo"),
        ({"algorithm": "dpo"}, "algorithm=dpo"),
        ({"gamma": 0.9}, "gamma"),
        ({"resume_from_checkpoint": "latest"}, "resume_from_checkpoint"),
        ({"report_to": "wandb", "wandb_project": "mine"}, "WANDB_PROJECT"),
        ({"overrides": {"learner.minibatches": 2}}, r"learner\.minibatches"),
        ({"overrides": {"rollout.redundancy": 2}}, r"rollout\.redundancy"),
    ],
)
def test_unsupported_settings_are_errors(more, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        asyncio.run(TRLGRPOTrainerWrapper(agent(), Talk(), short, settings(tmp_path / "run", **more)).train())
    assert not (tmp_path / "run").exists()


def test_without_trl_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(wrapper_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install arborl\[trl\]"):
        asyncio.run(TRLGRPOTrainerWrapper(agent(), Talk(), short).train())


def test_the_event_loop_runs_on_and_a_second_run_is_refused(tmp_path):
    async def both():
        ticks = 0
        first = asyncio.create_task(
            TRLGRPOTrainerWrapper(agent(), Talk(), short, settings(tmp_path / "one", eval_share=0)).train()
        )
        await asyncio.sleep(0.05)
        with pytest.raises(ConfigError, match="already"):
            await TRLGRPOTrainerWrapper(agent(), Talk(), short, settings(tmp_path / "two")).train()
        while not first.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, await first

    ticks, trained = asyncio.run(both())
    assert ticks > 20
    assert trained.summary["before"] == trained.summary["after"] == {}


def test_a_cancelled_run_ends_and_the_next_can_start(tmp_path):
    class Slow(Talk):
        async def step(self, state, action):
            started.set()
            await asyncio.sleep(60)

    async def cancelled():
        work = asyncio.create_task(TRLGRPOTrainerWrapper(agent(), Slow(), short, settings(tmp_path / "run")).train())
        while not started.is_set():
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(work, 30)

    started = asyncio.Event()
    asyncio.run(cancelled())
    assert not wrapper_module.TRAINING_LOCK.locked()


@pytest.mark.slow
def test_seedling_learns_to_be_brief(tmp_path):
    more = {"num_episodes": 80, "num_generations": 8, "gradient_accumulation_steps": 4, "eval_share": 0.34}
    chosen = settings(tmp_path / "run", **more)
    trained = asyncio.run(TRLGRPOTrainerWrapper(agent(), Talk(), short, chosen).train())
    assert trained.summary["after"]["reward"] > trained.summary["before"]["reward"] + 0.1
