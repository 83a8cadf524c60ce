"""Blocks 1 to 32 of the StateSet guide's 46 in its order: the same imports below `arborl.stateset`, the same calls with
the same argument names, on data of our own. `test_guide_commands.py` has the others.

Substitutions: `gpt2` is a folder of that name with GPT-2's width and random weights; numbers of episodes,
conversations, trials, tokens and ranks are small.

What the guide uses and never defines is defined here: the turns of block 4, two methods and an import of block 12, the
import of the callbacks in block 21, the preferences of block 29. Blocks 1 and 5 are diagrams.
"""

from __future__ import annotations

import random
import shutil
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from arborl.stateset.core.agent import AgentConfig
from arborl.stateset.core.reward import CompositeReward, EngagementReward, SafetyReward
from arborl.stateset.core.trajectory import ConversationTurn
from arborl.stateset.training.config import TrainingConfig
from guide_parts import HELLO, SCENARIOS, SMALL, TALK, bakery, config_of, small_agent, stub

from arborl.conversational.agent_training import run_config
from arborl.models.model_files import resolve
from arborl.stateset import ConversationEnvironment, HelpfulnessReward, MultiTurnAgent, train


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory) -> Path:
    """A model of GPT-2's width with one layer, without a chat template."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub") / "gpt2"
    shape = {"vocab_size": 2048, "n_positions": 1024, "n_embd": 768, "n_layer": 1, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=2, eos_token_id=2)).save_pretrained(folder)
    shutil.copyfile(resolve("seedling") / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, gpt2_files) -> Path:
    """Every block runs in an empty folder that has the model `gpt2`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").symlink_to(gpt2_files, target_is_directory=True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path


# ------------------------------------------------------------------------------------------------ overview, quick start


def test_block_01_a_trainer_holds_agent_environment_and_reward():
    from arborl.stateset.training.multi_turn_trainer import MultiTurnGRPOTrainer

    parts = (stub(), bakery(), HelpfulnessReward())
    trainer = MultiTurnGRPOTrainer(*parts)
    assert (trainer.agent, trainer.environment, trainer.reward_function) == parts


def test_block_02_the_package_installs_one_command():
    scripts = {one.name: one.value for one in entry_points(group="console_scripts", name="arborl")}
    assert scripts == {"arborl": "arborl.cli.main:main"}


async def test_block_03_an_agent_is_made_trained_and_asked():
    from arborl.stateset.core.agent import AgentConfig
    from arborl.stateset.core.reward import CompositeReward

    from arborl.stateset import ConversationEnvironment, HelpfulnessReward, MultiTurnAgent, SafetyReward, train

    config = AgentConfig(model_name="gpt2", system_prompt="You sell bread.", temperature=0.8, max_new_tokens=4)
    agent = MultiTurnAgent(config)
    await agent.initialize()
    scenarios = [{"id": "hello", "topic": "general", "user_responses": ["Good morning!"]}]
    environment = ConversationEnvironment(scenarios=scenarios, max_turns=2)
    reward_fn = CompositeReward([HelpfulnessReward(weight=0.7), SafetyReward(weight=0.3)])
    trained_agent = await train(
        agent=agent, environment=environment, reward_fn=reward_fn, num_episodes=4, profile="balanced"
    )
    assert isinstance(await trained_agent.generate_response(HELLO), str)
    assert trained_agent.summary["steps"] == 1
    assert {"reward"} == {"reward", "success"} & trained_agent.summary["after"].keys()  # text rewards know no success


# ------------------------------------------------------------------------------------------------ core concepts


def test_block_04_turns_and_trajectories():
    from arborl.stateset.core.trajectory import ConversationTurn, MultiTurnTrajectory

    turn = ConversationTurn(role="assistant", content="At seven.", reward=0.8, metadata={})
    turn1, turn2, turn3 = ConversationTurn(role="user", content="When?"), turn, turn
    trajectory = MultiTurnTrajectory(
        trajectory_id="one", turns=[turn1, turn2, turn3], episode_reward=0.85, trajectory_group_id="hours"
    )
    assert [one.role for one in trajectory.turns] == ["user", "assistant", "assistant"]
    assert (trajectory.episode_reward, trajectory.trajectory_group_id) == (0.85, "hours")


def test_block_05_advantages_are_distances_from_the_mean_of_the_group():
    from arborl.stateset.core.trajectory import MultiTurnTrajectory, TrajectoryGroup

    rewards = [0.1, 0.5, 0.3, 0.3]
    group = TrajectoryGroup("hours", [MultiTurnTrajectory(str(n), [], one) for n, one in enumerate(rewards)])
    assert group.advantages == pytest.approx([-0.2, 0.2, 0.0, 0.0])


