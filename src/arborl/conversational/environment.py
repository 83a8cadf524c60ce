"""Environments as an object with `reset` and `step`, the state passed from hand to hand; and the one for conversations.

`as_env` makes one of Arbor's own environments of each, which is what is trained in.
"""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from arborl.conversational.trajectory import ConversationTurn, as_turn
from arborl.envs.conversation import CONVERSATION_CONFIGS, Conversation, Persona, Scenario
from arborl.envs.conversation.game import read_scenarios
from arborl.envs.env import Env, Observation, Step
from arborl.errors import ConfigError
from arborl.rewards.text.text_measures import ROLES
from arborl.seeds import derive, generator
from arborl.types import Message, Metrics, Task

__all__ = ["CONVERSATION_CONFIGS", "ConversationEnvironment", "Environment", "EnvironmentState"]

Said = ConversationTurn | Message | Mapping[str, Any] | str | None


@dataclass(frozen=True, slots=True)
class EnvironmentState:
    """Where a conversation stands. `step` is given one and gives the next; none is ever changed."""

    conversation_history: Sequence[Any] = ()
    """What was said: turns, or messages of OpenAI's shape."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own."""


Answer = tuple[EnvironmentState, Said, float, bool]
"""The next state, what the user says, the reward, whether it is over."""
EVAL_SHARE = 0.1
"""Of scenarios, held out where nothing else is said."""


class Environment(ABC):
    """An environment of your own. One object plays any number of episodes at once: all that belongs to an episode is in
    its state.

    Scenarios to train on are those of an attribute `scenarios` or `tasks`, where there is one: all attempts of a group
    are then given the same. Else `reset` is called without, and what it draws by `random` follows from the run's seed.

    `reset` and `step` run in the event loop: where they wait they must `await`.

    Example:
        class Echo(Environment):
            scenarios = [{"id": "a", "word": "yes"}, {"id": "b", "word": "no"}]

            async def reset(self, scenario=None):
                said = [{"role": "user", "content": f"Say {scenario['word']}."}]
                return EnvironmentState(conversation_history=said, metadata=scenario)

            async def step(self, state, action):
                right = state.metadata["word"] in action.content
                return state, None, float(right), True
    """

    @abstractmethod
    async def reset(self, scenario: Any = None) -> EnvironmentState:
        """Begin. Turns in `conversation_history` are what the agent is shown first; without any it speaks first."""

    @abstractmethod
    async def step(self, state: EnvironmentState, action: ConversationTurn) -> Answer:
        """Answer what the agent said: the next state, what the user says (a turn, a message, a text, or None), the
        reward of this step, and whether the conversation is over."""

    def as_env(self) -> Env:
        """The same as one of Arbor's environments."""
        return Played(self)

    def rows(self) -> list[dict[str, Any]]:
        """Scenarios, each as a row that a task is made of; none where `reset` makes them up."""
        listed = getattr(self, "scenarios", None) or getattr(self, "tasks", None) or ()
        if isinstance(listed, str | Mapping) or not isinstance(listed, Sequence):
            kind = type(listed).__name__
            raise ConfigError(f"{type(self).__name__}: its scenarios are a {kind}. Give a list of them.")
        return [_row(scenario, number) for number, scenario in enumerate(listed)]

    @property
    def held_out(self) -> list[dict[str, Any]] | None:
        """Rows that are for measuring alone; without any, some of the others are held out."""
        return None

    randomize_scenarios: bool = True
    """Whether scenarios come in a new order every time round."""
    system: str = ""
    """What an agent is told that has no system prompt of its own; a system message of `reset`'s comes before it."""


def _row(scenario: Any, number: int) -> dict[str, Any]:
    """A scenario as a row. Rewards find it under `scenario`, and its keys by their names."""
    keys = dict(scenario) if isinstance(scenario, Mapping) else {}
    name = str(keys.get("id") or f"scenario-{number + 1}")
    return keys | {"id": name, "scenario": scenario, "messages": [{"role": "user", "content": name}]}


