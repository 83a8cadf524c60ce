"""`arborl replay`: an optimizer step again, from the files of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import AsJson, LogLevel, Trust, argument, option, path_and_settings
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from arborl.training_run.step_analysis import StepWithout, TokenExplanation, TokenRow
    from arborl.training_run.step_replay import StepReplay

SHOWN_METRICS = ("policy/loss", "learner/grad_norm", "policy/entropy", "policy/ratio", "policy/clipped", "policy/kl")
MAX_DIFFERENCES = 40
MAX_TENSORS = 5
EPISODE_HELP = "An episode: list its tokens. EPISODE:CALL:INDEX: explain one token. May be repeated."


def replay(
    arguments: Annotated[list[str] | None, argument("RUN a.b=c", "A run folder, and settings to change.")] = None,
    step: Annotated[int, typer.Option(min=1, help="Number of the optimizer step, from 1.")] = ...,  # type: ignore[assignment]
    explain: Annotated[list[str] | None, option(metavar="EPISODE[:CALL:INDEX]", help=EPISODE_HELP)] = None,
    without: Annotated[
        list[str] | None,
        option(metavar="EPISODE", help="What the step would be without this episode; may be repeated."),
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
    log_level: LogLevel = None,
) -> None:
    """Run an optimizer step again from the files of its run, and compare. Exit code 1 if the numbers differ.

    Uses the nearest checkpoint and the episode files. No environment, engine or reward is run."""
    path, settings = path_and_settings(arguments, "run")
    if path is None:
        raise ConfigError("replay needs a run. Write arborl replay RUN --step N.")
    from arborl.training_run.step_replay import StepReplayer

    with StepReplayer(Path(path), step, settings, trust=trust) as replayer:
        result = replayer.replay()
        from arborl.training_run.step_analysis import TokenExplainer, parse_address, step_without

        answers: list[list[TokenRow] | TokenExplanation] = []
        if explain:
            explainer = TokenExplainer(replayer)
            ids = [place.episode.id for place in explainer.places]
            for text in explain:
                episode, call, index = parse_address(text, ids)
                answers.append(
                    explainer.tokens(episode)
                    if call is None or index is None
                    else explainer.token(episode, call, index)
                )
        other = step_without(replayer, without) if without else None
    if as_json:
        typer.echo(json.dumps(as_tree(result, answers, other), indent=2, ensure_ascii=False))
    else:
        _print(result, answers, other, settings)
    if not result.equal and not settings:
        raise typer.Exit(1)


def as_tree(
    result: StepReplay, answers: list[list[TokenRow] | TokenExplanation], other: StepWithout | None
) -> dict[str, Any]:
    tree = result.as_json()
    rows = [one.as_json() for answer in answers if isinstance(answer, list) for one in answer]
    tokens = [answer.as_json() for answer in answers if not isinstance(answer, list)]
    tree |= {"tokens": rows} if rows else {}
    tree |= {"explained": tokens} if tokens else {}
    return tree | ({"without": other.as_json()} if other is not None else {})


# ------------------------------------------------------------------------------------------------ terminal


def _print(
    result: StepReplay,
    answers: list[list[TokenRow] | TokenExplanation],
    other: StepWithout | None,
    settings: list[str],
) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.width = console.width if console.is_terminal else 160
    _print_result(console, result, settings)
    for answer in answers:
        if isinstance(answer, list):
            _print_tokens(console, answer)
        else:
            _print_token(console, answer)
    if other is not None:
        _print_without(console, other)


def _print_result(console: Console, result: StepReplay, settings: list[str]) -> None:
    from arborl.cli.terminal_table import Text, new_table

    start = f"the checkpoint of step {result.start}" if result.checkpoint else "the initial model"
    first, last = result.start + 1, result.step - 1
    again = "" if first > last else f", step {first} again" if first == last else f", steps {first} to {last} again"
    console.print(f"{result.run}, step {result.step}: from {start}{again}")
    for note in result.notes:
        console.print(f"note: {note}")
    if result.earlier:
        console.print(f"steps on the way that differ: {', '.join(map(str, result.earlier))}", style="yellow")
    different = {one.name for one in result.differences}
    table = new_table("metric", "recorded", "replayed", "", left=("metric", ""))
    for name in (name for name in SHOWN_METRICS if name in result.metrics and name not in different):
        table.add_row(Text(name), _number(result.metrics[name]), _number(result.metrics[name]), "equal")
    for one in result.differences[:MAX_DIFFERENCES]:
        gap = None if one.recorded is None or one.replayed is None else one.replayed - one.recorded
        change = "different" if gap is None else f"{gap:+.3g}"
        table.add_row(Text(one.name), _number(one.recorded), _number(one.replayed), change, style="yellow")
    console.print(table)
    if len(result.differences) > MAX_DIFFERENCES:
        console.print(f"… and {len(result.differences) - MAX_DIFFERENCES} more; --json lists all")
    console.print(_verdict(result, settings), style="green" if result.equal else "yellow", soft_wrap=True)


def _verdict(result: StepReplay, settings: list[str]) -> str:
    weights, count = result.weights, len(result.differences)
    metrics = f"all {result.compared} metrics of the update" if not count else f"{count} of {result.compared} metrics"
    if weights is None:
        tensors = "no checkpoint of this step to compare weights with"
    elif not weights.different:
        tensors = f"{weights.tensors} tensors of its checkpoint are equal"
    else:
        some = ", ".join(weights.different[:MAX_TENSORS]) + (", …" if len(weights.different) > MAX_TENSORS else "")
        tensors = (
            f"{len(weights.different)} of {weights.tensors} tensors of its checkpoint differ, by at most "
            f"{weights.largest:.3g}: {some}"
        )
    changed = f" (with {' '.join(settings)})" if settings else ""
    return f"{'equal' if result.equal else 'different'}{changed}: {metrics}; {tensors}"


def _print_tokens(console: Console, rows: list[TokenRow]) -> None:
    from arborl.cli.terminal_table import Text, new_table

    head = ("token", "text", "sampled", "learner", "ratio", "clipped", "advantage", "weight", "logit gradient")
    table = new_table(*head, left=("token", "text"))
    for row in rows:
        clipped = "–" if row.clipped is None else "yes" if row.clipped else "no"
        share = "–" if row.logit_share is None else f"{row.logit_share:.2%}"
        numbers = map(_short, (row.sampling_logprob, row.logprob, row.ratio))
        last = map(_short, (row.advantage, row.weight))
        table.add_row(Text(row.address), Text(repr(row.text)), *numbers, clipped, *last, share)
    console.print(table)
    console.print(
        "sampled, learner: log-probabilities of the engine and of the learner before the step. logit gradient: share "
        "of the sum over all tokens of the step.",
        style="dim",
    )


def _print_token(console: Console, one: TokenExplanation) -> None:
    from arborl.cli.terminal_table import Text, new_table

    row, origin = one.row, one.advantage
    console.print()
    console.print(Text.assemble((f"{row.address}  ", "bold"), one.context, (repr(row.text)[1:-1], "reverse")))
    if one.not_trained:
        console.print(f"not trained: {one.not_trained}", style="yellow", soft_wrap=True)
    clipped = None if row.clipped is None else "yes" if row.clipped else "no"
    lines: dict[str, Any] = {
        "token": f"{row.token}, policy version {row.version}",
        "sampling log-probability": row.sampling_logprob, "learner log-probability": row.logprob,
        "reference log-probability": one.reference_logprob, "ratio": row.ratio, "clipped": clipped,
        "entropy": row.entropy, "advantage": row.advantage, "  estimator": origin["estimator"],
        "  reward of the episode": origin["reward"], "  reward of the turn": origin["turn_reward"],
        "  group mean, deviation": f"{_short(origin['group_mean'])}, {_short(origin['group_std'])} of "
        f"{len(origin['group_rewards'])} episodes of {origin['task']}",
        "  greedy baseline": origin["greedy"], "  value of the critic": one.value, "  value target": one.target,
        "weight": row.weight, "loss": row.loss, "derivative by log-probability": row.pull,
        "gradient norm": one.gradient_norm, "share of the step's gradient": one.gradient_share,
    }  # fmt: skip
    table = new_table("", " ", left=("", " "), fold=(" ",))
    for name, value in lines.items():
        if value is not None:
            table.add_row(Text(name), Text(value if isinstance(value, str) else _number(value)))
    console.print(table)


def _print_without(console: Console, other: StepWithout) -> None:
    from arborl.cli.terminal_table import Text, new_table

    console.print()
    console.print(Text(f"without {', '.join(other.episodes)}", "bold"))
    table = new_table("", "as it was", "without", left=("",))
    for name, (old, new) in other.numbers.items():
        table.add_row(name.replace("_", " "), _number(old), _number(new))
    console.print(table)
    pair = (("gradients", other.gradient_cosine), ("updates", other.update_cosine))
    console.print(", ".join(f"cosine of the {what}: {_short(value)}" for what, value in pair))
    if other.advantages:
        table = new_table("episode", "task", "reward", "advantage", "without", left=("episode", "task"))
        for one in other.advantages:
            numbers = map(_short, (one.reward, one.recorded, one.without))
            table.add_row(Text(one.episode), Text(one.task), *numbers)
        console.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else repr(value)


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
