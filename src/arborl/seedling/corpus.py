"""What seedling learned to speak from: transcripts of scripted players who know the formats and play badly.

A writer takes a NumPy generator and returns one conversation. To teach a new format, add a writer to `WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable

from arborl.seedling.document_transcripts import documents
from arborl.seedling.game_transcripts import frozen_lake, rooms, shop, sokoban
from arborl.seedling.tool_transcripts import search, use_calculator, write_code
from arborl.seedling.transcript import Chance, Transcript, pick
from arborl.types import Message

TALK = (
    (("Hello!", "Hi.", "Hey there.", "Good morning."), ("Hello! How can I help?", "Hi! What can I do for you?")),
    (("Who are you?", "What is your name?"), ("I am seedling, a very small model.", "My name is seedling.")),
    (("How are you?", "How is it going?"), ("I am fine, thank you.", "Quite well, thanks. And you?")),
    (("What can you do?", "What are you good at?"), ("I can play small games and use tools.", "Games and tools.")),
    (("Say yes.", "Answer yes."), ("Yes.",)),
    (("Say no.", "Answer no."), ("No.",)),
    (("Thank you.", "Thanks!"), ("You are welcome.", "My pleasure.")),
    (("Goodbye.", "Bye!"), ("Goodbye!", "See you soon.")),
)
MANNERS = ("", "You are a helpful assistant.", "Answer in few words.")


def small_talk(chance: Chance) -> Transcript:
    """One to three short exchanges."""
    system = pick(chance, MANNERS)
    messages = [Message("system", system)] if system else []
    for _ in range(int(chance.integers(1, 4))):
        asked, said = TALK[int(chance.integers(len(TALK)))]
        messages += [Message("user", pick(chance, asked)), Message("assistant", pick(chance, said))]
    return Transcript(messages)


WRITERS: dict[str, tuple[float, Callable[[Chance], Transcript | list[Transcript]]]] = {
    "frozen_lake": (0.26, frozen_lake),
    "sokoban": (0.24, sokoban),
    "rooms": (0.04, rooms),
    "shop": (0.12, shop),
    "calculator": (0.09, use_calculator),
    "code": (0.09, write_code),
    "search": (0.08, search),
    "documents": (0.06, documents),
    "small_talk": (0.02, small_talk),
}
"""Name -> share of the draws, writer. An episode over a document gives several transcripts, one a context."""


def write(chance: Chance) -> list[Transcript]:
    """What one draw of the mixture wrote."""
    shares = [share for share, _ in WRITERS.values()]
    written = list(WRITERS.values())[int(chance.choice(len(shares), p=shares))][1](chance)
    return written if isinstance(written, list) else [written]
