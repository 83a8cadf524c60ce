"""What a host has; Ray started there, and ended."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time

from .answers import Refused, pause, tell
from .folder import Folder
from .head import dashboard_answers
from .processes import GRACE, VARIABLE, alive, below, born, keep, marked, send

COMPARED = ("ray", "arborl", "torch", "transformers", "numpy")
"""Libraries that must be the same on all hosts."""
BUSY = "timed out during startup"
"""In what Ray says where a second try may succeed."""


def look(asked):
    """What the host has: versions, cores, GPUs, and what of the cluster is here."""
    folder = Folder(asked)
    record = folder.record()
    state = "none" if not record else "up" if alive(record) else "down"
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in COMPARED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "versions": versions,
        "dashboard": importlib.util.find_spec("aiohttp") is not None,
        "hostname": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": count_gpus(),
        "state": state,
        "why": folder.ended() if state == "down" else "",
        "said": folder.said(),
        **{key: record.get(key) for key in ("mark", "ip", "head", "settings", "role", "since", "joined")},
        **({"key": record.get("key")} if asked.get("with_key") else {}),
    }


def count_gpus():
    """Of NVIDIA's; the driver knows them also where no library does."""
    found = glob.glob("/proc/driver/nvidia/gpus/*")
    if found or shutil.which("nvidia-smi") is None:
        return len(found)
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines())


def own_address(asked):
    """The address that others of the cluster know this host by."""
    if asked.get("ip"):
        return asked["ip"]
    if asked["role"] == "worker":
        host, port = asked["head"].rsplit(":", 1)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return probe.getsockname()[0]
    told = os.environ.get("SSH_CONNECTION", "").split()
    return told[2] if len(told) == 4 else "127.0.0.1"


def check_ports(ports):
    """That nobody listens where Ray is to."""
    for name, port in ports.items():
        if not port:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
                probe.listen()
            except OSError as error:
                raise Refused(
                    f"port {port} cannot be used ({error.strerror}). Write another as ports.{name}, or end what "
                    f"listens there: `ss -ltnp sport = :{port}` shows it."
                ) from None


def start(asked):
    """Start Ray here, unless it is up."""
    folder = Folder(asked)
    lock = folder.lock()
    record = folder.record()
    if alive(record):
        return {"already": True, "ip": record["ip"], "mark": record["mark"]}
    try:
        if record:
            sweep(folder, record, asked.get("logs"))
            os.close(lock)
            lock = folder.lock()
        check_ports(asked["ports"])
        if asked["role"] == "worker":
            check_head(asked["head"])
        address = own_address(asked)
        record = {
            "cluster": asked["cluster"], "mark": asked["mark"], "role": asked["role"], "ip": address,
            "key": asked["key"], "head": asked.get("head"), "joined": asked.get("joined"), "since": time.time(),
            "settings": asked["settings"], "dashboard": asked["ports"].get("dashboard"), "pid": 0, "born": 0,
        }  # fmt: skip
        folder.write(record)
        words = ray_words(asked, address, os.path.join(folder.path, "r"))
        until = time.monotonic() + asked["seconds_to_start"]
        while True:
            begin(folder, record, words, environment_of(asked, address), lock)
            if answer := await_ready(folder, until, asked["seconds_to_start"]):
                return answer
            shutil.rmtree(os.path.join(folder.path, "r"), ignore_errors=True)
    except BaseException:
        sweep(folder, folder.record(), asked.get("logs"))
        raise


