"""Ways of writing tool calls, one file each: text to calls, and calls to text.

Start with `parser.py` (what a format is), then `hermes.py` (the usual one); `choose.py` picks one for a model.
"""

from arborl.chat.formats.choose import PARSERS, choose, sniff
from arborl.chat.formats.parser import Parser

__all__ = ["PARSERS", "Parser", "choose", "sniff"]
