"""Hosts over the system's ssh: a request in, an answer out, and every way it can fail as one sentence."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from arborl.cluster import on_host
from arborl.cluster.on_host.answers import MARK
from arborl.cluster.spec import ClusterSpec, HostConfig
from arborl.config.secrets import SecretRedactor
from arborl.errors import ConfigError

SENT = ("answers", "folder", "processes", "logs", "head", "start", "main")
"""The files of `on_host`, each after those that it imports."""
FIRST = 'import json,sys;a=json.loads(sys.stdin.readline());exec(a.pop("program"),{"asked":a})'
"""All that a host is told on a command line."""
PROGRAM = """
import sys, types
for name, text in [("", ""), *asked.pop("modules")]:
    module = types.ModuleType("arborl_on_host" + name)
    module.__package__, module.__path__ = "arborl_on_host", []
    sys.modules[module.__name__] = module
    exec(compile(text, module.__name__, "exec"), module.__dict__)
sys.modules["arborl_on_host.main"].main(asked)
"""
"""What the first line runs there: the files become modules that find each other, whatever is installed."""
LOST, NO_FILE, NOT_RUN = 255, 127, 126
"""Exit codes: of ssh itself, and of a shell that finds no program or may not run it."""


class HostError(ConfigError):
    """A host that cannot be reached, or does not do what it was asked; `host` is its address."""

    def __init__(self, host: str, what: str, reachable: bool = True):
        super().__init__(f"{host}: {what}")
        self.host, self.what, self.reachable = host, what, reachable


class Hosts:
    """The hosts of a cluster.

    Args:
        spec: the cluster's file.
        secrets: values that nothing which is printed may hold.
    """

    def __init__(self, spec: ClusterSpec, secrets: Mapping[str, str] | None = None):
        self.spec, self.open = spec, set[subprocess.Popen[str]]()
        self.veil = SecretRedactor({name: {"secret": value} for name, value in (secrets or {}).items()})
        if spec.ssh.key is not None and not spec.ssh.key.expanduser().is_file():
            raise ConfigError(f"ssh.key={spec.ssh.key}: no such file here. Name the private key, not the public one.")

    def words(self, host: HostConfig) -> list[str]:
        """The command line. Nothing of a request is in it."""
        ssh, options = self.spec.ssh, ["BatchMode=yes", f"ConnectTimeout={int(self.spec.ssh.seconds)}"]
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3", "ForwardX11=no", "LogLevel=ERROR"]
        options += [f"StrictHostKeyChecking={'yes' if ssh.host_keys == 'known' else 'accept-new'}"]
        options += [f"UserKnownHostsFile={ssh.known_hosts.expanduser()}"] if ssh.known_hosts else []
        options += ["IdentitiesOnly=yes"] if ssh.key else []
        words = ["ssh", "-T", *(part for option in options for part in ("-o", option))]
        words += ["-i", str(ssh.key.expanduser())] if ssh.key else []
        words += ["-p", str(port)] if (port := host.port or ssh.port) else []
        words += ["-l", user] if (user := host.user or ssh.user) else []
        return [*words, "--", host.address, shlex.join([self.spec.python_of(host), "-c", FIRST])]

    def ask(
        self,
        host: HostConfig,
        verb: str,
        told: Callable[[dict[str, Any]], None] = lambda told: None,
        seconds: float | None = 60,
        **more: Any,
    ) -> dict[str, Any]:
        """What the host answers.

        Args:
            host: which.
            verb: one of `on_host.main.VERBS`.
            told: is given what it says before its answer.
            seconds: after which it is given up, from the moment that it is reached; None for never.
            more: of the request.
        """
        asked = {"verb": verb, "cluster": self.spec.name, "folder": self.spec.folder(host), "logs": self.spec.logs}
        line = json.dumps({**asked, **more, "program": PROGRAM, "modules": _modules()}) + "\n"
        try:
            process = subprocess.Popen(
                self.words(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, encoding="utf-8", errors="replace", start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise ConfigError("ssh is not installed here. Install OpenSSH's client.") from error
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _end(process)

        clock = threading.Timer((seconds or 0) + self.spec.ssh.seconds, give_up)
        said: list[str] = []
        errors = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
        self.open.add(process)
        try:
            errors.start()
            if seconds is not None:
                clock.start()
            answer = self._converse(process, line, told)
            process.wait()
            errors.join(5)
        finally:
            clock.cancel()
            process.kill()
            process.wait()
            self.open.discard(process)
            for stream in (process.stdin, process.stdout):
                _close(stream)
        if answer is not None and "answer" in answer:
            return dict(answer["answer"])
        if answer is not None:
            raise HostError(host.address, answer["refused"])
        if late.is_set():
            raise HostError(host.address, f"no answer within {seconds:g} s.", reachable=False)
        raise self._failed(host, process.returncode, self.veil("".join(said)).strip())

    def _converse(
        self, process: subprocess.Popen[str], line: str, told: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any] | None:
        """Its last line, where it came; standard input stays open meanwhile, which says that we are here."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return None  # ssh says why
        for text in process.stdout:
            if not text.startswith(MARK):
                continue  # a login shell's own
            heard = dict(self._veiled(json.loads(text[1:])))
            if "answer" in heard or "refused" in heard:
                _close(process.stdin)
                return heard
            told(heard)
        return None

    def _veiled(self, what: Any) -> Any:
        """Without secrets, however deep: Ray repeats what a job has printed."""
        if isinstance(what, dict):
            return {name: self._veiled(value) for name, value in what.items()}
        if isinstance(what, list):
            return [self._veiled(value) for value in what]
        return self.veil(what) if isinstance(what, str) else what

    def _failed(self, host: HostConfig, code: int, said: str) -> HostError:
        """What ssh or the host's shell means."""
        python, where = self.spec.python_of(host), host.address
        last = said.splitlines()[-1].rstrip(".") if said else f"ssh ended with code {code}"
        if code in (NO_FILE, NOT_RUN):
            return HostError(where, f"there is no Python at {python} ({last}). Install it, or write `python: …`.")
        if code != LOST:
            return HostError(where, f"{python} failed with code {code}: {last}")
        if "Permission denied" in said:
            key = f"the key {self.spec.ssh.key}" if self.spec.ssh.key else "no key that ssh has tried"
            user = host.user or self.spec.ssh.user or "the user"
            return HostError(
                where, f"{user} is not let in with {key} ({last}). Write ssh: {{user: …, key: …}} that `ssh` takes."
            )
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said or "Host key verification failed" in said:
            changed = "has another key than known_hosts says" if "CHANGED" in said else "is not in known_hosts"
            advice = (
                "Ask whoever runs it"
                if "CHANGED" in said
                else "Log in once by hand, or write ssh: {host_keys: accept-new}"
            )
            return HostError(where, f"{changed}. {advice}.")
        advice = "Is it switched on, and is the address right? `ssh` must reach it without a question"
        return HostError(where, f"cannot be reached: {last}. {advice}.", reachable=False)

    def each(
        self, hosts: Iterable[HostConfig], do: Callable[[HostConfig], dict[str, Any]]
    ) -> dict[str, dict[str, Any] | HostError]:
        """The same on all of them at once; an error is that host's answer."""

        def one(host: HostConfig) -> dict[str, Any] | HostError:
            try:
                return do(host)
            except HostError as error:
                return error

        hosts = list(hosts)
        with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
            asked = [pool.submit(one, host) for host in hosts]
            try:
                return {host.address: future.result() for host, future in zip(hosts, asked, strict=True)}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                while wait(asked, 0.1).not_done:  # some may only be on their way
                    self.hang_up()
                raise

    def hang_up(self) -> None:
        """Leave whoever is being asked. What is being started there notices, and undoes it."""
        for process in list(self.open):
            _end(process)


@cache
def _modules() -> list[tuple[str, str]]:
    folder = Path(on_host.__file__).parent
    return [(f".{name}", (folder / f"{name}.py").read_text()) for name in SENT]


def _end(process: subprocess.Popen[str]) -> None:
    """A process below it may hold its output open: the end of standard input ends that one too."""
    _close(process.stdin)
    process.kill()


def _close(stream: Any) -> None:
    """Though whoever read it may be gone."""
    with suppress(OSError):
        stream.close()
