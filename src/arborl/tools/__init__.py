"""Tools: plain functions the model may call. What goes wrong with a call is an answer to the model, never an exception.

In reading order:

    tool.py           What a tool is
    schema.py         The arguments of a tool
    docstring.py      Reads a Google-style docstring: what a function does, and what each argument means
    injection.py      What a tool gets besides what the model wrote
    toolbox.py        Answers the tool calls of one message: all at once, in order, and whatever they are
    output.py         How much of a tool's answer the model reads
    threads.py        Plain functions beside the event loop, and the threads of those that never came back
    tool_warnings.py  What a tool's author left unsaid, and what the model therefore sees
    library/          Tools that ship, by the names in `arborl.tools.TOOLS`
    limit.py          A rate limit that holds over processes: at most `rate · t + burst` calls in any window of length t
    host_limit.py     A rate limit over the processes of one machine: a file holds what was granted, and who waits
    cluster.py        A rate limit that machines share: grants come from a tool server
    server.py         The tool server: `arborl tools serve`
    gate.py           What a request meets first
    json_bounds.py    Bounds on JSON from a client, checked on its bytes before any object is built
    dispatcher.py     The tool server without HTTP: admits calls, runs each once, keeps the state of sessions
    protocol.py       What tool server and client say to each other
    journal.py        Which stateful calls have been begun and answered
    client.py         Tools that another process runs, with the interface of those of this one
    http.py           HTTP/1.1 to one server
    breaker.py        Keeps many callers from knocking at a door that does not open
    mcp.py            MCP both ways: tools of an MCP server as ours, and ours as an MCP server
    guard.py          Runs one command so that nothing of it outlives who asked
    bounded.py        Bounds of a tool that a configuration sets: how often, how many at once, how long, how often again
    opened.py         The tools that a configuration names: made or connected to, within limits, closed with the run
"""

from arborl.registry import Registry
from arborl.tools.injection import Context, Given, State
from arborl.tools.limit import RateLimit
from arborl.tools.tool import AnyTool, Tool, tool
from arborl.tools.toolbox import Toolbox, as_tool

TOOLS = Registry(
    "tool",
    {
        "answer": "arborl.tools.library.finish:answer",
        "calculator": "arborl.tools.library.calculator:calculator",
        "check": "arborl.tools.library.check:Check",
        "fetch": "arborl.tools.library.fetch:Fetch",
        "finish": "arborl.tools.library.finish:finish",
        "python": "arborl.tools.library.python:Python",
        "retrieve": "arborl.tools.library.retrieve:Retrieve",
        "search": "arborl.tools.library.search:Search",
    },
)
"""A tool, or a class that makes one from its arguments."""

__all__ = ["TOOLS", "AnyTool", "Context", "Given", "RateLimit", "State", "Tool", "Toolbox", "as_tool", "tool"]
