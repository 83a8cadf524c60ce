"""What the model wrote, word for word, for when a client sends it back.

A client keeps parsed tool calls, and a template writes them as it likes. The model is to be shown what it wrote, as it
was in training; so an assistant's message whose calls are known here, and unchanged, is taken as it was sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from arborl.types import Message

REMEMBERED = 4096


class Memory:
    """Messages with calls, by the id of their first call; the oldest leave first."""

    def __init__(self, most: int = REMEMBERED):
        self.most = most
        self._said: OrderedDict[str, Message] = OrderedDict()

    def keep(self, message: Message) -> None:
        if message.tool_calls:
            self._said[message.tool_calls[0].id] = message
            while len(self._said) > self.most:
                self._said.popitem(last=False)

    def recalled(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, those that were sampled here as they were."""
        return [self._said.get(one.tool_calls[0].id, one) if self._knows(one) else one for one in messages]

    def _knows(self, message: Message) -> bool:
        known = self._said.get(message.tool_calls[0].id) if message.tool_calls else None
        return known is not None and known.tool_calls == message.tool_calls
