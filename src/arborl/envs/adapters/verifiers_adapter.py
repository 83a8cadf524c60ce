"""Environments of `verifiers` (Prime Intellect), in both directions: `VerifiersEnv`, `as_verifiers`.

Arbor's agent samples every message. `verifiers` provides the rows, the answers of the environment (`env_response`), the
end of the episode (`is_completed`), the execution of tools and the rubric; it never calls a model.

A process has one environment of `verifiers` for each name and arguments, as `verifiers` itself does, and one event loop
in a thread for all calls of it: clients and locks inside it belong to that loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from arborl.chat.formats import make_parser
from arborl.envs.adapters.other_packages import MissingRequirementError, require_package
from arborl.envs.env import Env, Observation, Step, split_of, task_split
from arborl.envs.games.text_game import require
from arborl.envs.wrapper import as_async_env
from arborl.registry import load
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task, ToolCall

if TYPE_CHECKING:
    from numpy.random import Generator

EXAMPLE = "arborl.envs.adapters.verifiers_adapter:as_verifiers"
TOOLS = "Tools:\n{}\nTo call one, write\n{}"
STEP_LIMIT = "max_turns_reached"
"""The stop condition of `verifiers` for too many messages."""


# ------------------------------------------------------------------------------------------------ the package


def _verifiers() -> Any:
    """The package; an error where its version has no `MultiTurnEnv`."""
    package = require_package("verifiers", "verifiers")
    if not hasattr(package, "MultiTurnEnv"):
        version = getattr(package, "__version__", "of this version")
        raise MissingRequirementError(
            f"verifiers {version} has no MultiTurnEnv: version 0.4 replaced environments by task sets, which run a "
            "model themselves. Write: pip install 'arborl[verifiers]' (a version before 0.4)"
        )
    # An environment replaces the handlers of Ctrl-C and SIGTERM, and can therefore only be made in the main thread.
    module = require_package("verifiers.envs.environment", "verifiers")
    if vars(module).get("signal") is signal:
        vars(module)["signal"] = SimpleNamespace(**vars(signal) | {"signal": lambda *_: None})
    return package


class _LoopThread:
    """An event loop in a thread of its own, started at the first call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self.lock:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(target=self.loop.run_forever, name="arborl-verifiers", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(self.submit(coroutine))


LOOP = _LoopThread()


class _NoModel:
    """In place of a client's model."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "this environment calls the client of its rollout, and there is none: Arbor's agent samples. Give the "
            "environment a client of its own, for example for a judge."
        )


# ------------------------------------------------------------------------------------------------ rows and splits


class _Loaded:
    """An environment of `verifiers` and the rows of its splits."""

    def __init__(self, env: Any):
        package = _verifiers()
        if not isinstance(env, package.MultiTurnEnv):
            kind = f"{type(env).__module__}.{type(env).__qualname__}"
            raise ValueError(f"environment: {kind} is not a verifiers.MultiTurnEnv (SingleTurnEnv, ToolEnv, …)")
        if env.requires_group_rollouts:
            raise ValueError(
                "environment: its rubric has reward functions of whole groups (`completions`, `states`, …). Rewards "
                "of a group are Arbor's rewards: see docs/rewards.md"
            )
        self.env = env
        self.lock = threading.Lock()

    @cached_property
    def _splits(self) -> dict[str, tuple[Any, Sequence[int]]]:
        train, held_out = self.env.build_dataset(), self.env.build_eval_dataset()
        for name, rows in (("dataset", train), ("eval_dataset", held_out)):
            require(rows is None or len(rows) > 0, f"environment: its {name} is empty")
        if train is not None and held_out is not None:
            return {"train": (train, range(len(train))), "held_out": (held_out, range(len(held_out)))}
        rows = held_out if train is None else train
        problems = [repr(prompt) for prompt in rows["prompt"]]
        chosen = {problem for problem in problems if split_of(problem) == "held_out"}
        different = set(problems)
        if len(different) > 1 and len(chosen) in (0, len(different)):
            chosen = {min(different, key=lambda problem: hashlib.blake2b(problem.encode()).digest())}
        places: dict[str, list[int]] = {"train": [], "held_out": []}
        for place, problem in enumerate(problems):
            places["held_out" if problem in chosen else "train"].append(place)
        if len(different) == 1:
            places = {"train": list(range(len(problems))), "held_out": []}
        return {split: (rows, found) for split, found in places.items()}

    def rows(self, split: str) -> tuple[Any, Sequence[int]]:
        with self.lock:
            found = self._splits[split]
        require(bool(found[1]), "environment: all its rows have the same prompt, and none can be held out")
        return found


_LOADED: dict[tuple[str, str], _Loaded] = {}
_LOADED_LOCK = threading.Lock()


def _load(environment: Any, args: Mapping[str, Any]) -> _Loaded:
    """The environment of a name, of `module:function` or of an object; a name is loaded once in a process."""
    if not isinstance(environment, str):
        return _Loaded(environment(**args) if callable(environment) else environment)
    key = (environment, json.dumps(args, sort_keys=True, default=repr))
    with _LOADED_LOCK:
        if key not in _LOADED:
            package = _verifiers()
            if ":" in environment:
                found = load(environment, "environment")
                made = found(**args) if callable(found) else found
            else:
                made = package.load_environment(environment, **args)
            _LOADED[key] = _Loaded(made)
        return _LOADED[key]


# ------------------------------------------------------------------------------------------------ from verifiers


@dataclass(eq=False)
class VerifiersEnv(Env):
    """An environment of `verifiers`: `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`, `StatefulToolEnv`, or your subclass.

    A task is a row of its data set, drawn by the task's seed, or the row number `index` of the task's fields. The
    reward is the rubric's, once, at the end; the value of every reward function is a metric under its name.
    """

    environment: Any = EXAMPLE
    """An installed environment (`gsm8k`), `package.module:load_environment`, or in Python an object or a function. By
    default Arbor's own `frozen_lake`, converted by `as_verifiers`."""
    args: Mapping[str, Any] | None = None
    """Arguments of its `load_environment`."""
    list_tools: bool = True
    """Whether the first message describes the environment's tools and the format of a call."""
    success: float | None = None
    """Minimum reward of a success; by default the environment's `pass_threshold`."""

    def __post_init__(self) -> None:
        self.isolated = isinstance(self.environment, str)
        try:
            self._get()
        except (TypeError, RuntimeError, ImportError) as error:
            raise ValueError(f"environment={self.environment!r}, args={dict(self.args or {})}: {error}") from error
        self.state: Any = None

    def _get(self) -> _Loaded:
        if not isinstance(self.environment, str):
            if "_own" not in vars(self):
                self._own = _load(self.environment, self.args or {})
            return self._own
        return _load(self.environment, self.args or {})

    async def reset(self, task: Task, seed: int) -> Observation:
        await self.close()
        rows, places = self._get().rows(task_split(task, "verifiers"))
        if (index := task.fields.get("index")) is not None:
            require(0 <= int(index) < len(rows), f"index={index}: the data set has rows 0 to {len(rows) - 1}")
            row = rows[int(index)]
        else:
            row = rows[places[derive(task.seed, "verifiers") % len(places)]]
        self.scores: Metrics = {}
        self.reward, self.is_over = 0.0, False
        self.key = hashlib.blake2b(digest_size=12)
        return self._observation(await LOOP.call(self._start(dict(row))))

    async def _start(self, row: dict[str, Any]) -> list[Message]:
        env, package = self._get().env, _verifiers()
        client = package.OpenAIChatCompletionsClient(_NoModel())
        self.state = await env.init_state(row, client, "arborl", {})
        self.state = await env.setup_state(self.state) or self.state
        self._raise_error()
        self.prompt = _normalized(await env.get_prompt_messages(self.state), "prompt")
        messages = [_from_verifiers(message, {}) for message in self.prompt]
        self.tools = [tool.model_dump(exclude_none=True) for tool in self.state["tool_defs"]]
        if self.tools and self.list_tools:
            shape = make_parser("hermes").format(ToolCall("call_0", "TOOL", {"NAME": "VALUE"}))
            text = TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.tools), shape)
            if messages and messages[0].role == "system":
                messages[0] = Message("system", f"{messages[0].content}\n\n{text}")
            else:
                messages.insert(0, Message("system", text))
        return messages

    async def step(self, action: Message) -> Step:
        messages = await LOOP.call(self._answer(action))
        limited = self.is_over and self.state["stop_condition"] == STEP_LIMIT and self._get().env.max_turns > 1
        return Step(
            self._observation([action, *messages], len(messages)),
            reward=self.reward,
            terminated=self.is_over and not limited,
            truncated=limited,
        )

    async def _answer(self, action: Message) -> list[Message]:
        env, state = self._get().env, self.state
        calls = action.tool_calls or make_parser("hermes").parse(action.content) if self.tools else ()
        await env.add_model_response(state, self.prompt, _response(action.content, calls))
        messages: list[Message] = []
        if not await env.is_completed(state):
            before = [*self.prompt, *state["trajectory"][-1]["completion"]]
            self.prompt = _normalized(await env.get_prompt_messages(state), "env_response")
            if self.prompt[: len(before)] != before:
                raise ValueError("the environment edits earlier messages of its prompt; only added messages are read")
            messages = [_from_verifiers(message, calls) for message in self.prompt[len(before) :]]
        self._raise_error()
        if await env.is_completed(state):
            await self._score()
        return messages

    async def _score(self) -> None:
        env, state = self._get().env, self.state
        self.is_over = True
        await env.cleanup(state)
        await env.rubric.score_rollout(state)
        self.reward = float(state["reward"])
        self.scores = {str(name): float(value) for name, value in (state["metrics"] or {}).items()}
        await env.rubric.cleanup(state)

    def _raise_error(self) -> None:
        if (error := self.state.get("error")) is not None:
            raise error

    def _observation(self, messages: Sequence[Message], shown: int | None = None) -> Observation:
        for message in messages:
            self.key.update(repr((message.role, message.content)).encode())
        return Observation(
            tuple(messages[len(messages) - shown :] if shown is not None else messages), self.state_key()
        )

    async def close(self) -> None:
        state, self.state = self.state, None
        if state is not None and not self.is_over:
            await LOOP.call(self._clean_up(state))

    async def _clean_up(self, state: Any) -> None:
        env = self._get().env
        await env.cleanup(state)
        await env.rubric.cleanup(state)

    def metrics(self) -> Metrics:
        threshold = self._get().env.pass_threshold if self.success is None else self.success
        return {**self.scores, "success": float(self.is_over and self.reward >= threshold)}

    def random(self, rng: Generator) -> str | None:
        """The answer of a random row; None without a column `answer`."""
        rows, _ = self._get().rows("train")
        if "answer" not in rows.column_names:
            return None
        return str(rows[int(rng.integers(len(rows)))]["answer"]) or None

    def state_key(self) -> str:
        return self.key.hexdigest()

    def render(self) -> str:
        if self.state is None:
            return ""
        steps = [*self.prompt, *(self.state["completion"] or [])] if self.is_over else self.prompt
        return "\n".join(f"{message.role}: {_text(message)}" for message in steps)

    def snapshot(self) -> None:
        return None


