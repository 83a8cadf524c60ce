"""The teacher of on-policy distillation: a model in this process, or one behind a server.

The policy samples; the teacher gives the log-probability of each sampled token in the same context. Both must have the
same tokenizer.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
from transformers import PreTrainedModel

from arborl.chat.tokenizer import FileTokenizer
from arborl.config.run_config import RunConfig
from arborl.errors import ConfigError
from arborl.learner.core.packing import Trees
from arborl.models.model_files import check_supported, read_model_config, resolve, stored_dtype
from arborl.models.model_loading import load_model
from arborl.retry import BUSY_STATUS, backoff_waits, retry_sync
from arborl.types import Floats, Ints, Terms, TokenTree

log = logging.getLogger(__name__)

TOKENIZER_SAMPLE = "Hello, world! 12 + 30 = 42\n\tdef f(x): return x ** 2  # \u00e9\u00df \u4f60\u597d"
"""A text on which both tokenizers are compared."""
CONCURRENCY, REQUEST_SECONDS = 16, 120.0  # concurrent requests; timeout of one attempt
SAME_MODEL_GAP = 1e-2
"""Log-probabilities that differ by less are those of the same model, apart from rounding."""


class RemoteTeacher:
    """A server with OpenAI's completions API that returns the log-probabilities of a prompt, as vLLM does
    (`prompt_logprobs`) or as others do (`echo` with `logprobs`). A sequence whose request fails gets NaN: its
    episode then fails. `url` goes up to `/v1`; `?model=NAME` selects a model, otherwise the first that the server
    lists. The API key is that of `OPENAI_API_KEY`. `wait` are the seconds before the second attempt, doubled each
    time."""

    def __init__(self, url: str, retries: int = 3, wait: float = 1.0):
        parts = urlsplit(url)
        self.url = url
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=base, headers=headers, timeout=REQUEST_SECONDS)
        self.retries, self.wait = retries, wait
        self.model = (parse_qs(parts.query).get("model") or [""])[0]

    def check(self, tokenizer: FileTokenizer, max_context: int) -> None:
        """Raise ConfigError unless the server answers, has the same tokenizer and a sufficient context."""
        try:
            reply = self.client.get("/v1/models")
            listed = {str(one["id"]): one for one in reply.raise_for_status().json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"algorithm.args.teacher={self.url}: the server does not list its models "
                f"({type(error).__name__}: {error}). Give the address of a server with OpenAI's API, up to /v1."
            ) from error
        self.model = self.model or next(iter(listed), "")
        if self.model not in listed:
            raise ConfigError(
                f"algorithm.args.teacher={self.url}: the server has no model {self.model!r}. It has: "
                f"{', '.join(listed)}."
            )
        longest = listed[self.model].get("max_model_len")
        if isinstance(longest, int) and longest <= max_context:
            raise ConfigError(
                f"algorithm.args.teacher={self.url}: its context of {longest} tokens must exceed "
                f"sampling.max_context={max_context} by one. Write a smaller sampling.max_context."
            )
        ids = tokenizer.encode(TOKENIZER_SAMPLE)
        self._check_ids(ids)
        try:
            self._request_logprobs(ids)
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(
                f"algorithm.args.teacher={self.url}: the server returns no log-probabilities of a prompt: {error}. "
                "Serve it with vLLM, or a server whose /v1/completions supports prompt_logprobs, or echo and logprobs."
            ) from error

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Compare token ids of a text, if the server can tokenize (vLLM's /tokenize)."""
        body = {"model": self.model, "prompt": TOKENIZER_SAMPLE, "add_special_tokens": False}
        try:
            reply = self.client.post("/tokenize", json=body)
            server_ids = reply.json()["tokens"] if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            server_ids = None
        if server_ids is None:
            log.warning("algorithm.args.teacher=%s: no /tokenize, so its tokenizer could not be compared.", self.url)
        elif list(server_ids) != list(ids):
            raise ConfigError(
                f"algorithm.args.teacher={self.url}: its tokenizer differs: {TOKENIZER_SAMPLE[:14]!r}… becomes "
                f"{server_ids[:5]}…, with the policy's tokenizer {list(ids[:5])}…. Use a teacher with the policy's "
                "tokenizer."
            )

    def logprobs(self, trees: Trees, terms: Terms) -> Floats:
        sequences: list[Sequence[int]] = []
        places: dict[tuple[int, int, int], tuple[int, int]] = {}
        for number in np.unique(terms.tree):
            for path in branch_paths(trees[number]):
                ids = trees[number].tokens[path]
                for at, (place, token) in enumerate(zip(path[:-1].tolist(), ids[1:].tolist(), strict=True), 1):
                    places[int(number), place, token] = len(sequences), at
                sequences.append(ids.tolist())
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            logprobs = list(pool.map(self._sequence_logprobs, sequences))
        keys = zip(terms.tree.tolist(), terms.position.tolist(), terms.token.tolist(), strict=True)
        return np.array([logprobs[row][at] for row, at in (places[key] for key in keys)], dtype=np.float64)

    def _sequence_logprobs(self, ids: Sequence[int]) -> Sequence[float]:
        try:
            return self._request_logprobs(ids)
        except (httpx.HTTPError, ValueError) as error:
            log.warning("algorithm.args.teacher=%s: request of %d tokens failed: %s", self.url, len(ids), error)
            return [math.nan] * len(ids)

    def _request_logprobs(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token given those before it; NaN for the first."""
        body = {
            "model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1,
            "prompt_logprobs": 0,
        }  # fmt: skip
        reply = retry_sync(
            lambda: self.client.post("/v1/completions", json=body),
            backoff_waits(self.retries, self.wait),
            lambda reply: reply.status_code in BUSY_STATUS,
            (httpx.TransportError,),
        )
        if reply.is_error:
            raise ValueError(f"status {reply.status_code}: {reply.text[:200]!r}")
        return read_logprobs(reply.json(), ids)


Teacher: TypeAlias = PreTrainedModel | RemoteTeacher
"""A model in this process, in evaluation mode and without gradients, or one behind a server."""


def teacher_of(config: RunConfig, student: Path) -> Teacher | None:
    """The teacher of a run; None if it has none."""
    name = next((name for one in config.algorithm.all if (name := one.options.teacher)), None)
    return open_teacher(name, student, config.model.device, config.sampling.max_context) if name else None


def open_teacher(name: str, student: Path, device: str, max_context: int) -> Teacher:
    """Open a teacher: a URL, or a model's name, folder or id, loaded in its stored precision."""
    if name.startswith(("http://", "https://")):
        remote = RemoteTeacher(name)
        remote.check(FileTokenizer(student), max_context)
        return remote
    try:
        folder = resolve(name)
        about = read_model_config(folder)
        check_supported(about, name, max_context)
    except ConfigError as error:
        raise ConfigError(f"algorithm.args.teacher={name}: {error}") from error
    check_tokenizer(student, folder, name)
    return load_model(folder, stored_dtype(about), device).requires_grad_(False)


def warn_if_same_model(gap: Floats) -> None:
    if len(gap) and not np.isnan(gap).all() and np.nanmax(np.abs(gap)) < SAME_MODEL_GAP:
        log.warning(
            "the teacher's log-probabilities equal the policy's, so the loss is 0. Write another model as "
            "algorithm.args.teacher."
        )


def branch_paths(tree: TokenTree) -> list[Ints]:
    leaves = np.flatnonzero(tree.end == np.arange(len(tree)) + 1)
    return [np.flatnonzero((np.arange(len(tree)) <= leaf) & (leaf < tree.end)) for leaf in leaves.tolist()]


def read_logprobs(reply: Any, ids: Sequence[int]) -> list[float]:
    """The prompt's log-probabilities in a completion, in vLLM's or OpenAI's format; ValueError if there are none."""
    try:
        choice = reply["choices"][0]
        prompt_logprobs = choice.get("prompt_logprobs")
        if prompt_logprobs is not None:
            logprobs = [
                math.nan,
                *(float(one[str(token)]["logprob"]) for one, token in zip(prompt_logprobs[1:], ids[1:], strict=True)),
            ]
        else:
            logprobs = [
                math.nan if one is None else float(one) for one in choice["logprobs"]["token_logprobs"][: len(ids)]
            ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no log-probabilities of the prompt in {str(reply)[:200]!r}") from error
    if len(logprobs) != len(ids):
        raise ValueError(f"log-probabilities of {len(logprobs)} tokens instead of {len(ids)}")
    return logprobs


def check_tokenizer(student: Path, teacher: Path, name: str) -> None:
    """Raise ConfigError if the teacher's token ids have another meaning."""
    ours, theirs = FileTokenizer(student), FileTokenizer(teacher)
    for number in range(ours.vocab_size):
        if ours.text_of(number) != theirs.text_of(number):
            raise ConfigError(
                f"algorithm.args.teacher={name}: its tokenizer differs: token {number} is {theirs.text_of(number)!r} "
                f"there and {ours.text_of(number)!r} here. Use a teacher with the policy's tokenizer."
            )
    if ours.encode(TOKENIZER_SAMPLE) != theirs.encode(TOKENIZER_SAMPLE):
        raise ConfigError(
            f"algorithm.args.teacher={name}: its tokenizer splits text differently. Use one with the policy's."
        )
