"""Configuration: all settings with their defaults in one typed tree. No torch, no objects, no side effects.

In reading order:

    run_config.py        `RunConfig`: all sections as one tree, dependent defaults; model, sandbox
    load_config.py       Load from a file, `a.b=c` overrides or Python keywords; bounds of YAML
    config_base.py       Base class of sections; messages for validation errors
    other_frameworks.py  Names of settings in other frameworks, and what to write instead
    consistency.py       Checks across sections
    algorithm_config.py  Presets, advantage, loss, KL penalty, importance weights, arguments
    training_config.py   Learner, trainer, evaluation, tracking
    data_config.py       Rows, mixtures of sources, demonstrations
    rollout_config.py    Batch size, limits, workers, sampling
    engine_config.py     Engine and placement on a Ray cluster
    part_config.py       Environment, prompts, agent, context policy, reward
    tool_config.py       Tools, tool servers, MCP servers, rate limits
    fault_config.py      Faults that a run injects into its own parts
    secrets.py           Masking of secrets in files and logs
    trust.py             Capabilities and signature of a run folder's configuration
    config_page.py       Generates docs/configuration.md
"""

from arborl.config.config_base import Config
from arborl.config.run_config import RunConfig

__all__ = ["Config", "RunConfig"]
