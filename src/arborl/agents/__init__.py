"""Agents: any async program that calls the model. An agent owns the prompt; recording and training are not its job.

Start with `agent.py` (the two protocols), then `chat.py` (the plain loop), then `rounds.py` (working before
acting) and what is built on it: `tool.py`, `code.py`, `react.py`. `context.py` says how a past is edited, `statelm.py`
is the agent whose model does so.
"""

from arborl.agents.agent import Agent, FunctionAgent, Model
from arborl.registry import Registry

AGENTS = Registry(
    "agent",
    {
        "chat": "arborl.agents.chat:ChatAgent",
        "code": "arborl.agents.code:CodeAgent",
        "react": "arborl.agents.react:ReactAgent",
        "statelm": "arborl.agents.statelm:StateLM",
        "step": "arborl.agents.step:StepAgent",
        "tool": "arborl.agents.tool:ToolAgent",
    },
)

__all__ = ["AGENTS", "Agent", "FunctionAgent", "Model"]
