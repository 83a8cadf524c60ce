"""Commands that read runs, models and other systems' files: view, report, compare, doctor, export, convert."""

from __future__ import annotations

import json
import os
import shutil
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import TextWrapper
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from arborl.cli.options import AsJson, LogLevel, Trust, argument, check_choice, option, path_and_settings
from arborl.errors import ConfigError, disk_errors

if TYPE_CHECKING:
    from rich.text import Text

    from arborl.convert import Draft
    from arborl.diagnosis.finding import Finding

VIEW_PORT = 7007
DTYPES = ("float32", "bfloat16", "float16")
Folder = Annotated[
    Path | None, typer.Argument(metavar="RUNS_DIR", help="A folder of runs, or one run.", show_default="runs")
]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="TCP port; 0 for any free one.", show_default=f"{VIEW_PORT}, or any free"),
]


def view(
    runs_dir: Folder = None,
    port: Port = None,
    no_browser: Annotated[bool, option("--no-browser", help="Print the address only.")] = False,
) -> None:
    """Show runs in a browser. Charts, episodes, tokens and trees, also while a run trains. For this machine only."""
    root = runs_dir or Path("runs")
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder. Write arborl view RUNS_DIR: a folder of runs, or a run.")
    try:
        from arborl.view.web.app import Viewer, free_port
    except ImportError as error:
        raise ConfigError(f"arborl view needs {error.name}: pip install 'arborl[serve]'") from error

    def on_start(url: str) -> None:
        typer.echo(f"arborl: {root} at {url} (Ctrl-C stops it)", err=True)
        if not no_browser:
            Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    Viewer(root, free_port(VIEW_PORT if port is None else port, port is not None), on_start).run()


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="report.html in the run folder")
    ] = None,
) -> None:
    """Write an HTML report of a run. One self-contained file, also while the run trains."""
    from tempfile import TemporaryDirectory

    from arborl.view.report import write_report
    from arborl.view.web.token_text import decoder_of

    if not any(os.path.lexists(run / name) for name in ("config.yaml", "metrics.jsonl")):
        raise ConfigError(f"{run}: contains no run. Write arborl report RUN: a folder with config.yaml, metrics.jsonl.")
    path = out or run / "report.html"
    with disk_errors(path), TemporaryDirectory() as folder:
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures = Path(folder) if out is not None else None
        typer.echo(write_report(run, decoder_of(run), out=path, pictures=pictures))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Run folders.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("compare.html"),
) -> None:
    """Compare runs on held-out tasks, and write an HTML page with curves. Seeds of one configuration are pooled, with
    intervals."""
    from rich.console import Console

    from arborl.cli.terminal_table import Text, new_table
    from arborl.view.comparison import held_out_table, settings_of, write_comparison

    if len(runs) < 2:
        raise ConfigError("compare needs two runs. Write arborl compare RUN RUN …, or arborl report RUN.")
    settings = settings_of(runs)
    head, rows = held_out_table(settings)
    if rows:
        table = new_table(*head, left=head[:1], fold=head[:1])
        for row in rows:
            table.add_row(*map(Text, row))
        console = Console(highlight=False)
        console.width = console.width if console.is_terminal else 160
        console.print(table)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(write_comparison(settings, out))


# ------------------------------------------------------------------------------------------------ doctor


def doctor(
    arguments: Annotated[list[str] | None, argument("RUN a.b=c", "A run folder; or settings to check.")] = None,
    model: Annotated[str, option(metavar="PATH", help="A model, a checkpoint or a run to check.")] = "",
    config: Annotated[Path | None, option(metavar="FILE", help="The YAML file of its training.")] = None,
    strict: Annotated[bool, option("--strict", help="Exit code 1 for warnings too.")] = False,
    as_json: AsJson = False,
    log_level: LogLevel = None,
) -> None:
    """Check the installation, a run, or a model before training. Exit code 1 if a check fails."""
    findings = find_problems(arguments or (), model, config)
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        from rich.console import Console

        console = Console()
        console.print(findings_text(findings, console.width if console.is_terminal else 120), soft_wrap=True)
        failed, warned = (sum(finding.state == state for finding in findings) for state in ("fail", "warn"))
        counts = f"{failed} failed, {warned} warnings. Explanations: docs/doctor.md."
        console.print(counts if failed or warned else "No problems found.", highlight=False, soft_wrap=True)
    bad = ("fail", "warn") if strict else ("fail",)
    if any(finding.state in bad for finding in findings):
        raise typer.Exit(1)


def find_problems(arguments: Sequence[str], model: str, config: Path | None) -> list[Finding]:
    """Findings about a run; about a model or settings; or, without arguments, about the installation."""
    path, settings = path_and_settings(arguments, "run")
    if path is not None and path.endswith(".yaml") and config is None:
        config, path = Path(path), None
    if path is not None and (model or config or settings):
        raise ConfigError(f"{path!r} is a run. Leave --model, --config and settings out.")
    if path is not None:
        from arborl.diagnosis.folder_diagnosis import examine_run

        if not Path(path).is_dir():
            raise ConfigError(f"{path!r}: no such folder. Write a run folder, or --model {path}.")
        return examine_run(Path(path))
    if not (model or config or settings):
        from arborl.doctor.installation import examine_installation

        return examine_installation()
    from arborl.cli.env_commands import model_folder
    from arborl.config.load_config import load
    from arborl.doctor.model_check import examine_model

    return examine_model(load(config, [*settings, *([f"model.name={model_folder(model)}"] if model else [])]))


def findings_text(findings: Sequence[Finding], width: int) -> Text:
    """A paragraph per finding; words such as ids of episodes are not broken."""
    from rich.text import Text

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    name_width = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (name_width + 8)
    wrapper = TextWrapper(
        width=max(width, len(indent) + 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    text = Text()
    for finding in findings:
        text.append(f"{finding.name:{name_width}}  ")
        text.append(f"{finding.state:4}", style=colors[finding.state])
        lines = [finding.detail, *(f"· {one}" for one in finding.evidence)]
        lines += [f"To do: {finding.advice}"] if finding.advice else []
        wrapped = [wrapper.fill(indent + line) for one in lines for line in one.splitlines()]
        text.append("  " + "\n".join(wrapped)[len(indent) :] + "\n")
    return text


# ------------------------------------------------------------------------------------------------ export, convert


def export(
    arguments: Annotated[list[str] | None, argument("PATH", "A run, a checkpoint, a model or adapters.")] = None,
    out: Annotated[Path | None, option(help="Folder to create.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights: float32, bfloat16, float16.")] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Write a policy as a Hugging Face model folder. Adapters are merged, log-probabilities verified, a card added."""
    path, settings = path_and_settings(arguments, "model to export")
    if path is None or out is None:
        raise ConfigError("path or --out is missing. Write arborl export PATH --out FOLDER.")
    check_choice("--dtype", dtype or DTYPES[0], DTYPES)
    from arborl.training_run.export_model import export as write

    result = write(path, out, tuple(settings), dtype, trust)
    if as_json:
        typer.echo(json.dumps(asdict(result) | {"folder": str(result.folder)}))
        return
    merged = "adapters merged, " if result.merged else ""
    gap = f"log-probabilities of {result.tokens} tokens differ by at most {result.max_gap:.1e}"
    typer.echo(f"wrote {out}: {merged}{gap}.")


def convert(
    system: Annotated[str, typer.Argument(help="verl, statelm, agentfly, roll, trl, stateset or cluster")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Scripts, override lists or YAML; later win.")],
    out: Annotated[Path | None, option(help="File to write.")] = None,
    as_json: Annotated[bool, option("--json", help="Print report and configuration as JSON.")] = False,
    use: Annotated[
        list[str] | None, typer.Option(metavar="THEIRS=OURS", help="Part for a name of theirs; may be repeated.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of your machine; default: as their files say.")] = None,
) -> None:
    """Convert a script of verl, StateLM, AgentFly, ROLL or TRL. Writes a configuration and reports on every key.

    `trl` reads a Python script with a GRPOTrainer, SFTTrainer, DPOTrainer or KTOTrainer; a second file may hold its
    command line. `stateset` rewrites the imports of Python scripts. `cluster` converts a script that starts a Ray
    cluster to a file of `arborl cluster`.
    """
    if system == "stateset":
        return _convert_script(files, out, as_json or bool(use) or gpus is not None)
    if system == "cluster":
        return _convert_cluster(files, out, as_json, bool(use) or gpus is not None)
    from arborl.cluster.planner.run_planner import check_devices
    from arborl.config.config_base import validate
    from arborl.config.run_config import RunConfig
    from arborl.convert import convert as read
    from arborl.convert.conversion_report import as_yaml, rows

    if gpus is not None:
        check_devices(gpus)
    uses = _parse_pairs(use or ())
    draft = read(system, files, uses, gpus)
    tree = draft.tree()
    config = validate(RunConfig, tree)
    if system != "trl":  # its parts are functions of the script, which is not imported
        from arborl.training_run.build import check

        try:
            check(config)
        except ConfigError as error:  # something is missing on this machine, and may be there on another
            if any(name in str(error) for name in uses.values()):
                raise
            draft.notes.append(f"on this machine `arborl train` does not start yet: {error}")
    text = as_yaml(tree)
    if out is not None:
        names = " ".join(", ".join(file.name for file in files).split())
        _write_converted({out: text} | {out.parent / name: text for name, text in draft.files.items()}, names, system)
    if as_json:
        data: dict[str, object] = {"system": system, "files": [str(file) for file in files]}
        data |= {"lines": rows(draft.lines), "devices": draft.notes, "config": tree}
        data |= {"written": draft.files} if draft.files else {}
        typer.echo(json.dumps(data, ensure_ascii=False, indent=2, default=str))
    else:
        _print_converted(draft, text, out)


def _print_converted(draft: Draft, text: str, out: Path | None) -> None:
    typer.echo(draft.report(shutil.get_terminal_size((140, 40)).columns), err=out is None)
    if out is not None:
        typer.echo(_what_was_written(out, list(draft.files)))
        return
    typer.echo(text, nl=False)
    for name in draft.files:
        typer.echo(f"{name}, which it names, is written with --out only.", err=True)


def _what_was_written(out: Path, more: Sequence[str]) -> str:
    also = "".join(f" and {out.parent / name}" for name in more)
    is_elsewhere = more and out.parent.resolve() != Path.cwd()
    command = f"{f'PYTHONPATH={out.parent} ' if is_elsewhere else ''}arborl train {out}"
    return f"wrote {out}{also}. Check it: {command} model=seedling trainer.steps=1 --stub   Train: {command}"


def _write_converted(texts: Mapping[Path, str], names: str, system: str) -> None:
    """Write files with a first line that says what they were converted from. Only such Python files are overwritten."""
    head = "# Converted from"
    for path in texts:
        if path.suffix == ".py" and path.exists() and not path.read_bytes().startswith(head.encode()):
            raise ConfigError(
                f"{path}: exists, and was not written by arborl convert. Move it, or write another --out."
            )
    for path, text in texts.items():
        with disk_errors(path):
            path.write_text(f"{head} {names} ({system}).\n{text}", encoding="utf-8")


def _convert_cluster(files: Sequence[Path], out: Path | None, as_json: bool, has_options: bool) -> None:
    from arborl.convert.cluster_files import convert_cluster
    from arborl.convert.conversion_report import as_yaml, rows

    if has_options:
        raise ConfigError("convert cluster takes scripts, --out and --json. Leave the rest out.")
    draft = convert_cluster(files)
    text = as_yaml(draft.tree())
    if out is not None:
        with disk_errors(out):
            out.write_text(f"# Converted from {', '.join(file.name for file in files)}.\n{text}", encoding="utf-8")
    if as_json:
        data = {"system": "cluster", "files": [str(file) for file in files], "lines": rows(draft.lines)}
        typer.echo(json.dumps(data | {"config": draft.tree()}, ensure_ascii=False, indent=2, default=str))
        return
    typer.echo(draft.report(shutil.get_terminal_size((140, 40)).columns), err=out is None)
    if out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"wrote {out}. Start it: arborl cluster setup --config {out}")


def _convert_script(files: Sequence[Path], out: Path | None, has_options: bool) -> None:
    from arborl.convert.reading.training_scripts import read_text
    from arborl.convert.stateset_imports import rewrite_imports

    if len(files) != 1 or has_options:
        raise ConfigError("convert stateset takes one Python script, and --out. Leave the rest out.")
    (file,) = files
    text, changed = rewrite_imports(read_text(file, newline=""), str(file))
    if out is None:
        typer.echo(text, nl=False)
        return
    with disk_errors(out):
        out.write_text(text, encoding="utf-8", newline="")
    typer.echo(f"wrote {out}: {changed} import{'s' * (changed != 1)} changed. Run it: python {out}")


def _parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        theirs, equals, ours = text.partition("=")
        if not (theirs and equals and ours):
            raise ConfigError(f"--use {text}: write THEIRS=OURS, as in --use ifeval=my_package.rewards:ifeval.")
        pairs[theirs] = ours
    return pairs
