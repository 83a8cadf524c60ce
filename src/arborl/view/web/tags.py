"""Tags and note of a run, in `tags.json` of its folder: the only file of a run folder that the viewer writes.

The file is written when a user saves tags or note in the browser, atomically and never through a link.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arborl.errors import ConfigError, printable
from arborl.track.folder_files import read_json, replace_file
from arborl.view.web.folders import read_mapping

FILE = "tags.json"
MAX_TAGS = 20
MAX_TAG = 40
"""Characters of a tag."""
MAX_NOTE = 4000
"""Characters of the note."""
MAX_BYTES = 2**16
_lock = threading.Lock()


class Outdated(ConfigError):
    """The tags were changed since the browser read them."""


@dataclass(frozen=True, slots=True)
class RunTags:
    """Tags and note; both may be empty."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_tags(folder: Path) -> tuple[RunTags, str]:
    """The tags of a run and the problem of their file."""
    found, problem = read_mapping(folder / FILE, _read)
    tags, note = found.get("tags"), found.get("note")
    texts = [one[:MAX_TAG] for one in tags if isinstance(one, str) and one] if isinstance(tags, list) else []
    return RunTags(tuple(dict.fromkeys(texts))[:MAX_TAGS], note[:MAX_NOTE] if isinstance(note, str) else ""), problem


def _read(path: Path) -> Any:
    return read_json(path, MAX_BYTES)


def parse_tags(given: Any) -> RunTags:
    """Tags from a request; an error says what is wrong."""
    if not isinstance(given, Mapping) or not given.keys() <= {"tags", "note"}:
        raise ConfigError("tags and note are expected, and nothing else")
    tags, note = given.get("tags", []), given.get("note", "")
    if not isinstance(tags, list) or not all(isinstance(one, str) for one in tags) or not isinstance(note, str):
        raise ConfigError("tags is a list of texts, and note is a text")
    tags = list(dict.fromkeys(" ".join(one.split()) for one in tags if one.strip()))
    note = note.replace("\r\n", "\n").strip()
    if len(tags) > MAX_TAGS or any(len(one) > MAX_TAG for one in tags):
        raise ConfigError(f"a run has at most {MAX_TAGS} tags of at most {MAX_TAG} characters")
    if any("," in one or one != printable(one) for one in tags):
        raise ConfigError("a tag has no commas and no control characters")
    if len(note) > MAX_NOTE:
        raise ConfigError(f"the note has {len(note):,} characters; at most {MAX_NOTE:,} are kept")
    return RunTags(tuple(tags), note)


def write_tags(folder: Path, tags: RunTags, before: RunTags) -> None:
    """Replace the tags of a run, if they are still those of `before`."""
    with _lock:
        if read_tags(folder)[0] != before:
            raise Outdated("the tags or the note were changed meanwhile; reload the page and repeat your change")
        if not folder.is_dir():  # it is not created again
            raise FileNotFoundError(2, "the run folder does not exist any more", str(folder))
        text = json.dumps(asdict(tags), ensure_ascii=False, indent=2) + "\n"
        replace_file(folder / FILE, text.encode("utf-8", "replace"))