def _normalized(messages: Any, where: str) -> list[Any]:
    utils = require_package("verifiers.utils.message_utils", "verifiers")
    return list(utils.maybe_normalize_messages(messages, field_name=where))


def _text(message: Any) -> str:
    content = message.content
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [part if isinstance(part, Mapping) else dict(part) for part in content]
    if other := [str(part.get("type")) for part in parts if part.get("type") != "text"]:
        raise ValueError(f"a message of role {message.role} contains {', '.join(other)}: only text is supported")
    return "\n".join(str(part["text"]) for part in parts)


def _from_verifiers(message: Any, calls: Sequence[ToolCall] | Mapping[str, Any]) -> Message:
    """A message for the agent. A call that could not be read is answered by its error."""
    if message.role != "tool":
        return Message("user" if message.role == "text" else message.role, _text(message))
    call = next((one for one in calls if isinstance(one, ToolCall) and one.id == message.tool_call_id), None)
    text = call.error if call is not None and call.error is not None else _text(message)
    return Message("tool", text, tool_call_id=message.tool_call_id, name=None if call is None else call.name)


def _response(text: str, calls: Sequence[ToolCall]) -> Any:
    types = require_package("verifiers.types", "verifiers")
    given = [types.ToolCall(id=call.id, name=call.name, arguments=json.dumps(call.arguments)) for call in calls]
    message = types.ResponseMessage(
        content=text,
        tool_calls=given or None,
        finish_reason="tool_calls" if given else "stop",
        is_truncated=False,
    )
    return types.Response(id="arborl", created=0, model="arborl", message=message)


