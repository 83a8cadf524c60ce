"""Prompts around environments: what the model reads, which action is found in a reply, and what is refused."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

import arborl
from arborl.agents.chat_agents import ChatAgent, StepAgent
from arborl.chat import Renderer
from arborl.config.load_config import from_kwargs, load
from arborl.config.part_config import PromptConfig
from arborl.engines.scripted import ScriptedEngine
from arborl.envs import from_gymnasium
from arborl.envs.checker import check_env
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.conversation_env import Conversation
from arborl.envs.games.frozen_lake import RULES, FrozenLake
from arborl.envs.prompt_wrapper import PromptLimits, prepend_system_prompt, wrap_with_prompt
from arborl.errors import ConfigError
from arborl.models.model_files import SEEDLING_DIR
from arborl.rollout.env_workers import Workers
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.training_run.part_factory import RunPartFactory, replies
from arborl.types import Message, Sampling, Task

TASK = Task("t", seed=3, fields={"split": "train"})
BRACKETS = r"\[(.*?)\]"


def say(text: str) -> Message:
    return Message("assistant", text, sampled=True)


def opening(env: Env, task: Task = TASK) -> tuple[Message, ...]:
    return asyncio.run(env.reset(task, 0)).messages


def steps(env: Env, *texts: str, task: Task = TASK) -> list[Step]:
    async def play() -> list[Step]:
        await env.reset(task, 0)
        return [await env.step(say(text)) for text in texts]

    return asyncio.run(play())


class Guess(Env):
    """An environment of a person's own: plain functions, bare words."""

    def reset(self, task, seed):
        self.heard = []
        return Observation((Message("user", "Guess {a number}."),))

    def step(self, action):
        self.heard.append(action.content)
        return Step(Observation((Message("user", "Higher."),)), terminated=len(self.heard) == 3)


# ------------------------------------------------------------------------------------------------ what is read


def test_every_observation_is_shown_through_the_template():
    text = "Turn {turn_idx} ({step_count} over), {actions_left} left, {max_response_length} tokens:\n{observation}"
    env = wrap_with_prompt(FrozenLake(max_steps=7), PromptConfig(observation=text), None, PromptLimits(5, 48))
    plain = opening(FrozenLake(max_steps=7))
    assert opening(env) == (plain[0], Message("user", f"Turn 1 (0 over), 5 left, 48 tokens:\n{plain[1].content}"))
    one, two = steps(env, "hm", "hm")
    assert one.observation.messages[0].content.startswith("Turn 2 (1 over), 4 left")
    assert two.observation.messages[0].content.startswith("Turn 3 (2 over), 3 left")
    assert one.observation.state_key == plain[1].content  # a state is the same whatever is written around it


def test_actions_left_is_the_smaller_of_the_environments_limit_and_the_runs():
    shown = PromptConfig(observation="{actions_left} {observation}")
    for env, left in ((FrozenLake(max_steps=4), 4), (Conversation(max_turns=3), 3), (Guess(), 9)):
        (*_, user) = opening(wrap_with_prompt(env, shown, None, PromptLimits(9, 8)))
        assert user.content.startswith(f"{left} ")


def test_rules_go_before_the_first_observation_when_the_system_message_is_another():
    env = wrap_with_prompt(FrozenLake(), PromptConfig(system="You are a good player."))
    system, user = opening(env)
    assert system.content == "You are a good player."
    assert user.content.startswith(f"{RULES}\n")
    (step,) = steps(env, "<answer>Up</answer>")
    assert RULES not in step.observation.messages[0].content


@pytest.mark.parametrize(
    ("prompt", "system", "user"),
    [
        ({"system": "Play well. {env_instruction}"}, f"Play well. {RULES}", "{}"),
        ({"system": "S", "observation": "{env_instruction}|{observation}"}, "S", RULES + "|{}"),
        ({"observation": "{env_instruction}|{observation}"}, None, RULES + "|{}"),
        ({"instruction": "My rules."}, "My rules.", "{}"),
        ({"instruction": ""}, None, "{}"),
        ({"system": "S", "instruction": ""}, "S", "{}"),
        ({"observation": "{suffix}|{observation}"}, RULES, "{}|{}"),
    ],
)
def test_rules_are_shown_once_and_where_a_template_says(prompt, system, user):
    board = opening(FrozenLake())[-1].content
    *head, last = opening(wrap_with_prompt(FrozenLake(), PromptConfig(**prompt)))
    assert [message.content for message in head] == ([system] if system else [])
    assert last.content == user.replace("{}", board)


