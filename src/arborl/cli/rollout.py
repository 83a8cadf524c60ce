"""`arborl rollout`: one episode, turn by turn, as the learner will see it: tokens, masks and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.arguments import LogLevel, split
from arborl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from arborl.chat import Renderer
    from arborl.tokens import Tokens
    from arborl.types import Call, Episode

OPTIONS = (
    "--env",
    "--agent",
    "--model",
    "--seed",
    "--step",
    "--task",
    "--member",
    "--held-out",
    "--stub",
    "--ids",
    "--log-level",
)


def rollout(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE a.b=c", help="A YAML file, and settings on top of it.", show_default=False),
    ] = None,
    env: Annotated[str, typer.Option(metavar="NAME", help="The environment.", show_default=False)] = "",
    agent: Annotated[str, typer.Option(metavar="NAME", help="The agent.", show_default=False)] = "",
    model: Annotated[
        str, typer.Option(metavar="PATH", help="A run, a checkpoint or a model.", show_default=False)
    ] = "",
    seed: Annotated[int | None, typer.Option(help="The run's seed.", show_default=False)] = None,
    step: Annotated[int, typer.Option(help="Of which training step.", min=1)] = 1,
    task: Annotated[int, typer.Option(help="Which task of it.", min=0)] = 0,
    member: Annotated[int, typer.Option(help="Which episode of its group.", min=0)] = 0,
    held_out: Annotated[bool, typer.Option("--held-out", help="A held-out task instead.")] = False,
    stub: Annotated[bool, typer.Option("--stub", help="Scripted replies instead of the model's.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids too.")] = False,
    log_level: LogLevel = None,
) -> None:
    """Play one episode and show what is recorded of it, token by token."""
    import asyncio

    from rich.console import Console

    from arborl.cli.play import model_folder
    from arborl.training_run.build import build

    chosen = {"env.name": env, "agent.name": agent, "model.name": str(model_folder(model)) if model else ""}
    given = {name: value for name, value in chosen.items() if value} | ({} if seed is None else {"seed": seed})
    config = configured(arguments or (), given)
    if stub and not config.data.offline:
        config = config.model_copy(update={"engine": config.engine.scripted()})
    parts = build(config, training=False)
    taken = config.rollout.tasks_per_step + config.rollout.spare_groups
    tasks = parts.source.evaluation(task + 1) if held_out else parts.source.take(step - 1, taken)
    if task >= len(tasks):
        raise ConfigError(f"--task {task}: there are {len(tasks)} tasks, 0 to {len(tasks) - 1}.")
    episode = asyncio.run(played(parts, tasks[task], step - 1, task, member))
    Printer(Console(highlight=False, soft_wrap=True), parts.renderer, ids).show(episode)
    if episode.failure is not None:
        raise typer.Exit(1)


def configured(arguments: Sequence[str], given: Mapping[str, Any]) -> Any:
    """The run that the episode is of."""
    from pathlib import Path

    from arborl.cli.arguments import one_path
    from arborl.config.load_config import load

    paths, settings = split(arguments, OPTIONS)
    path = one_path(paths, "file")
    return load(Path(path) if path is not None else None, [*settings, *(f"{k}={v}" for k, v in given.items())])


async def played(parts: Any, task: Any, done: int, place: int, member: int) -> Episode:
    """The episode that the step after so many would play, with the seed it would have there; and scored. Of a given
    task, what was said at it."""
    from arborl.data.reading.given import GivenTask
    from arborl.seeds import derive
    from arborl.types import Group

    if isinstance(task, GivenTask):
        sides: list[Episode] = parts.rollout.shown([task])[0].episodes
        return sides[min(member, len(sides) - 1)]
    seed = derive(parts.config.seed, "step", done)
    own = derive(seed, "task", place, "episode", member)
    try:
        episode: Episode = await parts.rollout.play(task, own, f"{task.id}#{member}")
        await parts.rewards.score([Group(task, [episode])])
    finally:
        await parts.close()
    return episode


class Printer:
    """Shows an episode on a terminal.

    What the model was given is dim and has mask 0; what it sampled is bright, has mask 1, and is redder the less likely
    it was. Tokens alternate between plain and underlined, so that their borders show.
    """

    def __init__(self, console: Console, renderer: Renderer, ids: bool = False):
        self.console, self.renderer, self.ids = console, renderer, ids

    def show(self, episode: Episode) -> None:
        from rich.text import Text

        self.console.print(Text(f"task {episode.task.id}   episode seed {episode.seed}", style="bold"))
        seen: list[Tokens] = []
        for number, call in enumerate(episode.calls):
            self._call(number, call, seen)
            seen.append(call.whole)
            last = number + 1 == len(episode.calls) or episode.calls[number + 1].turn != call.turn
            if last and call.turn < len(episode.turns):
                self._turn(episode, call.turn)
        self._end(episode)

    def _call(self, number: int, call: Call, seen: Sequence[Tokens]) -> None:
        """One model call: the new part of its prompt, and what was sampled."""
        from rich.text import Text

        from arborl.tokens import Tokens
        from arborl.types import NOT_SAMPLED

        known = max((len(whole) for whole in seen if whole.begins(Tokens(call.prompt))), default=0)
        size, said = len(call.prompt), call.completion
        head = f"\nturn {call.turn + 1}  call {number + 1}  prompt {size} tokens"
        head += f" ({size - known} new)" if known else " (a new branch)" if seen else ""
        whose = "given" if said.version == NOT_SAMPLED else f"weights of step {said.version}"
        whose += f" (from {said.oldest} on)" if said.versions else ""
        head += f"  sampled {len(said.tokens)}  {said.finish}  {whose}"
        self.console.print(Text(head, style="bold cyan"))
        self.console.print(self._tokens(call.prompt[known:], None))
        self.console.print(self._tokens(said.tokens, said.logprobs))
        sure = sum(said.logprobs) / max(len(said.logprobs), 1)
        before = f"{known} seen before, " if known else ""
        mask = f"mask  {before}0 x {size - known} given, {int(call.trained)} x {len(said.tokens)} sampled"
        sure_of = "" if said.version == NOT_SAMPLED else f"   mean log-probability {sure:.3f}"
        self.console.print(Text(f"{mask}{sure_of}", style="dim"))

    def _tokens(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> Text:
        from math import exp, isnan

        from rich.text import Text

        from arborl.view.transcript import pieces

        shown = Text()
        for place, (token, word) in enumerate(zip(tokens, pieces(tokens, self.renderer.tokenizer.decode), strict=True)):
            known = logprobs is not None and not isnan(logprobs[place])
            doubt = 1 - exp(min(logprobs[place], 0.0)) if logprobs is not None and known else 0.0
            color = f"rgb({int(60 + 195 * doubt)},{int(200 - 140 * doubt)},80)"
            style = "dim" if logprobs is None else f"bold {color}"
            shown.append(word, style if place % 2 else f"{style} underline")
            if self.ids:
                shown.append(f"[{token}]", "dim italic")
        return shown

    def _turn(self, episode: Episode, number: int) -> None:
        from rich.text import Text

        from arborl.cli.play import colored

        turn = episode.turns[number]
        numbers = "   ".join(f"{name} {value:g}" for name, value in turn.info.items())
        style = "green" if turn.reward > 0 else "red" if turn.reward < 0 else "dim"
        self.console.print(Text(f"reward {turn.reward:+.3g}", style=f"bold {style}"), Text(f"  {numbers}", style="dim"))
        for message in turn.observation:
            self.console.print(Text(f"{message.role}: ", style="dim"), end="")
            self.console.print(colored(f"\n{message.content}" if "\n" in message.content else message.content))

    def _end(self, episode: Episode) -> None:
        from rich.text import Text

        if episode.failure is not None:
            self.console.print(Text(f"\nfailed: {episode.failure}", style="bold red"))
        parts = "   ".join(f"{name} {value:+.3g}" for name, value in episode.rewards.items())
        numbers = "   ".join(f"{name} {value:.3g}" for name, value in episode.metrics.items())
        prompts = sum(len(call.prompt) for call in episode.calls)
        size = f"{len(episode.turns)} turns, {len(episode.calls)} calls"
        self.console.print(Text(f"\n{episode.stop}   reward {episode.reward:+.3g}   {size}", style="bold"))
        self.console.print(Text(f"rewards  {parts}\nmetrics  {numbers}", style="dim"))
        trained = f"tokens   {episode.sampled} sampled, each one loss term; {prompts} given in prompts, none trained"
        self.console.print(Text(f"{trained}   {episode.seconds:.2f} s", style="dim"))
