"""A model and a configuration, looked at before a run: is what will be trained what was meant?

First without weights (template, tokenizer, format), then one small step is played and learned from. Nothing is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from arborl.checkpoint import check_model
from arborl.config.run_config import RunConfig
from arborl.doctor import template
from arborl.doctor.finding import Finding
from arborl.errors import ArborError
from arborl.models.find import check_supported, described, resolve
from arborl.training_run.build import RunParts, build, make_renderer

BROKEN = "This is a fault of the model or of a part that the configuration names: mend it, or name another."


def examine_model(config: RunConfig) -> list[Finding]:
    """What is right and wrong with the model of this configuration, the tasks, rewards and learner around it.

    Example:
        examine_model(load(None, ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "env.name=sokoban"]))
    """
    found: list[Finding] = []
    try:
        folder = check_model(resolve(config.model.name))
        known = described(folder)
        check_supported(known, config.model.name, config.sampling.max_context)
        found.append(Finding("model", "ok", f"{known.get('model_type', 'a model')} in {folder}"))
        renderer = make_renderer(config, folder)
        tools = bool(config.tools) or any(source.tools for source in config.data.sources.values())
        subject = template.Subject(renderer, known, tools)
    except (ArborError, OSError, ValueError) as error:
        return [*found, Finding("model", "fail", str(error), "Do what it says, or name another model.")]
    found += [ask(question, subject) for question in template.QUESTIONS]
    return found + _with_weights(config)


def ask(question: Callable[[Any], Finding], subject: Any) -> Finding:
    """One that breaks is a failed row."""
    try:
        return question(subject)
    except Exception as error:
        name = question.__name__.replace("_", " ")
        return Finding(name, "fail", f"{type(error).__name__}: {error}", BROKEN)


def _with_weights(config: RunConfig) -> list[Finding]:
    try:
        with _quiet():
            parts = build(config)
    except (ArborError, OSError, ValueError, RuntimeError) as error:
        return [Finding("configuration", "fail", str(error), "Do what it says; `arborl train --print` shows all keys.")]
    return asyncio.run(_first_step(parts))


async def _first_step(parts: RunParts) -> list[Finding]:
    from arborl.doctor.first_step import QUESTIONS, take

    try:
        with _quiet():
            step = await take(parts)
        return [ask(question, step) for question in QUESTIONS]
    except Exception as error:
        return [Finding("first step", "fail", f"{type(error).__name__}: {error}", BROKEN)]
    finally:
        await parts.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of the parts come as rows here."""
    own = logging.getLogger("arborl")
    before = own.level
    own.setLevel(logging.ERROR)
    try:
        yield
    finally:
        own.setLevel(before)