class Played(Env):
    """One episode of an `Environment`."""

    blocking = False

    def __init__(self, environment: Environment):
        self.environment = environment
        self.max_steps = int(getattr(environment, "max_turns", 0) or 0)
        self.turns = 0

    def __deepcopy__(self, memo: Any) -> Played:
        """The environment is shared: what belongs to an episode is in the state."""
        made = copy.copy(self)
        memo[id(self)] = made
        return made

    async def reset(self, task: Task, seed: int) -> Observation:
        self.turns, self.chance = 0, derive(seed, "chance")
        self.state = await Drawing(task.seed, self.environment.reset(task.fields.get("scenario")))
        if not isinstance(self.state, EnvironmentState):
            raise TypeError(f"reset gave a {type(self.state).__name__}; give an EnvironmentState")
        shown = tuple(_message(said, "assistant") for said in self.state.conversation_history)
        told = bool(self.environment.system) and all(message.role != "system" for message in shown)
        return Observation((Message("system", self.environment.system), *shown) if told else shown)

    async def step(self, action: Message) -> Step:
        self.turns += 1
        answer = await Drawing(derive(self.chance, self.turns), self.environment.step(self.state, as_turn(action)))
        try:
            self.state, said, reward, over = answer
        except (TypeError, ValueError):
            raise TypeError(f"step gave {answer!r}; give (state, what the user says, reward, done)") from None
        late = bool(self.max_steps) and self.turns >= self.max_steps
        heard = () if said is None or over else (_message(said, "user"),)
        return Step(Observation(heard), float(reward), terminated=bool(over), truncated=late and not over)

    def metrics(self) -> Metrics:
        """What the state says: `completed`, or `success`, in its metadata."""
        for name in ("success", "completed"):
            if isinstance(found := self.state.metadata.get(name), bool | int | float):
                return {"success": float(found)}
        return {"judged": 0.0}


def _message(said: Said, role: str) -> Message:
    """A turn, a message, a dict or a text as a message; a text is of `role`."""
    match said:
        case Message():
            return said
        case ConversationTurn():
            role, content = said.role, said.content
        case Mapping():
            role, content = str(said.get("role", role)), said.get("content", "")
        case str():
            content = said
        case _:
            raise TypeError(
                f"{said!r} is nothing that was said; give a ConversationTurn, a dict with role and content, or a text"
            )
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"role={role!r}, content={content!r}: give one of {', '.join(ROLES)}, and a text")
    return Message(role, content)  # type: ignore[arg-type]


class Drawing:
    """Something awaited, in which what is drawn by `random` follows from a seed; whoever else runs meanwhile, and
    whatever comes after, draws as if this had not been.

    Example:
        await Drawing(7, environment.reset())
    """

    def __init__(self, seed: int, work: Coroutine[Any, Any, Any]):
        self.work, self.chance = work, random.Random(seed).getstate()

    def __await__(self) -> Generator[Any, Any, Any]:
        waiting, told = self.work.__await__(), partial(next)
        while True:
            outside = random.getstate()
            random.setstate(self.chance)
            try:
                asked = told(waiting)
            except StopIteration as end:
                return end.value
            finally:
                self.chance = random.getstate()
                random.setstate(outside)
            try:
                heard = yield asked
                told = partial(_send, heard)
            except BaseException as error:
                told = partial(_throw, error)


def _send(value: Any, waiting: Any) -> Any:
    return waiting.send(value)


def _throw(error: BaseException, waiting: Any) -> Any:
    return waiting.throw(error)


# ------------------------------------------------------------------------------------------------ conversations


