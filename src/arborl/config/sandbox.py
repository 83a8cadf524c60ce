"""Where code that the model wrote runs."""

from __future__ import annotations

from arborl.config.base import Config


class SandboxConfig(Config):
    """Where code that the model wrote runs: the `python` tool, the code agent, `code_tests`. See docs/security.md."""

    allow_unsafe: bool = False
    """Run it also where this machine can isolate nothing: it may then read and write whatever you may, and reach the
    network. Without this such a run does not start."""
