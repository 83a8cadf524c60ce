"""Environments with `reset(scenario)` and `step(state, action)`, the one for conversations, and trajectories.

`as_env` converts each into one of Arbor's environments for training.
"""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from statistics import fmean
from typing import Any

from arborl.conversational.config import EVAL_SHARE
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.conversation_env import CONVERSATION_CONFIGS, Conversation, Persona, Scenario, read_scenarios
from arborl.errors import ConfigError
from arborl.rewards.text.text_measures import ROLES, ConversationTurn, as_turn, turns_of
from arborl.seeds import derive, generator
from arborl.types import Episode, Group, Message, Metrics, Task

AnyTurn = ConversationTurn | Message | Mapping[str, Any] | str | None


@dataclass(frozen=True, slots=True)
class EnvironmentState:
    """State of a conversation. `step` takes one and returns the next; none is changed in place."""

    conversation_history: Sequence[Any] = ()
    """Turns, or messages in OpenAI's format."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Data of the environment."""


StepResult = tuple[EnvironmentState, AnyTurn, float, bool]
"""Next state, turn of the user, reward, whether the conversation is done."""


class Environment(ABC):
    """Base class of your environments. One object plays many episodes at once: their data is in their states.

    Tasks are the items of the attribute `scenarios` or `tasks` if there is one: all attempts of a group get the same
    one. Otherwise `reset` is called without a scenario, and `random` in it is seeded by the run.

    `reset` and `step` run in the event loop: they must `await` instead of blocking.

    Example:
        class Echo(Environment):
            scenarios = [{"id": "a", "word": "yes"}, {"id": "b", "word": "no"}]

            async def reset(self, scenario=None):
                history = [{"role": "user", "content": f"Say {scenario['word']}."}]
                return EnvironmentState(conversation_history=history, metadata=scenario)

            async def step(self, state, action):
                is_right = state.metadata["word"] in action.content
                return state, None, float(is_right), True
    """

    randomize_scenarios: bool = True
    """Whether scenarios have a new order in every epoch."""
    system: str = ""
    """System prompt of agents without their own, if `reset` returns no system message."""

    @abstractmethod
    async def reset(self, scenario: Any = None) -> EnvironmentState:
        """Start. The agent sees the turns of `conversation_history`; without any it speaks first."""

    @abstractmethod
    async def step(self, state: EnvironmentState, action: ConversationTurn) -> StepResult:
        """Reply to the agent: next state, turn of the user (a turn, a message, a text, or None), reward, done."""

    def as_env(self) -> Env:
        """One of Arbor's environments."""
        return EnvironmentAdapter(self)

    def rows(self) -> list[dict[str, Any]]:
        """Scenarios as rows of tasks; empty if `reset` makes them up."""
        scenarios = getattr(self, "scenarios", None) or getattr(self, "tasks", None) or ()
        if isinstance(scenarios, str | Mapping) or not isinstance(scenarios, Sequence):
            name, kind = type(self).__name__, type(scenarios).__name__
            raise ConfigError(f"{name}, scenarios: must be a list, not a {kind}.")
        return [_row(scenario, number) for number, scenario in enumerate(scenarios)]

    @property
    def held_out(self) -> list[dict[str, Any]] | None:
        """Rows for evaluation only; None: a share of `rows` is held out."""
        return None


def _row(scenario: Any, number: int) -> dict[str, Any]:
    """A scenario as a row. Rewards find it under `scenario`, and its keys by name."""
    keys = dict(scenario) if isinstance(scenario, Mapping) else {}
    name = str(keys.get("id") or f"scenario-{number + 1}")
    return keys | {"id": name, "scenario": scenario, "messages": [{"role": "user", "content": name}]}