def test_block_06_a_value_function_is_checked_against_the_model():
    from arborl.stateset.core.value_function import ValueFunction

    from arborl.errors import ConfigError

    value_fn = ValueFunction(hidden_size=768, gamma=0.99, gae_lambda=0.95)
    settings = {"algorithm": {"name": "grpo"}, "learner": {}}
    value_fn.apply(settings, AgentConfig(model_name="gpt2"))
    assert settings["algorithm"]["args"] == {"gae_lambda": 0.95}
    value_fn.apply({"algorithm": {"name": "grpo"}, "learner": {}}, stub().config)  # its size is not known
    with pytest.raises(ConfigError, match="hidden_size=768: seedling has 160"):
        value_fn.apply(settings, AgentConfig(model_name="seedling"))


# ------------------------------------------------------------------------------------------------ agents


async def test_block_07_every_setting_of_an_agent():
    from arborl.stateset.core.agent import AgentConfig, MultiTurnAgent

    config = AgentConfig(
        model_name="gpt2", system_prompt="You sell bread.", max_new_tokens=4, temperature=0.8, top_p=0.9, top_k=50,
        torch_dtype="bfloat16", attn_implementation="flash_attention_2", device_map="auto", enable_reasoning=False,
    )  # fmt: skip
    agent = MultiTurnAgent(config)
    await agent.initialize()
    assert isinstance(await agent.generate_response(HELLO), str)
    run, _ = run_config(agent, bakery(), [HelpfulnessReward()], TrainingConfig())
    assert (run.model.dtype, run.learner.attention, run.sampling.top_k) == ("bfloat16", "auto", 50)


async def test_block_08_a_stub_replies_without_a_model():
    config = AgentConfig(model_name="stub://demo", use_stub_model=True, stub_responses=["Yes.", "Rye.", "Bye."])
    agent = MultiTurnAgent(config)
    await agent.initialize()
    assert await agent.generate_response(HELLO) == "Yes."


async def test_block_09_a_subclass_changes_what_the_model_sees_and_says():
    from arborl.stateset.core.agent import MultiTurnAgent

    class Baker(MultiTurnAgent):
        async def generate_response(self, conversation_history):
            enhanced_history = self._add_context(conversation_history)
            response = await super().generate_response(enhanced_history)
            return self._ensure_professional_tone(response)

        def _add_context(self, history):
            return [*history, {"role": "assistant", "content": "Good morning."}, {"role": "user", "content": "Well?"}]

        def _ensure_professional_tone(self, response):
            return f"{response}!"

    agent = Baker(AgentConfig(use_stub_model=True, stub_responses=["First", "Second"]))
    assert await agent.generate_response(HELLO) == "Second!"


# ------------------------------------------------------------------------------------------------ environments


async def test_block_10_scenarios_of_a_conversation():
    from arborl.stateset.core.environment import ConversationEnvironment

    environment = ConversationEnvironment(scenarios=SCENARIOS, max_turns=10, randomize_scenarios=True)
    state = await environment.reset("rye")
    assert [turn.content for turn in state.conversation_history] == ["Do you have rye bread?"]
    assert environment.rows()[0]["metadata"] == {"difficulty": "easy", "category": "stock"}


def test_block_11_environments_of_common_domains():
    from arborl.stateset.core.environment import CONVERSATION_CONFIGS

    for domain in ("customer_service", "technical_support", "sales"):
        env = ConversationEnvironment(**CONVERSATION_CONFIGS[domain])
        assert len(env.rows()) >= 12


def own_environment(tasks):
    from arborl.stateset.core.environment import Environment, EnvironmentState

    class Ordering(Environment):
        def __init__(self, tasks):
            self.tasks = tasks

        async def reset(self, scenario=None):
            task = scenario or random.choice(self.tasks)
            return EnvironmentState(conversation_history=[], metadata={"task": task, "completed": False})

        async def step(self, state, action):
            new_history = state.conversation_history + [action]  # noqa: RUF005
            completed = self._check_completion(action, state.metadata["task"])
            reward = 1.0 if completed else 0.0
            done = completed or len(new_history) >= 10
            user_response = self._generate_user_response(state, action)
            new_state = EnvironmentState(
                conversation_history=new_history + [user_response],  # noqa: RUF005
                metadata={**state.metadata, "completed": completed},
            )
            return new_state, user_response, reward, done

        def _check_completion(self, action, task):
            return task in action.content

        def _generate_user_response(self, state, action):
            return ConversationTurn(role="user", content=f"Please say {state.metadata['task']}.")

    return Ordering(tasks)


