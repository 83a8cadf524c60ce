"""`arborl chat`: talk to a trained agent in a terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborl.cli.arguments import LogLevel, one_path, split
from arborl.errors import ConfigError, disk_errors

if TYPE_CHECKING:
    from rich.console import Console

    from arborl.serve.sessions import AgentSession, Company, Happened

HELP = """/reset        begin anew
/tools        what the agent may call
/save FILE    write the conversation as episodes, one a line
/exit         leave (Ctrl-D does too)"""


def chat(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT a.b=c",
            help="A run, a checkpoint, a model or adapters, and settings.",
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=FILE",
            help="A column of the task: document_content=report.txt.",
            show_default=False,
        ),
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Say this, print the answer, and leave.", show_default=False)
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Another agent of the run.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all chance.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of sampling; as in evaluation by default.", show_default=False)
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Import and contact what the run's folder names.")] = False,
    log_level: LogLevel = None,
) -> None:
    """Talk to the agent of a run, or to a model.

    Example: arborl chat runs/statelm-001 --field document_content=report.txt
    """
    paths, settings = split(arguments or (), ("--field", "--message", "--agent", "--seed", "--temperature", "--help"))
    path = one_path(paths, "one to talk to")
    if path is None:
        raise ConfigError("nobody to talk to. Write `arborl chat CHECKPOINT`: a run, a checkpoint, or a model's name.")
    more = {"fields": read_fields(field or ()), "agent": agent, "seed": seed, "temperature": temperature}
    asyncio.run(talk(path, settings, trust, more, message))


def read_fields(given: Any) -> dict[str, str]:
    """Columns of a task, from files."""
    found = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals:
            raise ConfigError(f"--field {text}: write NAME=FILE, as in document_content=report.txt.")
        try:
            found[name] = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--field {text}: cannot be read ({error}).") from error
    return found


async def talk(path: str, settings: list[str], trust: bool, more: dict[str, Any], message: str | None) -> None:
    from rich.console import Console

    from arborl.serve.opened import open_model

    opened = open_model(path, settings, trust)
    if more["agent"] is not None and more["agent"] not in opened.company.agents:
        raise ConfigError(f"--agent {more['agent']}: the run has {', '.join(opened.company.agents)}.")
    console = Console(highlight=False, soft_wrap=True)
    try:
        if message is not None:
            await Talk(console, opened.company, more).say(message)
        else:
            console.print(f"{opened.speaker.name}, agent {opened.company.agents[0]}. /help shows what else to write.")
            await Talk(console, opened.company, more).run()
    finally:
        await opened.close()


class Talk:
    """A terminal and a session."""

    def __init__(self, console: Console, company: Company, more: dict[str, Any]):
        self.console, self.company, self.more = console, company, more
        self.session = self._begin()

    def _begin(self) -> AgentSession:
        from arborl.serve.sessions import AgentSession

        return AgentSession(self.company, watch=self.show, **self.more)

    async def run(self) -> None:
        """Until the person leaves."""
        while True:
            try:
                said = (await asyncio.to_thread(self.console.input, "[bold]> [/bold]")).strip()
            except EOFError:
                self.console.print()
                return
            word, _, rest = said.partition(" ")
            if word in ("/exit", "/quit"):
                return
            if word == "/reset":
                await self.session.end()
                self.session = self._begin()
            elif word == "/tools":
                self.tools()
            elif word == "/save":
                self.save(rest.strip())
            elif word.startswith("/"):
                self.console.print(HELP, markup=False)
            elif said:
                await self.say(said)

    async def say(self, said: str) -> None:
        from arborl.serve.source import Refused, Unavailable

        try:
            reply = await self.session.say(said)
        except (Refused, Unavailable) as error:
            self.console.print(str(error), style="red", markup=False)
            return
        if reply.content or not reply.over:
            self.console.print(reply.content, markup=False)
        else:
            self.console.print(f"no answer: {reply.over.replace('_', ' ')}", style="red", markup=False)

    def show(self, happened: Happened) -> None:
        """A tool call, or what a tool answered."""
        message = happened.message
        for call in message.tool_calls:
            given = json.dumps(call.arguments, ensure_ascii=False) if call.error is None else call.error
            self.console.print(f"  -> {call.name} {given}", style="cyan", markup=False)
        if message.role == "tool":
            text = " ".join(message.content.split())
            self.console.print(f"  <- {text[:300]}{' …' if len(text) > 300 else ''}", style="dim", markup=False)

    def tools(self) -> None:
        specs = self.session.tools
        for spec in specs:
            told = " ".join(spec.description.split()).partition(". ")[0].rstrip(".")
            self.console.print(f"{spec.name:<16} {told}.", markup=False)
        if not specs:
            self.console.print("none", markup=False)

    def save(self, name: str) -> None:
        from arborl.rollout.store import dumps, to_json

        if not name:
            self.console.print("/save FILE", markup=False)
            return
        try:
            with disk_errors(Path(name)):
                text = "".join(dumps(to_json(episode)) + "\n" for episode in self.session.episodes)
                Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
        except ConfigError as error:
            self.console.print(str(error), style="red", markup=False)
            return
        self.console.print(f"{len(self.session.episodes)} in {name}", markup=False)
