"""Parts that several systems have and that are called otherwise here."""

from __future__ import annotations

from typing import Any

ENGINE = "sampling is done by Arbor's own engine, which shares the learner's weights"
MICRO = "micro-batches are counted in tokens, and change nothing but memory: learner.micro_batch_tokens"
REFERENCE = "the reference policy is a frozen copy, made where algorithm.kl.coef asks for one"
SEARCH_TAGS = {
    "code_start_tag": "<search>", "code_end_tag": "</search>",
    "result_start_tag": "<information>", "result_end_tag": "</information>",
}  # fmt: skip
"""An agent that writes queries between tags (Search-R1's form) is our code agent, whose tool is a search."""
CORPUS: dict[str, dict[str, Any]] = {
    "search": {"corpus": "corpus.jsonl"},
    "retrieve": {"corpus": "corpus.jsonl", "embed": "intfloat/e5-base-v2"},
}
"""What a tool that asks a service there needs here."""
DOCUMENTS = "a service there; here documents of yours, one a line: name the file"
