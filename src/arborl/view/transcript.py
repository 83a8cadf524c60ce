"""An episode as HTML: its messages by role, and how sure the model was of each token it sampled.

Everything a model, a task or an environment said is escaped here; nothing else in this room writes their words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from arborl.types import Call, Completion, Episode, Message

Decode = Callable[[Sequence[int]], str]


def transcript(episode: Episode, label: str, decode: Decode | None = None, opened: bool = False) -> str:
    """A foldable block with the whole conversation.

    Args:
        episode: what was recorded.
        label: where it comes from, `step 59`.
        decode: token ids to text; with it the model's words are shown token by token, shaded by probability.
        opened: show it unfolded.
    """
    calls: dict[int, list[Call]] = {}
    for call in episode.calls if decode else ():
        calls.setdefault(call.turn, []).append(call)
    parts = [_message(message) for message in episode.opening]
    for index, turn in enumerate(episode.turns):
        parts.append(_spoken(turn.message, calls.pop(index, []), decode, turn.reward))
        parts += [_message(message) for message in turn.observation]
    for unanswered in calls.values():  # sampled, and the episode ended before the environment heard it
        parts.append(_spoken(Message("assistant"), unanswered, decode, 0.0))
    if episode.failure:
        parts.append(f'<p class="failure">{escape(str(episode.failure))}</p>')
    return (
        f"<details{' open' if opened else ''}><summary>{escape(label)} · task {escape(episode.task.id)} · "
        f"<b>reward {episode.reward:.3g}</b> · {len(episode.turns)} turns · {episode.sampled} sampled tokens · "
        f"{escape(episode.stop.value)}</summary>{''.join(parts)}</details>"
    )


def _spoken(message: Message, calls: Sequence[Call], decode: Decode | None, reward: float) -> str:
    """The model's words of one turn. Between two calls of a turn stands what the agent added: a tool's answer."""
    if not calls or decode is None:
        return _message(message, reward)
    body = f"<pre>{_tokens(calls[0].completion, decode)}</pre>"
    for before, call in pairwise(calls):
        body += f'<pre class="added">{escape(_added(before, call, decode))}</pre>'
        body += f"<pre>{_tokens(call.completion, decode)}</pre>"
    return _block(message.role, body, reward)


def _added(before: Call, call: Call, decode: Decode) -> str:
    seen = before.prompt + before.completion.tokens
    if call.prompt[: len(seen)] == seen:
        return decode(call.prompt[len(seen) :]).strip()
    return f"(another context, {len(call.prompt)} tokens)"


def _message(message: Message, reward: float = 0.0) -> str:
    body = f"<pre>{escape(message.content)}</pre>" if message.content else ""
    if not message.sampled:  # a sampled message has its calls in its text
        body += "".join(f"<pre>{escape(f'{call.name}({call.arguments})')}</pre>" for call in message.tool_calls)
    return _block(message.role, body, reward)


def _block(role: str, body: str, reward: float) -> str:
    badge = f'<span class="reward">{reward:+.3g}</span>' if reward else ""
    return f'<div class="message {escape(role)}"><span class="role">{escape(role)}</span>{badge}{body}</div>'


def _tokens(completion: Completion, decode: Decode) -> str:
    words = pieces(completion.tokens, decode)
    return "".join(
        f'<span class="token" style="--doubt:{_doubt(logprob):.2f}" '
        f'title="token {token}, log-probability {logprob:.3f}, probability {_chance(logprob):.1%}">'
        f"{escape(word)}</span>"
        for token, logprob, word in zip(completion.tokens, completion.logprobs, words, strict=True)
    )


def pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text each token adds; together they are the text of all.

    A token may be part of a character: decoding it alone would show a question mark. Such a token adds nothing, and
    the one that completes the character adds it.
    """
    words, shown = list[str](), ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        if count < len(tokens) and (text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(shown)):
            words.append("")
            continue
        words.append(text[len(shown) :])
        shown = text
    return words


def _chance(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))


def _doubt(logprob: float) -> float:
    """0 for a sure token, 1 for one that was nearly impossible; not a number counts as that."""
    chance = _chance(logprob)
    return 1.0 - chance if math.isfinite(chance) else 1.0