async def test_block_12_an_environment_of_ones_own():
    environment = own_environment(["rye", "cake"])
    state = await environment.reset("rye")
    for text, completed in (("Cake?", False), ("One rye bread.", True)):
        state, answer, reward, done = await environment.step(state, ConversationTurn("assistant", text))
        assert (reward, done, state.metadata["completed"]) == (float(completed), completed, completed)
        assert answer.content == "Please say rye."
    assert len(state.conversation_history) == 4


@pytest.mark.slow
async def test_block_12_is_trained_in():
    trained = await train(stub(), own_environment(["rye", "cake"]), config=TrainingConfig(**SMALL, eval_share=0.5))
    after = trained.summary["after"]
    assert after["success"] == after["reward"] in (0.0, 1.0)  # `completed`, by what the stub says


# ------------------------------------------------------------------------------------------------ rewards


async def test_block_13_pre_built_rewards():
    from arborl.stateset.core.reward import (
        ConcisenessReward,
        CorrectnessReward,
        EngagementReward,
        HelpfulnessReward,
        SafetyReward,
        TaskCompletionReward,
    )
    from arborl.stateset.rewards import CustomerServiceReward, SalesAssistantReward, TechnicalSupportReward

    context = {"answer": "rye", "expect": ["rye"]}
    for kind in (
        ConcisenessReward, CorrectnessReward, EngagementReward, HelpfulnessReward, SafetyReward, TaskCompletionReward,
        CustomerServiceReward, SalesAssistantReward, TechnicalSupportReward,
    ):  # fmt: skip
        assert 0 <= (await kind().compute_reward(TALK, context)).score <= 1


async def test_block_14_a_composite_is_the_weighted_sum():
    from arborl.stateset.core.reward import CompositeReward, ConcisenessReward

    weights = {HelpfulnessReward: 0.4, SafetyReward: 0.3, ConcisenessReward: 0.2, EngagementReward: 0.1}
    reward_fn = CompositeReward(
        [
            HelpfulnessReward(weight=0.4),
            SafetyReward(weight=0.3),
            ConcisenessReward(weight=0.2),
            EngagementReward(weight=0.1),
        ]
    )
    parts = [weight * (await kind().compute_reward(TALK)).score for kind, weight in weights.items()]
    assert (await reward_fn.compute_reward(TALK)).score == pytest.approx(sum(parts))


async def test_block_15_a_function_is_a_reward():
    from arborl.stateset.core.reward import reward_function

    @reward_function(weight=0.5)
    async def courteous(turns, context=None):
        replies = [turn.content.lower() for turn in turns if turn.role == "assistant"]
        return sum("please" in reply for reply in replies) / max(len(replies), 1)

    reward_fn = CompositeReward([HelpfulnessReward(weight=0.5), courteous])
    found = await reward_fn.compute_reward(TALK)
    assert found.breakdown["courteous"] == 1.0
    assert found.score == pytest.approx(0.5 + 0.5 * found.breakdown["helpfulness"])


async def test_block_16_a_class_is_a_reward():
    from arborl.stateset.core.reward import RewardFunction, RewardResult

    class Length(RewardFunction):
        def __init__(self, min_length=10, max_length=100, weight=1.0):
            super().__init__(weight=weight)
            self.min_length, self.max_length = min_length, max_length

        async def compute_reward(self, turns, context=None):
            lengths = [len(turn.content) for turn in turns if turn.role == "assistant"]
            if not lengths:
                return RewardResult(score=0.0, breakdown={}, metadata={})
            scores = [float(self.min_length <= length <= self.max_length) for length in lengths]
            mean = sum(scores) / len(scores)
            return RewardResult(score=mean, breakdown={"length": mean}, metadata={"individual_scores": scores})

    reward = Length(min_length=20, weight=0.5)
    assert (await reward.compute_reward([])).score == 0.0
    assert (await CompositeReward([reward]).compute_reward(TALK)).score == 0.5


