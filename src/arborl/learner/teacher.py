"""Whom a policy is distilled from: a model in this process, or one behind a server that says how likely tokens are.

The student samples, the teacher is asked for the log-probability of each token that the student has sampled, in exactly
the context it was sampled in. So both must read the same token ids.
"""

from __future__ import annotations

import logging
import math
import os
import time
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
from arborl.models.find import check_supported, described, resolve, stored_dtype
from arborl.models.load import load_model
from arborl.types import Floats, Ints, Terms, TokenTree

log = logging.getLogger(__name__)

WORDS = "Hello, world! 12 + 30 = 42\n\tdef f(x): return x ** 2  # \u00e9\u00df \u4f60\u597d"
"""What both tokenizers must read alike."""
LATER = (408, 409, 429, 500, 502, 503, 504)
"""What a server says when the same request may work later."""


EQUAL = 1e-2
"""Log-probabilities that differ by less are one model's, but for rounding."""


class RemoteTeacher:
    """A server that speaks OpenAI's completions and gives log-probabilities of a prompt's tokens, as vLLM does
    (`prompt_logprobs`), or as others do (`echo` with `logprobs`).

    A sequence that it does not answer for is NaN: its episode then fails, by the name of the teacher.

    Args:
        url: up to `/v1`; `?model=NAME` says which, without it the first that the server lists. The key is in the
            environment variable `OPENAI_API_KEY`.
        concurrency: requests in flight.
        retries: further tries when the server is busy or away.
        wait: seconds before the second try; doubled each time.
        seconds: for one try.
    """

    def __init__(self, url: str, concurrency: int = 16, retries: int = 3, wait: float = 1.0, seconds: float = 120.0):
        parts = urlsplit(url)
        self.url = url
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=base, headers=headers, timeout=seconds)
        self.concurrency, self.retries, self.wait = concurrency, retries, wait
        self.model = (parse_qs(parts.query).get("model") or [""])[0]

    def check(self, tokenizer: FileTokenizer, max_context: int) -> None:
        """That it is there, reads the same ids and has room for the context; ConfigError where not."""
        try:
            reply = self.client.get("/v1/models")
            listed = {str(one["id"]): one for one in reply.raise_for_status().json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"algorithm.teacher={self.url}: does not list its models ({type(error).__name__}: {error}). Give the "
                "address of a server that speaks OpenAI's API, up to /v1."
            ) from error
        self.model = self.model or next(iter(listed), "")
        if self.model not in listed:
            raise ConfigError(
                f"algorithm.teacher={self.url}: the server has no model {self.model!r}. It has: {', '.join(listed)}."
            )
        longest = listed[self.model].get("max_model_len")
        if isinstance(longest, int) and longest <= max_context:
            raise ConfigError(
                f"algorithm.teacher={self.url}: reads {longest} tokens at most, one of them to answer with, and "
                f"sampling.max_context={max_context}. Write a smaller sampling.max_context."
            )
        ids = tokenizer.encode(WORDS)
        self._check_ids(ids)
        try:
            self._ask(ids)
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(
                f"algorithm.teacher={self.url}: does not say how likely a prompt's tokens are: {error}. Serve it with "
                "vLLM, or with another server that answers /v1/completions with prompt_logprobs or echo and logprobs."
            ) from error

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Ask for the ids of some text, where the server has a way to (vLLM's /tokenize)."""
        body = {"model": self.model, "prompt": WORDS, "add_special_tokens": False}
        try:
            reply = self.client.post("/tokenize", json=body)
            theirs = reply.json()["tokens"] if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            theirs = None
        if theirs is None:
            log.warning("algorithm.teacher=%s: has no /tokenize, so nobody has checked that it reads the same ids.",
                        self.url)  # fmt: skip
        elif list(theirs) != list(ids):
            raise ConfigError(
                f"algorithm.teacher={self.url}: its tokenizer is another: of {WORDS[:14]!r}… it makes {theirs[:5]}…, "
                f"the policy's {list(ids[:5])}…. Take a teacher with the policy's own tokenizer."
            )

    def logprobs(self, trees: Sequence[TokenTree], terms: Terms) -> Floats:
        """The log-probability of every term."""
        asked: list[Sequence[int]] = []
        places: dict[tuple[int, int, int], tuple[int, int]] = {}
        for number in np.unique(terms.tree):
            for path in paths(trees[number]):
                ids = trees[number].tokens[path]
                for at, (place, token) in enumerate(zip(path[:-1].tolist(), ids[1:].tolist(), strict=True), 1):
                    places[int(number), place, token] = len(asked), at
                asked.append(ids.tolist())
        with ThreadPoolExecutor(self.concurrency) as pool:
            said = list(pool.map(self._told, asked))
        keys = zip(terms.tree.tolist(), terms.position.tolist(), terms.token.tolist(), strict=True)
        return np.array([said[row][at] for row, at in (places[key] for key in keys)], dtype=np.float64)

    def _told(self, ids: Sequence[int]) -> Sequence[float]:
        try:
            return self._ask(ids)
        except (httpx.HTTPError, ValueError) as error:
            log.warning("algorithm.teacher=%s: no answer for a sequence of %d tokens: %s", self.url, len(ids), error)
            return [math.nan] * len(ids)

    def _ask(self, ids: Sequence[int]) -> list[float]:
        """How likely each token is behind those before it; of the first, nobody knows."""
        body = {
            "model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1,
            "prompt_logprobs": 0,
        }  # fmt: skip
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            try:
                reply = self.client.post("/v1/completions", json=body)
                if reply.status_code not in LATER or last:
                    if reply.is_error:
                        raise ValueError(f"status {reply.status_code}: {reply.text[:200]!r}")
                    return read_logprobs(reply.json(), ids)
            except httpx.TransportError:
                if last:
                    raise
            time.sleep(self.wait * 2**attempt)
        raise AssertionError("the last try returns or raises")


Teacher: TypeAlias = PreTrainedModel | RemoteTeacher
"""A model in this process, in evaluation mode and without gradients, or one behind a server."""


def teacher_of(config: RunConfig, student: Path) -> Teacher | None:
    """A run's teacher, where it has one."""
    name = next((one.teacher for one in config.algorithm.all if one.teacher), None)
    return open_teacher(name, student, config.model.device, config.sampling.max_context) if name else None


def open_teacher(name: str, student: Path, device: str, max_context: int) -> Teacher:
    """The teacher of this name: an address, or a model's name, folder or id; in its own precision."""
    if name.startswith(("http://", "https://")):
        remote = RemoteTeacher(name)
        remote.check(FileTokenizer(student), max_context)
        return remote
    try:
        folder = resolve(name)
        about = described(folder)
        check_supported(about, name, max_context)
    except ConfigError as error:
        raise ConfigError(f"algorithm.teacher={name}: {error}") from error
    check_tokenizer(student, folder, name)
    return load_model(folder, stored_dtype(about), device).requires_grad_(False)


def warn_of_equals(gap: Floats) -> None:
    """Say so where the teacher is the policy itself, but for rounding."""
    if len(gap) and not np.isnan(gap).all() and np.nanmax(np.abs(gap)) < EQUAL:
        log.warning(
            "the teacher equals the student: of every token it says what the policy says, so there is nothing to learn "
            "from it. Write another model as algorithm.teacher."
        )


def paths(tree: TokenTree) -> list[Ints]:
    """The places of every branch's tokens, from the root to its last."""
    leaves = np.flatnonzero(tree.end == np.arange(len(tree)) + 1)
    return [np.flatnonzero((np.arange(len(tree)) <= leaf) & (leaf < tree.end)) for leaf in leaves.tolist()]


def read_logprobs(reply: Any, ids: Sequence[int]) -> list[float]:
    """A completion's word on its prompt, in vLLM's form or in OpenAI's; ValueError where it has none."""
    try:
        choice = reply["choices"][0]
        told = choice.get("prompt_logprobs")
        if told is not None:
            found = [
                math.nan,
                *(float(one[str(token)]["logprob"]) for one, token in zip(told[1:], ids[1:], strict=True)),
            ]
        else:
            found = [
                math.nan if one is None else float(one) for one in choice["logprobs"]["token_logprobs"][: len(ids)]
            ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no log-probabilities of the prompt in {str(reply)[:200]!r}") from error
    if len(found) != len(ids):
        raise ValueError(f"log-probabilities of {len(found)} tokens, and {len(ids)} were asked for")
    return found


def check_tokenizer(student: Path, teacher: Path, name: str) -> None:
    """Refuse a teacher whose token ids mean something else."""
    mine, theirs = FileTokenizer(student), FileTokenizer(teacher)
    for number in range(mine.vocab_size):
        if mine.text_of(number) != theirs.text_of(number):
            raise ConfigError(
                f"algorithm.teacher={name}: its tokenizer is another: token {number} is {theirs.text_of(number)!r} "
                f"there and {mine.text_of(number)!r} here. Take a teacher with the policy's own tokenizer."
            )
    if mine.encode(WORDS) != theirs.encode(WORDS):
        raise ConfigError(
            f"algorithm.teacher={name}: its tokenizer cuts text otherwise, though the tokens are the same. Take a "
            "teacher with the policy's own tokenizer."
        )
