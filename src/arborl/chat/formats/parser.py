"""What a tool-call format is."""

from __future__ import annotations

from typing import Protocol

from arborl.types import ToolCall


class Parser(Protocol):
    """One way of writing tool calls. `parse(format(*calls)) == calls`, up to the calls' ids.

    A call that cannot be read is still a call, and its error says what to write. No text makes `parse` raise.

    One that also has `opens` says with it how every call begins: text before the first of these is no part of any, so
    it may be shown while the rest is still being written.
    """

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """Every call in a message, in order, with the ids `call_0`, `call_1`, …"""
        ...

    def format(self, *calls: ToolCall) -> str:
        """The calls as the model would write them; ValueError for one that this format cannot express."""
        ...