async def test_block_17_several_objectives():
    from arborl.stateset.rewards.multi_objective_reward import MultiObjectiveReward

    objectives = [
        {"name": "helpfulness", "reward": HelpfulnessReward(), "weight": 0.4},
        {"name": "safety", "reward": SafetyReward(), "weight": 0.3},
        {"name": "engagement", "reward": EngagementReward(), "weight": 0.3},
    ]
    found = {}
    for aggregation in ("weighted_sum", "min", "product"):
        reward_fn = MultiObjectiveReward(objectives=objectives, aggregation=aggregation, normalize=True)
        found[aggregation] = (await reward_fn.compute_reward(TALK)).score
    assert found["min"] < found["product"] < found["weighted_sum"]


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["conservative", "balanced", "aggressive"])
async def test_block_18_training_with_a_profile(profile):
    from arborl.stateset import train

    trained_agent = await train(
        agent=small_agent(), environment=bakery(), reward_fn=HelpfulnessReward(), num_episodes=8, profile=profile
    )
    groups = {"conservative": (8, 32), "balanced": (4, 16), "aggressive": (2, 8)}[profile]
    rollout = config_of(trained_agent)["rollout"]
    assert (rollout["tasks_per_step"], rollout["group_size"]) == groups


def guide_config() -> TrainingConfig:
    return TrainingConfig(
        num_episodes=8, num_epochs=1, learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, max_grad_norm=1.0,
        warmup_ratio=0.1, per_device_train_batch_size=1, gradient_accumulation_steps=4, num_generations=2,
        max_prompt_length=512, max_completion_length=4, bf16=True, fp16=False, eval_steps=50, save_steps=100,
        logging_steps=10, report_to="wandb", wandb_project="bread",
    )  # fmt: skip


def test_block_19_settings_of_training_are_those_of_the_run():
    run, _ = run_config(small_agent(), bakery(), [HelpfulnessReward()], guide_config())
    assert (run.trainer.steps, run.trainer.save_every, run.evaluation.every) == (2, 100, 50)
    assert (run.learner.lr, run.learner.betas, run.learner.warmup) == (5e-6, (0.9, 0.99), 0.1)
    assert (run.sampling.max_tokens, run.sampling.max_context, run.model.dtype) == (4, 516, "bfloat16")
    assert run.track.trackers[0].args == {"project": "bread"}


@pytest.mark.slow
async def test_block_19_trains_in_bfloat16_with_a_tracker():
    trained = await train(small_agent(), bakery(), HelpfulnessReward(), config=guide_config())
    assert trained.summary["steps"] == 2
    assert list(trained.run_folder.glob("wandb/offline-run-*"))


def test_block_20_settings_for_domains():
    from arborl.stateset.training.config import get_config_for_task

    config = get_config_for_task("customer_service", model_name="gpt2")
    assert not config.use_lora
    for domain, name in (("technical_support", "llama-7b"), ("sales", "mistral-7b")):
        assert get_config_for_task(domain, model_name=name).use_lora


@pytest.mark.slow
async def test_block_21_a_trainer_with_a_value_function_and_callbacks(here):
    from arborl.stateset.core.value_function import ValueFunction
    from arborl.stateset.training.callbacks import CheckpointCallback, EarlyStoppingCallback
    from arborl.stateset.training.multi_turn_trainer import MultiTurnGRPOTrainer

    trainer = MultiTurnGRPOTrainer(
        agent=small_agent(), environment=bakery(), reward_function=HelpfulnessReward(),
        config=TrainingConfig(**SMALL), value_function=ValueFunction(hidden_size=768),
    )  # fmt: skip
    trained_agent = await trainer.train(
        callbacks=[EarlyStoppingCallback(patience=10), CheckpointCallback(save_dir="./checkpoints")]
    )
    assert config_of(trained_agent)["algorithm"]["advantage"] == "gae"
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.slow
async def test_block_22_grpo_is_the_default():
    trained_agent = await train(
        agent=stub(), environment=bakery(), reward_fn=HelpfulnessReward(), config=TrainingConfig(num_episodes=4)
    )
    assert config_of(trained_agent)["algorithm"]["name"] == "grpo"


@pytest.mark.slow
async def test_block_23_gspo():
    from arborl.stateset.training.gspo_trainer import GSPOConfig, train_with_gspo

    gspo_config = GSPOConfig(
        num_generations=4, beta=0.0, clip_range_left=3e-4, clip_range_right=4e-4, num_outer_iterations=1,
        learning_rate=5e-6, per_device_train_batch_size=1, gradient_accumulation_steps=4, use_lora=True, lora_r=16,
        lora_alpha=32,
    )  # fmt: skip
    trained_agent = await train_with_gspo(
        config=gspo_config, agent=small_agent(), environment=bakery(), reward_model=HelpfulnessReward()
    )
    algorithm = config_of(trained_agent)["algorithm"]
    assert (algorithm["name"], algorithm["clip_low"], algorithm["clip_high"]) == ("gspo", 3e-4, 4e-4)


# ------------------------------------------------------------------------------------------------ searching


