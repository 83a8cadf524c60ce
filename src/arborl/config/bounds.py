"""What a YAML file may cost to read: some are small on disk and without end in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from arborl.errors import ConfigError

MAX_CHARS = 2**18
MAX_DEPTH = 64
MAX_VALUES = 100_000
"""With every alias written out."""
MAX_FILLED = 300
"""Times that a `${…}` is filled in because another one led there: two in each of twenty lines would be a million."""


PARSERS = [getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader]
"""The first is quick to find what is bad; the second is the one that OmegaConf builds with, and they may differ."""


def check_yaml(text: str, where: object, parsers: Sequence[Any] = PARSERS) -> None:
    """Refuse a text that is too large, too deep, contains itself, or grows beyond bounds through its aliases.

    Reads the parser's events and builds nothing, so it ends as soon as the text is known to be bad. What is not YAML at
    all is left to whoever builds something of it.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{where}: more than {MAX_CHARS:,} characters, which no configuration has.")
    for parser in parsers:
        with suppress(yaml.YAMLError):
            _walk(yaml.parse(text, parser), where)


def _walk(events: Iterator[Any], where: object) -> None:
    sizes: dict[str, int | None] = {}  # of what an anchor names, written out; None while it is still open
    open_: list[tuple[str | None, int]] = [(None, 0)]  # of each list or object around us: its anchor, the size before
    total = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, total))
            sizes |= {event.anchor: None} if event.anchor else {}
            if len(open_) > MAX_DEPTH:
                raise ConfigError(f"{where}: line {line}: nested more than {MAX_DEPTH} deep.")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            sizes |= {anchor: total - before + 1} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)
            if size is None:
                raise ConfigError(f"{where}: line {line}: *{event.anchor} stands inside what it names.")
            total += size
        elif isinstance(event, yaml.ScalarEvent):
            sizes |= {event.anchor: 1} if event.anchor else {}
            if not is_text(event.value):
                raise ConfigError(f"{where}: line {line}: half of a surrogate pair, which is no text.")
        total += isinstance(event, yaml.NodeEvent)
        if total > MAX_VALUES:
            raise ConfigError(f"{where}: line {line}: more than {MAX_VALUES:,} values, aliases (*name) written out.")


def is_text(value: str) -> bool:
    """Whether UTF-8 has a form for it."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def bounded() -> Iterator[list[str]]:
    """Inside, whatever file OmegaConf loads is checked first (Hydra loads more than the one it is given), and filling
    in `${…}` comes to an end. Yields the names of the environment variables that were filled in (`${oc.env:NAME}`)."""
    from omegaconf import OmegaConf
    from omegaconf.basecontainer import BaseContainer

    plain_load, plain_fill = OmegaConf.load, BaseContainer.resolve_parse_tree
    plain_call = BaseContainer._evaluate_custom_resolver
    depth = filled = 0
    variables: list[str] = []

    def load(file: Any) -> Any:
        if hasattr(file, "read"):
            check_yaml(file.read(MAX_CHARS + 1), getattr(file, "name", "the configuration"))
            file.seek(0)
        else:
            with Path(file).open(encoding="utf-8") as opened:
                check_yaml(opened.read(MAX_CHARS + 1), file)
        return plain_load(file)

    def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth, filled
        depth += 1
        filled += depth > 1
        try:
            if filled > MAX_FILLED:
                raise ConfigError("its ${…} refer to one another too often to be filled in.")
            return plain_fill(self, *args, **kwargs)
        finally:
            depth -= 1

    def call(self: Any, **given: Any) -> Any:
        if given["inter_type"] == "oc.env":
            variables.extend(str(name) for name in given["inter_args"][:1])
        return plain_call(self, **given)

    with (
        _replaced(OmegaConf, "load", staticmethod(load)),
        _replaced(BaseContainer, "resolve_parse_tree", fill),
        _replaced(BaseContainer, "_evaluate_custom_resolver", call),
    ):
        yield variables


@contextmanager
def _replaced(owner: type, name: str, by: Callable[..., Any]) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
