"""Agents: any async program that calls the model. An agent owns the prompt; recording and training are not its job.

Start with `agent.py` (the two protocols), then `chat.py` (the plain loop), then `tool.py` (the loop with tools).
"""

from arborl.agents.agent import Agent, FunctionAgent, Model
from arborl.registry import Registry

AGENTS = Registry(
    "agent",
    {
        "chat": "arborl.agents.chat:ChatAgent",
        "tool": "arborl.agents.tool:ToolAgent",
    },
)

__all__ = ["AGENTS", "Agent", "FunctionAgent", "Model"]
