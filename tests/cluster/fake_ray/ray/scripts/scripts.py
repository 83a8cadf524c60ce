"""What `arborl cluster` sees of Ray, started in a moment: `start --block`, nodes that the head counts, jobs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OPTIONS = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
NODES = Path(os.environ["FAKE"], "nodes")
LOGS = Path(OPTIONS["temp-dir"], "session_latest", "logs")
JOBS: dict[str, dict] = {}


class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {os.environ['RAY_AUTH_TOKEN']}":
            return self.answer({}, 401)
        path = self.path.partition("?")[0]
        if path == "/api/v0/nodes":
            found = [json.loads(file.read_text()) for file in NODES.glob("*")]
            shown = [
                {"node_id": one["ip"], "node_ip": one["ip"], "resources_total": {"CPU": 2.0},
                 "state": "ALIVE" if Path(f"/proc/{one['pid']}").exists() else "DEAD"}
                for one in found
            ]  # fmt: skip
            return self.answer({"data": {"result": {"result": shown}}})
        if path.startswith("/api/jobs/"):
            return self.answer(JOBS[path[10:]] if path[10:] else list(JOBS.values()))
        return self.answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/jobs/":
            threading.Thread(target=run, args=(json.loads(body),)).start()
            time.sleep(0.05)
        self.answer({})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        zipfile.ZipFile(io.BytesIO(body)).extractall(Path(OPTIONS["temp-dir"], Path(self.path).name))
        self.answer({})

    def answer(self, what: object, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *_: object) -> None:
        pass


def run(request: dict) -> None:
    folder = (request["runtime_env"].get("working_dir") or "gcs://").removeprefix("gcs://")
    about = {"submission_id": request["submission_id"], "status": "RUNNING", "entrypoint": request["entrypoint"]}
    JOBS[request["submission_id"]] = about
    with (LOGS / f"job-driver-{request['submission_id']}.log").open("w") as log:
        where = Path(OPTIONS["temp-dir"], folder)
        code = subprocess.run(
            request["entrypoint"], shell=True, stdout=log, stderr=log, cwd=where, check=False
        ).returncode
    about |= {"driver_exit_code": code, "status": "FAILED" if code else "SUCCEEDED"}


def main() -> None:
    mode_file = Path(os.environ["FAKE"], OPTIONS["node-ip-address"], "mode")
    mode = mode_file.read_text() if mode_file.exists() else ""
    if mode == "busy":  # once
        mode_file.unlink()
        sys.exit("Exception: The current node timed out during startup.")
    if mode == "fails":
        sys.exit("boom: no room for the object store")
    LOGS.mkdir(parents=True)
    (LOGS / "raylet.out").write_text("one\ntwo\nthree\n")
    # A process that leaves its parent and its session, as a user's own may.
    subprocess.Popen(["sh", "-c", "setsid sleep 1000 & exit"]).wait()
    if "--head" in sys.argv:
        gcs = ThreadingHTTPServer(("0.0.0.0", int(OPTIONS["port"])), Dashboard)
        server = ThreadingHTTPServer(("127.0.0.1", int(OPTIONS["dashboard-port"])), Dashboard)
        for one in (gcs, server):
            threading.Thread(target=one.serve_forever, daemon=True).start()
    if mode != "unseen":
        NODES.mkdir(exist_ok=True)
        own = {"ip": OPTIONS["node-ip-address"], "pid": os.getpid()}
        (NODES / OPTIONS["node-ip-address"]).write_text(json.dumps(own))
    if mode != "slow":
        sys.stdout.write("Ray runtime started.\n")
        sys.stdout.flush()
    while True:
        time.sleep(1)


main()
