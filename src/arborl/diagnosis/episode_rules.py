"""Rules about the stored episodes of a run: those of the last steps, compared with those of the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

from arborl.chat.formats import PARSERS
from arborl.diagnosis.finding import RULE_TEXTS, Evidence, State
from arborl.diagnosis.run_files import RunFiles, StepEpisode, without_failures
from arborl.tokens import Tokens
from arborl.types import Call, Episode

MAX_EVIDENCE = 3
"""Episodes that a finding names."""
NEARLY_ALL = 0.9
MIN_SAMPLES = 8
"""Episodes or calls that a rule needs."""


@dataclass(frozen=True, slots=True)
class EpisodeMatch:
    """A fault of episodes in one run."""

    detail: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class EpisodeRule:
    """One thing that can be wrong with episodes."""

    name: str
    check: Callable[[RunFiles], EpisodeMatch | None]
    advice: str
    state: State = "warn"


def replies_loop(files: RunFiles) -> EpisodeMatch | None:
    """Long completions repeat the same tokens."""
    calls = [(one, call) for one, call in _calls(files.last_episodes) if len(call.completion.tokens) >= 32]
    looping = [one for one, call in calls if _repetition(call.completion.tokens) > 0.7]
    if len(looping) < max(3, 0.2 * len(calls)):
        return None
    return EpisodeMatch(f"{len(looping)} of {len(calls)} long completions repeat themselves", _evidence(looping))


def identical_replies(files: RunFiles) -> EpisodeMatch | None:
    """All tasks get the same text, which does not solve them."""
    episodes = without_failures(files.last_episodes)
    texts = Counter(_text(one.episode) for one in episodes)
    tasks = {one.episode.task.id for one in episodes}
    if len(tasks) < 4 or len(episodes) < MIN_SAMPLES or _success(episodes) >= NEARLY_ALL:
        return None
    text, count = texts.most_common(1)[0]
    if count < NEARLY_ALL * len(episodes) or not text:
        return None
    detail = f"{count} of {len(episodes)} episodes of {len(tasks)} tasks have the same text: {text[:60]!r}"
    return EpisodeMatch(detail, _evidence([one for one in episodes if _text(one.episode) == text]))


def empty_replies(files: RunFiles) -> EpisodeMatch | None:
    calls = _calls(files.last_episodes)
    empty = [one for one, call in calls if len(call.completion.tokens) <= 1]
    if len(calls) < MIN_SAMPLES or len(empty) < 0.5 * len(calls):
        return None
    return EpisodeMatch(f"{len(empty)} of {len(calls)} completions are empty", _evidence(empty))


def environment_unresponsive(files: RunFiles) -> EpisodeMatch | None:
    """The environment returns the same observation after every message."""
    episodes = [one for one in without_failures(files.last_episodes) if len(one.episode.turns) >= 3]
    observations = {_observations(one.episode) for one in episodes}
    messages = {turn.message.content for one in episodes for turn in one.episode.turns}
    is_constant = all(len(set(texts)) == 1 and texts[0] for texts in observations)
    if len(episodes) < 4 or len(messages) < 2 or not is_constant or any(one.episode.reward for one in episodes):
        return None
    detail = f"{len(episodes)} episodes, {len(messages)} different messages, and one observation in each episode"
    return EpisodeMatch(detail, _evidence(episodes))


def failures_rewarded(files: RunFiles) -> EpisodeMatch | None:
    """Episodes without success have a higher reward than those with success."""
    episodes = [
        one for one in without_failures(files.last_episodes + files.first_episodes) if "success" in one.episode.metrics
    ]
    right = [one for one in episodes if one.episode.metrics["success"] >= 1]
    wrong = [one for one in episodes if one.episode.metrics["success"] < 1]
    if len(right) < 5 or len(wrong) < 5:
        return None
    good, bad = fmean(one.episode.reward for one in right), fmean(one.episode.reward for one in wrong)
    if bad - good <= 0.25 * pstdev(one.episode.reward for one in episodes):
        return None
    best = sorted(wrong, key=lambda one: -one.episode.reward)
    detail = f"mean reward {good:.3g} with success, {bad:.3g} without"
    return EpisodeMatch(detail, _evidence(best, lambda one: f"no success, reward {one.episode.reward:.3g}"))


def wrong_tool_format(files: RunFiles) -> EpisodeMatch | None:
    """Replies contain tool calls in another format than the configured one."""
    if not any(row.get("episode/tool/offered") for row in files.rows):
        return None
    replies = [(one, call.reply) for one, call in _calls(files.last_episodes) if call.reply is not None]
    unparsed = [(one, reply.content) for one, reply in replies if not reply.tool_calls]
    matches = {name: [one for one, text in unparsed if _parses(name, text)] for name in PARSERS.table}
    name, episodes = max(matches.items(), key=lambda item: len(item[1]))
    num_parsed = len(replies) - len(unparsed)
    if len(replies) < MIN_SAMPLES or len(episodes) < max(3, 0.2 * len(replies), num_parsed):
        return None
    detail = f"{len(episodes)} of {len(replies)} replies have a call in the format {name}, which is not parsed"
    return EpisodeMatch(detail, _evidence(episodes))


def double_bos(files: RunFiles) -> EpisodeMatch | None:
    """Every prompt begins with the same token twice: template and tokenizer both add the begin token."""
    calls = [(one, call) for one, call in _calls(files.last_episodes) if len(call.prompt) > 2]
    doubled = [one for one, call in calls if call.prompt[0] == call.prompt[1]]
    if len(calls) < MIN_SAMPLES or len(doubled) < len(calls):
        return None
    token = calls[0][1].prompt[0]
    return EpisodeMatch(f"all {len(calls)} prompts begin with the token {token} twice", _evidence(doubled))


def history_rewritten(files: RunFiles) -> EpisodeMatch | None:
    """The messages of a conversation grow, but its tokens change: every turn starts a new branch."""
    episodes = without_failures(files.last_episodes)
    pairs = [(one, pair) for one in episodes for pair in pairwise(one.episode.calls) if _extends(*pair)]
    rewritten = [one for one, (before, call) in pairs if not before.whole.begins(Tokens(call.prompt))]
    if len(pairs) < MIN_SAMPLES or len(rewritten) < 0.5 * len(pairs):
        return None
    detail = f"{len(rewritten)} of {len(pairs)} calls that extend a conversation do not begin with its tokens"
    return EpisodeMatch(detail, _evidence(rewritten))


def held_out_leaked(files: RunFiles) -> EpisodeMatch | None:
    """Held-out tasks are trained on."""
    trained = {_task_identity(one.episode) for one in files.first_episodes + files.last_episodes}
    leaked = [one for one in files.held_out if _task_identity(one.episode) in trained]
    if len(leaked) < max(2, 0.05 * len(files.held_out)):
        return None
    detail = f"{len(leaked)} of {len(files.held_out)} held-out episodes have tasks of the training data"
    return EpisodeMatch(detail, _evidence(leaked))


EPISODE_CHECKS = (
    replies_loop, identical_replies, empty_replies, environment_unresponsive, failures_rewarded, wrong_tool_format,
    double_bos, history_rewritten, held_out_leaked,
)  # fmt: skip
EPISODE_RULES = tuple(EpisodeRule(check.__name__, check, **RULE_TEXTS[check.__name__]) for check in EPISODE_CHECKS)


def evidence(one: StepEpisode, why: str = "") -> Evidence:
    return Evidence(one.step, one.episode.task.id, one.episode.id, why)


def _evidence(
    episodes: Sequence[StepEpisode], why: Callable[[StepEpisode], str] = lambda one: ""
) -> tuple[Evidence, ...]:
    """The first few distinct episodes."""
    distinct = {(one.step, one.episode.id): one for one in episodes}
    return tuple(evidence(one, why(one)) for one in list(distinct.values())[:MAX_EVIDENCE])


def _calls(episodes: Sequence[StepEpisode]) -> list[tuple[StepEpisode, Call]]:
    return [
        (one, call) for one in without_failures(episodes) if not one.episode.is_offline for call in one.episode.calls
    ]


def _extends(before: Call, call: Call) -> bool:
    """Whether the messages of a call are those of the call before, its reply, and more."""
    messages = (*before.messages, before.reply)
    return len(call.messages) > len(messages) and call.messages[: len(messages)] == messages


def _repetition(tokens: Sequence[int]) -> float:
    """Share of token triples that occurred before."""
    triples = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(triples)) / len(triples)


def _text(episode: Episode) -> str:
    return "\n".join(turn.message.content for turn in episode.turns)


def _observations(episode: Episode) -> tuple[str, ...]:
    """The observation of each turn but the last, which may be empty."""
    return tuple("\n".join(message.content for message in turn.observation) for turn in episode.turns[:-1])


def _success(episodes: Sequence[StepEpisode]) -> float:
    return fmean(one.episode.metrics.get("success", float(one.episode.reward >= 1)) for one in episodes)


def _parses(format_name: str, text: str) -> bool:
    """Whether this format parses a whole call in the text."""
    return any(call.error is None for call in PARSERS[format_name]().parse(text))


def _task_identity(episode: Episode) -> str:
    """Equal for equal tasks: environment and messages, or the fields and the seed."""
    task = episode.task
    if task.messages:
        return repr((task.env, [message.content for message in task.messages]))
    fields = {name: value for name, value in task.fields.items() if name != "split"}
    return repr((task.env, sorted(fields.items(), key=repr), task.seed))
