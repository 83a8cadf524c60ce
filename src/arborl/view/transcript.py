"""An episode as HTML: its messages by role, and how sure the model was of each token it sampled.

Everything a model, a task or an environment said is escaped here; nothing else in this room writes their words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from arborl.failures import trim_traceback
from arborl.types import NOT_SAMPLED, Call, Completion, Episode, Message

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
    for call in episode.calls if decode or any(call.reply for call in episode.calls) else ():
        calls.setdefault(call.turn, []).append(call)
    parts = [_message(message) for message in episode.opening]
    for index, turn in enumerate(episode.turns):
        parts.append(_spoken(turn.message, calls.pop(index, []), decode, turn.reward))
        parts += [_message(message) for message in turn.observation]
    for unanswered in calls.values():  # sampled, and the episode ended before the environment heard it
        parts.append(_spoken(Message("assistant"), unanswered, decode, 0.0))
    if episode.failure:
        trace = trim_traceback(episode.failure.traceback)
        parts.append(f'<p class="failure">{escape(str(episode.failure))}</p>')
        parts += [f'<pre class="trace">{escape(trace)}</pre>'] if trace else []
    return (
        f"<details{' open' if opened else ''}><summary>{escape(label)} · task {escape(episode.task.id)} · "
        f"<b>{escape(worth(episode))}</b> · {len(episode.turns)} turns · {episode.sampled} sampled tokens · "
        f"{escape(episode.stop.value)}</summary>{''.join(parts)}</details>"
    )


def worth(episode: Episode) -> str:
    """The reward that is learned from, and what it is made of where that is several.

    Example:
        worth(episode)      # reward 1.3 (env 1, brevity 0.3)
    """
    if episode.failure is not None:
        return "failed"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in episode.rewards.items())
    made_of = f" ({parts})" if len(episode.rewards) > 1 or set(episode.rewards) - {"env"} else ""
    return f"reward {episode.reward:.3g}{made_of}"


def _spoken(message: Message, calls: Sequence[Call], decode: Decode | None, reward: float) -> str:
    """The model's words of one turn. Between two calls of a turn stands what the agent added: a tool's answer."""
    if len(calls) < 2 and decode is None:
        return _message(message, reward)
    if not calls:
        return _message(message, reward)
    blocks = []
    for number, call in enumerate(calls):
        blocks += _between(calls[number - 1], call, decode) if number else []
        last = number == len(calls) - 1
        blocks.append(_block(message.role, _words(call, decode), reward if last else 0.0))
    return "".join(blocks)


def _words(call: Call, decode: Decode | None) -> str:
    """What was sampled, token by token where that can be shown."""
    if decode is not None:
        return f"<pre>{_tokens(call.completion, decode)}</pre>"
    return f"<pre>{escape(call.reply.content if call.reply else '')}</pre>"


def _between(before: Call, call: Call, decode: Decode | None) -> list[str]:
    """What the model was told between two calls: a tool's answer, as a message where messages were recorded."""
    known = len(before.messages)
    if call.messages and call.messages[:known] == before.messages:
        told = call.messages[known:]
        return [_message(message) for message in told if message != before.reply]
    words = _added(before, call, decode) if decode else f"(another context, {len(call.prompt)} tokens)"
    return [f'<pre class="added">{escape(words)}</pre>']


def _added(before: Call, call: Call, decode: Decode) -> str:
    seen = before.whole
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
    if completion.version == NOT_SAMPLED:  # nobody sampled it
        return "".join(f'<span class="token">{escape(word)}</span>' for word in words)
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
