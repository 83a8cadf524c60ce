"""What a tool's author left unsaid, and what the model therefore sees."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from arborl.tools.tool import AnyTool
from arborl.types import ToolSpec

log = logging.getLogger(__name__)


def warn_of_gaps(tools: Iterable[AnyTool]) -> None:
    """Warn of each tool that the model is told too little about."""
    for tool in tools:
        if missing := gaps(tool.spec):
            seen = json.dumps({"name": tool.spec.name, "description": tool.spec.description} | tool.spec.parameters)
            log.warning(
                "tool %r has %s. All that the model sees of it: %s. Write types in its signature, and a docstring with "
                "Args.", tool.name, " and ".join(missing), seen,
            )  # fmt: skip


def gaps(spec: ToolSpec) -> list[str]:
    """What is not there: `["no docstring", "no type for 'city'"]`."""
    missing = [] if spec.description.strip() else ["no docstring"]
    properties = spec.parameters.get("properties", {})
    typed = ("type", "anyOf", "allOf", "oneOf", "enum", "const", "$ref")
    bare = [repr(name) for name, about in properties.items() if not any(key in about for key in typed)]
    return missing + ([f"no type for {', '.join(bare)}"] if bare else [])
