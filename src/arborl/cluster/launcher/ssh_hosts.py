"""Requests to hosts over the system's ssh; every failure is one sentence."""

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

from arborl.cluster.launcher import on_host
from arborl.cluster.launcher.cluster_spec import ClusterSpec, HostConfig
from arborl.cluster.launcher.on_host.cluster_folder import MARK
from arborl.config.secrets import SecretRedactor
from arborl.errors import ConfigError

SENT_MODULES = ("cluster_folder", "supervisor", "dashboard", "host_commands")
"""Files of `on_host`, each after those that it imports."""
BOOTSTRAP = 'import json,sys;a=json.loads(sys.stdin.readline());exec(a.pop("program"),{"request":a})'
"""The command line on a host; the request follows on standard input."""
PROGRAM = """
import sys, types
for name, text in [("", ""), *request.pop("modules")]:
    module = types.ModuleType("arborl_on_host" + name)
    module.__package__, module.__path__ = "arborl_on_host", []
    sys.modules[module.__name__] = module
    exec(compile(text, module.__name__, "exec"), module.__dict__)
sys.modules["arborl_on_host.host_commands"].main(request)
"""
"""Loads the sent files as modules, independent of installed packages."""
SSH_FAILED, NOT_FOUND, NOT_EXECUTABLE = 255, 127, 126
"""Exit codes of ssh and of the host's shell."""


class HostError(ConfigError):
    """A host is unreachable or refuses a request."""

    def __init__(self, host: str, what: str, reachable: bool = True):
        super().__init__(f"{host}: {what}")
        self.host, self.what, self.reachable = host, what, reachable


class SshHosts:
    def __init__(self, spec: ClusterSpec, secrets: Mapping[str, str] | None = None):
        self.spec, self.open = spec, set[subprocess.Popen[str]]()
        self.redact = SecretRedactor({name: {"secret": value} for name, value in (secrets or {}).items()})
        if spec.ssh.key is not None and not spec.ssh.key.expanduser().is_file():
            raise ConfigError(f"ssh.key={spec.ssh.key}: no such file. Write the path of the private key.")

    def words(self, host: HostConfig) -> list[str]:
        """The ssh command line. It holds no part of a request."""
        ssh, options = self.spec.ssh, ["BatchMode=yes", f"ConnectTimeout={int(self.spec.ssh.seconds)}"]
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3", "ForwardX11=no", "LogLevel=ERROR"]
        options += [f"StrictHostKeyChecking={'yes' if ssh.host_keys == 'known' else 'accept-new'}"]
        options += [f"UserKnownHostsFile={ssh.known_hosts.expanduser()}"] if ssh.known_hosts else []
        options += ["IdentitiesOnly=yes"] if ssh.key else []
        words = ["ssh", "-T", *(part for option in options for part in ("-o", option))]
        words += ["-i", str(ssh.key.expanduser())] if ssh.key else []
        words += ["-p", str(port)] if (port := host.port or ssh.port) else []
        words += ["-l", user] if (user := host.user or ssh.user) else []
        return [*words, "--", host.address, shlex.join([self.spec.python_of(host), "-c", BOOTSTRAP])]

    def ask(
        self,
        host: HostConfig,
        verb: str,
        on_message: Callable[[dict[str, Any]], None] = lambda message: None,
        seconds: float | None = 60,
        **more: Any,
    ) -> dict[str, Any]:
        """Send a request (a key of `host_commands.VERBS`) and return the host's answer.

        Messages before the answer go to `on_message`. The timeout counts from the connection.
        """
        request = {"verb": verb, "cluster": self.spec.name, "folder": self.spec.folder(host), "logs": self.spec.logs}
        line = json.dumps({**request, **more, "program": PROGRAM, "modules": _modules()}) + "\n"
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
        stderr: list[str] = []
        errors = threading.Thread(target=lambda: stderr.extend(process.stderr or ()), daemon=True)
        self.open.add(process)
        try:
            errors.start()
            if seconds is not None:
                clock.start()
            answer = self._converse(process, line, on_message)
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
        raise self._failed(host, process.returncode, self.redact("".join(stderr)).strip())

    def _converse(
        self, process: subprocess.Popen[str], line: str, on_message: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any] | None:
        """The answer; None if none came. Standard input stays open meanwhile: its end tells the host to stop."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return None  # the cause is on standard error
        for text in process.stdout:
            if not text.startswith(MARK):
                continue  # output of a login shell
            message = dict(self._veiled(json.loads(text[1:])))
            if "answer" in message or "refused" in message:
                _close(process.stdin)
                return message
            on_message(message)
        return None

    def _veiled(self, what: Any) -> Any:
        if isinstance(what, dict):
            return {name: self._veiled(value) for name, value in what.items()}
        if isinstance(what, list):
            return [self._veiled(value) for value in what]
        return self.redact(what) if isinstance(what, str) else what

    def _failed(self, host: HostConfig, code: int, stderr: str) -> HostError:
        python, where = self.spec.python_of(host), host.address
        last = stderr.splitlines()[-1].rstrip(".") if stderr else f"ssh ended with code {code}"
        if code in (NOT_FOUND, NOT_EXECUTABLE):
            return HostError(where, f"no Python at {python} ({last}). Install it, or write `python: …`.")
        if code != SSH_FAILED:
            return HostError(where, f"{python} failed with code {code}: {last}")
        if "Permission denied" in stderr:
            key = f"the key {self.spec.ssh.key}" if self.spec.ssh.key else "the keys that ssh has tried"
            user = host.user or self.spec.ssh.user or "the user"
            advice = "Write ssh: {user: …, key: …} with which `ssh` works"
            return HostError(where, f"{user} is not accepted with {key} ({last}). {advice}.")
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr or "Host key verification failed" in stderr:
            if "CHANGED" in stderr:
                what = "has another key than in known_hosts. Verify the new key with its administrator."
            else:
                what = "is not in known_hosts. Log in once by hand, or write ssh: {host_keys: accept-new}."
            return HostError(where, what)
        advice = "Check that it runs and that `ssh` reaches it without a password"
        return HostError(where, f"cannot be reached: {last}. {advice}.", reachable=False)

    def each(
        self, hosts: Iterable[HostConfig], do: Callable[[HostConfig], dict[str, Any]]
    ) -> dict[str, dict[str, Any] | HostError]:
        """Call `do` for all hosts in parallel; a HostError is returned as the host's answer."""

        def one(host: HostConfig) -> dict[str, Any] | HostError:
            try:
                return do(host)
            except HostError as error:
                return error

        hosts = list(hosts)
        with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
            futures = [pool.submit(one, host) for host in hosts]
            try:
                return {host.address: future.result() for host, future in zip(hosts, futures, strict=True)}
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                while wait(futures, 0.1).not_done:  # some may start only now
                    self.hang_up()
                raise

    def hang_up(self) -> None:
        """Close all connections. A host that is starting Ray notices this and rolls back."""
        for process in list(self.open):
            _end(process)


@cache
def _modules() -> list[tuple[str, str]]:
    folder = Path(on_host.__file__).parent
    return [(f".{name}", (folder / f"{name}.py").read_text()) for name in SENT_MODULES]


def _end(process: subprocess.Popen[str]) -> None:
    """Close standard input, which also ends processes below it, and kill it."""
    _close(process.stdin)
    process.kill()


def _close(stream: Any) -> None:
    with suppress(OSError):
        stream.close()
