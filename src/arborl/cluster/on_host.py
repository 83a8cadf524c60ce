"""What runs on a host of a cluster, asked over ssh: it starts Ray there, looks after it and ends it.

This file is sent over ssh's standard input and run by the host's Python, so it imports nothing but the standard library
and nothing of it is installed. A request is one line of JSON on standard input; whatever is answered is a line of JSON
behind a mark, for a login shell may say things of its own. Secrets are in the request, and from there in the
environment of Ray's processes: never on a command line, in a file of others or in a log.

All that a cluster has on a host is one folder, with a record of who started it, and the processes below one keeper.
The keeper inherits what loses its parent, so that none of them can get away; each has the record's mark in its
environment as well, for the case that the keeper itself was killed.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import glob
import hashlib
import json
import os
import platform
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

MARK = "\x1e"
"""Before every line that is an answer."""
COMPARED = ("ray", "arborl", "torch", "transformers", "numpy")
"""Libraries that must be the same on all hosts."""
VARIABLE = "ARBORL_CLUSTER"
"""In the environment of every process that a cluster has on a host."""
SUBREAPER, DEATH_SIGNAL = 36, 1
"""Of prctl(2)."""
ENDED = "arborl:"
"""Begins what a keeper writes into Ray's log."""
GRACE = 15.0
"""Seconds that Ray has to end by itself."""
OVER = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of a job that has ended."""


class Refused(Exception):
    """What was asked cannot be done here; the text is for the user."""


def tell(**what):
    """One line to whoever asked."""
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def pause(seconds):
    """Wait; leave where whoever asked has gone, which ssh tells by the end of standard input."""
    ready, _, _ = select.select([0], [], [], seconds)
    if ready and not os.read(0, 1):
        sys.exit(0)


# ------------------------------------------------------------------------------------------------ the folder


class Folder:
    """The cluster's folder on this host, and what its record says."""

    def __init__(self, asked):
        self.path, self.cluster = asked["folder"], asked["cluster"]
        self.record_file = os.path.join(self.path, "record.json")
        self.log = os.path.join(self.path, "ray.log")

    def record(self):
        """What stands there; empty where the cluster has nothing here."""
        try:
            about = os.lstat(self.path)
        except FileNotFoundError:
            return {}
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            raise Refused(f"{self.path} is somebody else's. Write another `temp` or another `name`.")
        try:
            with open(self.record_file) as file:
                found = json.load(file)
        except FileNotFoundError:
            if not os.listdir(self.path):
                return {}
            raise Refused(
                f"{self.path} is there and was not made by this command. Remove it, or write another `temp`."
            ) from None
        if found.get("cluster") != self.cluster:
            raise Refused(f"{self.path} is of the cluster {found.get('cluster')!r}. Write another `temp`.")
        return found

    def write(self, record):
        """Readable for its owner alone: the cluster's key is in it."""
        handle = os.open(self.record_file + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(self.record_file + ".new", self.record_file)

    def lock(self):
        """Make it where it is not, and keep others that start or end something here waiting until this process ends."""
        until = time.monotonic() + 60
        while True:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                self.record()  # that it is ours
            try:
                handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_ino == os.stat(self.path).st_ino:
                    return handle
            except FileNotFoundError:
                pass  # whoever had it has removed it
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Refused(f"another command is at work in {self.path}. Try again.") from None
            time.sleep(0.1)

    def ended(self):
        """How, as far as there was anybody to write it down."""
        said = [line for line in last_lines(self.log, 50) if line.startswith(ENDED)]
        return said[-1][len(ENDED) + 1 :] if said else "Its processes were killed, or the host was."

    def tail(self, lines=12):
        """The last lines of what `ray start` wrote."""
        return "\n".join(last_lines(self.log, lines))


def last_lines(path, count):
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 200 * max(count, 1) - 20_000))
            return file.read().decode(errors="replace").splitlines()[-count:] if count else []
    except OSError:
        return []


# ------------------------------------------------------------------------------------------------ processes


def born(pid):
    """When a process began, in ticks since the machine did; None where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def alive(record):
    """Whether the keeper of a record is there: a number alone may be another process's by now."""
    return bool(record.get("pid")) and born(record["pid"]) == record["born"]


