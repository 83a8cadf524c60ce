"""A process without the run's secret is no rank: it is sent nothing, and nothing that it sends is unpickled."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from learner_fakes import SAMPLING, Fake
from other_user import as_other_user, reached, second_address, why_not
from worlds import Copies, body, world

from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError, LearnerRankLost
from arborl.learner.distributed import rank_group
from arborl.learner.distributed.learner_group import LearnerGroup
from arborl.learner.distributed.rank_worker import LearnerSpec
from arborl.learner.distributed.rendezvous import Rendezvous

CONFIG = LearnerConfig(lr=0.01)
NEEDS = Fake("value").needs


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def impostor(address: str, mark: str, ready) -> None:
    """A process outside the run that connects to torch's store and claims to be rank 1."""
    ready.set()
    host, _, port = address.rpartition(":")
    with suppress(Exception):
        store = dist.TCPStore(host, int(port), 2, is_master=False, wait_for_workers=False)
        hello = bytes(store.get("hello/0"))
        store.set("hello/1", hello)
        dist.init_process_group("gloo", store=dist.PrefixStore("lines", store), rank=1, world_size=2)
        dist.scatter_object_list([None], None, src=0)
        while True:
            dist.all_gather_object([None, None], Evil(Path(mark)))


class Nothing:
    """Starts no rank."""

    def lost(self) -> dict[int, str]:
        return {}

    def stop(self) -> None:
        pass


def test_a_process_that_claims_to_be_a_rank_gets_no_pickle_and_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr("arborl.learner.distributed.rendezvous.START_TIMEOUT", 6.0)
    rendezvous, info = Rendezvous.create(2, "127.0.0.1")
    mark = tmp_path / "ran"
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=impostor, args=(info.address, str(mark), ready), daemon=True)
    process.start()
    assert ready.wait(300)
    try:
        spec = LearnerSpec(CONFIG.model_copy(update={"strategy": "ddp", "ranks": 2}), SAMPLING, NEEDS, 0, 0, body)
        with pytest.raises((ConfigError, LearnerRankLost), match="rank 1 did not join"):
            LearnerGroup(rendezvous, spec, body(), Nothing())
    finally:
        process.kill()
        process.join()
    assert not mark.exists()
    assert pickle.loads(pickle.dumps(Evil(mark))) is None  # it would have
    assert mark.exists()


def test_a_line_whose_other_end_cannot_prove_itself_is_refused_before_anything_is_sent_over_it(monkeypatch):
    """As after an earlier connection by a process outside the run."""
    truth = rank_group.proof
    monkeypatch.setattr(rank_group, "proof", lambda session, *which: truth(session + "x", *which))
    rendezvous, info = Rendezvous.create(2)
    spec = LearnerSpec(CONFIG.model_copy(update={"strategy": "ddp", "ranks": 2}), SAMPLING, NEEDS, 0, 0, body)
    with pytest.raises((ConfigError, LearnerRankLost), match="did not prove that it belongs to this run"):
        LearnerGroup(rendezvous, spec, body(), Copies(2, info))


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_of_one_host_are_reached_from_no_other_address_and_by_no_other_user(tmp_path):
    mine = psutil.Process()

    def listening() -> set[tuple[str, int]]:
        tree = [mine, *mine.children(recursive=True)]
        return {
            (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)
            for each in tree
            for one in each.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }

    before = listening()
    with world("fsdp2", 2, body(), NEEDS, CONFIG) as group, second_address() as (here, there):
        opened = listening() - before
        assert {address for address, _ in opened} <= {"127.0.0.1"}
        assert reached(here, sorted(port for _, port in opened), there) == []
        words = [" ".join(psutil.Process(one.pid).cmdline()) for one in group.launcher.all.values()]
        assert words
        folder = Path(group.rendezvous.store.info.address.removeprefix("unix:")).parent
        looked = as_other_user("-I", "-S", "-c", f"import os; print(os.listdir({str(folder)!r}))")
        assert "PermissionError" in looked.stderr


def test_the_secret_of_a_run_is_on_no_command_line(monkeypatch):
    from arborl.learner.distributed.launch import RankProcesses
    from arborl.learner.distributed.run_store import JoinInfo

    started = []

    class Started:
        def __init__(self, words, env, **_):
            started.append((words, env))

    monkeypatch.setattr(subprocess, "Popen", Started)
    RankProcesses(3, JoinInfo("unix:/nowhere/store", "the secret"), "cpu")
    assert len(started) == 2
    assert all("the secret" not in " ".join(words) for words, _ in started)
    assert all(env["ARBORL_RANKS_SECRET"] == "the secret" for _, env in started)
