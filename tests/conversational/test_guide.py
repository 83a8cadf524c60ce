"""The conversational guide's capabilities in its order, each run with the embedded model or the stub.

docs/guide.md has the same headings, and names for each what is used here.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

import arborl
from arborl import (
    AgentConfig,
    CheckpointCallback,
    CompositeReward,
    ConcisenessReward,
    ConversationEnvironment,
    ConversationMemory,
    ConversationTurn,
    DistributedTrainer,
    EarlyStoppingCallback,
    EngagementReward,
    Environment,
    EnvironmentState,
    GSPOConfig,
    HelpfulnessReward,
    HPOConfig,
    MultiObjectiveReward,
    MultiTurnAgent,
    MultiTurnGRPOTrainer,
    MultiTurnTrajectory,
    RewardFunction,
    RewardResult,
    SafetyReward,
    SimilarityAwareReward,
    TrainingConfig,
    TrajectoryGroup,
    ValueFunction,
    get_config_for_task,
    get_search_space,
    quick_hpo,
    reward_function,
    train,
    train_with_gspo,
)
from arborl.conversational import agent_training

BAKERY = [
    {"id": "opening", "topic": "hours", "user_responses": ["When do you open?", "And on Sunday?"]},
    {"id": "bread", "topic": "goods", "user_responses": ["Do you have rye bread?"], "metadata": {"mood": "calm"}},
    {"id": "cake", "topic": "orders", "user_responses": ["I want a cake.", "For six.", "Thanks."]},
]


def slowly(*names):
    """Cases that others here cover nearly."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@reward_function(weight=1.0, name="letters")
def letters(turns, context=None):
    """The share of letters in the replies, which a model can change within a few steps."""
    texts = "".join(turn.content for turn in turns if turn.role == "assistant")
    return sum(map(str.isalpha, texts)) / max(len(texts), 1)


def small(tmp_path, **more):
    """A run of two small steps."""
    fields = {
        "num_episodes": 4, "gradient_accumulation_steps": 2, "num_generations": 2, "eval_num_generations": 1,
        "output_dir": tmp_path / "run", "eval_steps": 0, "overrides": {"track.gifs": 0},
    }  # fmt: skip
    return TrainingConfig(**fields | more)


def agent(**more) -> MultiTurnAgent:
    return MultiTurnAgent(AgentConfig(**{"max_new_tokens": 8, "max_context": 256} | more))


def bakery(**more) -> ConversationEnvironment:
    return ConversationEnvironment(scenarios=BAKERY, max_turns=4, **more)


def steps_of(trained, file="metrics.jsonl"):
    return [json.loads(line) for line in (trained.run_folder / file).read_text().splitlines()]


class Length(RewardFunction):
    """The share of replies that are short."""

    def __init__(self, most=40, weight=1.0):
        super().__init__(weight=weight)
        self.most = most

    async def compute_reward(self, turns, context=None):
        texts = [turn for turn in turns if turn.role == "assistant"]
        score = sum(len(turn.content) <= self.most for turn in texts) / max(len(texts), 1)
        return RewardResult(score=score, breakdown={"short": score}, metadata={"turns": len(texts)})


class Broken:
    """A callback that raises."""

    def on_step_end(self, data):
        raise RuntimeError("no disk")


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory):
    """An agent and its trained copy, with rewards of every kind and a callback that raises."""
    objectives = [
        {"name": "engagement", "reward": EngagementReward(), "weight": 0.4},
        {"name": "brief", "reward": ConcisenessReward(), "weight": 0.6},
    ]
    many = MultiObjectiveReward(objectives=objectives, aggregation="min", normalize=True)
    parts = [HelpfulnessReward(weight=0.7), SafetyReward(weight=0.3), many, letters, Length(weight=0.5)]
    reward = CompositeReward([*parts, SimilarityAwareReward(weight=0.2)])

    async def main():
        given = agent(system_prompt="You sell bread.")
        await given.initialize()
        assert isinstance(await given.generate_response([{"role": "user", "content": "Hello!"}]), str)
        trained = await train(
            agent=given, environment=bakery(), reward_fn=reward, num_episodes=4, profile="balanced",
            config=small(tmp_path_factory.mktemp("trained")), eval_rewards=[letters], callbacks=[Broken()],
        )  # fmt: skip
        for one in (given, trained):
            assert isinstance(await one.generate_response([{"role": "user", "content": "Hello!"}]), str)
        return given, trained

    return asyncio.run(main())


