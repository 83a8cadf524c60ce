"""The base of settings that are made in Python and may be changed afterwards, field by field.

Whatever is wrong is a `ConfigError` with one line for each mistake: the field, what it must be, what was given.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, ValidationError

from arborl.config.config_base import Config, explain
from arborl.errors import ConfigError


class Settings(Config):
    """Fields by name; a wrong one is refused when it is given, also later.

    Example:
        config = TrainingConfig(num_episodes=100)
        config.learning_rate = -1      # ConfigError: TrainingConfig, learning_rate: must be a number > 0, given -1. …
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)

    def __init__(self, **fields: Any):
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(self._explained(error)) from error

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(self._explained(error)) from error

    @property
    def said(self) -> set[str]:
        """Names of the fields that somebody gave."""
        return self.model_fields_set

    def _explained(self, error: ValidationError) -> str:
        """Each mistake with the name of the settings in front, and what the field is where nothing is said."""
        lines = explain(error, type(self)).split("\n")
        return "\n".join(f"{type(self).__name__}, {line}{self._usual(line)}" for line in lines)

    def _usual(self, line: str) -> str:
        field = type(self).model_fields.get(line.partition(":")[0])
        if field is None or field.is_required() or "Did you mean" in line:
            return ""
        usual = field.get_default(call_default_factory=True)
        return " Leave it out, or write None." if usual is None else f" Without it: {usual!r}."
