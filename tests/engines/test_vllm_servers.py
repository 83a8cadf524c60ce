"""Two servers of vLLM's own, one of which is killed and started again. `make test-vllm` runs this."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress

import httpx
import pytest
import torch

from arborl.chat import Renderer
from arborl.engines.copies import PROMPT, Probe
from arborl.engines.http import HttpEngine
from arborl.engines.padded_heads import export_padded
from arborl.engines.vllm_process import SIDE
from arborl.models.load import load_model, resolve
from arborl.types import Sampling

pytestmark = pytest.mark.vllm
STARTING = 500.0


class VllmServer:
    """vLLM's OpenAI server, as docs/engines.md says."""

    def __init__(self, python, folder, log, *more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(self.port),
            "--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
            "--generation-config", "vllm", "--kv-cache-memory-bytes", "100000000", "--max-num-seqs", "16",
            "--worker-extension-cls", "arborl_vllm.Extension", "--no-enable-chunked-prefill", *more,
        ]  # fmt: skip
        self.start()

    def start(self):
        quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env = {**os.environ, **quiet, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(SIDE)}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self):
        until = time.monotonic() + STARTING
        while time.monotonic() < until:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.5)
        raise AssertionError(f"not ready in {STARTING:g} s: {self.log.read_text()[-3000:]}")

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def folder(tmp_path):
    """seedling with heads that vLLM has a CPU kernel for."""
    return export_padded(resolve("seedling"), tmp_path / "seedling-64", 64)


@pytest.fixture
def servers(vllm_python, folder, tmp_path):
    """One that says of every token which weights sampled it, and one that must be asked."""
    made = [
        VllmServer(vllm_python, folder, tmp_path / "first.log", "--enable-scale-out"),
        VllmServer(vllm_python, folder, tmp_path / "second.log"),
    ]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


def test_a_server_that_is_killed_and_started_again_samples_from_the_newest_weights(servers, folder):
    model, renderer = load_model(folder, device="cpu"), Renderer.from_folder(folder)
    engine = HttpEngine(model, [server.url for server in servers], 256, renderer=renderer)
    probe, found = Probe(model, Sampling(), "float32"), []

    async def ask(count):
        asked = (engine.generate(PROMPT, Sampling(16, seed=i), session=f"{len(found)}-{i}") for i in range(count))
        for done in await asyncio.gather(*asked):
            expected = probe.expected(done.tokens, model.state_dict())
            found.append((done.version, max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True))))

    async def learn(version):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
        await engine.load(model.state_dict(), version)

    async def run():
        await learn(1)
        await ask(8)
        servers[0].kill()
        await ask(8)
        await learn(2)
        servers[0].start()
        await asyncio.to_thread(servers[0].wait)
        while not all(replica.up for replica in engine.replicas):
            await asyncio.sleep(0.2)
        await ask(16)
        shares = [sum(where is replica for where in engine.sessions.values()) for replica in engine.replicas]
        await engine.close()
        return shares

    shares = asyncio.run(run())
    assert [version for version, _ in found] == [1] * 16 + [2] * 16
    assert max(gap for _, gap in found) < 1e-3
    assert min(shares) > 4
