"""Tools in other processes. The server needs the extra `serve`, MCP the extra `mcp`.

In reading order:

    tool_server.py      The tool server: `arborl tools serve`
    http_middleware.py  API keys, body size and connection limits in front of a server
    tool_dispatcher.py  The tool server without HTTP: queues, sessions, and a journal of stateful calls
    tool_protocol.py    Requests and responses of the tool server
    tool_client.py      Client of a tool server
    http_connections.py A small HTTP/1.1 client with kept connections
    mcp.py              Tools of an MCP server, and tools served over MCP
"""
