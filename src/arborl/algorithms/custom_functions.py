"""Custom advantages and losses: functions whose parameters are filled by name.

A parameter with one of the names below receives that input; every other parameter is a setting, from `algorithm.args`
or its default. Before a run starts, a custom function is run on a small batch (`check_advantage`, `check_loss`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from arborl.algorithms.advantages import Credit, Memory, arrays_of, over_branches
from arborl.algorithms.loss_table import loss_inputs
from arborl.algorithms.token_losses import LossParts, ModelOutputs, TermBatch, pick_rows
from arborl.config.algorithm_config import AlgorithmConfig, is_custom
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import load
from arborl.types import Call, Completion, Episode, FinishReason, Floats, Group, Message, Task, Terms, Turn

T = TypeVar("T")
FindObject = Callable[[str, str], Any]  # returns the object for a name and the kind of part it is used as
TOLERANCE = 1e-6  # how much a token's loss may change with the other tokens of the batch


def object_finder(objects: Mapping[str, Any]) -> FindObject:
    """Finds objects that Python code passed in, then those that can be imported."""
    return lambda name, kind: objects[name] if name in objects else load(name, kind)


ADVANTAGE_INPUTS = {
    "rewards": "a list of arrays, one per group: the reward of each of its episodes",
    "groups": "the groups, `arborl.types.Group`; failed episodes are not among their `valid_episodes`",
    "terms": "one row per sampled token, `arborl.types.Terms`",
    "value": "the critic's estimate at each token; return two arrays then, advantage and target",
    "memory": "a dict that is kept from step to step and saved as JSON",
}
LOSS_INPUTS = {
    "new": "current log-probability of each sampled token, with gradient",
    "old": "the log-probability in the denominator of the ratio (`algorithm.anchor`)",
    "advantage": "of each token, with importance weights applied",
    "entropy": "of the distribution each token was sampled from, with gradient",
    "reference": "log-probability under the reference model",
    "episode": "number of each token's episode",
    "call": "number of its model call",
    "turn": "its turn within the episode",
    "group": "number of its group",
    "version": "version of the policy that sampled it",
}
EXPECTED = {
    "advantage": (
        "def advantage(rewards, *, my_setting=1.0) -> one array per group with a number per episode; or\n"
        "def advantage(groups, terms, *, my_setting=1.0) -> one array with a number per row of `terms`",
        ADVANTAGE_INPUTS,
    ),
    "loss": (
        "def loss(new, old, advantage, *, my_setting=1.0) -> a tensor with a number per token; or also a dict of more",
        LOSS_INPUTS,
    ),
}


class CustomFunction:
    """A function of the user, and which of its parameters are inputs and which are settings."""

    def __init__(self, kind: str, name: str, function: Any, args: Mapping[str, Any]):
        self.kind, self.name, self.function = kind, name, function
        if inspect.isclass(function) or not callable(function):
            what = "a class" if inspect.isclass(function) else f"an object of type {type(function).__name__}"
            raise self.error(f"is {what}. Write the name of a function")
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise self.error("has no readable signature") from error
        inputs = EXPECTED[kind][1]
        for one in parameters:
            if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL):
                raise self.error(f"has a parameter {str(one)!r}, which cannot be filled by name")
        self.accepts_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
        self.inputs = [one.name for one in named if one.name in inputs]
        self.settings = [one.name for one in named if one.name not in inputs]
        self.args = {key: value for key, value in args.items() if key in self.settings or self.accepts_any}
        for one in named:
            if one.name in self.settings and one.default is one.empty and one.name not in args:
                near = did_you_mean(one.name, inputs)
                raise self.error(f"needs a value for {one.name!r}.{near} Write algorithm.args.{one.name}=VALUE")

    def error(self, what: str) -> ConfigError:
        form, inputs = EXPECTED[self.kind]
        listed = "\n".join(f"  {name:<10} {meaning}" for name, meaning in inputs.items())
        return ConfigError(f"algorithm.{self.kind}={self.name}: {what}. Expected:\n{form}\nInputs by name:\n{listed}")

    def call(self, inputs: Mapping[str, Callable[[], Any]]) -> Any:
        return self.function(**{name: inputs[name]() for name in self.inputs}, **self.args)


class CustomAdvantage(CustomFunction):
    """A custom advantage with the signature of the entries of `ADVANTAGES`."""

    def __call__(self, groups: Sequence[Group], terms: Terms, config: AlgorithmConfig, memory: Memory) -> Credit:
        if not len(terms):
            return np.zeros(0), None
        arrays = arrays_of(groups, terms, config, memory)
        kept = memory.setdefault("own", {}) if "memory" in self.inputs else {}
        result = self.call(
            {
                "rewards": lambda: arrays.by_group(arrays.reward_E.copy()),
                "groups": lambda: groups,
                "terms": lambda: read_only(terms),
                "value": terms.value.copy,
                "memory": lambda: kept,
            }
        )
        if "value" in self.inputs:
            if not isinstance(result, tuple) or len(result) != 2:
                raise self.error(f"takes `value` and returns {_describe(result)}, not two arrays (advantage, target)")
            return self._column(result[0], len(terms)), self._column(result[1], len(terms))
        if isinstance(result, list | tuple):
            by_group = [self._column(one, size) for one, size in zip(result, arrays.sizes, strict=False)]
            if len(result) != len(arrays.sizes):
                raise self.error(f"returns {len(result)} arrays for {len(arrays.sizes)} groups")
            return over_branches(arrays, np.concatenate(by_group), config), None
        return self._column(result, len(terms)), None

    def _column(self, result: Any, size: int) -> Floats:
        if isinstance(result, Tensor):
            result = result.detach().cpu().numpy()
        try:
            column = np.asarray(result, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self.error(f"returns {_describe(result)} instead of numbers") from error
        if column.shape != (size,):
            raise self.error(f"returns {_describe(result)} instead of {size} numbers")
        return column


class CustomLoss(CustomFunction):
    """A custom loss with the signature of the entries of `LOSSES`."""

    def __call__(self, outputs: ModelOutputs, terms: TermBatch, config: AlgorithmConfig) -> LossParts:
        result = self.call(loss_inputs(outputs, terms, config))
        loss_M, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        size = outputs.logprob_M.shape
        if not isinstance(loss_M, Tensor) or loss_M.shape != size or not isinstance(parts, Mapping):
            raise self.error(f"returns {_describe(result)} instead of a tensor of {size[0]} numbers")
        for name, vector in parts.items():
            if not isinstance(vector, Tensor) or vector.shape != size:
                raise self.error(f"returns {_describe(vector)} as {name!r} instead of a tensor of {size[0]} numbers")
        return loss_M, {name if "/" in name else f"policy/{name}": vector for name, vector in parts.items()}


def read_only(terms: Terms) -> Terms:
    """Views of the terms, which are trained on afterwards."""
    columns = [getattr(terms, name) for name in Terms.__slots__]
    views: list[Any] = [one if one is None else np.broadcast_to(one, one.shape) for one in columns]
    return Terms(*views)


def custom_parts(config: AlgorithmConfig, find: FindObject = load) -> tuple[CustomAdvantage | None, CustomLoss | None]:
    """The custom advantage and loss of a configuration. Every setting of `algorithm.args` must belong to one of
    them."""
    advantage = loss = None
    if is_custom(config.advantage):
        advantage = CustomAdvantage("advantage", config.advantage, find(config.advantage, "advantage"), config.own_args)
    if is_custom(config.loss):
        loss = CustomLoss("loss", config.loss, find(config.loss, "loss"), config.own_args)
    both = [one for one in (advantage, loss) if one is not None]
    settings = [name for one in both for name in one.settings]
    for key in config.own_args:
        if key not in settings and not any(one.accepts_any for one in both):
            near = did_you_mean(key, settings)
            raise ConfigError(f"algorithm.args.{key}: unknown setting.{near} Known: {', '.join(settings) or 'none'}.")
    return advantage, loss


def _describe(result: Any) -> str:
    if isinstance(result, Tensor | np.ndarray):
        return f"an array of shape {tuple(result.shape)}"
    if isinstance(result, list | tuple):
        return f"{len(result)} objects"
    return f"an object of type {type(result).__name__}"


def check_advantage(custom: CustomAdvantage, config: AlgorithmConfig) -> None:
    """Raise ConfigError unless it returns a finite number for each token of a small batch."""
    groups = small_groups()
    terms, memory = small_terms(groups), dict[str, object]()
    with np.errstate(all="ignore"):
        advantage, target = run_checked(custom, lambda: custom(groups, terms, config, memory))
    for column in (advantage, target):
        if column is not None and not np.isfinite(column).all():
            raise custom.error(
                "returns numbers that are not finite for a small batch, which has a group with one episode and a group "
                "with equal rewards"
            )
    try:
        json.dumps(memory)
    except TypeError as error:
        raise custom.error(f"stores a value in `memory` that JSON cannot represent ({error})") from error


def check_loss(custom: CustomLoss, config: AlgorithmConfig) -> None:
    """Raise ConfigError unless each token of a small batch has a finite loss and gradient that depend on it alone."""
    terms = term_batch(small_terms(small_groups()))
    size = len(terms.old_M)
    new_M = (terms.old_M + 0.1 * torch.linspace(-1, 1, size, dtype=torch.float64)).requires_grad_()
    entropy_M = torch.linspace(0.5, 1.5, size, dtype=torch.float64).requires_grad_()
    loss_M, _ = run_checked(custom, lambda: custom(ModelOutputs(new_M, entropy_M), terms, config))
    if not torch.isfinite(loss_M).all():
        raise custom.error("returns a loss that is not finite for a small batch")
    if not loss_M.requires_grad:
        raise custom.error("returns a loss without a gradient: compute it with torch from `new` (or `entropy`)")
    found = torch.autograd.grad(loss_M.sum(), [new_M, entropy_M], allow_unused=True)
    gradient_M = torch.cat([gradient for gradient in found if gradient is not None])
    if not torch.isfinite(gradient_M).all():
        raise custom.error("has a gradient that is not finite for a small batch")
    if not gradient_M.any():
        raise custom.error("has a gradient of 0 for a small batch")
    for rows in (torch.arange(size // 2), torch.arange(size // 2, size)):
        part = pick_rows(terms, rows)
        part_M, _ = run_checked(custom, partial(custom, ModelOutputs(new_M[rows], entropy_M[rows]), part, config))
        if not torch.allclose(part_M, loss_M[rows], rtol=TOLERANCE, atol=TOLERANCE):
            raise custom.error(
                "returns a loss of a token that depends on other tokens (a mean over the batch?). Batches are split: "
                "a token's loss must depend on that token alone; normalize in the advantage"
            )


def run_checked(custom: CustomFunction, work: Callable[[], T]) -> T:
    """Call `work`; its exceptions become a ConfigError with the expected signature."""
    try:
        return work()
    except ConfigError:
        raise
    except Exception as error:
        raise custom.error(f"failed on a small batch: {type(error).__name__}: {error}") from error


def small_groups() -> list[Group]:
    """Episodes of one and two turns: groups of three, two, two with equal rewards, and one."""
    groups = []
    for number, rewards in enumerate(((1.0, 0.0, 0.25), (0.5, 2.0), (1.0, 1.0), (1.0,))):
        task, episodes = Task(f"small-{number}"), []
        for place, reward in enumerate(rewards):
            calls: list[Call] = []
            prompt: tuple[int, ...] = (1, 2 + number)
            for turn in range(1 + place % 2):
                tokens = tuple(range(5, 6 + place + turn))
                logprobs = tuple(-0.5 - 0.1 * token for token in tokens)
                calls.append(Call(prompt, Completion(tokens, logprobs, FinishReason.STOP), turn))
                prompt = (*prompt, *tokens, 3)
            turns = [Turn(Message("assistant", "…"), reward=0.0) for _ in calls]
            one = Episode(f"small-{number}#{place}", task, turns=turns, calls=calls, rewards={"r": reward})
            episodes.append(one)
        groups.append(Group(task, episodes))
    return groups


def small_terms(groups: list[Group]) -> Terms:
    """The terms of these groups with all columns filled."""
    rows: list[tuple[int, ...]] = []
    logprobs: list[float] = []
    episodes = calls = 0
    for number, group in enumerate(groups):
        for episode in group.valid_episodes:
            for call in episode.calls:
                tokens = call.completion.tokens
                rows += [(number, n, token, episodes, calls, call.turn) for n, token in enumerate(tokens)]
                logprobs += call.completion.logprobs
                calls += 1
            episodes += 1
    tree, position, token, of, call_of, turn = (np.array(column) for column in zip(*rows, strict=True))
    old, size = np.array(logprobs), len(rows)
    advantage, weight, none = np.linspace(1, -1, size), np.full(size, 1 / size), np.full(size, np.nan)
    scored = (old - 0.01, old - 0.2, np.linspace(0, 1, size), np.zeros(size), none, old - 0.3)
    return Terms(tree, position, token, old, advantage, weight, of, call_of, turn, np.zeros_like(turn), *scored)


def term_batch(terms: Terms) -> TermBatch:
    names = {"old": "logprob", "group": "tree"}
    fields = [field.name.removesuffix("_M") for field in dataclasses.fields(TermBatch) if field.name != "sequence_M"]
    return TermBatch(*(torch.from_numpy(getattr(terms, names.get(name, name))) for name in fields))
