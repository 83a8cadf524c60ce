"""An episode as HTML: messages by role, and the probability of each sampled token.

All text of models, tasks and environments is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from arborl.failures import trim_traceback
from arborl.types import NOT_SAMPLED, Call, Completion, Episode, Message
from arborl.view.web.token_text import Decode, pieces


def transcript(episode: Episode, label: str, decode: Decode | None = None, opened: bool = False) -> str:
    """A foldable block with the whole conversation; with `decode`, sampled tokens are shaded by probability."""
    calls: dict[int, list[Call]] = {}
    for call in episode.calls if decode or any(call.reply for call in episode.calls) else ():
        calls.setdefault(call.turn, []).append(call)
    parts = [_message(message) for message in episode.opening]
    for index, turn in enumerate(episode.turns):
        parts.append(_model_turn(turn.message, calls.pop(index, []), decode, turn.reward))
        parts += [_message(message) for message in turn.observation]
    for unused in calls.values():  # the episode ended before the environment got it
        parts.append(_model_turn(Message("assistant"), unused, decode, 0.0))
    if episode.failure:
        trace = trim_traceback(episode.failure.traceback)
        parts.append(f'<p class="failure">{escape(str(episode.failure))}</p>')
        parts += [f'<pre class="trace">{escape(trace)}</pre>'] if trace else []
    reward = f'<b class="{sign_class(episode)}">{escape(reward_text(episode))}</b>'
    return (
        f"<details{' open' if opened else ''}><summary>{escape(label)} · episode {escape(episode.id)} · {reward} · "
        f"{len(episode.turns)} turns · {episode.sampled} sampled tokens · "
        f"{escape(episode.stop.value)}</summary>{''.join(parts)}</details>"
    )


def reward_text(episode: Episode) -> str:
    """The reward and its parts: `reward +1.3 (env +1, brevity +0.3)`."""
    if episode.failure is not None:
        return "failed"
    parts = ", ".join(f"{name} {signed(value)}" for name, value in episode.rewards.items())
    made_of = f" ({parts})" if len(episode.rewards) > 1 or set(episode.rewards) - {"env"} else ""
    return f"reward {signed(episode.reward)}{made_of}"


def signed(value: float) -> str:
    """A number with its sign; zero has none.

    >>> signed(0.5), signed(-0.01), signed(0.0)
    ('+0.5', '-0.01', '0')
    """
    return f"{value:+.3g}" if value else "0"


def sign_class(value: float | Episode) -> str:
    """The class of a reward or advantage: `positive` (green), `negative` (red) or `zero`; red for a failed episode."""
    if isinstance(value, Episode):
        value = -1.0 if value.failure is not None else value.reward
    return "positive" if value > 0 else "negative" if value < 0 else "zero"


def _model_turn(message: Message, calls: Sequence[Call], decode: Decode | None, reward: float) -> str:
    """The model calls of one turn, with tool results between them."""
    if not calls or (len(calls) < 2 and decode is None):
        return _message(message, reward)
    blocks = []
    for number, call in enumerate(calls):
        blocks += _between(calls[number - 1], call, decode) if number else []
        last = number == len(calls) - 1
        blocks.append(_block(message.role, _completion(call, decode), reward if last else 0.0))
    return "".join(blocks)


def _completion(call: Call, decode: Decode | None) -> str:
    if decode is not None:
        return f"<pre>{_tokens(call.completion, decode)}</pre>"
    return f"<pre>{escape(call.reply.content if call.reply else '')}</pre>"


def _between(before: Call, call: Call, decode: Decode | None) -> list[str]:
    """What the agent added between two calls: tool results."""
    known = len(before.messages)
    if call.messages and call.messages[:known] == before.messages:
        return [_message(message) for message in call.messages[known:] if message != before.reply]
    seen, words = before.whole, f"(another context, {len(call.prompt)} tokens)"
    if decode is not None and call.prompt[: len(seen)] == seen:
        words = decode(call.prompt[len(seen) :]).strip()
    return [f'<pre class="added">{escape(words)}</pre>']


def _message(message: Message, reward: float = 0.0) -> str:
    body = f"<pre>{escape(message.content)}</pre>" if message.content else ""
    if not message.sampled:  # a sampled message has its calls in its text
        body += "".join(f"<pre>{escape(f'{call.name}({call.arguments})')}</pre>" for call in message.tool_calls)
    return _block(message.role, body, reward)


def _block(role: str, body: str, reward: float) -> str:
    badge = f'<span class="reward {sign_class(reward)}">{signed(reward)}</span>' if reward else ""
    return f'<div class="message {escape(role)}"><span class="role">{escape(role)}</span>{badge}{body}</div>'


def _tokens(completion: Completion, decode: Decode) -> str:
    words = pieces(completion.tokens, decode)
    if completion.version == NOT_SAMPLED:  # a demonstration
        return "".join(f'<span class="token">{escape(word)}</span>' for word in words)
    spans = []
    for token, logprob, word in zip(completion.tokens, completion.logprobs, words, strict=True):
        probability = math.exp(min(logprob, 0.0))
        doubt = 1.0 - probability if math.isfinite(probability) else 1.0
        title = f"token {token}, log-probability {logprob:.3f}, probability {probability:.1%}"
        spans.append(f'<span class="token" style="--doubt:{doubt:.2f}" title="{title}">{escape(word)}</span>')
    return "".join(spans)