class ConversationEnvironment(Environment):
    """A user who says the lines of a scenario, one after the other; the user speaks first.

    Args:
        scenarios: each `{"id", "topic", "user_responses": [...], "metadata"}`; see `arborl.envs.conversation`. Without
            any, those of `preset`.
        max_turns: the conversation is cut short after this many replies of the agent.
        randomize_scenarios: whether they come in a new order every time round.
        preset: `customer_service`, `technical_support` or `sales`.
        eval_scenarios: what is measured on; without any, one in ten of the others is held out.
        system: what an agent is told that has no system prompt of its own; by default the preset's.
        more: further arguments of `arborl.envs.conversation.Conversation` (`personas`, `user`, `topics`, `order`, …).

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
            raise ConfigError(
                f"ConversationEnvironment, randomize_scenarios={randomize_scenarios!r}: give True or False."
            )
        if scenarios is None and preset is None:
            presets = ", ".join(CONVERSATION_CONFIGS)
            raise ConfigError(f"ConversationEnvironment: give scenarios, or preset=NAME: {presets}.")
        if preset is None:  # what the user said is all that is said, and nothing is told to the agent
            more = {"personas": (Persona("plain"),)} | more
        told = {"preset": preset or "customer_service", "max_turns": max_turns, **more}
        told["system"] = ("" if preset is None else None) if system is None else system
        try:
            self.game = Listed(scenarios=scenarios, **told)
            self.scenarios, self.max_turns = list(self.game.scenarios), max_turns
            if eval_scenarios is not None:
                self.game.scenarios += Listed(scenarios=eval_scenarios, **told).scenarios
        except (TypeError, ValueError) as error:
            raise ConfigError(f"ConversationEnvironment, {error}.") from error
        self.system, self.randomize_scenarios = self.game.system, randomize_scenarios

    def as_env(self) -> Env:
        return copy.deepcopy(self.game)

    def rows(self) -> list[dict[str, Any]]:
        return self.game.rows(range(len(self.scenarios)))

    @property
    def held_out(self) -> list[dict[str, Any]] | None:
        apart = range(len(self.scenarios), len(self.game.scenarios))
        return self.game.rows(apart) if apart else None

    async def transcripts(
        self, count: int, skill: float = 0.5, seed: int = 0, eval_share: float = EVAL_SHARE
    ) -> list[dict[str, Any]]:
        """Conversations of a scripted agent, to imitate: it knows a good reply to each line, and gives it in a share of
        `skill`; else it says what fits somewhere else. Held-out scenarios are not among them.

        Args:
            count: how many.
            skill: between 0 and 1.
            seed: of all chance.
            eval_share: as in the `TrainingConfig` that they are for.
        """
        rows = self.rows() if self.held_out is not None else split(self.rows(), eval_share)[0]
        if not 0 <= skill <= 1 or count < 1:
            raise ConfigError(
                f"transcripts, count={count}, skill={skill}: give 1 or more, and a share between 0 and 1."
            )
        chance = generator(seed, "transcripts")
        made = []
        for number in range(count):
            row, game = rows[number % len(rows)], copy.deepcopy(self.game)
            said = list((await game.reset(Task(row["id"], fields=row), seed)).messages)
            over = False
            while not over:
                good = chance.random() < skill
                said.append(Message("assistant", (game.oracle() if good else game.random(chance)) or "I understand."))
                answer = await game.step(said[-1])
                said, over = [*said, *answer.observation.messages], answer.over
            made.append({"messages": [{"role": message.role, "content": message.content} for message in said]})
        return made

    async def reset(self, scenario: Any = None) -> EnvironmentState:
        """Begin with this scenario, one of its id, or any."""
        game = copy.deepcopy(self.game)
        if isinstance(scenario, Mapping | Scenario):
            game.scenarios, scenario = read_scenarios([scenario]), None
        rows = [row for row in game.rows() if scenario in (None, row["id"], row["scenario_id"])]
        if not rows:
            known = ", ".join(one.id for one in game.scenarios)
            raise ValueError(f"scenario={scenario!r}: there is no such one. Known: {known}")
        row = random.choice(rows)
        opening = await game.reset(Task(row["id"], fields=row), random.getrandbits(32))
        return EnvironmentState(tuple(map(as_turn, opening.messages)), {"scenario": row["id"], "game": game})

    async def step(self, state: EnvironmentState, action: ConversationTurn) -> Answer:
        game: Conversation = copy.deepcopy(state.metadata["game"])
        said = _message(action, "assistant")
        answer = await game.step(said)
        heard = [as_turn(message) for message in answer.observation.messages]
        history = (*state.conversation_history, as_turn(said, answer.reward), *heard)
        after = EnvironmentState(history, {**state.metadata, "game": game, **game.metrics()})
        return after, heard[0] if heard else None, answer.reward, answer.over


class Listed(Conversation):
    """Conversations whose tasks say which scenario they are about, and with whom."""

    def rows(self, numbers: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Every scenario with everybody who may come with it; of these scenarios alone, where some are named."""
        chosen = range(len(self.scenarios)) if numbers is None else numbers
        return [
            {
                "id": scenario.id if len(self.personas) == 1 else f"{scenario.id}/{persona.name}",
                "scenario": number,
                "scenario_id": scenario.id,
                "topic": scenario.topic,
                "goal": scenario.goal,
                "user_responses": [line.text for line in scenario.lines],
                "metadata": dict(scenario.metadata),
                "persona": persona.name,
                "messages": [{"role": "user", "content": scenario.lines[0].text}],
            }
            for number in chosen
            for scenario in [self.scenarios[number]]
            for persona in self.personas
            if scenario.persona in ("", persona.name)
        ]

    def _draw(self, task: Task) -> tuple[Scenario, Persona]:
        if "scenario" not in task.fields:
            return super()._draw(task)
        persona = next(one for one in self.personas if one.name == task.fields["persona"])
        return self.scenarios[task.fields["scenario"]], persona


def split(rows: Sequence[dict[str, Any]], share: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows to measure on, by a hash of their names: at least one of several, none of one."""
    count = min(max(round(len(rows) * share), 1), len(rows) - 1) if share else 0
    ranked = sorted(rows, key=lambda row: hashlib.blake2b(str(row["id"]).encode()).digest())
    apart = {id(row) for row in ranked[:count]}
    return [row for row in rows if id(row) not in apart], [row for row in rows if id(row) in apart]