# ------------------------------------------------------------------------------------------------ quick start


def test_train_returns_a_trained_copy_of_the_agent(trained_pair):
    given, trained = trained_pair
    assert type(trained) is MultiTurnAgent
    assert trained is not given
    assert given.config.model_name == "seedling"  # the one that was given stays as it was
    assert trained.config.model_name != "seedling"
    assert trained.config.system_prompt == "You sell bread."
    assert {"reward", "reward/letters"} <= trained.summary["after"].keys()  # a second number beside the one learned
    assert (trained.run_folder / "report.html").exists()


def test_the_loss_is_over_sampled_tokens_only(trained_pair):
    _, trained = trained_pair
    episodes = steps_of(trained, "episodes/step-000001.jsonl")
    sampled = sum(len(call["tokens"]) for one in episodes for call in one["calls"])
    first = next(step for step in steps_of(trained) if step.get("step") == 1 and "learner/terms" in step)
    assert first["learner/terms"] == sampled > 0


# ------------------------------------------------------------------------------------------------ core concepts


def test_trajectories_and_their_groups_are_plain_records():
    turn = ConversationTurn(role="assistant", content="We open at seven.", reward=0.8, metadata={})
    one = MultiTurnTrajectory(
        trajectory_id="a", turns=[turn], episode_reward=0.85, trajectory_group_id="opening", metadata={}
    )
    group = TrajectoryGroup("opening", [one, MultiTurnTrajectory("b", [turn], 0.15, "opening")])
    assert group.advantages == pytest.approx([0.35, -0.35])


def test_a_value_function_computes_gae():
    value = ValueFunction(gamma=0.9, gae_lambda=0.8)
    advantages, returns = value.compute_advantages([0.0, 0.0, 1.0], [0.2, 0.5, 0.6])
    last = 1.0 - 0.6
    middle = 0.9 * 0.6 - 0.5 + 0.9 * 0.8 * last
    first = 0.9 * 0.5 - 0.2 + 0.9 * 0.8 * middle
    assert advantages == pytest.approx([first, middle, last])
    assert returns == pytest.approx([first + 0.2, middle + 0.5, last + 0.6])


# ------------------------------------------------------------------------------------------------ creating agents


def test_every_setting_of_an_agent_reaches_the_run(tmp_path):
    config = AgentConfig(
        model_name="seedling", system_prompt="Be kind.", max_new_tokens=12, temperature=0.8, top_p=0.9, top_k=50,
        torch_dtype="float32", attn_implementation="eager", device_map="cpu", stop=("Bye",), max_context=300,
    )  # fmt: skip
    run, _ = agent_training.run_config(MultiTurnAgent(config), bakery(), [letters], small(tmp_path))
    drawn = run.sampling
    assert (drawn.max_tokens, drawn.temperature, drawn.top_p, drawn.top_k) == (12, 0.8, 0.9, 50)
    assert (drawn.stop, drawn.max_context) == (("Bye",), 300)
    assert (run.model.dtype, run.model.device, run.learner.attention) == ("float32", "cpu", "dense")


def test_a_stub_needs_no_model_and_can_be_trained(tmp_path):
    config = AgentConfig(
        model_name="stub://demo", use_stub_model=True, stub_responses=["Good morning!", "Of course.", "Anything else?"]
    )

    async def main():
        stub = MultiTurnAgent(config)
        await stub.initialize()
        first = await stub.generate_response([{"role": "user", "content": "Hi"}])
        texts = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
        second = await stub.generate_response([*texts, {"role": "user", "content": "Rye?"}])
        trained = await train(stub, bakery(), letters, config=small(tmp_path))
        return first, second, await trained.generate_response([{"role": "user", "content": "Hi"}])

    assert asyncio.run(main()) == ("Good morning!", "Of course.", "Good morning!")