def below(pid):
    """All descendants of a process."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found, more = [], [pid]
    while more:
        more = [child for child, parent in parents.items() if parent in more]
        found += more
    return found


def marked(mark):
    """Processes that have the mark in their environment."""
    found = []
    wanted = f"{VARIABLE}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0") and int(name) != os.getpid():
                    found.append(int(name))
        except OSError:
            continue
    return found


def send(number, pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def prctl(option, value):
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def keep(words, environment):
    """Run Ray until it ends or this process is told to; leave nothing that it started."""
    prctl(SUBREAPER, 1)
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.append(True))
    keeper, ray = os.getpid(), os.fork()
    if ray == 0:
        try:
            prctl(DEATH_SIGNAL, signal.SIGTERM)  # should the keeper be killed
            os.chdir(os.path.expanduser("~") if os.path.isdir(os.path.expanduser("~")) else "/")
            os.execvpe(words[0], words, environment)
        except OSError as error:
            os.write(2, f"{words[0]}: {error}\n".encode())
        os._exit(127)
    ended = False
    while not (ended or told):
        ended = reap(ray)
        time.sleep(0.2)
    os.write(1, f"{ENDED} Ray ended {'by itself' if ended else 'when it was told to'}.\n".encode())
    send(signal.SIGTERM, [] if ended else [ray])
    until = time.monotonic() + GRACE
    while not ended and time.monotonic() < until:
        ended = reap(ray)
        time.sleep(0.1)
    send(signal.SIGTERM, below(keeper))
    until = time.monotonic() + 2
    while left := below(keeper):
        if time.monotonic() > until:
            send(signal.SIGKILL, left)
        reap(ray)
        time.sleep(0.1)


def reap(pid):
    """Whether this child has ended; other children that have are let go too."""
    gone = False
    try:
        while (found := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            gone = gone or found == pid
    except ChildProcessError:
        return True
    return gone


# ------------------------------------------------------------------------------------------------ what is here


def look(asked):
    """What the host has: versions, cores, GPUs, and what of the cluster is here."""
    import importlib.metadata
    import importlib.util

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


# ------------------------------------------------------------------------------------------------ start and end


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
        begin(folder, record, words, environment_of(asked), lock)
        return await_ready(folder, asked["seconds_to_start"])
    except BaseException:
        sweep(folder, folder.record(), None)
        raise


def ray_words(asked, address, temp):
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={address}", f"--temp-dir={temp}"]
    if asked["role"] == "head":
        words += ["--head", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
    else:
        words += [f"--address={asked['head']}"]
    return words + asked["options"]


def environment_of(asked):
    """The login's, with what the cluster's file adds."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "RAY_", VARIABLE))}
    folder = os.path.dirname(sys.executable)
    own["PATH"] = folder + os.pathsep + own.get("PATH", os.defpath)
    own["PYTHONUNBUFFERED"] = "1"  # what a job prints is followed
    own["TMPDIR"] = os.path.join(asked["folder"], "t")  # what Ray's processes leave there goes with the folder
    os.makedirs(own["TMPDIR"], exist_ok=True)
    own.update(asked["env"])
    own.update({VARIABLE: asked["mark"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": asked["key"]})
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


def await_ready(folder, seconds):
    """Until Ray says that it runs, or has ended."""
    until = time.monotonic() + seconds
    while True:
        record = folder.record()
        with open(folder.log, errors="replace") as file:
            said = file.read()
        if not alive(record):
            raise Refused(f"Ray ended at once. It said:\n{folder.tail()}")
        if "Ray runtime started" in said and (record["role"] == "worker" or dashboard_answers(record)):
            return {"already": False, "ip": record["ip"], "mark": record["mark"]}
        if time.monotonic() > until:
            raise Refused(f"Ray was not ready after {seconds:g} s. Write more as `seconds`. It said:\n{folder.tail()}")
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
    while record.get("mark") and (left := [pid for pid in marked(record["mark"]) if born(pid) is not None]):
        send(signal.SIGKILL, left)
        time.sleep(0.1)
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


# ------------------------------------------------------------------------------------------------ the head's part


def call(record, path, body=None, method=None, kind="application/json", seconds=30):
    """Ask the dashboard, which listens on this host alone."""
    import urllib.error
    import urllib.request

    address = f"http://127.0.0.1:{record['dashboard']}{path}"
    request = urllib.request.Request(address, body, method=method)
    request.add_header("Authorization", f"Bearer {record['key']}")
    request.add_header("Content-Type", kind)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=seconds) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace").strip().splitlines()
        raise Refused(f"Ray says: {said[-1] if said else error}") from None
    except OSError as error:
        raise Refused(f"Ray's dashboard does not answer on port {record['dashboard']} ({error}).") from None


def dashboard_answers(record):
    try:
        call(record, "/api/version", seconds=2)
        nodes_of(record)
        return True
    except (Refused, ValueError, KeyError):
        return False


def running_head(asked):
    record = Folder(asked).record()
    if not record or not alive(record):
        raise Refused("Ray's head does not run. `arborl cluster restart` brings it back.")
    return record


def nodes_of(record):
    return json.loads(call(record, "/api/v0/nodes?detail=1&limit=10000"))["data"]["result"]["result"]


def nodes(asked):
    """Nodes and jobs as the head knows them; with `await`, as soon as these addresses are there."""
    record = running_head(asked)
    until = time.monotonic() + asked.get("seconds_to_start", 0)
    while True:
        found = nodes_of(record)
        up = {node["node_ip"] for node in found if node["state"] == "ALIVE"}
        missing = [address for address in asked.get("await", ()) if address not in up]
        if not missing or time.monotonic() > until:
            break
        time.sleep(0.5)
    try:
        status = json.loads(call(record, "/api/cluster_status"))["data"]["clusterStatus"]
        usage = status["loadMetricsReport"]["usageByNode"]
    except (Refused, KeyError, TypeError, ValueError):
        usage = {}  # not there in the first seconds
    jobs = json.loads(call(record, "/api/jobs/"))
    return {
        "missing": missing,
        "port": record["dashboard"],
        "nodes": [
            {
                "id": node["node_id"], "ip": node["node_ip"], "alive": node["state"] == "ALIVE",
                "why": node.get("state_message") or "", "total": node.get("resources_total") or {},
                "used": {name: pair[0] for name, pair in usage.get(node["node_id"], {}).items()},
            }
            for node in found
        ],
        "jobs": [
            {
                "id": job.get("submission_id") or job.get("job_id"), "status": job.get("status"),
                "command": job.get("entrypoint"), "started": (job.get("start_time") or 0) / 1000,
                "ended": (job.get("end_time") or 0) / 1000, "exit_code": job.get("driver_exit_code"),
                "message": job.get("message") or "",
            }
            for job in jobs
        ],
    }  # fmt: skip


def submit(asked):
    """Run a command as a job of the cluster; by default until it ends, with what it prints."""
    record = running_head(asked)
    wanted = {"entrypoint": asked["command"], "submission_id": asked["job"], "runtime_env": {}}
    if asked.get("files"):
        content = base64.b64decode(asked["files"])
        name = f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:16]}.zip"
        call(record, f"/api/packages/gcs/{name}", content, "PUT", "application/octet-stream", 120)
        wanted["runtime_env"]["working_dir"] = f"gcs://{name}"
    call(record, "/api/jobs/", json.dumps(wanted).encode(), "POST", seconds=120)
    tell(job=asked["job"])
    return follow_job(asked, record) if asked.get("wait", True) else {"job": asked["job"]}


