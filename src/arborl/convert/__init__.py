"""Configurations of verl, ROLL and AgentFly as configurations of Arbor. Their files are read as text.

conversion.py         From the keys of another system to a valid configuration
draft.py              The configuration under construction, and the outcome of every key
conversion_report.py  The outcomes as a table and as JSON; the configuration as YAML
reading/              Keys and values of scripts, override lists and YAML
common_rules.py       Rules as data; reasons and parts that several systems share
verl/                 verl
agentfly.py           AgentFly, in addition to verl's keys
roll/                 ROLL
stateset_imports.py   Imports of scripts written for the StateSet guide
"""

from arborl.convert.conversion import SYSTEMS, convert
from arborl.convert.draft import Draft

__all__ = ["SYSTEMS", "Draft", "convert"]