def test_an_override_of_generate_response_is_used_in_training(tmp_path):
    class Polite(MultiTurnAgent):
        async def generate_response(self, conversation_history):
            fields = {"role": "system", "content": "You are a baker."}
            return f"{await super().generate_response([fields, *conversation_history])} Thank you!"

    polite = Polite(AgentConfig(max_new_tokens=8))
    trained = asyncio.run(train(polite, bakery(), letters, config=small(tmp_path)))
    assert type(trained) is Polite
    for one in steps_of(trained, "episodes/step-000001.jsonl"):
        assert all(turn["message"]["content"].endswith("Thank you!") for turn in one["turns"])
        assert one["calls"][0]["messages"][2][0] == {"role": "system", "content": "You are a baker."}


def test_thoughts_are_removed_from_the_reply():
    async def main():
        thinker = MultiTurnAgent(
            AgentConfig(use_stub_model=True, enable_reasoning=True, stub_responses=["<think>Rye?</think> At seven."])
        )
        return await thinker.generate_response([{"role": "user", "content": "When?"}])

    assert asyncio.run(main()) == "At seven."


# ------------------------------------------------------------------------------------------------ environments


def test_the_lines_of_a_scenario_are_played_in_order_up_to_max_turns():
    async def main():
        environment = ConversationEnvironment(scenarios=BAKERY, max_turns=2, randomize_scenarios=False)
        state = await environment.reset("cake")
        texts = [turn.content for turn in state.conversation_history]
        state, answer, _reward, done = await environment.step(state, ConversationTurn("assistant", "For how many?"))
        _, _silence, _, over = await environment.step(state, "Fine.")
        return texts, answer.content, done, over

    texts, answer, done, over = asyncio.run(main())
    assert texts == ["I want a cake."]
    assert answer == "For six."
    assert not done
    assert over


def test_scenarios_keep_their_order_unless_randomized(tmp_path):
    def order(shuffled):
        folder = tmp_path / str(shuffled)
        asyncio.run(
            train(
                agent(use_stub_model=True), bakery(randomize_scenarios=shuffled), letters,
                config=small(folder, num_episodes=8, eval_share=0),
            )
        )  # fmt: skip
        files = sorted((folder / "run/episodes").glob("step-*.jsonl"))
        return [json.loads(line)["task"]["id"] for file in files for line in file.read_text().splitlines()][::2]

    in_order = order(False)
    assert in_order == ["opening", "bread", "cake"] * 2 + ["opening", "bread"]
    assert order(True) != in_order


class Counting(Environment):
    """A task of one's own: the agent is to say a number."""

    def __init__(self, tasks):
        self.tasks = tasks

    async def reset(self, scenario=None):
        task = scenario or random.choice(self.tasks)
        texts = [ConversationTurn("user", f"Say {task['number']}.")]
        return EnvironmentState(conversation_history=texts, metadata={"task": task, "completed": False})

    async def step(self, state, action):
        completed = str(state.metadata["task"]["number"]) in action.content
        history = [*state.conversation_history, action]
        answer = ConversationTurn("user", "Again, please.")
        after = EnvironmentState(
            conversation_history=[*history, answer], metadata={**state.metadata, "completed": completed}
        )
        return after, answer, float(completed), completed or len(history) >= 4


def test_a_custom_environment_provides_the_default_reward(tmp_path):
    environment = Counting([{"id": str(number), "number": number} for number in range(6)])
    trained = asyncio.run(train(agent(), environment, config=small(tmp_path)))
    for one in steps_of(trained, "episodes/step-000001.jsonl"):
        assert one["opening"][0]["content"] == f"Say {one['task']['fields']['number']}."
    assert "success" in trained.summary["after"]


# ------------------------------------------------------------------------------------------------ rewards