class EnvironmentAdapter(Env):
    """One episode of an `Environment`."""

    blocking = False

    def __init__(self, environment: Environment):
        self.environment = environment
        self.max_steps = int(getattr(environment, "max_turns", 0) or 0)
        self.num_turns = 0

    def __deepcopy__(self, memo: Any) -> EnvironmentAdapter:
        """The environment is shared: data of an episode is in its state."""
        made = copy.copy(self)
        memo[id(self)] = made
        return made

    async def reset(self, task: Task, seed: int) -> Observation:
        self.num_turns, self.step_seed = 0, derive(seed, "chance")
        self.state = await WithRandomSeed(task.seed, self.environment.reset(task.fields.get("scenario")))
        if not isinstance(self.state, EnvironmentState):
            raise TypeError(f"reset returned a {type(self.state).__name__}; return an EnvironmentState")
        messages = tuple(_as_message(turn, "assistant") for turn in self.state.conversation_history)
        system = self.environment.system
        needs_system = bool(system) and all(message.role != "system" for message in messages)
        return Observation((Message("system", system), *messages) if needs_system else messages)

    async def step(self, action: Message) -> Step:
        self.num_turns += 1
        seed = derive(self.step_seed, self.num_turns)
        result = await WithRandomSeed(seed, self.environment.step(self.state, as_turn(action)))
        try:
            self.state, turn, reward, is_done = result
        except (TypeError, ValueError):
            raise TypeError(f"step returned {result!r}; return (state, turn of the user, reward, done)") from None
        is_last = bool(self.max_steps) and self.num_turns >= self.max_steps
        messages = () if turn is None or is_done else (_as_message(turn, "user"),)
        return Step(Observation(messages), float(reward), terminated=bool(is_done), truncated=is_last and not is_done)

    def metrics(self) -> Metrics:
        """`success` or `completed` of the state's metadata."""
        for name in ("success", "completed"):
            if isinstance(value := self.state.metadata.get(name), bool | int | float):
                return {"success": float(value)}
        return {"judged": 0.0}


def _as_message(turn: AnyTurn, role: str) -> Message:
    """A turn, a message, a dict or a text as a message; a text has this role."""
    match turn:
        case Message():
            return turn
        case ConversationTurn():
            role, content = turn.role, turn.content
        case Mapping():
            role, content = str(turn.get("role", role)), turn.get("content", "")
        case str():
            content = turn
        case _:
            raise TypeError(f"{turn!r} is not a turn; use a ConversationTurn, a dict with role and content, or a text")
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"role={role!r}, content={content!r}: role must be one of {', '.join(ROLES)}, content a text")
    return Message(role, content)  # type: ignore[arg-type]


class WithRandomSeed:
    """Awaits a coroutine with its own state of the module `random`; other tasks are not affected."""

    def __init__(self, seed: int, work: Coroutine[Any, Any, Any]):
        self.work, self.state = work, random.Random(seed).getstate()

    def __await__(self) -> Generator[Any, Any, Any]:
        iterator = self.work.__await__()
        resume: Callable[[Any], Any] = next
        while True:
            outer_state = random.getstate()
            random.setstate(self.state)
            try:
                awaited = resume(iterator)
            except StopIteration as end:
                return end.value
            finally:
                self.state = random.getstate()
                random.setstate(outer_state)
            try:
                resume = methodcaller("send", (yield awaited))
            except BaseException as error:
                resume = methodcaller("throw", error)


# ------------------------------------------------------------------------------------------------ conversations


