"""Makers of the agents and environments of a run: everything that is the same for all episodes is worked out once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from arborl.agents.agent import Agent, as_agent, is_async
from arborl.envs.env import Env
from arborl.errors import ConfigError
from arborl.registry import check_arguments

SCALARS = (str, int, float, bool, type(None))
"""Values that cannot be changed, so that any number of objects may hold them."""


class PartMaker:
    """Makes a fresh object where a name leads to a class or a function that makes one; else gives the object it leads
    to.

    Args:
        found: what the name leads to.
        name: of the part.
        args: its arguments, from the configuration.
        where: the key that named it.
        more: further arguments; those it does not take are left out.
    """

    def __init__(self, found: Any, name: str, args: Mapping[str, Any], where: str, more: Mapping[str, Any]):
        self.found, self.where, self.args = found, f"{where}.args", dict(args)
        self.of_class = inspect.isclass(found)
        self.makes = self.of_class or (inspect.isfunction(found) and not is_async(found))
        if self.makes:
            takes = inspect.signature(found).parameters
            self.args |= {key: value for key, value in more.items() if key in takes}
            check_arguments(found, self.args, self.where)
        elif args:
            raise ConfigError(f"{self.where}: {name!r} is an object already and takes no arguments.")

    def __call__(self) -> Any:
        return self.with_args(self.args)

    def with_args(self, args: Mapping[str, Any]) -> Any:
        """The same with other values of the arguments."""
        if not self.makes:
            return self.found
        try:
            return self.found(**args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.where}: {error}") from error


def env_maker(make: PartMaker) -> Callable[[], Env]:
    """Makes environments that share nothing that was handed in: each plays one episode, and many play at once."""
    if not make.of_class:
        return lambda: copy.deepcopy(make())
    if all(isinstance(value, SCALARS) for value in make.args.values()):
        return make
    return lambda: make.with_args(copy.deepcopy(make.args))


def agent_maker(make: PartMaker, said: str) -> Callable[[], Agent]:
    """Makes agents; whether one can play is checked once per class.

    Args:
        make: gives what is to be an agent.
        said: the key that named it, and the name, for the error message.
    """
    if not make.makes:
        found = as_agent(make(), said)
        return lambda: found
    checked: set[type] = set()

    def fresh() -> Agent:
        made = make()
        of_class = "run" not in getattr(made, "__dict__", ())
        if of_class and type(made) in checked:
            return made  # type: ignore[no-any-return]
        agent = as_agent(made, said)
        if of_class and agent is made:
            checked.add(type(made))
        return agent

    return fresh
