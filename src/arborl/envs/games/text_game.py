"""What the games share: counts of legal and effective messages, steps, metrics, checks of arguments, pages of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from arborl.envs.env import Env, Observation, Step
from arborl.types import Message, Metrics

if TYPE_CHECKING:
    from PIL.Image import Image


def require(condition: bool, message: str) -> None:
    """ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def chosen_symbols(given: Mapping[str, str] | None, usual: Mapping[str, str]) -> dict[str, str]:
    """The characters of a board by kind of cell: `usual`, with those that are given."""
    chosen = {**usual, **(given or {})}
    unknown = [kind for kind in chosen if kind not in usual]
    require(not unknown, f"symbols: unknown {', '.join(map(str, unknown))}; give some of {', '.join(usual)}")
    for kind, sign in chosen.items():
        visible = isinstance(sign, str) and len(sign) == 1 and sign.isprintable() and not sign.isspace()
        require(visible, f"symbols.{kind}={sign!r}: give one visible character")
    require(len(set(chosen.values())) == len(chosen), f"symbols: two cells look alike in {' '.join(chosen.values())}")
    return chosen


class TextGame(Env):
    """Base class of the games. An illegal message changes nothing and gets `invalid` before the observation."""

    rules: str
    """The system message; empty for none."""
    invalid: str
    max_steps: int
    format_penalty: float

    def check_limits(self) -> None:
        require(self.max_steps >= 1, f"max_steps={self.max_steps}: give at least 1")
        require(self.format_penalty <= 0, f"format_penalty={self.format_penalty}: a penalty is negative or zero")

    def opening(self, text: str | None = None) -> Observation:
        """The first observation; its text is the state key by default."""
        self.steps = self.valid = self.effective = 0
        key = self.state_key()
        system = (Message("system", self.rules),) if self.rules else ()
        return Observation((*system, Message("user", key if text is None else text)), state_key=key)

    def next_step(
        self, valid: bool, effective: bool, reward: float, over: bool, text: str | None = None, **info: float
    ) -> Step:
        """Count a message; the step that answers it."""
        self.steps += 1
        self.valid += valid
        self.effective += effective
        key = self.state_key()
        text = key if text is None else text
        return Step(
            Observation((Message("user", text if valid else f"{self.invalid}\n{text}"),), state_key=key),
            reward=reward,
            terminated=over,
            truncated=not over and self.steps >= self.max_steps,
            info={"valid": float(valid), "effective": float(effective), **info},
        )

    def shares(self) -> Metrics:
        """Shares of legal and of effective messages."""
        played = max(self.steps, 1)
        return {"valid": self.valid / played, "effective": self.effective / played}

    def state_key(self) -> str:
        return self.render()

    def picture(self) -> Image:
        from arborl.envs.games.drawing import draw_text_page

        return draw_text_page(self.render(), type(self).__name__)
