"""Configurations of verl, ROLL and AgentFly, and scripts of TRL, as configurations of Arbor. Files are read as text.

conversion.py         From the keys of another system to a valid configuration
draft.py              The configuration under construction, and the outcome of every key
conversion_report.py  The outcomes as a table and as JSON; the configuration as YAML
reading/              Keys and values of scripts, override lists and YAML
devices.py            GPUs, strategies and engines as learner, placement and engine
common_rules.py       Rules as data; reasons and parts that several systems share
verl/                 verl
agentfly.py           AgentFly, in addition to verl's keys
roll/                 ROLL
trl_scripts.py        TRL: what a Python script passes to its trainer; its functions as a module
trl_rules.py          TRL: rules for batches, length, optimizer, precision, adapters, losses, sampling
trl_keys.py           TRL: what becomes of each key; rows, rewards and tools
cluster_files.py      Scripts that start a Ray cluster
stateset_imports.py   Imports of scripts written for the StateSet guide
"""

from arborl.convert.conversion import SYSTEMS, conversion_advice, convert
from arborl.convert.draft import Draft

__all__ = ["SYSTEMS", "Draft", "conversion_advice", "convert"]