def ray_words(asked, address, temp):
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={address}", f"--temp-dir={temp}"]
    if asked["role"] == "head":
        words += ["--head", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
    else:
        words += [f"--address={asked['head']}"]
    return words + asked["options"]


def environment_of(asked, address):
    """The login's, with what the cluster's file adds."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "RAY_", VARIABLE))}
    folder = os.path.dirname(sys.executable)
    own["PATH"] = folder + os.pathsep + own.get("PATH", os.defpath)
    own["PYTHONUNBUFFERED"] = "1"  # what a job prints is followed
    own["TMPDIR"] = os.path.join(asked["folder"], "t")  # what Ray's processes leave there goes with the folder
    os.makedirs(own["TMPDIR"], exist_ok=True)
    own.update(asked["env"])
    own.update({VARIABLE: asked["mark"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": asked["key"]})
    if address == "127.0.0.1":  # else Ray would replace it by another of this host's, and listen on all interfaces
        own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return own


def check_head(head):
    host, port = head.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5).close()
    except OSError as error:
        raise Refused(
            f"the head does not answer at {head} from here ({error}). Open that port between the hosts, or write the "
            "address at which they reach it: head: {address: …, ip: …}."
        ) from None


def begin(folder, record, words, environment, lock):
    """Leave a keeper behind that belongs to no login, and write down which process it is."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        try:
            os.close(reader)
            os.close(lock)
            record.update(pid=os.getpid(), born=born(os.getpid()))
            folder.write(record)
            log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number, handle in enumerate((nothing, log, log)):
                os.dup2(handle, number)
            os.close(writer)
            keep(words, environment)
        finally:
            os._exit(0)
    os.close(writer)
    os.wait()
    os.read(reader, 1)  # the end of it: the keeper is on its way
    os.close(reader)


def await_ready(folder, until, seconds):
    """Until Ray says that it runs, or has ended. None where it had too little time: it gives itself half a minute, and
    a busy host may take longer."""
    while True:
        record = folder.record()
        with open(folder.log, errors="replace") as file:
            written = file.read()
        if not alive(record):
            if BUSY in folder.said() and time.monotonic() < until:
                os.remove(folder.log)
                return None
            raise Refused(f"Ray ended at once. It said: {folder.said()}")
        if "Ray runtime started" in written and (record["role"] == "worker" or dashboard_answers(record)):
            return {"already": False, "ip": record["ip"], "mark": record["mark"]}
        if time.monotonic() > until:
            raise Refused(f"Ray was not ready after {seconds:g} s. Write more as `seconds`. It said: {folder.said()}")
        pause(0.3)


def stop(asked):
    """End what the cluster has here, and remove it."""
    folder = Folder(asked)
    if not folder.record():
        if os.path.isdir(folder.path):
            os.rmdir(folder.path)
        return {"was": "none"}
    folder.lock()
    record = folder.record()
    if asked.get("mark") and record.get("mark") != asked["mark"]:
        return {"was": "another"}  # somebody has started it anew meanwhile
    was = "up" if alive(record) else "down"
    sweep(folder, record, asked.get("logs"))
    return {"was": was}


def sweep(folder, record, logs):
    """End the keeper and all below it; keep the logs where they are to be kept; remove the folder."""
    if alive(record):
        keeper, known = record["pid"], below(record["pid"])
        send(signal.SIGTERM, [keeper])
        until = time.monotonic() + GRACE + 5
        while alive(record) and time.monotonic() < until:
            time.sleep(0.1)
        if alive(record):
            send(signal.SIGKILL, [keeper, *known])
    until = time.monotonic() + 20
    while record.get("mark") and (left := [pid for pid in marked(record["mark"]) if born(pid) is not None]):
        send(signal.SIGKILL, left)
        time.sleep(0.1)
        if time.monotonic() > until:
            raise Refused(f"processes {', '.join(map(str, left))} do not end, not even when killed.")
    if logs and record:
        kept = os.path.join(os.path.expanduser(logs), time.strftime("%Y%m%d-%H%M%S-") + os.path.basename(folder.path))
        try:
            os.makedirs(kept, mode=0o700)
            for path in (folder.log, os.path.join(folder.path, "r", "session_latest", "logs")):
                if os.path.isdir(path):
                    shutil.copytree(path, os.path.join(kept, "ray"), symlinks=True, ignore_dangling_symlinks=True)
                elif os.path.exists(path):
                    shutil.copy(path, kept)
        except (OSError, shutil.Error) as error:
            tell(note=f"the logs could not be kept in {kept}: {error}")
    shutil.rmtree(folder.path, ignore_errors=True)
    if os.path.exists(folder.path):
        shutil.rmtree(folder.path)  # once more, and say why not