def test_braces_of_the_environment_are_text():
    (message,) = opening(wrap_with_prompt(Guess(), PromptConfig(observation="{{}} {observation}")))
    assert message.content == "{} Guess {a number}."


# ------------------------------------------------------------------------------------------------ what is received


def test_the_pattern_finds_the_action_and_what_does_not_match_is_invalid_and_counted():
    env = wrap_with_prompt(FrozenLake(), PromptConfig(action_pattern=BRACKETS))
    played = steps(env, "I go [Up] now", "<answer>Up</answer>", "[nowhere]")
    assert [step.info["valid"] for step in played] == [1.0, 0.0, 0.0]
    assert [step.info["matched"] for step in played] == [1.0, 0.0, 1.0]
    assert played[1].reward == FrozenLake().format_penalty
    assert env.metrics()["matched"] == pytest.approx(2 / 3)
    assert env.metrics()["valid"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("pattern", "reply", "heard"),
    [
        (BRACKETS, "a [7] b [8]", "7"),
        (r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think>5?</think>\n<answer> 7\n</answer>", "7"),
        (r"(?P<action>\d+)|(no)", "it is 7", "7"),
        (r"\d+", "it is 77 or 8", "77"),
        (r"a(\d)?b", "ab", ""),
        (BRACKETS, "seven", ""),
    ],
)
def test_a_custom_environment_gets_the_extracted_action(pattern, reply, heard):
    inner = Guess()
    steps(wrap_with_prompt(inner, PromptConfig(action_pattern=pattern)), reply)
    assert inner.heard == [heard]


def test_gymnasium_gets_the_action_in_answer_tags():
    env = wrap_with_prompt(
        from_gymnasium("CliffWalking-v1", names=("U", "R", "D", "L")), PromptConfig(action_pattern=BRACKETS)
    )
    (good, bad) = steps(env, "[U]", "<answer>U</answer>")
    assert (good.info["valid"], bad.info["valid"]) == (1.0, 0.0)


def test_players_speak_so_that_the_pattern_hears_them():
    for pattern in (BRACKETS, "<answer>(.*?)</answer>", r"^<think>(.*?)</think>\s*<go>(.*?)</go>$", r"Move:\s*(\w+)\."):
        env = wrap_with_prompt(FrozenLake(), PromptConfig(action_pattern=pattern))
        opening(env)
        assert len(env.actions()) == 4
        (step,) = steps(env, str(env.oracle()))
        assert step.info["valid"] == 1.0
    silent = wrap_with_prompt(FrozenLake(), PromptConfig(action_pattern=r"(?:a|b)(\d{3})"))
    opening(silent)
    assert silent.oracle() is None
    assert silent.actions() == []


def test_a_prompted_environment_keeps_the_contract_and_can_be_sent_elsewhere():
    prompt = PromptConfig(system="S", observation="{turn_idx} {observation}", action_pattern=BRACKETS)
    assert check_env(lambda: wrap_with_prompt(FrozenLake(), prompt, "P"), TASK) == []
    env = pickle.loads(pickle.dumps(wrap_with_prompt(FrozenLake(), prompt)))
    opening(env)
    kept = env.snapshot()
    again = [asyncio.run(env.step(say("[Up]"))).observation]
    env.restore(kept)
    assert [asyncio.run(env.step(say("[Up]"))).observation] == again


def test_it_runs_where_the_environment_would_and_by_its_name():
    async def place(env):
        workers = Workers()
        placed, name = await workers.place(
            lambda: wrap_with_prompt(env, PromptConfig(action_pattern=BRACKETS)), None, 5
        )
        await placed.close()
        return type(placed).__name__, name

    assert asyncio.run(place(FrozenLake())) == ("PromptWrapper", "FrozenLake")
    assert asyncio.run(place(Guess())) == ("ThreadEnv", "Guess")


def test_what_an_environment_returns_by_mistake_is_still_named():
    class Wrong(Env):
        async def reset(self, task, seed):
            return "hello"

    assert asyncio.run(wrap_with_prompt(Wrong(), PromptConfig(system="S")).reset(TASK, 0)) == "hello"


# ------------------------------------------------------------------------------------------------ tokens


def rollout(agent, env, texts):
    renderer = Renderer.from_folder(SEEDLING_DIR)
    engine = ScriptedEngine(replies(renderer, texts), decode=renderer.tokenizer.decode)
    episode_factories = EpisodeFactories(lambda task: agent, env)
    return Rollout(engine, renderer, episode_factories, Sampling(32), EpisodeLimits(max_context=2048), concurrency=2)


def test_every_prompt_of_an_episode_goes_on_from_the_one_before_and_equals_the_whole_render():
    prompt = PromptConfig(system="Play.", observation="Turn {turn_idx}:\n{observation}", action_pattern=BRACKETS)
    made = rollout(ChatAgent(), lambda task: wrap_with_prompt(FrozenLake(), prompt, "You."), ["[nothing]", "what?"])
    episode = asyncio.run(made.play(TASK, 1, "e"))
    assert episode.failure is None
    assert len(episode.calls) == 10
    for before, after in zip(episode.calls, episode.calls[1:], strict=False):
        whole = (*before.prompt, *before.completion.tokens)
        assert after.prompt[: len(whole)] == whole
    for call in episode.calls:
        assert list(call.prompt) == made.renderer.encode(made.renderer.render(call.messages))
    assert episode.metrics["matched"] + 0.0 == sum(turn.info["matched"] for turn in episode.turns) / 10


def test_steps_with_a_prompt_each_are_numbered_as_they_were_played():
    prompt = PromptConfig(observation="Turn {turn_idx}:\n{observation}")
    made = rollout(StepAgent(1), lambda task: wrap_with_prompt(FrozenLake(), prompt, "You."), ["hm"])
    episode = asyncio.run(made.play(TASK, 1, "e"))
    shown = [message.content for message in episode.calls[4].messages]
    assert shown[0] == f"You.\n\n{RULES}"
    assert [text.partition(":")[0] for text in (shown[1], shown[3])] == ["Turn 4", "Turn 5"]


# ------------------------------------------------------------------------------------------------ agent.system


def test_a_system_prompt_stands_before_what_the_row_has_of_its_own():
    user = Message("user", "6 * 7?")
    assert prepend_system_prompt((user,), "Be brief.") == (Message("system", "Be brief."), user)
    assert prepend_system_prompt((Message("system", "Own."), user), "Be brief.") == (
        Message("system", "Be brief.\n\nOwn."),
        user,
    )
    assert prepend_system_prompt((user,), "") == (user,)


def cast_of(tmp_path, rows, **settings):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = from_kwargs(data=str(tmp_path / "rows.json"), rewards=["exact"], engine="scripted", **settings)
    workshop = RunPartFactory(config, {})
    return workshop.episode_factories(), workshop.source(Renderer.from_folder(SEEDLING_DIR))[0]


def test_rows_get_the_system_prompt_of_the_runs_agent_whatever_agent_they_name(tmp_path):
    rows = [{"question": f"{n}?", "answer": n, "agent_name": ("chat", "react", "mine")[n % 3]} for n in range(30)]
    agents = {"mine": {"name": "chat", "system": "Mine."}}
    episode_factories, source = cast_of(
        tmp_path, rows, agent={"name": "tool", "system": "Run's."}, **{"data.agents": agents}
    )
    for task in source.take(0, 12):
        received = opening(episode_factories.env(task), task)[0]
        assert received == Message("system", "Mine." if task.agent == "mine" else "Run's.")


def test_a_system_prompt_may_lie_in_a_file_and_is_remembered_as_text(tmp_path):
    (tmp_path / "you.txt").write_text("You are {brief}.\n")
    config = load(None, [f"agent.system=@{tmp_path}/you.txt"])
    assert config.agent.system == "You are {brief}."
    with pytest.raises(ConfigError, match=r"agent.system: @nowhere.txt: cannot read nowhere.txt"):
        from_kwargs(agent={"system": "@nowhere.txt"})
    (tmp_path / "odd.txt").write_text("@you")
    with pytest.raises(ConfigError, match="begins with @"):
        from_kwargs(agent={"system": f"@{tmp_path}/odd.txt"})


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (
            {"observation": "{observaton}"},
            "env.prompt.observation: unknown field {observaton}. Did you mean 'observation'",
        ),
        ({"observation": "{history} {observation}"}, "agent.args.history_length"),
        ({"observation": "{observation.__class__}"}, "unknown field {observation.__class__}"),
        ({"observation": "{turn_idx:>{observation}}"}, "a field is a name alone"),
        ({"observation": "Turn {turn_idx}"}, "has no {observation}"),
        ({"observation": "{observation"}, "env.prompt.observation: expected '}'"),
        ({"observation": "{} {observation}"}, "unknown field {}"),
        ({"system": "Turn {turn_idx}"}, "Known: env_instruction, max_response_length, actions_left"),
        ({"action_pattern": "<answer>(.*?"}, "env.prompt.action_pattern: not a regular expression"),
        ({"action_pattern": ""}, "is empty"),
        ({"pattern": "x"}, "env.prompt.pattern: unknown key"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_with_what_is_known(prompt, words):
    with pytest.raises(ConfigError) as received:
        from_kwargs(env={"prompt": prompt})
    assert words in str(received.value)


def test_a_pattern_at_an_environment_that_takes_every_reply_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="env=question, whose answer is the whole reply"):
        from_kwargs(data="x.json", rewards=["exact"], **{"env.prompt.action_pattern": "x"})


def test_a_prompt_of_an_environment_that_no_source_plays_is_refused():
    sources = {"a": {"env": "sokoban"}, "b": {"env": "rooms"}}
    with pytest.raises(ConfigError, match=r"Write data\.sources\.a\.env\.prompt"):
        from_kwargs(data={"sources": sources}, **{"env.prompt.system": "x"})


def test_sources_have_prompts_of_their_own():
    prompt = {
        "system": "You're {{a player}}.", "instruction": "Go.", "action_pattern": BRACKETS,
        "observation": "{turn_idx}/{actions_left}/{max_response_length} {observation}",
    }  # fmt: skip
    lake = {
        "env": {"name": "frozen_lake", "args": {"size": 3}, "prompt": prompt}, "rollout": {"max_turns": 6},
        "sampling": {"max_tokens": 16},
    }  # fmt: skip
    sources = {"Lake": lake, "plain": {"env": "frozen_lake"}}
    config = from_kwargs(data={"sources": sources}, engine="scripted")
    episode_factories = RunPartFactory(config, {}).episode_factories()
    tasks = {name: Task("t", source=name, fields={"split": "train"}) for name in sources}
    system, user = opening(episode_factories.env(tasks["Lake"]), tasks["Lake"])
    assert system.content == "You're {a player}."
    assert user.content.startswith("Go.\n1/6/16 ")
    assert opening(episode_factories.env(tasks["plain"]), tasks["plain"])[0].content == RULES
    assert config == from_kwargs(**config.model_dump())  # what a run writes down is read back as it was
    lake["env"]["prompt"]["observation"] = "{obs}"
    with pytest.raises(ConfigError, match=r"data.sources.Lake.env.prompt.observation: unknown field {obs}"):
        from_kwargs(data={"sources": sources})


def test_a_run_trains_and_evaluates_with_its_prompts_and_writes_them_down(tmp_path):
    settings = {
        "env.prompt.observation": "Turn {turn_idx}\n{observation}", "env.prompt.action_pattern": BRACKETS,
        "agent.system": "Answer:briefly",
        "evaluation.tasks": 4, "rollout.tasks_per_step": 2, "rollout.group_size": 2, "threads": 1,
        "track.gifs": 1, "track.tensorboard": False, "output_dir": tmp_path / "run", "trainer.save_every": 1,
    }  # fmt: skip
    run = arborl.run(steps=1, engine="scripted", **settings)
    assert run.summary["after"]["success"] >= 0
    kept = load(tmp_path / "run" / "config.yaml")
    assert kept.env.prompt.action_pattern == BRACKETS
    text = next((tmp_path / "run" / "episodes").glob("step-*.jsonl")).read_text()
    assert "Turn 2" in text
    assert "Answer:briefly\\n\\nCross the frozen" in text
    assert run.evaluate()["sampled"]["tasks"] == 4
