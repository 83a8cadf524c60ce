"""Inspection of a host, start and stop of Ray; table of requests."""

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

from .cluster_folder import ClusterFolder, RequestRefused, pause, send
from .dashboard import dashboard_answers, logs, nodes, stop_job, submit
from .supervisor import GRACE, VARIABLE, alive, descendants, processes_with_id, send_signal, start_time, supervise

COMPARED = ("ray", "arborl", "torch", "transformers", "numpy")
"""Libraries that must be the same on all hosts."""
BUSY = "timed out during startup"
"""In Ray's output when a second attempt may succeed."""


def inspect(request):
    """Versions, cores, GPUs, and state of the cluster on this host."""
    folder = ClusterFolder(request)
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
        "last_line": folder.last_line(),
        **{key: record.get(key) for key in ("mark", "ip", "head", "settings", "role", "since", "joined")},
        **({"key": record.get("key")} if request.get("with_key") else {}),
    }


def count_gpus():
    """NVIDIA GPUs, by the driver's files or nvidia-smi."""
    found = glob.glob("/proc/driver/nvidia/gpus/*")
    if found or shutil.which("nvidia-smi") is None:
        return len(found)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def host_address(request):
    if request.get("ip"):
        return request["ip"]
    if request["role"] == "worker":
        host, port = request["head"].rsplit(":", 1)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))
            return probe.getsockname()[0]
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return connection[2] if len(connection) == 4 else "127.0.0.1"


def check_ports(ports):
    """RequestRefused if a port is in use."""
    for name, port in ports.items():
        if not port:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
                probe.listen()
            except OSError as error:
                raise RequestRefused(
                    f"port {port} cannot be used ({error.strerror}). Write another as ports.{name}, or end what "
                    f"listens there: `ss -ltnp sport = :{port}` shows it."
                ) from None


def start(request):
    """Start Ray here, unless it is up."""
    folder = ClusterFolder(request)
    lock = folder.lock()
    record = folder.record()
    if alive(record):
        return {"already": True, "ip": record["ip"], "mark": record["mark"]}
    try:
        if record:
            remove_cluster(folder, record, request.get("logs"))
            os.close(lock)
            lock = folder.lock()
        check_ports(request["ports"])
        if request["role"] == "worker":
            check_head(request["head"])
        address = host_address(request)
        record = {
            "cluster": request["cluster"], "mark": request["mark"], "role": request["role"], "ip": address,
            "key": request["key"], "head": request.get("head"), "joined": request.get("joined"), "since": time.time(),
            "settings": request["settings"], "dashboard": request["ports"].get("dashboard"), "pid": 0, "born": 0,
        }  # fmt: skip
        folder.write(record)
        words = ray_words(request, address, os.path.join(folder.path, "r"))
        until = time.monotonic() + request["seconds_to_start"]
        while True:
            begin(folder, record, words, environment_of(request, address), lock)
            if answer := await_ready(folder, until, request["seconds_to_start"]):
                return answer
            shutil.rmtree(os.path.join(folder.path, "r"), ignore_errors=True)
    except BaseException:
        remove_cluster(folder, folder.record(), request.get("logs"))
        raise


