"""A package of the shape of `verifiers` 0.3, as far as its adapter and the examples use it: no model, no server."""

from __future__ import annotations

import inspect
import json
import signal
import sys
from types import ModuleType


class Record:
    """As a model of pydantic: fields by name."""

    role = content = tool_calls = tool_call_id = None

    def __init__(self, **fields):
        vars(self).update(fields)

    def __eq__(self, other):
        return isinstance(other, Record) and vars(self) == vars(other)

    __hash__ = None

    def model_dump(self, exclude_none=False):
        return dict(vars(self))


def normalize_messages(messages, field_name=""):
    return [one if isinstance(one, Record) else Record(**one) for one in messages]


class Rubric:
    has_group_rewards = False

    def __init__(self, funcs=(), weights=None):
        self.funcs, self.weights = list(funcs), list(weights or [1.0] * len(funcs))
        self.has_group_rewards = any("completions" in inspect.signature(one).parameters for one in self.funcs)

    def add_metric(self, function):
        self.funcs.append(function)
        self.weights.append(0.0)

    async def score_rollout(self, state):
        given = {name: state.get(name) for name in ("prompt", "completion", "answer", "info")} | {"state": state}
        state["metrics"], state["reward"] = {}, 0.0
        for function, weight in zip(self.funcs, self.weights, strict=True):
            value = function(**{name: given[name] for name in inspect.signature(function).parameters})
            value = float(await value if inspect.isawaitable(value) else value)
            state["metrics"][function.__name__] = value
            state["reward"] += weight * value

    async def cleanup(self, state): ...


def cleanup(function):
    function.is_cleanup = True
    return function


async def num_turns(state):
    return len(state["trajectory"])


class MultiTurnEnv:
    pass_threshold = 0.5
    tool_defs = ()

    def __init__(self, dataset=None, eval_dataset=None, rubric=None, max_turns=-1, system_prompt=None):
        self.dataset, self.eval_dataset = (
            rows and self._with_prompt(rows, system_prompt) for rows in (dataset, eval_dataset)
        )
        self.rubric, self.max_turns = rubric, max_turns
        rubric.add_metric(num_turns)
        sys.modules["verifiers.envs.environment"].signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def _with_prompt(self, rows, system_prompt):
        if "prompt" in rows.column_names:
            return rows
        first = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return rows.add_column("prompt", [[*first, {"role": "user", "content": text}] for text in rows["question"]])

    @property
    def requires_group_rollouts(self):
        return self.rubric.has_group_rewards

    def build_dataset(self):
        return self.dataset

    def build_eval_dataset(self):
        return self.eval_dataset

    get_dataset = build_dataset

    def get_eval_dataset(self, n=-1):
        return self.eval_dataset if n < 0 else self.eval_dataset.select(range(n))

    async def init_state(self, row, client, model, sampling_args):
        info = row.get("info")
        state = {"error": None, "trajectory": [], "completion": None, "final_env_response": None, "client": client}
        state |= {**row, "prompt": normalize_messages(row["prompt"]), "tool_defs": list(self.tool_defs)}
        return state | {"info": json.loads(info) if isinstance(info, str) else info, "stop_condition": None}

    async def setup_state(self, state):
        return None

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *(await self.env_response(messages, state))]

    async def add_model_response(self, state, prompt, response):
        said = Record(role="assistant", content=response.message.content, tool_calls=response.message.tool_calls)
        state["trajectory"].append({"prompt": prompt, "completion": [said]})

    async def is_completed(self, state):
        reasons = {"has_final_env_response": state["final_env_response"] is not None}
        reasons["max_turns_reached"] = 0 < self.max_turns <= len(state["trajectory"])
        reasons["no_tools_called"] = bool(
            self.tool_defs and state["trajectory"] and not state["trajectory"][-1]["completion"][-1].tool_calls
        )
        state["stop_condition"] = next((name for name, holds in reasons.items() if holds), None)
        return state["stop_condition"] is not None

    async def cleanup(self, state):
        if state["trajectory"]:
            last = state["trajectory"][-1]
            whole = [*last["prompt"], *last["completion"], *(state["final_env_response"] or [])]
            state["completion"] = whole[len(state["prompt"]) :]
        for name in dir(type(self)):
            if getattr(getattr(type(self), name), "is_cleanup", False):
                await getattr(self, name)(state)


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **more):
        super().__init__(max_turns=1, **more)


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools=(), max_turns=10, **more):
        super().__init__(max_turns=max_turns, **more)
        self.tool_map, self.tool_defs = {}, []
        for tool in tools:
            self.add_tool(tool)

    def add_tool(self, tool, args_to_skip=()):
        name = tool.__name__
        parameters = [one for one in inspect.signature(tool).parameters if one not in args_to_skip]
        self.tool_map[name] = tool
        self.tool_defs.append(Record(name=name, description=tool.__doc__, parameters={"properties": parameters}))

        def count(completion):
            return sum(call.name == name for message in completion for call in message.tool_calls or ())

        count.__name__ = f"{name}_calls"
        self.rubric.add_metric(count)

    def update_tool_args(self, tool_name, tool_args, messages, state):
        return tool_args

    async def env_response(self, messages, state, **kwargs):
        answers = []
        for call in messages[-1].tool_calls:
            try:
                given = self.update_tool_args(call.name, json.loads(call.arguments), messages, state)
                text = str(self.tool_map[call.name](**given))
            except Exception as error:  # as the formatter of errors
                text = f"{error}"
            answers.append(Record(role="tool", tool_call_id=call.id, content=text))
        return answers


class StatefulToolEnv(ToolEnv): ...


def load_environment(name, **args):
    raise ValueError(f"Could not import '{name}' environment.")


def modules():
    """The modules by name, for `sys.modules`."""
    names = ("verifiers", "verifiers.types", "verifiers.envs", "verifiers.envs.environment", "verifiers.utils")
    found = {name: ModuleType(name) for name in (*names, "verifiers.utils.message_utils")}
    vars(found["verifiers"]).update(
        Rubric=Rubric, MultiTurnEnv=MultiTurnEnv, SingleTurnEnv=SingleTurnEnv, ToolEnv=ToolEnv, cleanup=cleanup,
        StatefulToolEnv=StatefulToolEnv, load_environment=load_environment,
        OpenAIChatCompletionsClient=lambda model: model,
        UserMessage=lambda content: Record(role="user", content=content),
    )  # fmt: skip
    vars(found["verifiers.types"]).update(ToolCall=Record, ResponseMessage=Record, Response=Record)
    vars(found["verifiers.envs.environment"])["signal"] = signal
    vars(found["verifiers.utils.message_utils"]).update(
        normalize_messages=normalize_messages, maybe_normalize_messages=normalize_messages
    )
    return found
