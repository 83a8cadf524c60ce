"""Configuration: every knob, with its default, in one typed tree. No torch, no objects, no side effects.

In reading order:

    run.py        The whole configuration tree
    load.py       From a file, `a.b=c` overrides or Python keywords to a `RunConfig`
    base.py       The base of every section, and what turns a mistake in one into a line that says what to write instead
    bounds.py     What a YAML file may cost to read: some are small on disk and without end in memory
    parts.py      Parts chosen by name: the sections that a run and each of its sources share
    prompt.py     What the model is told around an environment's own words, and how an action is read out of a reply
    tools.py      The tools of a run: from the library, your own, behind a tool server, or of an MCP server
    algorithm.py  How reward becomes gradient: an advantage, a loss, and what both read
    algorithm_parts.py  What stands around an advantage and a loss: penalties, guards, the critic's loss, a trust region
    presets.py    Presets of algorithms, and which settings each advantage and loss reads
    training.py   How gradients become weights, for how long, and how what they became is measured
    data.py       Where tasks come from
    given.py      Runs that learn from given rows: when a run is one, and which settings then count
    engine.py     What samples: in this process, in vLLM's, or at servers
    rollout.py    How episodes are played: how many, by whom, where, and for how long
    placement.py  Where the parts of a run are: all in this process, or some on a Ray cluster
    sandbox.py    Where code that the model wrote runs
    track.py      What is written while training, and who else follows the run
    secrets.py    Keys and passwords: what is never written down, in whatever file
    capabilities.py  What a configuration makes a command do beyond computing: import code, start programs, send data, …
    trust.py      Whether a run folder's `config.yaml` may do more than compute: a configuration is code
    document.py   The page that lists every key: `python -m arborl.config.document > docs/configuration.md`
"""

from arborl.config.base import Config
from arborl.config.run import RunConfig

__all__ = ["Config", "RunConfig"]
