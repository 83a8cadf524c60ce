"""`arborl evaluate` and `arborl rollout`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.options import FileAndSettings, LogLevel, Trust, argument, file_and_settings, option, split_settings
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from arborl.chat import Renderer
    from arborl.tokens import Tokens
    from arborl.trainer.policy_comparison import PolicyResult
    from arborl.types import Call, Episode

OUTPUT_HELP = ".json, .csv or .html: the metrics; .jsonl: every episode. May be repeated."


def evaluate(
    arguments: Annotated[
        list[str] | None, argument("PATH… a.b=c", "Runs, checkpoints, models or YAML files, and settings.")
    ] = None,
    env: Annotated[str, option(metavar="NAME", help="Environment.")] = "",
    episodes: Annotated[int | None, option(metavar="N", min=1, help="Number of held-out tasks.")] = None,
    attempts: Annotated[int | None, option(metavar="K", min=1, help="Episodes of each task, for pass@k.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="T", min=0, help="Sampling temperature; may be repeated. 0: greedy.")
    ] = None,
    checkpoint: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="The same as PATH; may be repeated.")
    ] = None,
    input_file: Annotated[Path | None, option("--input", metavar="FILE", help="Prompts to answer instead.")] = None,
    message: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt to answer instead; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another model; openai:NAME is served at --base-url.")
    ] = None,
    base_url: Annotated[str | None, option(metavar="URL", help="Server of openai:NAME.")] = None,
    api_key_env: Annotated[str | None, option(metavar="NAME", help="Environment variable with its API key.")] = None,
    output: Annotated[list[Path] | None, typer.Option(metavar="FILE", help=OUTPUT_HELP)] = None,
    as_json: Annotated[bool, option("--json", help="Print the metrics, or the answers, as JSON.")] = False,
    trust: Trust = False,
    log_level: LogLevel = None,
) -> None:
    """Evaluate policies on held-out tasks, or on your prompts. PATH is a run, a checkpoint, a model or a YAML file."""
    from arborl.view.policy_table import check_output_path, results_json, write_results

    paths, settings = split_settings(arguments)
    names = [*paths, *(checkpoint or ()), *(model or ())]
    check_names(names, base_url)
    settings += [f"env={env}"] if env else []
    settings += [f"evaluation.tasks={episodes}"] if episodes is not None else []
    for path in output or ():
        check_output_path(path)
    prompts = read_prompts(input_file, message or ())
    if prompts is not None and (env or episodes is not None):
        raise ConfigError("--env and --episodes select held-out tasks; --input and --message replace them. Leave out.")

    from arborl import training_run

    where = {} if base_url is None else {"base_url": base_url}
    options = training_run.MeasureOptions(
        settings, temperature or (), attempts, prompts, key=api_key_env, trust=trust, **where
    )
    results = training_run.measure(names, options)
    for path in output or ():
        write_results(results, path)
    if as_json:
        typer.echo(results_json(results, prompts is not None))
        return
    if prompts is not None and not output:
        print_replies(results, with_prompts=input_file is not None)
    if prompts is None or any(one.judged for one in results):
        print_results(names, results)
    for path in output or ():
        typer.echo(f"wrote {path}")


def check_names(names: Sequence[str], base_url: str | None) -> None:
    """Check that at least one model is named, and that no name is a setting without its `=`."""
    from arborl.config.load_config import find_setting
    from arborl.models.model_files import EMBEDDED

    if not names:
        raise ConfigError(
            "nothing to evaluate. Write `arborl evaluate PATH`: a run, a checkpoint, a model name or a YAML file."
        )
    if base_url is not None and not any(name.startswith("openai:") for name in names):
        raise ConfigError("--base-url: no model is served there. Write --model openai:NAME.")
    for name in names[1:]:
        setting = None if name in EMBEDDED or Path(name).exists() else find_setting(name)
        if setting is not None:
            raise ConfigError(f"{name!r}: no such folder or file. A setting is written {setting}=VALUE.")


def read_prompts(path: Path | None, messages: Sequence[str]) -> list[dict[str, Any]] | None:
    """Rows of a file (JSON, JSONL, CSV, Parquet; a JSON list may contain plain texts) and prompts as typed."""
    rows: list[dict[str, Any]] = []
    if path is not None:
        from arborl.data.reading.table_files import open_table

        rows = _text_rows(path)
        if not rows:
            table = open_table(path)
            rows = [dict(row) for row in table.rows(range(sum(table.sizes)))]
    rows += [{"question": text} for text in messages]
    return rows if path is not None or messages else None


def _text_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON list of texts; empty for any other file."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []  # `open_table` reports the error
    is_texts = isinstance(data, list) and data and all(isinstance(item, str) for item in data)
    return [{"question": text} for text in data] if is_texts else []


def print_replies(results: Sequence[PolicyResult], with_prompts: bool = False) -> None:
    has_reply = False
    for one in results:
        for episode in (episode for group in one.groups for episode in group.episodes):
            if len(results) > 1:
                typer.echo(f"{one.name} ({one.decoding}):")
            if with_prompts and episode.opening:
                typer.echo(f"> {episode.opening[-1].content}")
            if episode.failure is not None:
                typer.echo(f"arborl: failed: {episode.failure}", err=True)
            elif not episode.turns:
                typer.echo(f"arborl: no reply: {episode.stop}. Write a larger sampling.max_context.", err=True)
            else:
                typer.echo(episode.answer)
            has_reply = has_reply or bool(episode.turns)
    if not has_reply:
        raise typer.Exit(1)


def print_results(names: Sequence[str], results: Sequence[PolicyResult]) -> None:
    from rich.console import Console

    from arborl.trainer.policy_comparison import compare_policies

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(results_table(" ".join(names), results), crop=False)
    for pair in compare_policies(results):
        interval = "" if pair.low is None or pair.high is None else f" [{pair.low:+.3g}, {pair.high:+.3g}]"
        text = f"{pair.first} minus {pair.second}, {pair.decoding}: {pair.metric} {pair.difference:+.4g}{interval}"
        console.print(f"{text}, p = {pair.p:.3g} over {pair.tasks} tasks", markup=False, soft_wrap=True)


def results_table(title: str, results: Sequence[PolicyResult]) -> Table:
    """One row per metric, one column per model and sampling mode."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from arborl.view.policy_table import format_score

    table = Table(box=box.SIMPLE, title=Text(title), title_justify="left", min_width=min(len(title), 120))
    table.add_column("metric")
    has_several = len({one.name for one in results}) > 1
    for one in results:
        table.add_column(Text(f"{one.name}\n{one.decoding}" if has_several else one.decoding), justify="right")
    for source in dict.fromkeys([None, *(source for one in results for source in one.sources)]):
        columns = [{name: format_score(score) for name, score in one.scores(source).items()} for one in results]
        for column, one in zip(columns, results, strict=True):
            tasks, _, failed = one.count(source)
            column |= {"tasks": str(tasks), "failed": str(failed)}
        for name in dict.fromkeys(name for column in columns for name in column):
            label = name if source is None else f"{name}/{source}"
            table.add_row(Text(label), *(column.get(name, "–") for column in columns))
    return table