def test_rewards_of_every_kind_can_be_combined(trained_pair):
    _, trained = trained_pair
    first = next(step for step in steps_of(trained) if "reward/composite/letters" in step)
    assert {"reward/composite/multi_objective", "reward/composite/length"} <= first.keys()


def test_a_reward_that_raises_stops_the_run_and_is_named(tmp_path):
    @reward_function
    def broken(turns, context=None):
        raise KeyError("price")

    with pytest.raises(arborl.errors.RunStopped, match="broken"):
        asyncio.run(train(agent(), bakery(), CompositeReward([letters, broken]), config=small(tmp_path)))


# ------------------------------------------------------------------------------------------------ training


def test_every_field_of_a_training_configuration_reaches_the_run(tmp_path):
    config = TrainingConfig(
        num_episodes=1000, num_epochs=2, learning_rate=5e-6, adam_beta1=0.8, adam_beta2=0.98, max_grad_norm=0.7,
        warmup_ratio=0.1, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=6,
        max_prompt_length=200, max_completion_length=20, bf16=True, eval_steps=5, save_steps=7, logging_steps=3,
        report_to="wandb", wandb_project="bread", use_lora=True, lora_r=4, lora_alpha=8, lora_dropout=0.05,
        lora_target_modules=["q_proj", "v_proj"], kl_penalty=0.1, clip_range=0.15, temperature=0.9, seed=3,
        output_dir=tmp_path, overrides={"rollout.episode_seconds": 7},
    )  # fmt: skip
    run, _ = agent_training.run_config(agent(max_new_tokens=64, max_context=None), bakery(), [letters], config)
    assert run.trainer.steps == 250
    assert run.trainer.save_every == 7
    assert run.evaluation.every == 5
    learner = run.learner
    assert (learner.lr, learner.betas, learner.max_grad_norm, learner.warmup) == (5e-6, (0.8, 0.98), 0.7, 0.1)
    assert (run.rollout.tasks_per_step, run.rollout.group_size, run.rollout.episode_seconds) == (8, 6, 7)
    assert (run.sampling.max_tokens, run.sampling.max_context, run.sampling.temperature) == (20, 220, 0.9)
    assert learner.micro_batch_tokens == 2 * 6 * 220
    lora = run.model.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target) == (4, 8, 0.05, ("q_proj", "v_proj"))
    assert (run.model.dtype, run.track.trackers[0].args, run.seed) == ("bfloat16", {"project": "bread"}, 3)
    assert (run.algorithm.kl.coef, run.algorithm.clip_low, run.algorithm.clip_high) == (0.1, 0.15, 0.15)


def test_there_are_settings_for_domains_and_models():
    assert get_config_for_task("customer_service", model_name="gpt2").num_generations == 12
    assert get_config_for_task("technical_support", model_name="llama-7b").use_lora
    assert not get_config_for_task("sales", model_name="Qwen/Qwen2.5-0.5B").use_lora
    with pytest.raises(arborl.errors.ConfigError, match="Did you mean 'sales'"):
        get_config_for_task("sale")


def test_profiles_do_not_override_explicit_fields():
    careful, bold = (TrainingConfig.from_profile(name) for name in ("conservative", "aggressive"))
    assert careful.learning_rate_scale < 1 < bold.learning_rate_scale
    assert careful.clip_range < bold.clip_range
    assert careful.kl_penalty > bold.kl_penalty
    assert TrainingConfig(num_generations=3).with_profile("conservative").num_generations == 3
    assert TrainingConfig(learning_rate=1e-6).with_profile("conservative").learning_rate_scale == 1.0
    assert TrainingConfig(clip_range_left=0.3).with_profile("conservative").clip_range is None
    assert GSPOConfig().with_profile("experimental").algorithm == "gspo"
    assert TrainingConfig.from_profile("conservative", algorithm="gspo").clip_range is None  # another measure there
    assert TrainingConfig.from_profile("experimental").algorithm == "dapo"


