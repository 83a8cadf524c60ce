"""Tools inside one process.

In reading order:

    tool.py                A tool: a function, its description, and `run`
    arguments.py           JSON schema of a tool's arguments, and validation of a call
    tool_context.py        Task fields, episode state and other parameters that the model does not write; output limits
    toolbox.py             Runs the tool calls of one message
    background_threads.py  Plain functions in threads, and a count of those that hang
    json_bounds.py         Bounds of untrusted JSON, checked before parsing
    rate_limit.py          A rate limit over processes and machines
"""
