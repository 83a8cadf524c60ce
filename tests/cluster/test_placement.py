"""Where the parts of a run are: what is refused, and what a run on a cluster of two nodes comes to."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time

import pytest
from forked import Forked, forked

from arborl.cluster.placement import ray_cluster
from arborl.cluster.placement.actors import ClusterActor, VersionMismatch, check_versions, versions
from arborl.cluster.placement.ray_cluster import ClusterNode, find_node, gpus_of
from arborl.config.load_config import load
from arborl.engines.remote.replicas import ReplicaUnavailable
from arborl.errors import ConfigError
from arborl.track.jsonl import read_metrics
from arborl.training_run import train
from arborl.training_run.build import build
from arborl.types import Sampling

SMALL = [
    "deterministic=true", "threads=1", "model.device=cpu", "env.args.size=3", "env.args.max_steps=4",
    "rollout.tasks_per_step=3", "rollout.group_size=4", "trainer.steps=2", "evaluation.tasks=0", "track.gifs=0",
    "track.tensorboard=false", "learner.lr=0.002",
]  # fmt: skip
PLACED = ["placement=ray", "placement.engines=2", "placement.env_workers=2"]


def config_of(*words):
    return load(None, [*SMALL, *words])


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["placement.engines=2"], "engines is for placement=ray"),
        (["placement=ray"], "places nothing"),
        (["placement=ray", "placement.engines=2", "engine=scripted"], "replicas of engine=local, and engine=scripted"),
        (["placement=ray", "placement.engines=2", "engine.sleep_mode=true"], "Leave engine.sleep_mode out"),
        (["placement=ray", "placement.env_workers=2", "rollout.workers=thread"], "rollout.workers=thread"),
        (["placement=ray", "placement.engines=2", "placement.address=ray://head:10001"], "ray job submit"),
        (["placement=ray", "placement.engines=1", "placement.device_mapping.engines=[0,1]"], "2 GPUs for engines=1"),
        (["placement=ray", "placement.engines=1", "placement.device_mapping.engines='list(range(8))'"], "a list"),
    ],
)
def test_what_does_not_fit_together_is_refused(words, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load(None, words)


def test_a_cluster_that_does_not_answer_is_named_before_anything_is_written(tmp_path):
    home = tmp_path / "run"
    words = [f"output_dir={home}", "placement=ray", "placement.engines=1", "placement.address=127.0.0.1:9"]
    with pytest.raises(ConfigError, match=r"placement.address=127.0.0.1:9: no Ray cluster answers"):
        train(config_of(*words))
    assert not home.exists()


def test_without_ray_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'arborl\[ray\]'"):
        build(config_of("placement=ray", "placement.engines=1"))


def test_evaluate_runs_in_its_own_process_by_default(tmp_path):
    from arborl.training_run.measure import MeasureOptions, policies

    file = tmp_path / "run.yaml"
    file.write_text("placement: {name: ray, engines: 2}\n")
    assert policies([str(file)], MeasureOptions())[0].config.placement.name == "local"
    placement = policies([str(file)], MeasureOptions(["placement.engines=3"]))[0].config.placement
    assert (placement.name, placement.engines) == ("ray", 3)


def test_a_node_with_other_versions_is_refused_by_name():
    ours = versions()
    check_versions(ours, dict(ours), "engine 0")
    with pytest.raises(VersionMismatch, match=r"engine 0 .* has torch 1.0 \(driver"):
        check_versions(ours, ours | {"torch": "1.0"}, "engine 0 (process 7 on 10.0.0.2)")


def test_an_engine_of_the_cluster_is_saturated_when_every_replica_is_at_its_limit():
    from arborl.cluster.placement.ray_engine import EngineReplica, RayEngine
    from arborl.engines.remote.replicas import ReplicaPool

    replicas = [EngineReplica("engine 0", up=True, busy=2), EngineReplica("engine 1", up=True, busy=1)]
    engine = RayEngine.__new__(RayEngine)  # without a cluster
    engine.max_requests, engine.routes = 2, ReplicaPool(replicas, None, 1.0, "engine")
    assert not engine.is_saturated
    replicas[1].busy = 2
    assert engine.is_saturated


def test_gpus_are_counted_over_all_nodes_and_a_node_that_is_back_is_found_by_its_address():
    nodes = [ClusterNode("a", "10.0.0.1", 8, 2), ClusterNode("b", "10.0.0.2", 8, 2)]
    gpu = gpus_of(nodes)[3]
    assert (gpu.node.id, gpu.index) == ("b", 1)
    assert find_node(gpu, [nodes[0], ClusterNode("c", "10.0.0.2", 8, 2)]).id == "c"
    with pytest.raises(ReplicaUnavailable, match=r"10.0.0.2 with its GPU 1 is gone"):
        find_node(gpu, nodes[:1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["placement.engines=9"], r"requests 9 cores .* the cluster has 8 on 2 node"),
        (["placement.engines=1", "threads=5"], r"an engine runs on one node; .* 4, 4 cores"),
        (["placement.engines=2", "placement.device_mapping.engines=[0,2]"], r"names GPU 2, and the cluster has 2"),
        (["placement.reward_workers=1"], "only the reward env"),
    ],
)
def test_more_than_the_cluster_has_is_refused_before_anything_is_written(two_nodes, tmp_path, words, message):
    home = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        train(config_of(f"output_dir={home}", "model.device=auto", "placement=ray", *words))
    assert not home.exists()


# ------------------------------------------------------------------------------------------------ on two nodes


def test_a_process_sees_the_gpu_that_the_mapping_gives_it(two_nodes):
    class Looking(ClusterActor):  # the second node says that it has two
        async def devices(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    placement = config_of(
        "model.device=auto", "placement=ray", "placement.engines=2", "placement.device_mapping.engines=[1,0]"
    ).placement
    cluster = ray_cluster.RayCluster(placement)
    try:
        gpus = cluster.engine_gpus(None)
        actors = [cluster.start(Looking, gpu=gpu) for gpu in gpus]
        assert cluster.ray.get([actor.devices.remote() for actor in actors]) == ["1", "0"]
        info = cluster.ray.get(actors[0].info.remote())
        assert info.node == two_nodes.second.node_id
        assert info.versions == versions()
    finally:
        cluster.close()


def episodes_of(home):
    """Every training episode, without what clocks say."""
    found = []
    for file in sorted((home / "episodes").glob("step-*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            row.pop("seconds", None)
            for call in row.get("calls", ()):
                call.pop("seconds", None)
            found.append((file.name, row))
    return found


def weights_of(home):
    last = sorted((home / "checkpoints").glob("step-*"))[-1]
    return hashlib.sha256(next((last / "model").glob("*.safetensors")).read_bytes()).hexdigest()


def test_a_run_on_two_nodes_that_loses_an_engine_and_a_worker_is_the_run_in_one_process(
    two_nodes, tmp_path, monkeypatch, caplog
):
    from arborl.cluster.placement.ray_engine import RayEngine
    from arborl.cluster.placement.ray_environments import RayHolder

    ask, send, calls, killed = RayEngine._ask, RayHolder._send, [], []

    async def asking(self, replica, prompt, sampling, session):
        under_way = asyncio.ensure_future(ask(self, replica, prompt, sampling, session))
        calls.append(session)
        if len(calls) == 16:
            killed.append((replica.info.pid, {one.info.node for one in self.replicas}))
            os.kill(replica.info.pid, signal.SIGKILL)
        return await under_way

    def sending(self, packed):
        send(self, packed)
        if len(calls) > 30 and len(killed) == 1:
            killed.append(self)
            os.kill(int(self.name.split("process ")[1].split()[0]), signal.SIGKILL)

    monkeypatch.setattr(RayEngine, "_ask", asking)
    monkeypatch.setattr(RayHolder, "_send", sending)
    train(config_of(f"output_dir={tmp_path / 'local'}"))
    train(config_of(f"output_dir={tmp_path / 'ray'}", *PLACED))
    assert len(killed) == 2
    assert len(killed[0][1]) == 2, "the engines were on one node"
    local, placed = episodes_of(tmp_path / "local"), episodes_of(tmp_path / "ray")
    assert len(placed) == 24
    assert placed == local  # bit for bit, and so nothing is there twice
    assert weights_of(tmp_path / "ray") == weights_of(tmp_path / "local")
    rows = [row for row in read_metrics(tmp_path / "ray" / "metrics.jsonl") if "time/step" in row]
    assert sum(row["engine/lost"] for row in rows) == 1
    assert sum(row["engine/retried"] for row in rows) >= 1
    assert sum(row["engine/seconds_lost"] for row in rows) > 0
    assert sum(row["rollout/processes_replaced"] for row in rows) == 1
    assert sum(row["rollout/seconds_lost"] for row in rows) > 0
    assert sum(row["rollout/processes_hung"] for row in rows) == 0
    assert f"process {killed[0][0]}" in caplog.text  # the log names the lost process
    assert killed[1].name in caplog.text
    assert "Processes were lost and replaced: 1 × engine, " in caplog.text  # and what it cost
    assert "processes were lost and replaced" in (tmp_path / "ray" / "report.html").read_text().lower()


def test_after_kill_9_a_run_whose_engine_was_killed_too_is_the_run_in_one_process(two_nodes, tmp_path):
    small = [word for word in SMALL if not word.startswith("trainer.steps")] + [
        "trainer.steps=4", "trainer.save_every=1", "trainer.keep=9",
    ]  # fmt: skip
    faults, home = tmp_path / "faults.yaml", tmp_path / "ray"
    faults.write_text("- {part: engine, kind: die, at: {step: 2}, once: true}\n")
    words = ["-m", "arborl", "train", *small, *PLACED, f"placement.address={two_nodes.address}", f"output_dir={home}"]
    words += ["--faults", str(faults), "--resume", "auto"]
    victim, deadline = Forked(words), time.monotonic() + 200
    while len(list((home / "checkpoints").glob("step-*/MANIFEST*"))) < 3:
        assert time.monotonic() < deadline
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert not (home / "summary.json").exists()
    code, output = forked(*words)
    assert code == 0, output
    train(load(None, [*small, f"output_dir={tmp_path / 'local'}"]))
    assert episodes_of(home) == episodes_of(tmp_path / "local")
    assert weights_of(home) == weights_of(tmp_path / "local")
    summary = json.loads((home / "summary.json").read_text())
    assert summary["accounting"] == json.loads((tmp_path / "local" / "summary.json").read_text())["accounting"]
    assert summary["accounting"]["started"] == 48
    assert summary["faults"] == {"faults/engine/die": 1}
    assert sum(row.get("engine/lost", 0) for row in read_metrics(home / "metrics.jsonl")) == 1


@pytest.mark.slow
def test_an_engine_in_the_place_of_a_dead_one_has_the_newest_weights_before_its_first_request(two_nodes, monkeypatch):
    from arborl.engines.remote import replicas

    monkeypatch.setattr(replicas, "RETRY_SECONDS", 0.05)
    parts = build(config_of("placement=ray", "placement.engines=1"))
    engine, how = parts.engine, Sampling(max_tokens=4, temperature=0.0)

    async def run():
        before = await engine.generate([1, 2, 3, 5, 8], how, session="a")
        moved = {name: tensor + 0.02 * (tensor.ndim == 1) for name, tensor in parts.model.state_dict().items()}
        await engine.load(moved, 7)
        there = await engine.generate([1, 2, 3, 5, 8], how, session="a")
        os.kill(engine.replicas[0].info.pid, signal.SIGKILL)
        again = await engine.generate([1, 2, 3, 5, 8], how, session="a")
        await parts.close()
        return before, there, again

    before, there, again = asyncio.run(run())
    assert (before.version, there.version, again.version) == (0, 7, 7)
    assert (again.tokens, again.logprobs) == (there.tokens, there.logprobs)
    assert again.logprobs != before.logprobs


def run_rewarded(tmp_path, reward, **more):
    """A step with scripted replies, whose rewards are on the cluster."""
    import arborl

    settings = dict(word.split("=", 1) for word in SMALL if not word.startswith(("env", "track")))
    settings = {key: json.loads(value) if value[0].isdigit() else value for key, value in settings.items()}
    settings |= {"trainer.steps": 1, "deterministic": True, "output_dir": tmp_path / "run", "engine": "scripted"}
    return arborl.run(**settings, rewards=[reward], placement="ray", **more, **{"track.tensorboard": False})


@pytest.mark.slow
def test_a_reward_worker_that_is_killed_costs_time_and_no_episode(two_nodes, tmp_path):
    import arborl
    from arborl.rollout.episode_store import EpisodeStore

    once, later = tmp_path / "once", tmp_path / "later"

    @arborl.reward
    def deadly(episode):
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with later.open("a") as scored:  # by whom it was scored
            scored.write(f"{episode.id} {os.getpid()}\n")
        return 1.0 if int(episode.id[-1]) else 0.0

    done = run_rewarded(tmp_path, deadly, **{"placement.reward_workers": 1})
    episodes = list(EpisodeStore.read(done.folder / "episodes" / "step-000001.jsonl"))
    assert len({one.id for one in episodes}) == len(episodes) == 12
    assert all(one.failure is None and "deadly" in one.rewards for one in episodes)
    scored = [line.split()[0] for line in later.read_text().splitlines()]
    assert {one.id for one in episodes} <= set(scored)
    row = next(row for row in read_metrics(done.folder / "metrics.jsonl") if "time/step" in row)
    assert row["rewards/lost"] == 1
    assert row["rewards/seconds_lost"] > 0
    log = (done.folder / "run.log").read_text()
    assert "a reward worker is lost and will be retried" in log
    assert "reward worker 0 answers again after" in log
    assert "1 × reward worker, " in log


def test_a_reward_on_the_cluster_that_breaks_costs_itself_and_is_named(two_nodes, tmp_path):
    import arborl
    from arborl.rollout.episode_store import EpisodeStore

    @arborl.reward
    def brittle(episode):
        if int(episode.id[-1]) == 1:
            raise ArithmeticError(f"in process {os.getpid()}")
        return {"pid": 1.0 / os.getpid()}

    done = run_rewarded(tmp_path, brittle, **{"placement.reward_workers": 1})
    episodes = list(EpisodeStore.read(done.folder / "episodes" / "step-000001.jsonl"))
    failed = [one for one in episodes if one.failure is not None]
    assert len(failed) == 3
    assert all(one.failure.where == "reward 'brittle'" and "ArithmeticError" in one.failure.kind for one in failed)
    pids = {round(1 / one.rewards["brittle/pid"]) for one in episodes if one.failure is None}
    assert len(pids) == 1
    assert os.getpid() not in pids


@pytest.mark.slow
def test_plain_rewards_on_one_worker_wait_at_the_same_time_and_one_that_hangs_is_named(two_nodes, tmp_path):
    import arborl
    from arborl.rollout.episode_store import EpisodeStore

    calls = tmp_path / "calls"
    calls.mkdir()

    @arborl.reward
    def judge(episode):
        (calls / f"{episode.task.id}-{episode.id[-1]}".replace("/", "-")).touch()
        until = time.monotonic() + 120
        while len(list(calls.iterdir())) < 12 and time.monotonic() < until:
            time.sleep(0.02)
        if int(episode.id[-1]) == 1:
            time.sleep(600)
        return 1.0

    done = run_rewarded(tmp_path, judge, **{"placement.reward_workers": 1, "rollout.step_seconds": 25})
    episodes = list(EpisodeStore.read(done.folder / "episodes" / "step-000001.jsonl"))
    failures = [str(one.failure) for one in episodes if one.failure is not None]
    assert failures == ["reward 'judge': timeout: took longer than 25 s"] * 3
    assert [one.reward for one in episodes if one.failure is None] == [1.0] * 9