# ------------------------------------------------------------------------------------------------ to verifiers


def as_verifiers(
    env: str = "frozen_lake",
    args: Mapping[str, Any] | None = None,
    train_tasks: int = 1000,
    held_out_tasks: int = 100,
    max_turns: int = 64,
    **more: Any,
) -> Any:
    """An environment of Arbor as a `verifiers.MultiTurnEnv`, for `vf-eval` and trainers that use `verifiers`.

    A row of `dataset` or `eval_dataset` is a task: a seed and a split. Its first messages are made at the start of a
    rollout. The reward is the sum of the environment's rewards; its metrics are metrics of the rubric.

    Example:
        def load_environment(**args):  # in your module my_lake.py, for vf-eval my_lake
            return as_verifiers("frozen_lake", args)

    Args:
        env: name, or `package.module:Class`.
        args: arguments of the environment.
        train_tasks, held_out_tasks: numbers of rows.
        max_turns: messages of a rollout.
        more: arguments of `verifiers.MultiTurnEnv`.
    """
    from arborl.envs import ENVS

    package = _verifiers()
    dataset = require_package("datasets", "verifiers").Dataset
    given = dict(args or {})

    def make() -> Env:
        return as_async_env(ENVS.build(env, given, "args"))

    async def names() -> list[str]:
        made = make()
        await made.reset(Task(f"{env}/0"), 0)
        found = list(made.metrics())
        await made.close()
        return found

    def rows(split: str, count: int) -> Any:
        prompt = [{"role": "user", "content": f"{env}: a task of split {split}"}]
        fields = [json.dumps({"seed": derive(number, split) % 2**31, "split": split}) for number in range(count)]
        return dataset.from_dict({"prompt": [prompt] * count, "answer": [""] * count, "info": fields})

    rubric = package.Rubric(funcs=[total_reward], weights=[1.0])
    for name in LOOP.submit(names()).result():
        rubric.add_metric(_metric(name))
    more = {"dataset": rows("train", train_tasks), "eval_dataset": rows("held_out", held_out_tasks)} | more
    return _converted_class(package)(make, rubric=rubric, max_turns=max_turns, **more)


