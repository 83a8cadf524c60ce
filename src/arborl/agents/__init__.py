"""Agents: async programs that call the model. An agent builds the prompts; recording and training are not its job.

agent_interface.py  The interfaces of agents and of the model that an agent calls
chat_agents.py      Agents without tools: whole conversation, or a window of steps
tool_agents.py      Agents with tools: tool calls, code between tags, ReAct
context/            Agents that edit their own context
"""

from collections.abc import Container

from arborl.agents.agent_interface import Agent, FunctionAgent, Model
from arborl.registry import Registry

AGENTS = Registry(
    "agent",
    {
        "chat": "arborl.agents.chat_agents:ChatAgent",
        "code": "arborl.agents.tool_agents:CodeAgent",
        "endpoint": "arborl.serve.endpoint_agent:EndpointAgent",  # in a higher layer: it uses the server's routes
        "react": "arborl.agents.tool_agents:ReactAgent",
        "statelm": "arborl.agents.context.statelm:StateLM",
        "step": "arborl.agents.chat_agents:StepAgent",
        "tool": "arborl.agents.tool_agents:ToolAgent",
    },
)

VERL_AGENT_NAMES = {
    "single_turn_agent": "chat", "tool_agent": "tool", "code_agent": "code", "code_execution_agent": "code",
    "react_agent": "react", "statelm_tool_agent": "statelm",
}  # fmt: skip
"""Agent names in rows of verl and its forks -> names of this registry."""


def resolve_agent_name(name: str, defined: Container[str] = ()) -> str:
    """The agent that a row's name refers to. A name that the run defines itself is kept."""
    return name if name in defined else VERL_AGENT_NAMES.get(name, name)


__all__ = ["AGENTS", "VERL_AGENT_NAMES", "Agent", "FunctionAgent", "Model", "resolve_agent_name"]
