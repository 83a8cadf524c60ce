"""Engines: sample token ids and their log-probabilities from the policy. They never see a message.

engine.py           `Engine`, the interface, with defaults for optional capabilities
engine_requests.py  Validation of prompts and sampling parameters; stop texts
scripted.py         Fixed replies without a model, and no engine at all
local/              Sampling in this process with the learner's weights
remote/             Sampling by vLLM in another process and by HTTP servers
"""

from arborl.engines.engine import Engine, Weights
from arborl.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "local": "arborl.engines.local:LocalEngine",
        "vllm": "arborl.engines.remote.vllm_engine:VllmEngine",
        "http": "arborl.engines.remote.http_engine:HttpEngine",
        "none": "arborl.engines.scripted:NoEngine",
        "sglang": "arborl.engines.remote.http_engine:HttpEngine",
        "scripted": "arborl.engines.scripted:ScriptedEngine",
    },
)

__all__ = ["ENGINES", "Engine", "Weights"]