class ConversationEnvironment(Environment):
    """A user with the lines of a scenario; the user speaks first.

    Args:
        scenarios: each `{"id", "topic", "user_responses": [...], "metadata"}`, see
            `arborl.envs.games.conversation_env`. Default: those of `preset`.
        max_turns: replies of the agent at most.
        randomize_scenarios: whether scenarios have a new order in every epoch.
        preset: `customer_service`, `technical_support` or `sales`.
        eval_scenarios: scenarios for evaluation; default: one in ten of the others is held out.
        system: system prompt of agents without their own; default: the preset's.
        more: other arguments of `arborl.envs.games.conversation_env.Conversation` (`personas`, `user`,
            `topics`, `order`, …).

    Example:
        ConversationEnvironment(scenarios=[{"id": "hello", "user_responses": ["Hello!", "Who are you?"]}], max_turns=6)
        ConversationEnvironment(**CONVERSATION_CONFIGS["customer_service"])
    """

    def __init__(
        self,
        scenarios: Sequence[Mapping[str, Any] | Scenario] | str | None = None,
        max_turns: int = 10,
        randomize_scenarios: bool = True,
        *,
        preset: str | None = None,
        eval_scenarios: Sequence[Mapping[str, Any] | Scenario] | None = None,
        system: str | None = None,
        **more: Any,
    ):
        if not isinstance(randomize_scenarios, bool):
            given = f"randomize_scenarios={randomize_scenarios!r}"
            raise ConfigError(f"ConversationEnvironment, {given}: must be True or False.")
        if scenarios is None and preset is None:
            presets = ", ".join(CONVERSATION_CONFIGS)
            raise ConfigError(f"ConversationEnvironment: write scenarios=[…], or preset=NAME: {presets}.")
        if preset is None:  # only the lines of the scenarios, and no system prompt
            more = {"personas": (Persona("plain"),)} | more
        options = {"preset": preset or "customer_service", "max_turns": max_turns, **more}
        options["system"] = ("" if preset is None else None) if system is None else system
        try:
            self.game = ScenarioConversation(scenarios=scenarios, **options)
            self.scenarios, self.max_turns = list(self.game.scenarios), max_turns
            if eval_scenarios is not None:
                self.game.scenarios += ScenarioConversation(scenarios=eval_scenarios, **options).scenarios
        except (TypeError, ValueError) as error:
            raise ConfigError(f"ConversationEnvironment, {error}.") from error
        self.system, self.randomize_scenarios = self.game.system, randomize_scenarios

    def as_env(self) -> Env:
        return copy.deepcopy(self.game)

    def rows(self) -> list[dict[str, Any]]:
        return self.game.rows(range(len(self.scenarios)))

    @property
    def held_out(self) -> list[dict[str, Any]] | None:
        numbers = range(len(self.scenarios), len(self.game.scenarios))
        return self.game.rows(numbers) if numbers else None

    async def transcripts(
        self, count: int, skill: float = 0.5, seed: int = 0, eval_share: float = EVAL_SHARE
    ) -> list[dict[str, Any]]:
        """Conversations of a scripted agent, for imitation. It gives a good reply with probability `skill`, and a reply
        that fits elsewhere otherwise. Held-out scenarios are excluded.
        """
        rows = self.rows() if self.held_out is not None else split_rows(self.rows(), eval_share)[0]
        if not 0 <= skill <= 1 or count < 1:
            raise ConfigError(f"transcripts, count={count}, skill={skill}: count must be >= 1, skill from 0 to 1.")
        rng = generator(seed, "transcripts")
        transcripts = []
        for number in range(count):
            row, game = rows[number % len(rows)], copy.deepcopy(self.game)
            messages = list((await game.reset(Task(row["id"], fields=row), seed)).messages)
            is_over = False
            while not is_over:
                is_good = rng.random() < skill
                reply = (game.oracle() if is_good else game.random(rng)) or "I understand."
                messages.append(Message("assistant", reply))
                step = await game.step(messages[-1])
                messages, is_over = [*messages, *step.observation.messages], step.over
            transcripts.append({"messages": [{"role": one.role, "content": one.content} for one in messages]})
        return transcripts

    async def reset(self, scenario: Any = None) -> EnvironmentState:
        """Start with this scenario, the scenario of this id, or a random one."""
        game = copy.deepcopy(self.game)
        if isinstance(scenario, Mapping | Scenario):
            game.scenarios, scenario = read_scenarios([scenario]), None
        rows = [row for row in game.rows() if scenario in (None, row["id"], row["scenario_id"])]
        if not rows:
            known = ", ".join(one.id for one in game.scenarios)
            raise ValueError(f"scenario={scenario!r}: unknown. Known: {known}")
        row = random.choice(rows)
        opening = await game.reset(Task(row["id"], fields=row), random.getrandbits(32))
        return EnvironmentState(tuple(map(as_turn, opening.messages)), {"scenario": row["id"], "game": game})

    async def step(self, state: EnvironmentState, action: ConversationTurn) -> StepResult:
        game: Conversation = copy.deepcopy(state.metadata["game"])
        message = _as_message(action, "assistant")
        step = await game.step(message)
        turns = [as_turn(one) for one in step.observation.messages]
        history = (*state.conversation_history, as_turn(message, step.reward), *turns)
        next_state = EnvironmentState(history, {**state.metadata, "game": game, **game.metrics()})
        return next_state, turns[0] if turns else None, step.reward, step.over


