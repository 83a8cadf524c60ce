"""Nodes and jobs, by Ray's dashboard on the head; log files and their new lines."""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import os
import time
import urllib.error
import urllib.request

from .cluster_folder import ClusterFolder, RequestRefused, last_lines, pause, send
from .supervisor import alive

OVER = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of a job that has ended."""


def call(record, path, body=None, method=None, kind="application/json", seconds=30):
    """Call the dashboard, which listens on the loopback interface."""
    address = f"http://127.0.0.1:{record['dashboard']}{path}"
    request = urllib.request.Request(address, body, method=method)
    request.add_header("Authorization", f"Bearer {record['key']}")
    request.add_header("Content-Type", kind)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=seconds) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        lines = error.read().decode(errors="replace").strip().splitlines()
        raise RequestRefused(f"Ray: {lines[-1] if lines else error}") from None
    except OSError as error:
        raise RequestRefused(f"Ray's dashboard does not answer on port {record['dashboard']} ({error}).") from None


def dashboard_answers(record):
    try:
        call(record, "/api/version", seconds=2)
        nodes_of(record)
        return True
    except (RequestRefused, ValueError, KeyError):
        return False


def running_head(request):
    record = ClusterFolder(request).record()
    if not record or not alive(record):
        raise RequestRefused("Ray's head does not run. `arborl cluster restart` brings it back.")
    return record


def nodes_of(record):
    return json.loads(call(record, "/api/v0/nodes?detail=1&limit=10000"))["data"]["result"]["result"]


def nodes(request):
    """Nodes and jobs; with `await`, wait until these addresses have joined."""
    record = running_head(request)
    until = time.monotonic() + request.get("seconds_to_start", 0)
    while True:
        found = nodes_of(record)
        up = {node["node_ip"] for node in found if node["state"] == "ALIVE"}
        missing = [address for address in request.get("await", ()) if address not in up]
        if not missing or time.monotonic() > until:
            break
        time.sleep(0.5)
    try:
        status = json.loads(call(record, "/api/cluster_status"))["data"]["clusterStatus"]
        usage = status["loadMetricsReport"]["usageByNode"]
    except (RequestRefused, KeyError, TypeError, ValueError):
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


def submit(request):
    """Submit a job; by default wait for its end and send its output."""
    record = running_head(request)
    wanted = {"entrypoint": request["command"], "submission_id": request["job"], "runtime_env": {}}
    if request.get("files"):
        content = base64.b64decode(request["files"])
        name = f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:16]}.zip"
        call(record, f"/api/packages/gcs/{name}", content, "PUT", "application/octet-stream", 120)
        wanted["runtime_env"]["working_dir"] = f"gcs://{name}"
    call(record, "/api/jobs/", json.dumps(wanted).encode(), "POST", seconds=120)
    send(job=request["job"])
    return follow_job(request, record) if request.get("wait", True) else {"job": request["job"]}


def follow_job(request, record):
    """Output and exit code of a job; its log file is on the head."""
    file = LogFollower(os.path.join(ClusterFolder(request).ray_logs, f"job-driver-{request['job']}.log"), None)
    while True:
        about = json.loads(call(record, f"/api/jobs/{request['job']}"))
        for line in file.more():
            send(line=line)
        if about["status"] in OVER:
            for line in file.more(final=True):
                send(line=line)
            return {
                "job": request["job"], "status": about["status"], "exit_code": about.get("driver_exit_code"),
                "message": about.get("message") or "",
            }  # fmt: skip
        pause(0.5)


def stop_job(request):
    call(running_head(request), f"/api/jobs/{request['job']}/stop", b"", "POST")
    return {}


class LogFollower:
    """Reads the last lines of a file (None: all), then new ones."""

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


def logs(request):
    """The last lines of files; with `follow`, new lines too."""
    folder = ClusterFolder(request)
    if not folder.record():
        raise RequestRefused("the cluster has no files on this host.")
    there = folder.ray_logs
    followed = {}
    while True:
        wanted = [folder.log] if any(pattern in ("*", "ray.log") for pattern in request["files"]) else []
        for pattern in request["files"]:
            wanted += sorted(glob.glob(os.path.join(glob.escape(there), pattern)))
        for path in wanted:
            if path not in followed and os.path.isfile(path):
                followed[path] = LogFollower(path, request["lines"])
        for path, file in followed.items():
            for line in file.more(final=not request["follow"]):
                send(file=os.path.basename(path), line=line)
        if not request["follow"]:
            return {"files": sorted(map(os.path.basename, followed)), "there": sorted(os.listdir(there))}
        pause(0.5)
