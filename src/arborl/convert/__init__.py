"""Convert: configurations of verl, ROLL and AgentFly as configurations here. It reads text; it runs nothing of theirs.

In reading order:

    convert.py   From their keys to a configuration that validates here
    draft.py     What a conversion keeps account of: the new configuration, and what became of every key of the old one
    reading.py   Keys and values out of shell scripts, override lists and YAML
    verl.py      verl's keys, those of its mixed-training and StateLM forks included
    roll.py      ROLL's keys, of its agentic pipeline
    agentfly.py  AgentFly's keys beside verl's
"""

from arborl.convert.convert import SYSTEMS, convert
from arborl.convert.draft import Draft

__all__ = ["SYSTEMS", "Draft", "convert"]
