import asyncio
import itertools
import math
from dataclasses import replace

import pytest

from arborl.envs.checker import assert_env, check_env
from arborl.envs.env import Env, Observation, Step
from arborl.seeds import generator
from arborl.types import Message, Task

TASK = Task("t", seed=3)
ticket = itertools.count()


class Walk(Env):
    """A sound environment: a walk along a line, with a little chance."""

    async def reset(self, task, seed):
        self.place, self.rng = task.seed % 5, generator(seed, "walk")
        return self.seen()

    def seen(self):
        return Observation((Message("user", f"at {self.place}"),), state_key=str(self.place))

    async def step(self, action):
        self.place += {"left": -1, "right": 1}.get(action.content, 0) * int(self.rng.integers(1, 3))
        return Step(self.seen(), reward=0.5, terminated=self.place > 8, info={"place": self.place})

    def actions(self):
        return ["left", "right"]

    def metrics(self):
        return {"success": float(self.place > 8)}


class Bent(Walk):
    """The same, with every step changed by `how`."""

    def __init__(self, how):
        self.how = how

    async def step(self, action):
        return self.how(await super().step(action))


def test_a_sound_environment_has_no_problems_and_needs_no_methods_beyond_two():
    class Bare(Env):
        async def reset(self, task, seed):
            return Observation((Message("user", "hi"),))

        async def step(self, action):
            return Step(Observation(()))

    assert check_env(Walk, TASK) == []
    assert check_env(Bare, TASK) == []
    assert_env(Walk, TASK, seed=4, steps=5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reward": math.nan}, "step() returned reward=nan (float): return a finite float."),
        ({"reward": "1"}, "step() returned reward='1' (str)"),
        ({"reward": None}, "step() returned reward=None (NoneType)"),
        ({"terminated": 1}, "step() returned terminated=1 (int): return True or False."),
        ({"truncated": None}, "step() returned truncated=None"),
        ({"terminated": True, "truncated": True}, "step() returned both terminated and truncated"),
        ({"info": {"note": "hm"}}, "step() returned info['note']='hm' (str): return a finite number"),
        ({"info": {"x": math.inf}}, "step() returned info['x']=inf"),
        ({"info": None}, "step() returned info=None"),
        ({"observation": "text"}, "step() returned 'text' (str) as observation: return an Observation."),
        ({"observation": Observation([])}, "step() returned messages as list: return a tuple of Message."),
        ({"observation": Observation(("hi",))}, "step() returned 'hi' (str) among messages"),
        ({"observation": Observation((Message("user", None),))}, "content is None"),
        ({"observation": Observation((Message("npc", "hi"),))}, "role 'npc'"),
        ({"observation": Observation((), state_key=7)}, "step() returned state_key=7 (int): return a str"),
    ],
)
def test_each_wrong_field_is_named_with_what_to_return(change, says):
    problems = check_env(lambda: Bent(lambda step: replace(step, **change)), TASK)
    assert any(says in problem for problem in problems), problems
    assert len(problems) == len(set(problems))


def test_a_step_that_is_no_step_is_named():
    assert check_env(lambda: Bent(lambda step: (step.observation, 0.0)), TASK)[0].startswith("step() returned (Obs")


def fresh_reward(step):
    return replace(step, reward=float(next(ticket)))


def fresh_key(step):
    return replace(step, observation=replace(step.observation, state_key=f"{next(ticket)}"))


class Opens(Walk):
    """A walk whose opening is changed by `change(env, task, opening)`."""

    def __init__(self, change):
        self.change, self.number, self.games = change, next(ticket), 0

    async def reset(self, task, seed):
        self.games += 1
        return replace(await super().reset(task, seed), **self.change(self))


class Seedy(Walk):
    async def reset(self, task, seed):
        return await super().reset(replace(task, seed=seed), seed)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Bent(fresh_reward), "another reward on replay (step 1)"),
        (lambda: Bent(fresh_key), "another state_key on replay"),
        (lambda: Opens(lambda env: {"messages": (Message("user", f"game {env.games}"),)}), "other messages the second"),
        (lambda: Opens(lambda env: {"state_key": str(next(ticket))}), "other state_key the second time"),
        (lambda: Opens(lambda env: {"messages": (Message("user", f"{env.number}"),)}), "in a second environment"),
        (Seedy, "derive the start state from task.seed"),
    ],
)
def test_what_does_not_follow_from_task_and_seed_is_found(make, says):
    assert says in check_env(make, TASK)[0]


def test_whatever_raises_is_a_problem_and_not_an_exception():
    class Raises(Walk):
        def __init__(self, where):
            self.where, self.closed = where, 0

        def fail(self, where):
            if self.where == where:
                raise OSError("gone")

        async def reset(self, task, seed):
            self.fail("reset")
            return await super().reset(task, seed)

        async def step(self, action):
            self.fail("step")
            return await super().step(action)

        def actions(self):
            self.fail("actions")
            return super().actions()

        def metrics(self):
            self.fail("metrics")
            return super().metrics()

        async def close(self):
            self.closed += 1
            if self.closed == 2:
                self.fail("the second close")

    for where in ("reset", "step", "actions", "metrics", "the second close"):
        assert check_env(lambda where=where: Raises(where), TASK) == [f"{where}() raised OSError: gone."]
    assert check_env(lambda: Raises(), TASK)[0].startswith("make() raised TypeError")