def follow_job(asked, record):
    """What it prints, and how it ended. Its driver is on the head, and so is the file that it prints to."""
    file = Follower(job_log(Folder(asked), asked["job"]), None)
    while True:
        about = json.loads(call(record, f"/api/jobs/{asked['job']}"))
        for line in file.more():
            tell(line=line)
        if about["status"] in OVER:
            for line in file.more(final=True):
                tell(line=line)
            return {
                "job": asked["job"], "status": about["status"], "exit_code": about.get("driver_exit_code"),
                "message": about.get("message") or "",
            }  # fmt: skip
        pause(0.5)


def stop_job(asked):
    call(running_head(asked), f"/api/jobs/{asked['job']}/stop", b"", "POST")
    return {}


def job_log(folder, job):
    return os.path.join(folder.path, "r", "session_latest", "logs", f"job-driver-{job}.log")


# ------------------------------------------------------------------------------------------------ logs


class Follower:
    """A file that grows: its last lines first, None for all of it, then whatever is added."""

    def __init__(self, path, lines):
        self.path, self.rest, self.at = path, b"", 0
        self.first = [] if lines is None else last_lines(path, lines)
        if lines is not None and os.path.exists(path):
            self.at = os.path.getsize(path)

    def more(self, final=False):
        first, self.first = self.first, []
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                added = file.read()
                self.at += len(added)
        except FileNotFoundError:
            added = b""
        *whole, self.rest = (self.rest + added).split(b"\n")
        if final and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        return first + [line.decode(errors="replace") for line in whole]


def logs(asked):
    """The last lines of files, and with `follow` what is added to them."""
    folder = Folder(asked)
    if not folder.record():
        raise Refused("nothing of the cluster is here, so there are no logs.")
    there = os.path.join(folder.path, "r", "session_latest", "logs")
    followed = {}
    while True:
        wanted = [folder.log] if any(pattern in ("*", "ray.log") for pattern in asked["files"]) else []
        for pattern in asked["files"]:
            wanted += sorted(glob.glob(os.path.join(glob.escape(there), pattern)))
        for path in wanted:
            if path not in followed and os.path.isfile(path):
                followed[path] = Follower(path, asked["lines"])
        for path, file in followed.items():
            for line in file.more(final=not asked["follow"]):
                tell(file=os.path.basename(path), line=line)
        if not asked["follow"]:
            return {"files": sorted(map(os.path.basename, followed)), "there": sorted(os.listdir(there))}
        pause(0.5)


VERBS = {
    "look": look, "start": start, "stop": stop, "nodes": nodes, "submit": submit, "stop_job": stop_job, "logs": logs,
}  # fmt: skip


def main(asked):
    """Answer one request."""
    try:
        tell(answer=VERBS[asked["verb"]](asked))
    except Refused as error:
        tell(refused=str(error))
    except BrokenPipeError:
        os._exit(1)
    except OSError as error:
        tell(refused=f"{error.filename or asked['verb']}: {error.strerror or error}.")
    except Exception as error:  # a defect, or a Ray that answers otherwise: said where it can be read
        tell(refused=f"{asked['verb']}: {type(error).__name__}: {error}")


if "ASKED" in globals():  # set by the line that runs this on a host
    main(globals()["ASKED"])