# ------------------------------------------------------------------------------------------------ rollout


def rollout(
    arguments: FileAndSettings = None,
    env: Annotated[str, option(metavar="NAME", help="Environment.")] = "",
    agent: Annotated[str, option(metavar="NAME", help="Agent.")] = "",
    model: Annotated[str, option(metavar="PATH", help="A run, a checkpoint or a model.")] = "",
    seed: Annotated[int | None, option(help="Seed of the run.")] = None,
    step: Annotated[int, typer.Option(help="Training step.", min=1)] = 1,
    task: Annotated[int, typer.Option(help="Number of the task in that step.", min=0)] = 0,
    member: Annotated[int, typer.Option(help="Number of the episode in its group.", min=0)] = 0,
    held_out: Annotated[bool, option("--held-out", help="Take a held-out task.")] = False,
    stub: Annotated[bool, option("--stub", help="Use scripted replies instead of the model.")] = False,
    ids: Annotated[bool, option("--ids", help="Show token ids.")] = False,
    log_level: LogLevel = None,
) -> None:
    """Play one episode and print its tokens. Shows masks and rewards as the learner sees them."""
    import asyncio

    from rich.console import Console

    from arborl.cli.env_commands import model_folder
    from arborl.config.load_config import load
    from arborl.training_run.build import build

    options = {"env.name": env, "agent.name": agent, "model.name": str(model_folder(model)) if model else ""}
    options |= {} if seed is None else {"seed": str(seed)}
    file, settings = file_and_settings(arguments)
    config = load(file, settings + [f"{key}={value}" for key, value in options.items() if value])
    if stub and not config.data.offline:
        config = config.model_copy(update={"engine": config.engine.scripted()})
    parts = build(config, training=False)
    num_tasks = config.rollout.tasks_per_step + config.rollout.spare_groups
    tasks = parts.source.evaluation(task + 1) if held_out else parts.source.take(step - 1, num_tasks)
    if task >= len(tasks):
        raise ConfigError(f"--task {task}: there are {len(tasks)} tasks, 0 to {len(tasks) - 1}.")
    episode = asyncio.run(play_episode(parts, tasks[task], step - 1, task, member))
    EpisodePrinter(Console(highlight=False, soft_wrap=True), parts.renderer, ids).show(episode)
    if episode.failure is not None:
        raise typer.Exit(1)