def ray_words(request, address, temp):
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={address}", f"--temp-dir={temp}"]
    if request["role"] == "head":
        words += ["--head", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
    else:
        words += [f"--address={request['head']}"]
    return words + request["options"]


def environment_of(request, address):
    """The login environment with the variables of the cluster's file."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "RAY_", VARIABLE))}
    folder = os.path.dirname(sys.executable)
    own["PATH"] = folder + os.pathsep + own.get("PATH", os.defpath)
    own["PYTHONUNBUFFERED"] = "1"  # job output is followed
    own["TMPDIR"] = os.path.join(request["folder"], "t")  # removed with the folder
    os.makedirs(own["TMPDIR"], exist_ok=True)
    own.update(request["env"])
    own.update({VARIABLE: request["mark"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": request["key"]})
    if address == "127.0.0.1":  # else Ray listens on all interfaces
        own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return own


def check_head(head):
    host, port = head.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5).close()
    except OSError as error:
        raise RequestRefused(
            f"the head does not answer at {head} from here ({error}). Open that port between the hosts, or write the "
            "address at which they reach it: head: {address: …, ip: …}."
        ) from None


def begin(folder, record, words, environment, lock):
    """Start the supervisor as a daemon, and record its pid."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        try:
            os.close(reader)
            os.close(lock)
            record.update(pid=os.getpid(), born=start_time(os.getpid()))
            folder.write(record)
            log = os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number, handle in enumerate((nothing, log, log)):
                os.dup2(handle, number)
            os.close(writer)
            supervise(words, environment)
        finally:
            os._exit(0)
    os.close(writer)
    os.wait()
    os.read(reader, 1)  # returns when the supervisor has started
    os.close(reader)


def await_ready(folder, until, seconds):
    """Wait until Ray runs or has ended. None if its own start timeout expired; the caller starts it again."""
    while True:
        record = folder.record()
        with open(folder.log, errors="replace") as file:
            written = file.read()
        if not alive(record):
            if BUSY in folder.last_line() and time.monotonic() < until:
                os.remove(folder.log)
                return None
            raise RequestRefused(f"Ray ended at once. Its last line: {folder.last_line()}")
        if "Ray runtime started" in written and (record["role"] == "worker" or dashboard_answers(record)):
            return {"already": False, "ip": record["ip"], "mark": record["mark"]}
        if time.monotonic() > until:
            raise RequestRefused(
                f"Ray was not ready after {seconds:g} s. Write more as `seconds`. Its last line: {folder.last_line()}"
            )
        pause(0.3)


def stop(request):
    folder = ClusterFolder(request)
    if not folder.record():
        if os.path.isdir(folder.path):
            os.rmdir(folder.path)
        return {"was": "none"}
    folder.lock()
    record = folder.record()
    if request.get("mark") and record.get("mark") != request["mark"]:
        return {"was": "another"}  # it was started again meanwhile
    was = "up" if alive(record) else "down"
    remove_cluster(folder, record, request.get("logs"))
    return {"was": was}


def remove_cluster(folder, record, logs):
    """End the supervisor and its processes; copy the logs if requested; remove the folder."""
    if alive(record):
        supervisor, known = record["pid"], descendants(record["pid"])
        send_signal(signal.SIGTERM, [supervisor])
        until = time.monotonic() + GRACE + 5
        while alive(record) and time.monotonic() < until:
            time.sleep(0.1)
        if alive(record):
            send_signal(signal.SIGKILL, [supervisor, *known])
    until = time.monotonic() + 20
    while record.get("mark"):
        left = [pid for pid in processes_with_id(record["mark"]) if start_time(pid) is not None]
        if not left:
            break
        send_signal(signal.SIGKILL, left)
        time.sleep(0.1)
        if time.monotonic() > until:
            raise RequestRefused(f"processes {', '.join(map(str, left))} do not end after SIGKILL.")
    if logs and record:
        kept = os.path.join(os.path.expanduser(logs), time.strftime("%Y%m%d-%H%M%S-") + os.path.basename(folder.path))
        try:
            os.makedirs(kept, mode=0o700)
            for path in (folder.log, folder.ray_logs):
                if os.path.isdir(path):
                    shutil.copytree(path, os.path.join(kept, "ray"), symlinks=True, ignore_dangling_symlinks=True)
                elif os.path.exists(path):
                    shutil.copy(path, kept)
        except (OSError, shutil.Error) as error:
            send(note=f"the logs could not be kept in {kept}: {error}")
    shutil.rmtree(folder.path, ignore_errors=True)
    if os.path.exists(folder.path):
        shutil.rmtree(folder.path)  # again, with an error message


VERBS = {
    "look": inspect, "start": start, "stop": stop, "nodes": nodes, "submit": submit, "stop_job": stop_job, "logs": logs,
}  # fmt: skip


def main(request):
    try:
        send(answer=VERBS[request["verb"]](request))
    except RequestRefused as error:
        send(refused=str(error))
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        send(refused=f"{error.filename or request['verb']}: {error.strerror or error}.")
    except Exception as error:  # a defect, or an unknown answer of Ray
        send(refused=f"{request['verb']}: {type(error).__name__}: {error}")
