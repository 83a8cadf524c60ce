"""Convert: configurations of verl, ROLL and AgentFly as configurations here. It reads text; it runs nothing of theirs.

In reading order:

    convert.py      From their keys to a configuration that validates here
    draft.py        What a conversion keeps account of: the new configuration, and what became of every key
    report.py       That account, line by line, as a table and as JSON, and the configuration as a file
    reading.py      Keys and values out of shell scripts and override lists
    hydra_files.py  Keys and values out of Hydra's YAML
    parts.py        Parts that several systems have and that are called otherwise here
    verl.py         verl's keys, those of its mixed-training and StateLM forks included
    roll/           ROLL's keys
    agentfly.py     AgentFly's keys beside verl's
"""

from arborl.convert.convert import SYSTEMS, convert
from arborl.convert.draft import Draft

__all__ = ["SYSTEMS", "Draft", "convert"]
