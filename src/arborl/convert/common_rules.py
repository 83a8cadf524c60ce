"""Reasons and parts that several systems share."""

from __future__ import annotations

from typing import Any

ENGINE = "sampling is done by Arbor's own engine, which shares the learner's weights"
MICRO = "micro-batches are counted in tokens, and change nothing but memory: learner.micro_batch_tokens"
REFERENCE = "the reference policy is a frozen copy, made when algorithm.kl.coef > 0"
SEARCH_TAGS = {
    "code_start_tag": "<search>", "code_end_tag": "</search>",
    "result_start_tag": "<information>", "result_end_tag": "</information>",
}  # fmt: skip
"""Search-R1's agent, which writes queries between tags, is the code agent with a search tool."""
CORPUS: dict[str, dict[str, Any]] = {
    "search": {"corpus": "corpus.jsonl"},
    "retrieve": {"corpus": "corpus.jsonl", "embed": "intfloat/e5-base-v2"},
}
"""Arguments of tools that call a service there."""
DOCUMENTS = "a service there; here a file with one document per line"
