"""What only episodes show: a table of questions about those that a run kept.

Each is asked of the episodes of the last steps (and the first, to compare), and answers with what is wrong and the
episodes that show it, or with nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from arborl.chat.formats import PARSERS
from arborl.doctor.finding import Evidence, State
from arborl.doctor.run_files import Played, RunFiles, alive
from arborl.tokens import Tokens
from arborl.types import Call, Episode

SHOWN = 3
"""Episodes that are named."""
NEARLY = 0.9
ENOUGH = 8
"""Episodes or calls below which nothing is said."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is wrong, and who shows it."""

    detail: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class EpisodeRule:
    """One thing that can be wrong with episodes."""

    name: str
    look: Callable[[RunFiles], Shown | None]
    advice: str
    state: State = "warn"


def replies_loop(files: RunFiles) -> Shown | None:
    """Long replies that say the same again and again."""
    said = [(one, call) for one, call in _calls(files.late) if len(call.completion.tokens) >= 32]
    looping = [one for one, call in said if _repeats(call.completion.tokens) > 0.7]
    if len(looping) < max(3, 0.2 * len(said)):
        return None
    return Shown(f"{len(looping)} of {len(said)} long replies repeat themselves", _named(looping))


def all_alike(files: RunFiles) -> Shown | None:
    """The same words whatever the task is, and they do not solve it."""
    played = alive(files.late)
    texts = Counter(_text(one.episode) for one in played)
    tasks = {one.episode.task.id for one in played}
    if len(tasks) < 4 or len(played) < ENOUGH or _success(played) >= NEARLY:
        return None
    text, count = texts.most_common(1)[0]
    if count < NEARLY * len(played) or not text:
        return None
    shown = f"{count} of {len(played)} episodes of {len(tasks)} tasks say the very same: {text[:60]!r}"
    return Shown(shown, _named([one for one in played if _text(one.episode) == text]))


def empty_replies(files: RunFiles) -> Shown | None:
    said = _calls(files.late)
    empty = [one for one, call in said if len(call.completion.tokens) <= 1]
    if len(said) < ENOUGH or len(empty) < 0.5 * len(said):
        return None
    return Shown(f"{len(empty)} of {len(said)} replies are empty", _named(empty))


def environment_dead(files: RunFiles) -> Shown | None:
    """Whatever is done, the environment answers the same."""
    played = [one for one in alive(files.late) if len(one.episode.turns) >= 3]
    answers = {_answers(one.episode) for one in played}
    moves = {turn.message.content for one in played for turn in one.episode.turns}
    unmoved = all(len(set(own)) == 1 and own[0] for own in answers)
    if len(played) < 4 or len(moves) < 2 or not unmoved or any(one.episode.reward for one in played):
        return None
    shown = f"{len(played)} episodes, {len(moves)} different messages, and after each the same answer as before"
    return Shown(shown, _named(played))


def wrong_ones_paid(files: RunFiles) -> Shown | None:
    """Episodes that succeed earn less than those that do not."""
    played = [one for one in alive(files.late + files.early) if "success" in one.episode.metrics]
    right = [one for one in played if one.episode.metrics["success"] >= 1]
    wrong = [one for one in played if one.episode.metrics["success"] < 1]
    if len(right) < 5 or len(wrong) < 5:
        return None
    good, bad = fmean(one.episode.reward for one in right), fmean(one.episode.reward for one in wrong)
    if bad - good <= 0.25 * pstdev(one.episode.reward for one in played):
        return None
    best = sorted(wrong, key=lambda one: -one.episode.reward)
    shown = f"those that succeed earn {good:.3g} on average, those that do not {bad:.3g}"
    return Shown(shown, _named(best, lambda one: f"no success, reward {one.episode.reward:.3g}"))


def calls_unread(files: RunFiles) -> Shown | None:
    """Replies hold a call in another format than the one they are read in."""
    if not any(row.get("episode/tool/offered") for row in files.rows):
        return None
    said = [(one, call) for one, call in _calls(files.late) if call.reply is not None]
    read = sum(bool(call.reply and call.reply.tool_calls) for _, call in said)
    other = Counter(
        name
        for name in PARSERS.table
        for _, call in said
        if call.reply and not call.reply.tool_calls and _reads(name, call.reply.content)
    )
    if len(said) < ENOUGH or not other:
        return None
    name, count = other.most_common(1)[0]
    if count < max(3, 0.2 * len(said)) or count < read:
        return None
    unread = [
        one for one, call in said if call.reply and not call.reply.tool_calls and _reads(name, call.reply.content)
    ]
    return Shown(f"{count} of {len(said)} replies hold a call in the format {name}, which is not read", _named(unread))


def begins_twice(files: RunFiles) -> Shown | None:
    """Every prompt begins with the same token twice: a begin token that two places have written."""
    said = [(one, call) for one, call in _calls(files.late) if len(call.prompt) > 2]
    doubled = [one for one, call in said if call.prompt[0] == call.prompt[1]]
    if len(said) < ENOUGH or len(doubled) < len(said):
        return None
    token = next(call.prompt[0] for _, call in said)
    return Shown(f"all {len(said)} prompts begin with the token {token} twice", _named(doubled))