@pytest.mark.slow
async def test_block_24_a_search_for_better_settings():
    from arborl.stateset.training.hpo import quick_hpo

    summary = await quick_hpo(
        agent=stub(), environment=bakery(), reward_function=HelpfulnessReward(), base_config=TrainingConfig(**SMALL),
        n_trials=2, backend="optuna",
    )  # fmt: skip
    assert len(summary.trials) == 2
    assert summary.best_params is not None
    assert 0 <= summary.best_reward <= 1


def test_block_25_named_search_spaces():
    from arborl.stateset.training.hpo import get_search_space

    names = ("grpo", "full", "customer_service", "conservative", "aggressive")
    sizes = {name: len(get_search_space(name)) for name in names}
    assert sizes["full"] > sizes["grpo"] > 0


def test_block_26_a_search_space_of_ones_own():
    from arborl.stateset.training.hpo import HPOConfig

    hpo_config = HPOConfig(
        search_space={
            "learning_rate": {"type": "loguniform", "low": 1e-7, "high": 1e-4},
            "num_generations": {"type": "categorical", "choices": [4, 8, 16]},
            "temperature": {"type": "uniform", "low": 0.5, "high": 1.2},
            "clip_range": {"type": "uniform", "low": 0.1, "high": 0.3},
        },
        n_trials=3,
        optimization_direction="maximize",
        pruning=True,
    )
    assert list(hpo_config.space) == ["learning_rate", "num_generations", "temperature", "clip_range"]


# ------------------------------------------------------------------------------------------------ advanced


@pytest.mark.slow
async def test_block_27_two_ranks(monkeypatch, caplog):
    from arborl.stateset.training.distributed import DistributedTrainer

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    agent = small_agent("seedling", device_map="cpu")
    trainer = DistributedTrainer(
        agent=agent, environment=bakery(), reward_fn=HelpfulnessReward(),
        config=TrainingConfig(**SMALL, overrides={"track.gifs": 0}), num_gpus=2, strategy="ddp",
    )  # fmt: skip
    trained_agent = await trainer.train()
    config = config_of(trained_agent)
    assert (config["learner"]["ranks"], config["learner"]["strategy"], config["track"]["gifs"]) == (2, "ddp", 0)
    assert "num_gpus=2: no GPU; ranks are processes on the CPU" in caplog.text


def test_block_28_adapters():
    config = TrainingConfig(
        use_lora=True, lora_r=16, lora_alpha=32, lora_dropout=0.05, lora_target_modules=["q_proj", "v_proj"]
    )
    lora = config.run_settings(AgentConfig())["model"]["lora"]
    assert lora == {"rank": 16, "alpha": 32.0, "dropout": 0.05, "target": ["q_proj", "v_proj"]}


@pytest.mark.slow
async def test_block_29_a_reward_learned_from_preferences():
    from arborl.stateset.training.neural_reward_trainer import NeuralRewardTrainer

    preference_dataset = [(f"Please take loaf {n}, thank you.", f"No {n}.") for n in range(8)]
    reward_trainer = NeuralRewardTrainer(model_name="gpt2", preference_data=preference_dataset)
    neural_reward = await reward_trainer.train()
    trained_agent = await train(
        agent=stub(), environment=bakery(), reward_fn=neural_reward, config=TrainingConfig(**SMALL)
    )
    assert "success" not in trained_agent.summary["after"]


@pytest.mark.slow
async def test_block_30_trl():
    pytest.importorskip("trl", reason="the extra 'trl'")
    from arborl.stateset.training.trl_grpo_wrapper import TRLGRPOTrainerWrapper

    trainer = TRLGRPOTrainerWrapper(
        agent=small_agent("seedling"), environment=bakery(), reward_fn=HelpfulnessReward(),
        config=TrainingConfig(**SMALL),
    )  # fmt: skip
    trained_agent = await trainer.train()
    assert isinstance(await trained_agent.generate_response(HELLO), str)


@pytest.mark.parametrize("strategy", ["summary", "truncate", "sliding_window"])
def test_block_31_context_compression(strategy):
    config = AgentConfig(
        model_name="gpt2", enable_context_compression=True, compression_ratio=0.5, compression_strategy=strategy
    )
    assert config.compression_policy is not None


async def test_block_32_a_memory_across_conversations():
    from arborl.stateset.core.memory import ConversationMemory

    memory = ConversationMemory(max_turns=100, summarization_threshold=50)
    config = AgentConfig(use_stub_model=True, stub_responses=["Noted."])
    agent = MultiTurnAgent(config, memory=memory)
    await agent.generate_response([{"role": "user", "content": "I am Ada."}])
    assert "I am Ada." in memory.recall()
