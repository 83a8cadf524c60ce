"""Two servers of vLLM's own, one of which is killed and started again. `make test-vllm` runs this."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import time
from contextlib import suppress

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from arborl.chat import Renderer
from arborl.child_process import supervised_command
from arborl.cli.main import app
from arborl.engines.remote.http_engine import HttpEngine
from arborl.engines.remote.padded_heads import export_padded
from arborl.engines.remote.vllm_process import WORKER_DIR
from arborl.engines.remote.weight_sync import PROBE_PROMPT, WeightProbe
from arborl.models.model_loading import load_model, resolve
from arborl.rollout.episode_store import EpisodeStore
from arborl.track.jsonl import read_metrics
from arborl.types import Sampling

pytestmark = pytest.mark.vllm
STARTING = 1500.0
RUN = [
    "rollout.tasks_per_step=2", "rollout.group_size=4", "trainer.steps=6", "evaluation.tasks=1", "env.args.size=3",
    "env.args.max_steps=4", "track.gifs=0", "track.tensorboard=false", "threads=1", "model.device=cpu",
    "algorithm.skip_zero_variance=false", "sampling.max_context=512", "sampling.max_tokens=12", "model.dtype=float32",
]  # fmt: skip
"""Of a few small steps."""


class VllmServer:
    """vLLM's OpenAI server, as docs/engines.md says."""

    def __init__(self, python, folder, log, *more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self.command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(self.port),
            "--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--logprobs-mode", "processed_logprobs",
            "--generation-config", "vllm", "--kv-cache-memory-bytes", "100000000", "--max-num-seqs", "16",
            "--worker-extension-cls", "arborl_vllm.Extension", "--no-enable-chunked-prefill", *more,
        ]  # fmt: skip
        self.start()

    def start(self):
        quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env = {**os.environ, **quiet, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(WORKER_DIR)}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                supervised_command(self.command, True), env=env, stdout=log, stderr=log, start_new_session=True
            )

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
        """SIGKILL, to it and to all that it has started."""
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """seedling with heads that vLLM has a CPU kernel for."""
    return export_padded(resolve("seedling"), tmp_path_factory.mktemp("models") / "seedling-64", 64)


@pytest.fixture(scope="module")
def servers(vllm_python, folder):
    """One server that reports the weight version of every token, and one that must be queried. Every test leaves them
    running: they take a minute to start."""
    made = [
        VllmServer(vllm_python, folder, folder.parent / "first.log", "--enable-scale-out"),
        VllmServer(vllm_python, folder, folder.parent / "second.log"),
    ]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


async def test_a_server_that_is_killed_and_started_again_samples_from_the_newest_weights(servers, folder):
    model, renderer = load_model(folder, device="cpu"), Renderer.from_folder(folder)
    engine = HttpEngine(model, [server.url for server in servers], 256, renderer=renderer)
    probe, found = WeightProbe(model, Sampling(), "float32"), []

    async def ask(count):
        requests = (
            engine.generate(PROBE_PROMPT, Sampling(16, seed=i), session=f"{len(found)}-{i}") for i in range(count)
        )
        for done in await asyncio.gather(*requests):
            expected = probe.expected(done.tokens, model.state_dict())
            found.append((done.version, max(abs(a - b) for a, b in zip(done.logprobs, expected, strict=True))))

    async def learn(version):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
        await engine.load(model.state_dict(), version)

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
    shares = [sum(where is replica for where in engine.routes.sessions.values()) for replica in engine.replicas]
    await engine.close()
    assert [version for version, _ in found] == [1] * 16 + [2] * 16
    assert max(gap for _, gap in found) < 1e-3
    assert min(shares) > 4


def test_a_run_goes_on_when_a_server_is_killed_and_the_restarted_one_samples_from_the_newest_weights(
    servers, folder, tmp_path, monkeypatch
):
    """Killed with requests under way in the third of six steps; started again after the fourth."""
    first, load = servers[0], HttpEngine.load
    weights, places, killers, heard = {}, {}, [], 0

    async def kill_when_busy(engine):
        while engine.replicas[0].busy < 2:
            await asyncio.sleep(0.005)
        first.kill()

    async def watched(engine, given, version):
        nonlocal heard
        places.setdefault(version - 1, {name: replica.url for name, replica in engine.routes.sessions.items()})
        await load(engine, given, version)
        weights[version] = {name: tensor.detach().clone() for name, tensor in given.items()}
        if version == 2:
            killers.append(asyncio.create_task(kill_when_busy(engine)))
        if version == 4:
            heard = first.log.stat().st_size
            first.start()
            await asyncio.to_thread(first.wait)
            while not engine.replicas[0].up:
                await asyncio.sleep(0.1)

    monkeypatch.setattr(HttpEngine, "load", watched)
    urls = f"engine.args.urls=[{servers[0].url},{servers[1].url}]"
    ran = CliRunner().invoke(
        app, ["train", f"output_dir={tmp_path / 'run'}", f"model.name={folder}", "engine=http", urls, *RUN]
    )
    assert ran.exit_code == 0, ran.output

    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "policy/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["engine/servers"] for row in rows] == [2, 2, 1, 1, 2, 2]
    assert rows[2]["engine/retried"] >= 2
    assert max(row["policy/logprob_diff_max"] for row in rows) < 1e-3

    played = [list(EpisodeStore.read(file)) for file in sorted((tmp_path / "run" / "episodes").glob("step-*.jsonl"))]
    assert [len({one.id for one in step}) for step in played] == [len(step) for step in played] == [8] * 6
    learner, gaps = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for version, step in enumerate(played):
        assert not any(one.failure for one in step)
        assert {call.completion.version for one in step for call in one.calls} == {version}
        learner.load_state_dict(weights[version])
        of_first = [one for one in step if places[version][one.id] == first.url]
        assert bool(of_first) == (version not in (2, 3))
        gaps += [gap_of(learner, call) for one in of_first if version > 3 for call in one.calls]
    assert max(gaps) < 1e-3

    log_text = first.log.read_bytes()[heard:].decode(errors="replace")  # since it was started again
    paths = [path for path, code in re.findall(r'"POST (\S+?)(?:\?\S*)? HTTP/1.1" (\d+)', log_text) if code == "200"]
    assert paths.index("/update_weight_version") < paths.index("/inference/v1/generate")
    assert paths.count("/inference/v1/generate") > len(gaps)  # and probes


@torch.no_grad()
def gap_of(model, call):
    """The largest difference between the engine's log-probabilities of a call and those of the library's model."""
    begin, scores = len(call.prompt), model(torch.tensor([list(call.whole)])).logits[0].log_softmax(-1)
    tokens = zip(call.completion.tokens, call.completion.logprobs, strict=True)
    return max(abs(float(scores[begin - 1 + i, token]) - logprob) for i, (token, logprob) in enumerate(tokens))