def history_rewritten(files: RunFiles) -> Shown | None:
    """A conversation grows, and its tokens do not: the next prompt shows what was said in another way."""
    grown = [(one, pair) for one in alive(files.late) for pair in pairwise(one.episode.calls) if _goes_on(*pair)]
    anew = [one for one, (before, call) in grown if not before.whole.begins(Tokens(call.prompt))]
    if len(grown) < ENOUGH or len(anew) < 0.5 * len(grown):
        return None
    return Shown(f"{len(anew)} of {len(grown)} calls that go on from one do not begin with its tokens", _named(anew))


def held_out_seen(files: RunFiles) -> Shown | None:
    """Held-out tasks that are trained on, too."""
    trained = {_identity(one.episode) for one in files.early + files.late}
    seen = [one for one in files.held_out if _identity(one.episode) in trained]
    if len(seen) < max(2, 0.05 * len(files.held_out)):
        return None
    return Shown(
        f"{len(seen)} of {len(files.held_out)} held-out episodes are of tasks that are trained on", _named(seen)
    )


EPISODE_RULES = (
    EpisodeRule(
        "replies_loop", replies_loop,
        "The policy has degenerated: go on from an earlier checkpoint with algorithm.kl.coef=0.01 or a smaller "
        "learner.lr_scale.", "fail",
    ),
    EpisodeRule(
        "all_alike", all_alike,
        "It no longer reads the task. Go on from an earlier checkpoint with algorithm.entropy_coef=0.01 or a smaller "
        "learner.lr_scale; check that the prompt holds the task.", "fail",
    ),
    EpisodeRule(
        "empty_replies", empty_replies,
        "Saying nothing is paid as well as trying: let a reward ask for an answer; check sampling.stop.", "fail",
    ),
    EpisodeRule(
        "environment_dead", environment_dead,
        "No message changes its state: `arborl env play NAME` plays it by hand, `arborl env check NAME` holds it to "
        "its contract.", "fail",
    ),
    EpisodeRule(
        "wrong_ones_paid", wrong_ones_paid,
        "The reward pays for something else: try it alone on a right and on a wrong answer, and check the sign of its "
        "weight.", "fail",
    ),
    EpisodeRule("calls_unread", calls_unread, "Write agent.tool_format as the detail names it.", "fail"),
    EpisodeRule(
        "begins_twice", begins_twice,
        "The template and the tokenizer both write the begin token: mend chat_template.jinja, or write "
        "model.chat_template.", "fail",
    ),
    EpisodeRule(
        "history_rewritten", history_rewritten,
        "Training is right, and slower than it could be: the chat template rewrites what was said. "
        "`arborl doctor --model MODEL` says what; write model.chat_template=chatml.",
    ),
    EpisodeRule(
        "held_out_seen", held_out_seen,
        "Held-out numbers then say nothing about other tasks: write data.deduplicate=true and data.split=content, or "
        "give others as data.evaluation_path.", "fail",
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ what they share


def _calls(played: Sequence[Played]) -> list[tuple[Played, Call]]:
    return [(one, call) for one in alive(played) if not one.episode.is_offline for call in one.episode.calls]


def _named(played: Sequence[Played], why: Callable[[Played], str] = lambda one: "") -> tuple[Evidence, ...]:
    """The first few of them, each once."""
    once = {(one.step, one.episode.id): one for one in played}
    return tuple(evidence(one, why(one)) for one in list(once.values())[:SHOWN])


def evidence(one: Played, why: str = "") -> Evidence:
    return Evidence(one.step, one.episode.task.id, one.episode.id, why)


def _goes_on(before: Call, call: Call) -> bool:
    """Whether the agent asked with what it had asked before, the reply to it, and more."""
    asked = (*before.messages, before.reply)
    return len(call.messages) > len(asked) and call.messages[: len(asked)] == asked


def _repeats(tokens: Sequence[int]) -> float:
    """The share of triples of tokens that were there before."""
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(triples)) / len(triples)


def _text(episode: Episode) -> str:
    return "\n".join(turn.message.content for turn in episode.turns)


def _answers(episode: Episode) -> tuple[str, ...]:
    """What the environment said after each message; at the end it may say nothing."""
    return tuple("\n".join(message.content for message in turn.observation) for turn in episode.turns[:-1])


def _success(played: Sequence[Played]) -> float:
    return fmean(one.episode.metrics.get("success", float(one.episode.reward >= 1)) for one in played)


def _reads(name: str, text: str) -> bool:
    """Whether this format sees a whole call in the text."""
    return any(call.error is None for call in PARSERS[name]().parse(text))


def _identity(episode: Episode) -> str:
    """What makes a task the same task: what is asked, or else what it is drawn from."""
    task = episode.task
    if task.messages:
        return repr((task.env, [message.content for message in task.messages]))
    fields = {name: value for name, value in task.fields.items() if name != "split"}
    return repr((task.env, sorted(fields.items(), key=repr), task.seed))
