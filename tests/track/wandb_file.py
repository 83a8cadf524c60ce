"""The file that Weights & Biases writes offline, read record by record with its own messages.

The framing is LevelDB's log: blocks of 32 KiB, each record in pieces with a header of 7 bytes; a header of the file
comes first. The package has a writer for it only, in its service process.
"""

from __future__ import annotations

import json
from pathlib import Path

BLOCK = 32 * 1024
WHOLE, FIRST, LAST = 1, 2, 4


def records(path: Path):
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # the rest of a block, too small for a header
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        piece = data[place + 7 : place + 7 + size]
        place += 7 + size
        parts = piece if kind in (WHOLE, FIRST) else parts + piece
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def values(items) -> dict:
    """What the items say, by key; what a picture or a table consists of, in a dictionary of its own."""
    found: dict = {}
    for item in items:
        *above, last = item.nested_key or [item.key]
        inner = found
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return found


def history(path: Path) -> dict[int, dict]:
    """Numbers and tables by step."""
    found: dict[int, dict] = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = values(record.history.item)
            found.setdefault(row.pop("_step"), {}).update(row)
    return found


def config(path: Path) -> dict:
    (run,) = (record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    return values(run.config.update)


def summary(path: Path) -> dict:
    found: dict = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "summary":
            found |= values(record.summary.update)
    return found
