"""Convert: configurations of verl, ROLL and AgentFly as configurations here. It reads text; it runs nothing of theirs.

In reading order:

    convert.py   From their keys to a configuration that validates here
    draft.py     What a conversion keeps account of: the new configuration, and what became of every key
    report.py    That account, line by line, as a table and as JSON, and the configuration as a file
    reading/     Keys and values out of shell scripts, lists of overrides and Hydra's YAML
    parts.py     Parts and reasons that several systems have
    verl/        verl's keys, those of its mixed-training and StateLM forks included
    agentfly.py  AgentFly's keys beside verl's
    roll/        ROLL's keys
"""

from arborl.convert.convert import SYSTEMS, convert
from arborl.convert.draft import Draft

__all__ = ["SYSTEMS", "Draft", "convert"]