async def total_reward(state: Any) -> float:
    return float(state["arborl_reward"])


def _metric(name: str) -> Any:
    async def metric(state: Any) -> float:
        return float(state["arborl_metrics"].get(name, 0.0))

    metric.__name__ = name
    return metric


def _converted_class(package: Any) -> Any:
    class ConvertedEnv(package.MultiTurnEnv):  # type: ignore[misc, name-defined]
        """Plays an environment of Arbor in the event loop of this module, so that it does not block `verifiers`."""

        def __init__(self, make: Any, **more: Any):
            super().__init__(**more)
            self.make = make
            self.rollouts = itertools.count()

        async def setup_state(self, state: Any) -> Any:
            info = state["info"]
            task = Task(f"{info['split']}/{info['seed']}", fields={"split": info["split"]}, seed=int(info["seed"]))
            state["arborl_env"], state["arborl_reward"], state["arborl_metrics"] = self.make(), 0.0, {}
            opening = await LOOP.call(state["arborl_env"].reset(task, derive(task.seed, next(self.rollouts))))
            state["prompt"] = _to_verifiers(opening.messages)
            return state

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            env = state["arborl_env"]
            step = await LOOP.call(env.step(Message("assistant", _text(messages[-1]))))
            state["arborl_reward"] += float(step.reward)
            state["arborl_metrics"] = dict(env.metrics())
            answer = _to_verifiers(step.observation.messages)
            if step.over:
                state["final_env_response"] = answer
            return answer

        @package.cleanup  # type: ignore[untyped-decorator]
        async def close_environment(self, state: Any) -> None:
            env = state.pop("arborl_env", None)
            if env is not None:
                await LOOP.call(env.close())

    return ConvertedEnv


def _to_verifiers(messages: Sequence[Message]) -> Any:
    utils = require_package("verifiers.utils.message_utils", "verifiers")
    fields = [{"role": message.role, "content": message.content} for message in messages]
    for one, message in zip(fields, messages, strict=True):
        if message.role == "tool":
            one["tool_call_id"] = message.tool_call_id or "call_0"
    return utils.normalize_messages(fields, field_name="messages")
