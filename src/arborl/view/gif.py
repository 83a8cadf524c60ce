"""An episode as a GIF: replayed from its record, with the model's messages beside the frames."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arborl.envs.env import Env
from arborl.rollout.env_workers import Workers
from arborl.seeds import derive
from arborl.types import Episode
from arborl.view.transcript import reward_text

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont
    from PIL.ImageFont import ImageFont as BitmapFont

    Font = FreeTypeFont | BitmapFont

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]

END = re.compile(r"(<\|[^|>]*\|>|</s>|<end_of_turn>)\s*$")
"""End-of-turn marks of several models."""
SIDE = (192, 480)
"""Minimum and maximum pixels of an image's longer side; smaller ones are enlarged by an integer factor."""
PANEL = 240
MARGIN = 12
MAX_NOTE_LINES = 4
PAPER, INK, FAINT, ACCENT = "#fbfaf7", "#23262b", "#8a8f98", "#1f6feb"


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of an episode."""

    picture: Image
    caption: str = ""
    """The message before this frame; empty at the start."""
    note: str = ""
    """The environment's reward so far; at the end, the training reward."""


async def replay(fresh_env: Env, episode: Episode, decode: Decode | None = None) -> list[Frame]:
    """Replay the recorded messages in a new environment: the start, then one frame per turn. No model is needed.

    An environment without images is shown as its rendered text; without either there are no frames. If it behaves
    differently than recorded, a warning is logged. `decode` is needed for episodes recorded without their messages.
    """
    frames: list[Frame] = []
    reward = 0.0
    env, _ = await Workers().place(lambda: fresh_env, None, seconds=60)

    def take(caption: str, last: bool = False) -> None:
        from arborl.envs.games.drawing import draw_text_page

        picture = env.picture() or (draw_text_page(text) if (text := env.render()) else None)
        if picture is not None:
            note = reward_text(episode) if last and episode.rewards else f"environment so far {reward:.2f}"
            frames.append(Frame(picture, caption, note))

    try:
        opening = await env.reset(episode.task, derive(episode.seed, "environment"))  # the seed it was recorded with
        same = opening.messages == episode.opening
        take("")
        for number, turn in enumerate(episode.turns):
            step = await env.step(turn.message)
            same = same and step.observation.messages == turn.observation
            reward += step.reward
            take(turn_text(episode, number, decode), last=number == len(episode.turns) - 1)
    finally:
        await env.close()
    if not same:
        why = "was the environment created with the same arguments?"
        log.warning("the replay of episode %s differs from the record; %s", episode.id, why)
    return frames


def turn_text(episode: Episode, number: int, decode: Decode | None) -> str:
    """The message of a turn; if the turn has several calls or the agent changed the message, every call."""
    message = episode.turns[number].message
    calls = [call for call in episode.calls if call.turn == number]
    if not calls or (len(calls) == 1 and message.sampled):
        return message.content
    if all(call.reply for call in calls):
        return "\n".join(call.reply.content.strip() for call in calls if call.reply)
    if decode is None:
        return message.content
    return "\n".join(END.sub("", decode(call.completion.tokens)).strip() for call in calls)


def save_gif(frames: Sequence[Frame], path: Path, seconds: float = 0.8, last_seconds: float = 2.5) -> Path:
    """Write the frames as a looping GIF, with the durations of a frame and of the last one."""
    if not frames:
        raise ValueError(f"no frames for {path}: the environment has no images. Implement picture().")
    drawn = [_draw(frame, turn, len(frames) - 1) for turn, frame in enumerate(frames)]
    width, height = max(image.width for image in drawn), max(image.height for image in drawn)
    drawn = [_on_paper(image, width, height) for image in drawn]
    durations = [round(1000 * seconds)] * (len(drawn) - 1) + [round(1000 * last_seconds)]
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=durations, loop=0)
    return path


def _draw(frame: Frame, turn: int, turns: int) -> Image:
    from PIL import ImageDraw, ImageFont

    picture = _fit(frame.picture)
    image = _on_paper(picture, picture.width + PANEL, max(picture.height, SIDE[0]))
    pen = ImageDraw.Draw(image)
    small, words = ImageFont.load_default(size=14), ImageFont.load_default(size=15)
    note = _wrap(pen, frame.note, small, PANEL - 2 * MARGIN, MAX_NOTE_LINES)
    left, bottom = picture.width + MARGIN, image.height - MARGIN - 18 * max(len(note), 1)
    pen.text((left, MARGIN), f"turn {turn}/{turns}" if turn else "start", fill=FAINT, font=small)
    for row, text in enumerate(note):
        pen.text((left, bottom + 18 * row), text, fill=ACCENT, font=small)
    top, line = MARGIN + 26, 20
    for row, text in enumerate(_wrap(pen, frame.caption, words, PANEL - 2 * MARGIN, (bottom - top) // line)):
        pen.text((left, top + row * line), text, fill=INK, font=words)
    return image


def _fit(picture: Image) -> Image:
    from PIL.Image import Resampling

    side, (least, most) = max(picture.size), SIDE
    picture = picture.convert("RGB")
    if side < least:
        factor = -(-least // side)
        return picture.resize((picture.width * factor, picture.height * factor), Resampling.NEAREST)
    if side > most:
        picture.thumbnail((most, most))
    return picture


def _on_paper(picture: Image, width: int, height: int) -> Image:
    from PIL import Image

    if picture.size == (width, height):
        return picture
    paper = Image.new("RGB", (width, height), PAPER)
    paper.paste(picture, (0, 0))
    return paper


def _wrap(pen: ImageDraw, text: str, font: Font, width: int, rows: int) -> list[str]:
    """Break text into at most `rows` lines of at most `width` pixels; the rest becomes `...`."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            for piece in _pieces(pen, word, font, width):
                joined = f"{line} {piece}".strip()
                if line and pen.textlength(joined, font=font) > width:
                    lines.append(line)
                    line = piece
                else:
                    line = joined
        lines.append(line)
    return lines if len(lines) <= rows else [*lines[: max(rows - 1, 0)], "..."]


def _pieces(pen: ImageDraw, word: str, font: Font, width: int) -> list[str]:
    """A word cut into pieces that fit the panel."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and pen.textlength(pieces[-1] + letter, font=font) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces
