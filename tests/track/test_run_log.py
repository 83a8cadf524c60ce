"""`run.log`, and how much of the log the terminal shows."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
import warnings
from contextlib import contextmanager

import pytest
from rich.console import Console as RichConsole
from typer.testing import CliRunner

import arborl
from arborl.cli.main import app
from arborl.errors import ConfigError
from arborl.track import Console, table_before_after
from arborl.track.run_log import OURS, RunLog, _stderr_handler, show_level

ours = logging.getLogger("arborl.some.module")


@pytest.fixture(autouse=True)
def as_it_was():
    before = OURS.level, list(logging.root.handlers)
    yield
    OURS.setLevel(before[0])
    logging.root.handlers[:] = before[1]
    assert OURS.propagate
    assert OURS.handlers == []


@contextmanager
def bare():
    """A process that has set up no logging: warnings go to standard error by themselves."""
    before, logging.root.handlers[:] = list(logging.root.handlers), []
    try:
        yield
    finally:
        logging.root.handlers[:] = before


def test_the_file_has_more_than_the_terminal_which_shows_what_it_always_did(tmp_path, capsys):
    with bare():
        ours.warning("before")
        with RunLog(tmp_path / "run.log"):
            ours.info("a detail")
            ours.warning("a warning")
            logging.getLogger("other.library").info("chatter")
            logging.getLogger("other.library").warning("of theirs")
            ours.debug("too much")
        ours.warning("after")
        assert logging.root.handlers == []
    assert capsys.readouterr().err.splitlines() == ["before", "a warning", "of theirs", "after"]
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines[2:]] == [
        "INFO    arborl.some.module: a detail",
        "WARNING arborl.some.module: a warning",
        "WARNING other.library: of theirs",
    ]


def test_handlers_of_the_users_own_get_what_they_would_have_got(tmp_path):
    stream = io.StringIO()
    logging.root.addHandler(logging.StreamHandler(stream))
    with RunLog(tmp_path / "run.log"):
        ours.info("a detail")
        ours.warning("a warning")
    assert stream.getvalue() == "a warning\n"


def test_it_goes_on_where_an_earlier_life_ended_and_says_how_each_did(tmp_path):
    path = tmp_path / "run.log"
    with pytest.raises(KeyError), RunLog(path):
        raise KeyError("gone")
    with pytest.raises(ConfigError), RunLog(path):
        raise ConfigError("a: wrong")
    with RunLog(path) as log:
        log.say("well")
    text = path.read_text()
    assert "ERROR   arborl: ended: KeyError: 'gone'\nTraceback" in text
    assert "ERROR   arborl: ended: ConfigError: a: wrong\n20" in text  # which says it all
    assert text.rstrip().endswith("INFO    arborl: well")


def test_secrets_stay_out_of_it_in_messages_tracebacks_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["arborl", "train", "agent.args.api_key=sk-123456"])
    log = RunLog(tmp_path / "run.log", {"api_key": "sk-123456"})
    with log:
        ours.warning("asked with %s", "sk-123456")
    with pytest.raises(ValueError, match="sk-"), log:
        raise ValueError("refused: sk-123456")
    assert "sk-123456" not in (tmp_path / "run.log").read_text()


def test_what_a_live_display_shows_in_another_form_is_there_as_plain_lines(tmp_path):
    drawn = io.StringIO()
    terminal = RichConsole(file=drawn, force_terminal=True, width=80)
    with (
        RunLog(tmp_path / "run.log") as log,
        Console(3, ["lake", "into x"], console=terminal, on_line=log.say) as shown,
    ):
        shown.progress("measuring")
        shown.log({"reward/mean": 0.5, "time/step": 1.0}, 1)
        shown.note("[red]stays[/]")
        log.show(table_before_after({"success": 0.5}, {"success": 0.75}))
    text = (tmp_path / "run.log").read_text()
    for words in ("lake", "into x", "measuring", "step   1/3  reward  0.500", "[red]stays[/]", "75.0%"):
        assert words in text
    assert "\x1b" not in text


def test_two_runs_of_one_process_restore_logging_in_any_order_of_their_ends(tmp_path, capsys):
    one, two = RunLog(tmp_path / "one.log"), RunLog(tmp_path / "two.log")
    with bare():
        one.__enter__()
        two.__enter__()
        ours.warning("both")
        one.__exit__(None, None, None)
        ours.warning("second alone")
        two.__exit__(None, None, None)
    assert capsys.readouterr().err.splitlines() == ["both", "second alone"]
    assert "second alone" not in (tmp_path / "one.log").read_text()
    assert "second alone" in (tmp_path / "two.log").read_text()


def test_lines_of_many_threads_are_whole_and_warnings_of_python_are_there(tmp_path):
    with RunLog(tmp_path / "run.log"):
        threads = [threading.Thread(target=lambda: [ours.info("x" * 500) for _ in range(50)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old thing", UserWarning, stacklevel=1)
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert sum(line.endswith(" " + "x" * 500) for line in lines) == 400
    assert any("UserWarning: old thing" in line for line in lines)


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path):
    with RunLog(tmp_path / "run.log") as log:
        log.file.close()
        log.file = open("/dev/full", "w")  # noqa: SIM115
        log.say("lost")
        ours.info("lost too")
        log.file = open(tmp_path / "more", "w")  # noqa: SIM115


def test_a_level_decides_what_the_terminal_shows_and_debug_goes_to_the_file_too(tmp_path, capsys):
    show_level("debug")
    with RunLog(tmp_path / "run.log"):
        ours.debug("all of it")
    assert capsys.readouterr().err == "DEBUG arborl.some.module: all of it\n"
    assert "DEBUG   arborl.some.module: all of it" in (tmp_path / "run.log").read_text()
    show_level("error")
    assert logging.root.handlers.count(_stderr_handler) == 1
    with RunLog(tmp_path / "quiet.log"):
        ours.warning("not shown")
    assert capsys.readouterr().err == ""
    assert "not shown" in (tmp_path / "quiet.log").read_text()


def test_a_level_that_is_none_is_refused_in_a_line():
    done = CliRunner().invoke(app, ["train", "--log-level", "debgu", "--print"])
    assert done.exit_code == 2
    assert "--log-level debgu: no such level. Did you mean 'debug'? Write debug, info, warning, error." in done.output


@pytest.mark.parametrize("verb", ["train", "evaluate", "rollout"])
def test_every_verb_that_runs_something_takes_a_level(verb):
    assert "--log-level" in CliRunner().invoke(app, [verb, "--help"]).output


@pytest.mark.parametrize(("value", "traces"), [("1", True), ("0", False), ("", False)])
def test_debugging_shows_where_an_error_comes_from(value, traces, monkeypatch):
    monkeypatch.setenv("ARBORL_DEBUG", value)
    done = CliRunner().invoke(app, ["train", "lr=1"])
    assert done.exit_code == 2
    assert "lr: unknown key" in done.output
    assert ("Traceback" in done.output) == traces
    assert (OURS.level == logging.DEBUG) == traces


def test_a_server_that_refuses_spans_is_logged_once_and_delays_nothing(monkeypatch, caplog):
    from arborl.spans import span
    from arborl.track import tracing

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(tracing, "SHUTDOWN_SECONDS", 1.5)  # it tries again after a second
    began = time.monotonic()
    with tracing.traced("run"), span("arborl.step"):
        pass
    assert time.monotonic() - began < 10
    assert [record.name.partition(".")[0] for record in caplog.records] == ["opentelemetry"]


def test_warnings_from_before_the_folder_exists_are_in_the_log_and_on_the_terminal(tmp_path, capsys):
    rows = [{"question": "1+1?", "answer": "2"}]
    with bare():
        run = arborl.run(data=rows, rewards=["exact"], stub=True, steps=1, output_dir=str(tmp_path / "run"))
    written = (run.folder / "run.log").read_text()
    assert "WARNING" in written.partition("nothing is held out")[0].splitlines()[-1]
    assert "nothing is held out" in capsys.readouterr().err
