"""Nodes and jobs, as Ray's dashboard on the head knows them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
import urllib.error
import urllib.request

from .answers import Refused, pause, tell
from .folder import Folder
from .logs import Follower
from .processes import alive

OVER = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of a job that has ended."""


def call(record, path, body=None, method=None, kind="application/json", seconds=30):
    """Ask the dashboard, which listens on this host alone."""
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
