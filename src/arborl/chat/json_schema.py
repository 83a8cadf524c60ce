"""JSON schemas as constraints on tokens: which tokens may follow the sampled ones, so that the text becomes valid JSON.

Masks come from `llguidance` (extra `json`) and depend on tokenizer, schema, stop tokens and sampled tokens alone. The
learner computes them again from a recorded call, and nothing but the schema is stored with it.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from arborl.chat.tokenizer import FileTokenizer, Tokenizer
from arborl.errors import SchemaError

llguidance: Any = None
with suppress(ImportError):  # the extra `json`
    llguidance = importlib.import_module("llguidance")

ANY_OBJECT = '{"type":"object"}'
"""The schema of JSON mode."""
MAX_CHARS = 2**16
MAX_PATTERNS = 12
"""In a schema with `allOf`: the time to intersect them grows exponentially with their number."""
MAX_COMPILED = 64
COMPILE_OPTIONS = {
    "whitespace_pattern": r" |\n[ \t]{0,16}",  # bounded: a model cannot continue with white space until `max_tokens`
    "lenient": False,
    "coerce_one_of": False,
}
REASONS = (
    ("Unimplemented keys: ", "unsupported keyword "),
    ("oneOf constraints are not supported", "unsupported keyword oneOf; write anyOf. llguidance: oneOf"),
    ("regex parse error", "pattern: regex parse error"),
    ("Unable to determine if regex is empty", "pattern: the intersection of patterns (allOf) is too complex"),
    ("Resource ", "$ref: resource "),
    ("Unsatisfiable schema", "no JSON value satisfies it"),
)
"""Messages of llguidance, and how they name the keyword."""


def schema_text(schema: Mapping[str, Any] | bool) -> str:
    """A schema as `Sampling.schema`; equal schemas with equal order of keys give equal texts."""
    try:
        return json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the JSON schema cannot be written as JSON: {error}") from error


class SchemaMatcher:
    """One completion and its schema."""

    def __init__(self, matcher: Any):
        self._matcher = matcher
        self._num_consumed, self._mask = 0, b""

    def allowed(self, sampled: Sequence[int]) -> bytes:
        """Which tokens may follow the sampled ones: one bit for each token id, least significant bit first. `sampled`
        usually extends that of the last call. Stop tokens are allowed where the text is complete."""
        if len(sampled) < self._num_consumed:
            self._matcher.reset()
            self._num_consumed, self._mask = 0, b""
        if not self._mask or len(sampled) > self._num_consumed:
            new = [int(token) for token in sampled[self._num_consumed :]]
            fits = self._matcher.consume_tokens(new) if new else True
            self._mask = self._matcher.compute_bitmask() if fits else b""
            self._num_consumed = len(sampled)
        if self._matcher.is_error() or self._mask.count(0) == len(self._mask):
            reason = self._matcher.get_error().partition("\n")[0] or "no token continues the text"
            raise SchemaError(f"the JSON schema stops the completion at token {len(sampled)}: {reason}")
        return self._mask


class SchemaCompiler:
    """Schemas of one tokenizer. Compiled ones are cached. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._cached_tokenizer = lru_cache(4)(self._vocabulary)
        self._cached = lru_cache(MAX_COMPILED)(self._compile)

    def matcher(self, schema: str, stop: Sequence[int]) -> SchemaMatcher:
        """A matcher at the start of a completion that one of the tokens `stop` ends. Raises SchemaError, which names
        the keyword, if the schema is invalid or cannot be expressed."""
        return SchemaMatcher(self._cached(schema, tuple(stop)).deep_copy())

    def masks(self, schema: str, stop: Sequence[int], sampled: Sequence[int]) -> Iterator[bytes]:
        """The mask of each token of a completion."""
        matcher = self.matcher(schema, stop)
        for count in range(len(sampled)):
            yield matcher.allowed(sampled[:count])

    def _vocabulary(self, stop: tuple[int, ...]) -> Any:
        if llguidance is None:
            raise SchemaError("JSON mode and JSON schemas need llguidance: pip install 'arborl[json]'")
        if not isinstance(self.tokenizer, FileTokenizer):
            raise SchemaError("JSON schemas need a tokenizer with a tokenizer.json")
        if not stop:
            raise SchemaError("a JSON schema needs stop tokens that end the completion: set Sampling.stop")
        return llguidance.LLTokenizer(self.tokenizer.to_json(), eos_token=list(stop))

    def _compile(self, schema: str, stop: tuple[int, ...]) -> Any:
        vocabulary = self._cached_tokenizer(stop)
        check_size(schema)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=COMPILE_OPTIONS)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds tables that copies share
        if matcher.is_error():
            message = matcher.get_error().strip()
            for start, named in REASONS:
                if message.startswith(start):
                    message = named + message[len(start) :]
            raise SchemaError(f"the JSON schema is not supported: {message[:500]}")
        return matcher


def check_size(schema: str) -> None:
    """Raise SchemaError for a schema that may take very long to compile."""
    if len(schema) > MAX_CHARS:
        raise SchemaError(f"the JSON schema has {len(schema):,} characters; at most {MAX_CHARS:,}")
    try:
        tree = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the JSON schema is not JSON: {error}") from error
    keys: Counter[str] = Counter()
    rest = [tree]
    while rest:
        node = rest.pop()
        rest.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
        keys.update(list(node) if isinstance(node, dict) else ())
    if keys["allOf"] and keys["pattern"] + keys["format"] > MAX_PATTERNS:
        raise SchemaError(f"the JSON schema has allOf and more than {MAX_PATTERNS} times pattern or format")