@pytest.mark.parametrize("algorithm", ["dpo", "trpo", *slowly("grpo", "gspo", "a2c", "ppo")])
def test_algorithms_are_chosen_by_name(tmp_path, algorithm):
    trained = asyncio.run(train(agent(), bakery(), letters, algorithm=algorithm, config=small(tmp_path)))
    assert trained.summary["steps"] == 2


def test_early_stopping_and_copies_of_checkpoints(tmp_path):
    events = []

    @reward_function
    def constant(turns, context=None):
        return 0.5

    async def main():
        trainer = MultiTurnGRPOTrainer(
            agent=agent(), environment=bakery(), reward_function=constant,
            config=small(tmp_path, num_episodes=40), value_function=ValueFunction(hidden_size=160),
        )  # fmt: skip
        return await trainer.train(
            callbacks=[
                EarlyStoppingCallback(patience=2),
                CheckpointCallback(save_dir=tmp_path / "kept", save_steps=1),
                lambda event, data: events.append(event),
            ]
        )

    trained = asyncio.run(main())
    assert trained.summary["steps"] == 3  # the first is the best, and two more were waited for
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["step-000001", "step-000002", "step-000003"]
    fields = agent(model_name=str(tmp_path / "kept/step-000003/model"))
    assert isinstance(asyncio.run(fields.generate_response([{"role": "user", "content": "Hi"}])), str)
    assert events[0] == "train_start"
    assert events[-1] == "train_end"
    assert events.count("step_end") == 3
    assert events.count("episode_end") == 6


def test_a_callback_that_raises_does_not_stop_the_run(trained_pair):
    _, trained = trained_pair
    assert trained.summary["steps"] == 2
    assert steps_of(trained)[-1].get("callback/errors", 2.0) == 2.0


# ------------------------------------------------------------------------------------------------ GRPO and GSPO


def test_gspo_settings_reach_the_run(tmp_path):
    config = GSPOConfig(
        num_generations=2, beta=0.01, clip_range_left=3e-4, clip_range_right=4e-4, num_outer_iterations=2,
        learning_rate=5e-6, per_device_train_batch_size=1, gradient_accumulation_steps=2, use_lora=True, lora_r=4,
        lora_alpha=8, output_dir=tmp_path / "run", eval_num_generations=1,
    )  # fmt: skip
    trained = asyncio.run(train_with_gspo(config=config, agent=agent(), environment=bakery(), reward_model=letters))
    texts = (trained.run_folder / "config.yaml").read_text()
    assert "name: gspo" in texts
    assert "clip_low: 0.0003" in texts
    assert "coef: 0.01" in texts
    assert "rank: 4" in texts
    saved = {path.name for path in Path(trained.config.model_name).iterdir()}
    assert "adapter_model.safetensors" in saved
    assert "model.safetensors" not in saved
    assert trained.summary["steps"] == 2
    assert isinstance(asyncio.run(trained.generate_response([{"role": "user", "content": "Hi"}])), str)


# ------------------------------------------------------------------------------------------------ searching


def test_a_search_finds_the_best_settings(tmp_path):
    space = {
        "learning_rate": {"type": "loguniform", "low": 1e-5, "high": 1e-3},
        "num_generations": {"type": "categorical", "choices": [2, 3]},
    }
    config = small(tmp_path, output_dir=None, learning_rate_scale=2.0)
    summary = asyncio.run(
        quick_hpo(
            agent=agent(), environment=bakery(), reward_function=letters, base_config=config,
            hpo_config=HPOConfig(search_space=space, n_trials=2, pruning=True), folder=tmp_path / "study",
        )
    )  # fmt: skip
    assert len(summary.trials) == 2
    assert summary.best_reward == max(trial.value for trial in summary.trials)
    assert set(summary.best_params) <= set(space)


@pytest.mark.parametrize("name", ["grpo", "full", "customer_service", "conservative", "aggressive"])
def test_every_name_of_a_search_space_is_a_setting_of_training_or_of_the_agent(name):
    assert set(get_search_space(name)) <= {*TrainingConfig.model_fields, "top_p", "top_k", "max_new_tokens"}


# ------------------------------------------------------------------------------------------------ advanced