def test_wrong_actions_and_metrics_are_named():
    class Wrong(Walk):
        def actions(self):
            return ("left",)

        async def step(self, action):
            return Step(self.seen())

        def metrics(self):
            return {"success": math.nan}

    problems = check_env(Wrong, TASK)
    assert any(problem.startswith("actions() returned ('left',)") for problem in problems)
    assert any(problem.startswith("metrics() returned metrics['success']=nan") for problem in problems)


def test_it_can_be_called_inside_an_event_loop():
    async def inside():
        return check_env(Walk, TASK)

    assert asyncio.run(inside()) == []


def test_the_assertion_lists_the_problems():
    with pytest.raises(AssertionError, match=r"violates the protocol:\n- step\(\) returned reward=nan"):
        assert_env(lambda: Bent(lambda step: replace(step, reward=math.nan)), TASK)


# ------------------------------------------------------------------------------------------------ further methods


def problems_of(kind):
    return check_env(kind, TASK, seed=2)


def test_a_step_in_gymnasiums_shape_is_recognised():
    def five(step):
        return step.observation.messages[0].content, 0.0, False, False, {}

    assert check_env(lambda: Bent(five), TASK)[0].endswith("arborl.envs.from_gymnasium wraps such an environment.)")


def test_a_message_that_is_no_move_must_be_answered():
    class Strict(Walk):
        async def step(self, action):
            if action.content not in self.actions():
                raise KeyError(action.content)
            return await super().step(action)

    assert problems_of(Strict)[0] == "step() on the message '' (str) raised KeyError: ''."


def test_nonsense_that_counts_as_a_move_is_found():
    class Lenient(Walk):
        async def step(self, action):
            return replace(await super().step(action), info={"valid": 1.0})

    assert "info['valid']=1.0 (float) for '' (str), which is not among actions()" in problems_of(Lenient)[0]


@pytest.mark.parametrize("method", ["render", "picture", "oracle", "random", "state_key", "metrics", "snapshot"])
def test_looking_that_changes_the_state_is_found(method):
    def look(self, *given):
        self.place += 1
        return getattr(Walk, method)(self, *given)

    assert "these must not change the state" in problems_of(type("Shy", (Walk,), {method: look}))[-1]


@pytest.mark.parametrize(
    ("method", "returned", "says"),
    [
        ("render", 7, "render() returned 7 (int): return a str"),
        ("picture", "png", "picture() returned 'png' (str): return a PIL image of mode RGB"),
        ("state_key", 7, "state_key() returned 7 (int): return a str"),
        ("state_key", "here", "state_key() returned 'here' (str), the observation has '3' (str)"),
        ("oracle", 7, "oracle() returned 7 (int): return the text of a message"),
        ("random", 7, "random() returned 7 (int): return the text of a message"),
        ("metrics", {"success": 0.5}, "metrics() returned success=0.5 (float): return 1 for a solved task, else 0."),
        ("metrics", {"valid": -0.5}, "metrics() returned valid=-0.5 (float): return a fraction from 0 to 1."),
        ("metrics", {"effective": 2}, "metrics() returned effective=2 (int): return a fraction from 0 to 1."),
    ],
)
def test_a_wrong_answer_of_a_further_method_is_named(method, returned, says):
    problems = problems_of(type("Wrong", (Walk,), {method: lambda self, *given: returned}))
    assert any(says in problem for problem in problems), problems


def test_a_snapshot_that_forgets_chance_or_shares_the_state_is_found():
    class Forgets(Walk):
        def snapshot(self):
            return self.place

        def restore(self, snapshot):
            self.place, self.rng = snapshot, generator(99, "walk")

    class Shares(Walk):
        def snapshot(self):
            return vars(self)

        def restore(self, snapshot):
            vars(self).update(snapshot)

    for kind in (Forgets, Shares):
        assert any("after restore() in the same environment" in problem for problem in problems_of(kind))


def test_a_snapshot_that_only_its_own_environment_understands_is_found():
    class Keeps(Walk):
        def snapshot(self):
            self.kept = super().snapshot()
            return "kept"

        def restore(self, snapshot):
            super().restore(getattr(self, "kept", {"place": 0, "rng": generator(0)}))

    assert any("after restore() in a new environment" in problem for problem in problems_of(Keeps))


def test_an_environment_may_say_that_it_has_no_snapshots():
    class Remote(Walk):
        def snapshot(self):
            return None

    assert problems_of(Remote) == []


def test_an_environment_of_plain_functions_is_checked_like_any_other():
    class Sound(Env):
        def reset(self, task, seed):
            self.place = task.seed
            return Observation((Message("user", str(self.place)),), state_key=str(self.place))

        def step(self, action):
            self.place += 1
            return Step(Observation((Message("user", str(self.place)),), str(self.place)), terminated=self.place > 8)

        def state_key(self):
            return str(self.place)

    assert check_env(Sound, TASK) == []


def test_what_stops_the_event_loop_or_interrupts_is_a_problem_and_not_a_pass():
    class Stops(Walk):
        async def step(self, action):
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
            return await super().step(action)

    class Interrupts(Walk):
        async def step(self, action):
            raise KeyboardInterrupt("mine")

    assert "the check stopped at RuntimeError: Event loop stopped" in check_env(Stops, Task("t", seed=1))[0]
    assert check_env(Interrupts, Task("t", seed=1)) == ["the check stopped at KeyboardInterrupt: mine."]
