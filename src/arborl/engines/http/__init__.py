"""Sampling by servers that run already: `engine=http`.

In reading order:

    engine.py    Which server a request goes to, and what happens when one goes or comes back
    replicas.py  One server of several: what is known of it, and what it is asked besides completions
    servers.py   What is said to a vLLM server, a SGLang server, and one that only chats
    files.py     Weights on their way to servers: folders that they read
"""

from arborl.engines.http.engine import HttpEngine

__all__ = ["HttpEngine"]