def test_a_distributed_trainer_checks_the_number_of_gpus(tmp_path, monkeypatch):
    trainer = DistributedTrainer(
        agent=agent(), environment=bakery(), reward_fn=letters, config=small(tmp_path), num_gpus=1, strategy="ddp"
    )
    assert asyncio.run(trainer.train()).summary["steps"] == 2
    refused = {1: "1 GPU. Write num_gpus=1", 2: "2 GPUs. Write num_gpus=2"}
    for count, words in refused.items():
        monkeypatch.setattr(agent_training, "gpu_count", lambda device, count=count: count)
        with pytest.raises(arborl.errors.ConfigError, match=f"num_gpus=4: this machine has {words}"):
            asyncio.run(DistributedTrainer(agent(), bakery(), letters, num_gpus=4).train())
    ranks = DistributedTrainer(agent(), bakery(), letters, small(tmp_path), num_gpus=4).config.overrides
    assert ranks == {"track.gifs": 0, "learner.strategy": "ddp", "learner.ranks": 4}
    with pytest.raises(arborl.errors.ConfigError, match=r"num_gpus=4: overrides has learner.ranks=2"):
        DistributedTrainer(agent(), bakery(), letters, small(tmp_path, overrides={"learner.ranks": 2}), num_gpus=4)


@pytest.mark.parametrize("strategy", ["summary", "truncate", *slowly("sliding_window")])
def test_a_long_conversation_is_compressed_in_training_and_in_use(tmp_path, strategy):
    long = [{"id": "long", "user_responses": [f"Line {number}: tell me about bread and cake." for number in range(12)]}]
    talker = agent(
        max_context=200, enable_context_compression=True, compression_ratio=0.6, compression_strategy=strategy
    )
    environment = ConversationEnvironment(scenarios=long, max_turns=12)

    async def main():
        trained = await train(talker, environment, letters, config=small(tmp_path, num_episodes=2))
        history = []
        for number in range(12):
            history.append({"role": "user", "content": f"Line {number}: tell me about bread and cake."})
            history.append({"role": "assistant", "content": await trained.generate_response(history)})
        return trained, history

    trained, history = asyncio.run(main())
    assert len(history) == 24
    edited = "episode/context/folded" if strategy == "summary" else "episode/context/truncated"
    step = next(step for step in steps_of(trained) if edited in step)
    assert step[edited] > 0
    assert step["stop/done"] == 1.0


def test_memory_is_kept_across_conversations_and_summarized():
    memory = ConversationMemory(max_turns=20, summarization_threshold=4)
    talker = MultiTurnAgent(AgentConfig(use_stub_model=True, stub_responses=["Noted."]), memory=memory)

    async def main():
        for name in ("Ada", "Ben", "Cleo"):
            await talker.generate_response([{"role": "user", "content": f"I am {name}."}])

    asyncio.run(main())
    assert memory.summary == "Noted."  # the reply of the stub
    assert "I am Cleo." in memory.recall()
    assert "I am Ada." not in memory.recall()
    shown = talker._prompt([arborl.Message("user", "Who am I?")])
    assert shown[0].role == "system"
    assert "I am Cleo." in shown[0].content


# ------------------------------------------------------------------------------------------------ again, and wrong


def test_equal_seeds_give_equal_runs(tmp_path):
    def play(name, seed):
        config = small(tmp_path / name, seed=seed, deterministic=True, num_episodes=2)
        trained = asyncio.run(train(agent(), bakery(), letters, config=config))
        weights = sorted((trained.run_folder / "checkpoints").glob("step-000001/model/*.safetensors"))
        episodes = steps_of(trained, "episodes/step-000001.jsonl")
        texts = [turn["message"]["content"] for one in episodes for turn in one["turns"]]
        return [path.read_bytes() for path in weights], texts

    assert play("a", 1) == play("b", 1) != play("c", 2)


