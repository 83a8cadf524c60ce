"""Trajectories, rewards over turns, environments, held-out scenarios, memory, and settings of GSPO."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from arborl import (
    CONVERSATION_CONFIGS,
    AgentConfig,
    ConversationEnvironment,
    ConversationMemory,
    Environment,
    EnvironmentState,
    GSPOConfig,
    MultiTurnAgent,
    TrainingConfig,
    train,
)
from arborl.conversational.agent_training import run_config
from arborl.conversational.environment import ConversationTurn, MultiTurnTrajectory, TrajectoryGroup
from arborl.conversational.multi_turn_agent import EPISODE_CONVERSATION, ModelConversation, ScriptedModel
from arborl.errors import ConfigError
from arborl.rewards.text.text_reward import RewardFunction, RewardResult, reward_function
from arborl.types import Episode, Message, Task, Turn


def episode(*replies: str) -> Episode:
    made = Episode("e", Task("t", fields={"topic": "parcels"}), opening=(Message("user", "Where is it?"),))
    made.turns = [Turn(Message("assistant", reply), (Message("user", "And now?"),), 0.5) for reply in replies]
    return made


def test_a_trajectory_has_all_turns_in_order_with_the_reward_of_each_reply():
    trajectory = MultiTurnTrajectory.of(episode("Here.", "There."))
    assert [turn.role for turn in trajectory.turns] == ["user", "assistant", "user", "assistant", "user"]
    assert [turn.content for turn in trajectory.turns[:3]] == ["Where is it?", "Here.", "And now?"]
    assert [turn.reward for turn in trajectory.replies] == [0.5, 0.5]


def test_advantages_of_a_group_are_rewards_minus_their_mean():
    group = TrajectoryGroup("g", [MultiTurnTrajectory(str(r), [], r) for r in (0.7, 0.9, 0.6, 0.8)])
    assert group.advantages == pytest.approx([-0.05, 0.15, -0.15, 0.05])


def test_an_unknown_role_is_an_error():
    with pytest.raises(ValueError, match="role='robot'"):
        ConversationTurn("robot", "hello")


def test_a_class_and_a_decorated_function_are_rewards():
    class LongestReply(RewardFunction):
        async def compute_reward(self, turns, context=None):
            return RewardResult(float(max(len(turn.content) for turn in turns if turn.role == "assistant")))

    @reward_function(weight=0.5)
    def about(turns, context=None):
        return float(context["topic"] == "parcels")

    assert LongestReply().name == "longest_reply"
    assert (about.name, about.weight) == ("about", 0.5)
    assert asyncio.run(LongestReply()(episode("Here.", "Over there."))) == 11.0
    assert asyncio.run(about(episode("Here."))) == 1.0


@pytest.mark.parametrize(
    ("opening", "expected"),
    [
        ((), [("system", "Be brief.")]),
        (({"role": "user", "content": "Hello!"},), [("system", "Be brief."), ("user", "Hello!")]),
        (({"role": "system", "content": "Be kind."},), [("system", "Be kind.")]),
    ],
)
def test_the_system_prompt_of_an_environment_is_shown_unless_reset_returns_one(opening, expected):
    class Brief(Environment):
        system = "Be brief."

        async def reset(self, scenario=None):
            return EnvironmentState(opening)

        async def step(self, state, action):
            return state, None, 0.0, True

    observation = asyncio.run(Brief().as_env().reset(Task("one"), 0))
    assert [(message.role, message.content) for message in observation.messages] == expected


def test_beta_of_gspo_is_its_kl_coefficient():
    assert GSPOConfig(beta=0.1).run_settings(AgentConfig())["algorithm"]["kl"] == {"coef": 0.1}
    assert "kl" not in GSPOConfig().run_settings(AgentConfig())["algorithm"]
    with pytest.raises(ConfigError, match="beta and kl_penalty"):
        GSPOConfig(beta=0.1, kl_penalty=0.1).run_settings(AgentConfig())


# ------------------------------------------------------------------------------------------------ environments


def rows_of(run, objects):
    """The rows of training and of evaluation."""
    return [list(objects[rows.name]()) for rows in (run.data.rows, run.data.evaluation_rows)]


SCENARIOS = [{"id": f"s{n}", "user_responses": [f"Question {n}?", "And then?"]} for n in range(20)]


@pytest.mark.parametrize("domain", ["customer_service", "technical_support", "sales"])
def test_every_domain_has_six_scenarios_and_four_kinds_of_users(domain):
    environment = ConversationEnvironment(**CONVERSATION_CONFIGS[domain])
    rows = environment.rows()
    assert environment.system
    assert (len({row["scenario_id"] for row in rows}), len({row["persona"] for row in rows})) == (6, 4)


def test_one_scenario_in_ten_is_held_out_unless_there_are_scenarios_for_evaluation():
    def rows(**more):
        environment = ConversationEnvironment(scenarios=SCENARIOS, **more)
        run, objects = run_config(MultiTurnAgent(), environment, [], TrainingConfig(eval_num_generations=3))
        trained, held_out = ([row["id"] for row in part] for part in rows_of(run, objects))
        assert (run.evaluation.tasks, run.evaluation.group_size) == (len(held_out), 3)
        return trained, held_out

    trained, held_out = rows()
    assert len(held_out) == 2
    assert sorted([*trained, *held_out]) == sorted(one["id"] for one in SCENARIOS)
    own = [{"id": "own", "user_responses": ["Hello?"]}]
    assert rows(eval_scenarios=own) == ([one["id"] for one in SCENARIOS], ["own"])


async def test_a_user_can_have_personas_or_be_a_function():
    personas = [{"name": "polite"}, {"name": "plain"}]
    environment = ConversationEnvironment(scenarios=SCENARIOS[:1], personas=personas)
    assert {row["persona"] for row in environment.rows()} == {"polite", "plain"}
    environment = ConversationEnvironment(scenarios=SCENARIOS[:1], user=lambda messages: f"{len(messages)} so far")
    state = await environment.reset()
    _, answer, _, _ = await environment.step(state, "Yes.")
    assert answer.content.endswith("so far")


async def test_numbers_that_an_environment_draws_follow_from_the_seed():
    class Dice(Environment):
        async def reset(self, scenario=None):
            return EnvironmentState([{"role": "user", "content": str(random.random())}])

        async def step(self, state, action):
            return state, str(random.random()), 0.0, False

    async def draws(seed):
        env = Dice().as_env()
        opening = await env.reset(Task("one", seed=seed), seed)
        step = await env.step(Message("assistant", "Roll."))
        return opening.messages[0].content, step.observation.messages[0].content

    state = random.getstate()
    first, second, other = [await draws(seed) for seed in (1, 1, 2)]
    assert first == second != other
    assert random.getstate() == state  # the numbers of the program are not touched


async def test_transcripts_of_a_scripted_agent_are_demonstrations(tmp_path):
    environment = ConversationEnvironment(scenarios=SCENARIOS)
    rows = await environment.transcripts(40, skill=0.5)
    file = tmp_path / "shown.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainingConfig(num_episodes=8, demonstrations=file, demonstration_steps=3)
    run, objects = run_config(MultiTurnAgent(), environment, [], config)
    assert (run.demonstrations.path, run.demonstrations.steps, run.trainer.steps) == (file, 3, 5)
    held_out = {row["messages"][0]["content"] for row in rows_of(run, objects)[1]}
    assert not held_out & {row["messages"][0]["content"] for row in rows}
    assert {message["role"] for row in rows for message in row["messages"]} == {"user", "assistant"}


# ------------------------------------------------------------------------------------------------ agents, training


def test_an_agent_that_reasons_is_asked_to_think_first():
    prompts = [MultiTurnAgent(AgentConfig(enable_reasoning=reasons))._prompt([]) for reasons in (True, False)]
    assert "<think>" in prompts[0][0].content
    assert prompts[1] == []


async def test_a_memory_is_saved_and_read_and_does_not_change_in_training(tmp_path):
    memory = ConversationMemory(max_turns=20, summarization_threshold=4)
    agent = MultiTurnAgent(AgentConfig(use_stub_model=True, stub_responses=["Noted."]), memory=memory)
    for name in ("Ada", "Ben", "Zoë"):
        await agent.generate_response([{"role": "user", "content": f"I am {name}."}])
    memory.save(tmp_path / "memory.json")
    assert ConversationMemory.load(tmp_path / "memory.json").recall() == memory.recall()
    before = memory.recall()
    token = EPISODE_CONVERSATION.set(ModelConversation(ScriptedModel(["Hello."]), None))
    await agent.generate_response([{"role": "user", "content": "I am Dora."}])
    EPISODE_CONVERSATION.reset(token)
    assert memory.recall() == before


async def test_a_cancelled_training_stops_with_a_checkpoint_and_resumes(tmp_path):
    def cancel(event, data):
        if event == "step_end" and data["step"] == 1:
            task.cancel()

    agent = MultiTurnAgent(AgentConfig(use_stub_model=True))
    config = TrainingConfig(num_episodes=4, num_generations=2, gradient_accumulation_steps=2, eval_share=0)
    parts = {"environment": ConversationEnvironment(scenarios=SCENARIOS[:2]), "config": config}
    task = asyncio.create_task(train(agent, **parts, save_path=tmp_path / "run", callbacks=[cancel]))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())][-1].startswith("step-00000")
    trained = await train(agent, **parts, save_path=tmp_path / "run", resume_from_checkpoint="latest")
    assert trained.summary["steps"] == 2
    assert trained.run_folder == tmp_path / "run"