async def play_episode(parts: Any, task: Any, step: int, task_number: int, member: int) -> Episode:
    """Play and score the episode that training plays at this place. A task with a demonstration is only rendered."""
    from arborl.data.reading.row_reader import OfflineTask
    from arborl.seeds import derive
    from arborl.types import Group

    if isinstance(task, OfflineTask):
        episodes: list[Episode] = parts.rollout.offline_groups([task])[0].episodes
        return episodes[min(member, len(episodes) - 1)]
    seed = derive(derive(parts.config.seed, "step", step), "task", task_number, "episode", member)
    try:
        episode: Episode = await parts.rollout.play(task, seed, f"{task.id}#{member}")
        await parts.rewards.score([Group(task, [episode])])
    finally:
        await parts.close()
    return episode


class EpisodePrinter:
    """Prints an episode. Prompt tokens are dim (mask 0), sampled ones bright (mask 1); the redder, the less likely.

    Tokens alternate between plain and underlined, so that their borders are visible.
    """

    def __init__(self, console: Console, renderer: Renderer, ids: bool = False):
        self.console, self.renderer, self.ids = console, renderer, ids

    def show(self, episode: Episode) -> None:
        self._print(f"episode {episode.id}   seed {episode.seed}", "bold")
        earlier: list[Tokens] = []
        for number, call in enumerate(episode.calls):
            self._show_call(number, call, earlier)
            earlier.append(call.whole)
            is_last = number + 1 == len(episode.calls) or episode.calls[number + 1].turn != call.turn
            if is_last and call.turn < len(episode.turns):
                self._show_turn(episode, call.turn)
        self._show_end(episode)

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style))

    def _show_call(self, number: int, call: Call, earlier: Sequence[Tokens]) -> None:
        """One model call: the new part of its prompt, and the sampled tokens."""
        from arborl.tokens import Tokens
        from arborl.types import NOT_SAMPLED

        known = max((len(tokens) for tokens in earlier if tokens.begins(Tokens(call.prompt))), default=0)
        size, completion = len(call.prompt), call.completion
        is_given = completion.version == NOT_SAMPLED
        head = f"\nturn {call.turn + 1}  call {number + 1}  prompt {size} tokens"
        head += f" ({size - known} new)" if known else " (a new branch)" if earlier else ""
        head += f"  sampled {len(completion.tokens)}  {completion.finish}"
        head += "  given" if is_given else f"  policy version {completion.version}"
        head += f" (from {completion.oldest} on)" if completion.versions else ""
        self._print(head, "bold cyan")
        self.console.print(self._tokens(call.prompt[known:], None))
        self.console.print(self._tokens(completion.tokens, completion.logprobs))
        mask = f"mask  {f'{known} seen before, ' if known else ''}0 x {size - known} prompt, "
        mask += f"{int(call.trained)} x {len(completion.tokens)} sampled"
        mean = sum(completion.logprobs) / max(len(completion.logprobs), 1)
        self._print(mask + ("" if is_given else f"   mean log-probability {mean:.3f}"), "dim")

    def _tokens(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> Text:
        from math import exp, isnan

        from rich.text import Text

        from arborl.view.web.token_text import pieces

        text = Text()
        for place, (token, word) in enumerate(zip(tokens, pieces(tokens, self.renderer.tokenizer.decode), strict=True)):
            doubt = 0.0
            if logprobs is not None and not isnan(logprobs[place]):
                doubt = 1 - exp(min(logprobs[place], 0.0))
            color = f"rgb({int(60 + 195 * doubt)},{int(200 - 140 * doubt)},80)"
            style = "dim" if logprobs is None else f"bold {color}"
            text.append(word, style if place % 2 else f"{style} underline")
            if self.ids:
                text.append(f"[{token}]", "dim italic")
        return text

    def _show_turn(self, episode: Episode, number: int) -> None:
        from rich.text import Text

        from arborl.cli.env_commands import colored

        turn = episode.turns[number]
        info = "   ".join(f"{name} {value:g}" for name, value in turn.info.items())
        style = "green" if turn.reward > 0 else "red" if turn.reward < 0 else "dim"
        self.console.print(Text(f"reward {turn.reward:+.3g}", style=f"bold {style}"), Text(f"  {info}", style="dim"))
        for message in turn.observation:
            self.console.print(Text(f"{message.role}: ", style="dim"), end="")
            self.console.print(colored(f"\n{message.content}" if "\n" in message.content else message.content))

    def _show_end(self, episode: Episode) -> None:
        if episode.failure is not None:
            self._print(f"\nfailed: {episode.failure}", "bold red")
        rewards = "   ".join(f"{name} {value:+.3g}" for name, value in episode.rewards.items())
        metrics = "   ".join(f"{name} {value:.3g}" for name, value in episode.metrics.items())
        num_prompt = sum(len(call.prompt) for call in episode.calls)
        size = f"{len(episode.turns)} turns, {len(episode.calls)} calls"
        self._print(f"\n{episode.stop}   reward {episode.reward:+.3g}   {size}", "bold")
        self._print(f"rewards  {rewards}\nmetrics  {metrics}", "dim")
        tokens = f"tokens   {episode.sampled} sampled, each one loss term; {num_prompt} in prompts, without loss"
        self._print(f"{tokens}   {episode.seconds:.2f} s", "dim")
