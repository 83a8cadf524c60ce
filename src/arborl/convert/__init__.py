"""Convert: configurations of verl, ROLL and AgentFly as configurations here. It reads text; it runs nothing of theirs.

Start with `draft.py` (what a conversion keeps account of) and `reading.py` (scripts, override lists and YAML as keys);
`verl.py`, `agentfly.py` and `roll.py` are tables: one line a key, with where it goes or why it goes nowhere.
"""

from arborl.convert.convert import SYSTEMS, convert
from arborl.convert.draft import Draft

__all__ = ["SYSTEMS", "Draft", "convert"]
