import asyncio
import copy
import json

import pytest

from arborl.envs.checker import check_env
from arborl.envs.games.conversation_env import (
    CONVERSATION_CONFIGS,
    EMPTY,
    END,
    Conversation,
    Persona,
    Scenario,
    UserLine,
)
from arborl.envs.games.conversation_presets import read_scenario, split_pairs
from arborl.rewards.answers import environment
from arborl.rewards.reward import Rewards
from arborl.types import Episode, Group, Message, Task, Turn

SCENARIO = {
    "id": "late",
    "topic": "orders",
    "user_responses": ["It is late.", {"text": "Number 12.", "expect": ["12", "sorry|apologise"]}, "When?", "Thanks!"],
    "metadata": {"difficulty": "easy"},
}
OTHER = {"id": "hello", "topic": "small_talk", "user_responses": ["Hello!", "Bye."]}
QUIET = [{"name": "quiet"}]


def talk(env, *replies, task=None):
    async def run():
        opening = await env.reset(task or Task("t", fields={"user_responses": SCENARIO["user_responses"]}), 0)
        return opening, [await env.step(Message("assistant", reply)) for reply in replies]

    opening, steps = asyncio.run(run())
    heard = [opening.messages[-1].content]
    heard += [message.content for step in steps for message in step.observation.messages]
    return steps, heard


def test_the_user_speaks_first_and_says_every_line_in_order():
    env = Conversation(personas=QUIET)
    steps, heard = talk(env, "a", "b", "c", "d")
    assert heard == ["It is late.", "Number 12.", "When?", "Thanks!"]
    assert [step.terminated for step in steps] == [False, False, False, True]
    assert env.metrics()["finished"] == 1.0


def test_a_random_order_keeps_the_opening_and_every_line_and_is_the_same_for_a_whole_group():
    def heard(seed, rng):
        async def run():
            env = Conversation(personas=QUIET, order="random", scenarios=[SCENARIO, OTHER], topics=["orders"])
            task = Task("t", seed=seed, fields={"user_responses": SCENARIO["user_responses"]})
            lines = [(await env.reset(task, rng)).messages[-1].content]
            for _ in range(3):
                lines.append((await env.step(Message("assistant", "yes"))).observation.messages[0].content)
            return tuple(lines)

        return asyncio.run(run())

    orders = {heard(seed, 0) for seed in range(30)}
    assert len(orders) > 3
    assert all(order[0] == "It is late." and sorted(order) == sorted(heard(0, 0)) for order in orders)
    assert all(heard(seed, 0) == heard(seed, 9) for seed in range(5))


def test_a_reply_is_rewarded_for_what_it_was_expected_to_mention_and_success_wants_all_of_it():
    env = Conversation(personas=QUIET)
    steps, _ = talk(env, "hm", "I APOLOGISE for order 12.", "soon", "bye")
    assert [step.reward for step in steps] == [0.0, 1.0, 0.0, 0.0]
    assert env.metrics() == {"success": 1.0, "met": 1.0, "finished": 1.0, "valid": 1.0}
    steps, _ = talk(env, "hm", "I am sorry, order 123.", "soon", "bye")
    assert [step.reward for step in steps] == [0.0] * 4
    assert env.metrics()["success"] == 0.0


def test_expectations_are_met_by_whole_words_and_any_of_the_alternatives():
    line = UserLine("?", ("on|power", "money back"))
    assert line.is_met_by("Is it ON? You get your money back.")
    assert not line.is_met_by("Button. money back")
    assert not line.is_met_by("power")
    assert UserLine("?").is_met_by("anything")
    assert line.is_met_by(line.good_reply)


@pytest.mark.parametrize("preset", CONVERSATION_CONFIGS)
def test_every_scenario_of_the_presets_can_be_satisfied(preset):
    env = Conversation(**CONVERSATION_CONFIGS[preset])
    assert {scenario.topic for scenario in env.scenarios} == {preset}
    for scenario in env.scenarios:
        for line in scenario.lines:
            assert line.expect
            assert line.is_met_by(line.reply), (scenario.id, line)


def test_an_empty_reply_is_no_reply_and_the_script_waits():
    env = Conversation(personas=QUIET)
    steps, heard = talk(env, "  ", "a")
    assert steps[0].reward == -0.05
    assert steps[0].info["valid"] == 0.0
    assert heard == ["It is late.", EMPTY, "Number 12."]


def test_too_many_turns_are_cut():
    steps, _ = talk(Conversation(personas=QUIET, max_turns=2), "a", "b")
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]


def test_a_persona_shows_in_the_opening_and_may_be_fixed_by_the_scenario():
    curt = Persona("curt", remark="Quick!")
    _, heard = talk(Conversation(personas=[curt]), "a")
    assert heard[0] == "It is late. Quick!"
    fixed = read_scenario({**OTHER, "persona": "curt"})
    assert {persona.name for _, persona in split_pairs([fixed], [curt, Persona("mild")], "train")} <= {"curt"}
    with pytest.raises(ValueError, match="no persona 'loud'; known: curt"):
        Conversation(scenarios=[{**OTHER, "persona": "loud"}], personas=[curt])