def test_a_run_resumes_from_its_checkpoint(tmp_path):
    asyncio.run(train(agent(), bakery(), letters, config=small(tmp_path, num_episodes=2)))
    more = small(tmp_path, num_episodes=4)
    trained = asyncio.run(train(agent(), bakery(), letters, config=more, resume_from_checkpoint="latest"))
    assert trained.summary["steps"] == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AgentConfig(temperature=5), "temperature: must be a number >= 0 and <= 2, given 5. Default: 1.0."),
        (lambda: AgentConfig(max_new_tokens=0), "max_new_tokens: must be a whole number >= 1 and <= 8192, given 0."),
        (lambda: AgentConfig(temprature=1), "temprature: unknown key. Did you mean 'temperature'?"),
        (lambda: AgentConfig(torch_dtype="bf16"), "torch_dtype: must be one of auto, float32, bfloat16"),
        (lambda: AgentConfig(model_name="stub://x"), "Write use_stub_model=True"),
        (lambda: AgentConfig(compression_ratio=0.3), "write enable_context_compression=True too"),
        (lambda: TrainingConfig(learning_rate=-1), "learning_rate: must be a number > 0, given -1."),
        (lambda: TrainingConfig(num_generations=0), "num_generations: must be a whole number >= 1, given 0."),
        (lambda: TrainingConfig(algorithm="grop"), "Did you mean 'grpo'?"),
        (lambda: TrainingConfig(lora_r=8), "Write use_lora=True"),
        (lambda: TrainingConfig(bf16=True, fp16=True), "bf16 and fp16 are both True"),
        (lambda: TrainingConfig().with_profile("fast"), "profile='fast': must be one of conservative, balanced"),
        (lambda: GSPOConfig(num_outer_iterations=0), "num_outer_iterations: must be a whole number >= 1, given 0."),
        (lambda: ValueFunction(gamma=2), "gamma: must be a number >= 0 and <= 1, given 2."),
        (lambda: ConversationMemory(max_turns=0), "max_turns=0: must be a whole number >= 1"),
        (lambda: EarlyStoppingCallback(patience=0), "patience=0: must be a whole number >= 1"),
        (lambda: ConversationEnvironment(), "or preset=NAME"),
        (lambda: ConversationEnvironment(scenarios=[{"id": "a"}]), "scenarios.0.user_responses=None"),
        (lambda: ConversationEnvironment(scenarios=BAKERY, max_turns=0), "max_turns=0"),
    ],
)
def test_errors_name_the_field_its_value_and_the_remedy(make, message):
    with pytest.raises(arborl.errors.ConfigError) as refused:
        make()
    assert message in str(refused.value)


def test_assigned_fields_are_validated():
    config = TrainingConfig()
    config.per_device_train_batch_size, config.use_lora, config.kl_penalty = 4, True, 0.1
    with pytest.raises(arborl.errors.ConfigError, match="learning_rate: must be a number > 0, given 0"):
        config.learning_rate = 0
    assert config.learning_rate is None
    with pytest.raises(arborl.errors.ConfigError, match=r"lerning_rate: unknown key. Did you mean 'learning_rate'\?"):
        config.lerning_rate = 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"agent": "seedling"}, "agent='seedling': must be a MultiTurnAgent"),
        ({"environment": ConversationEnvironment}, "ConversationEnvironment is a class"),
        ({"config": {"num_episodes": 3}}, "must be a TrainingConfig"),
        ({"callbacks": [EarlyStoppingCallback]}, "EarlyStoppingCallback is a class"),
        ({"config": TrainingConfig(overrides={"rolout.x": 1})}, "rolout"),
        ({"algorithm": "dpo", "config": TrainingConfig(clip_range=0.1)}, "clip_low=0.1 is not read with"),
        ({"value_function": ValueFunction(hidden_size=768)}, "hidden_size=768: seedling has 160"),
        ({"reward_fn": "helpfull"}, "helpfull"),
    ],
)
def test_wrong_arguments_of_train_are_errors_before_any_file_is_written(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(arborl.errors.ConfigError) as refused:
        asyncio.run(train(**{"agent": agent(), "environment": bakery(), "reward_fn": letters} | given))
    assert message in str(refused.value)
    assert not (tmp_path / "runs").exists()