class ScenarioConversation(Conversation):
    """A conversation environment whose tasks name their scenario and persona."""

    def rows(self, numbers: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Every scenario with every persona that it allows; only the scenarios with these numbers if given."""
        chosen = range(len(self.scenarios)) if numbers is None else numbers
        return [
            {
                "id": scenario.id if len(self.personas) == 1 else f"{scenario.id}/{persona.name}",
                "scenario": number, "scenario_id": scenario.id, "topic": scenario.topic, "goal": scenario.goal,
                "user_responses": [line.text for line in scenario.lines], "metadata": dict(scenario.metadata),
                "persona": persona.name, "messages": [{"role": "user", "content": scenario.lines[0].text}],
            }
            for number in chosen
            for scenario in [self.scenarios[number]]
            for persona in self.personas
            if scenario.persona in ("", persona.name)
        ]  # fmt: skip

    def _draw(self, task: Task) -> tuple[Scenario, Persona]:
        if "scenario" not in task.fields:
            return super()._draw(task)
        persona = next(one for one in self.personas if one.name == task.fields["persona"])
        return self.scenarios[task.fields["scenario"]], persona


def split_rows(rows: Sequence[dict[str, Any]], share: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows by a hash of their ids: at least one of several is held out, none of one."""
    count = min(max(round(len(rows) * share), 1), len(rows) - 1) if share else 0
    ranked = sorted(rows, key=lambda row: hashlib.blake2b(str(row["id"]).encode()).digest())
    held_out = {id(row) for row in ranked[:count]}
    return [row for row in rows if id(row) not in held_out], [row for row in rows if id(row) in held_out]


# ------------------------------------------------------------------------------------------------ trajectories


@dataclass(frozen=True, slots=True)
class MultiTurnTrajectory:
    """A conversation and its reward, for rewards, callbacks and readers. Training uses token ids only."""

    trajectory_id: str
    turns: Sequence[ConversationTurn]
    episode_reward: float = 0.0
    trajectory_group_id: str | None = None
    """Shared by all conversations of one scenario."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, episode: Episode) -> MultiTurnTrajectory:
        return cls(episode.id, turns_of(episode), episode.reward, episode.task.id, {"stop": str(episode.stop)})

    @property
    def replies(self) -> list[ConversationTurn]:
        """The assistant's turns."""
        return [turn for turn in self.turns if turn.role == "assistant"]


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Conversations of one scenario."""

    group_id: str
    trajectories: Sequence[MultiTurnTrajectory]

    @classmethod
    def of(cls, group: Group) -> TrajectoryGroup:
        return cls(group.task.id, [MultiTurnTrajectory.of(episode) for episode in group.valid_episodes])

    @property
    def rewards(self) -> list[float]:
        return [one.episode_reward for one in self.trajectories]

    @property
    def advantages(self) -> list[float]:
        """Reward minus the group's mean.

        Example (rewards 0.7, 0.9, 0.6, 0.8):  ->  -0.05, 0.15, -0.15, 0.05
        """
        mean = fmean(self.rewards) if self.trajectories else 0.0
        return [reward - mean for reward in self.rewards]