def test_a_simulated_user_hears_the_conversation_from_their_side_and_ends_it():
    requested = []

    async def user(messages, seed):
        requested.append((messages, seed))
        return Message("assistant", "And then?") if len(requested) < 3 else f"{END} thanks"

    env = Conversation(scenarios=[{**SCENARIO, "goal": "to know when"}, OTHER], user=user, personas=QUIET)
    steps, heard = talk(env, "one", "two", "three")
    assert heard[1:] == ["And then?", "And then?"]
    assert steps[-1].terminated
    assert env.metrics() == {"judged": 0.0, "finished": 1.0, "valid": 1.0}  # no one received what is a success
    roles = [[message.role for message in messages] for messages, _ in requested]
    assert roles[1] == ["system", "assistant", "user", "assistant", "user"]
    assert requested[1][0][2].content == "one"
    assert END in requested[0][0][0].content
    assert len({seed for _, seed in requested}) == 3
    assert env.oracle() is None


def test_a_simulated_user_may_be_an_object_with_chat_a_plain_function_or_a_name():
    class Engine:
        def __init__(self):
            self.lock = asyncio.Lock()

        async def chat(self, messages):
            return Message("assistant", "Hm.")

        def __deepcopy__(self, memo):
            raise AssertionError("an engine is not to be copied")

    engine = Engine()
    for user in (engine, lambda messages: "Hm.", f"{__name__}:shrug"):
        env = copy.deepcopy(Conversation(user=user, personas=QUIET))
        _, heard = talk(env, "one")
        assert heard[1] == "Hm."
        assert env.snapshot() is not None
    assert check_env(lambda: Conversation(user=engine), Task("t", seed=1)) == []
    with pytest.raises(ValueError, match="give a function of messages"):
        Conversation(user=3)


def shrug(messages):
    return "Hm."


def test_a_simulated_user_who_says_no_text_is_named():
    with pytest.raises(TypeError, match=r"returned 7 \(int\): return a Message or a str"):
        talk(Conversation(user=lambda messages: 7, personas=QUIET), "a")


def test_scenarios_come_from_a_file_and_mistakes_in_them_are_named(tmp_path):
    file = tmp_path / "scenarios.json"
    file.write_text(json.dumps([SCENARIO, OTHER]))
    assert [scenario.id for scenario in Conversation(scenarios=str(file)).scenarios] == ["late", "hello"]
    assert Conversation(scenarios=str(file), topics=["orders"]).scenarios[0].metadata == {"difficulty": "easy"}
    file.with_suffix(".x").write_text("{}")
    for given, says in [
        ([{"id": "x"}], "scenarios.0.user_responses=None"),
        ([{**OTHER, "responses": []}], "scenarios.0.responses: unknown key"),
        ([{**OTHER, "user_responses": ["hi", 3]}], "scenarios.0.user_responses.1=3"),
        ([{**OTHER, "user_responses": [{"text": "hi", "expects": []}]}], "user_responses.0="),
        (str(tmp_path / "none.json"), "no such file"),
        (str(file.with_suffix(".x")), "write a list of scenarios"),
    ]:
        with pytest.raises(ValueError, match=says):
            Conversation(scenarios=given)


def test_one_pair_in_ten_is_held_out_and_never_trained_on():
    scenarios = [Scenario(f"s{i}", "t", (UserLine("hi"),)) for i in range(10)]
    people = [Persona(name) for name in "abc"]
    train, held_out = split_pairs(scenarios, people, "train"), split_pairs(scenarios, people, "held_out")
    assert len(held_out) == 3
    assert len(train) == 27
    assert not [pair for pair in held_out if pair in train]
    with pytest.raises(ValueError, match="give more of either"):
        talk(Conversation(scenarios=[OTHER], personas=QUIET), task=Task("t", fields={"split": "held_out"}))


def test_gibberish_is_no_success_where_nothing_is_expected_and_no_reward_judges_it():
    env = Conversation(scenarios=[{"id": "a", "user_responses": ["Hello.", "Bye."]}], personas=[{"name": "x"}] * 2)

    async def scored(*rewards):
        episode = Episode("e", Task("t"), 0)
        await env.reset(Task("t", seed=1), 0)
        for _ in range(2):
            step = await env.step(Message("assistant", "qwrtz"))
            episode.turns.append(Turn(Message("assistant", "qwrtz"), (), step.reward, "", {}))
        episode.metrics.update(env.metrics())
        await Rewards(rewards, 5.0).score([Group(episode.task, [episode])])
        return episode.metrics

    assert "success" not in asyncio.run(scored(("env", environment, 1.0)))
    judged = asyncio.run(scored(("env", environment, 1.0), ("polite", lambda episode: 1.0, 1.0)))
    assert judged["success"] == 1.0
