"""Agents: any async program that calls the model. An agent owns the prompt; recording and training are not its job.

In reading order:

    agent.py    What an agent is, and what it sees of the model
    chat.py     The plain loop: say something, hear the environment's answer, until it is over
    step.py     Every step its own prompt: the rules, the last few steps, and what is seen now
    rounds.py   The loop of agents that work before they act: rounds with tools, then one message to the environment
    tool.py     The loop with tools: calls are answered by the toolbox, everything else goes to the environment
    code.py     The code agent: code between tags is run, and what it printed comes back between tags of its own
    react.py    ReAct
    context/    Agents that edit their own context
"""

from collections.abc import Container

from arborl.agents.agent import Agent, FunctionAgent, Model
from arborl.registry import Registry

AGENTS = Registry(
    "agent",
    {
        "chat": "arborl.agents.chat:ChatAgent",
        "code": "arborl.agents.code:CodeAgent",
        "endpoint": "arborl.serve.endpoint_agent:EndpointAgent",  # a room above: it is made of the server's routes
        "react": "arborl.agents.react:ReactAgent",
        "statelm": "arborl.agents.context.statelm:StateLM",
        "step": "arborl.agents.step:StepAgent",
        "tool": "arborl.agents.tool:ToolAgent",
    },
)

FOREIGN = {
    "single_turn_agent": "chat", "tool_agent": "tool", "code_agent": "code", "code_execution_agent": "code",
    "react_agent": "react", "statelm_tool_agent": "statelm",
}  # fmt: skip
"""What the names that rows of verl and its forks give their agents stand for."""


def called_here(name: str, defined: Container[str] = ()) -> str:
    """The agent that rows mean by a name; one that a run defines itself keeps it.

    Example:
        called_here("tool_agent"), called_here("tool_agent", {"tool_agent"})      # 'tool', 'tool_agent'
    """
    return name if name in defined else FOREIGN.get(name, name)


__all__ = ["AGENTS", "FOREIGN", "Agent", "FunctionAgent", "Model", "called_here"]
