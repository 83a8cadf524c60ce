"""The process of `engine=vllm`, with a stand-in for vLLM: what happens when it breaks, lies or dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from vllm_stand_in import check_weights, stand_in_for_vllm

from arborl.engines.remote.vllm_engine import VllmEngine
from arborl.errors import EngineError
from arborl.types import Sampling


@pytest.fixture(scope="module", autouse=True)
def loaded_weights(tmp_path_factory):
    with stand_in_for_vllm(tmp_path_factory.mktemp("stand-in")) as file:
        yield file


@pytest.fixture
def engine(seedling):
    made = VllmEngine(seedling[0], 128, 8, python=sys.executable)
    made.loaded, made.version = True, 0
    yield made
    asyncio.run(made.close())


def labelled(engine):
    """Loads weights and their label without the check of an update."""
    return engine.process.call("load", 5, version=f"{engine.run}:0")


def test_weights_go_through_host_memory_and_wrong_samples_are_noticed_after_the_update(
    engine, seedling, loaded_weights
):
    assert engine.gpu is None
    engine.heads = None  # as on a GPU: the weights are sent without padding
    with pytest.raises(EngineError, match="vLLM does not match the learner's model"):
        asyncio.run(engine.load(seedling[0].state_dict(), 1))
    check_weights(loaded_weights, seedling[0], "cpu")


def test_what_was_sampled_from_weights_that_are_not_ours_is_refused(engine):
    with pytest.raises(EngineError, match="weights of another run"):
        asyncio.run(engine.generate([1], Sampling(3), session="a"))


def test_waiting_and_later_requests_fail_when_the_process_dies(engine):
    async def run():
        await labelled(engine)
        waiting = asyncio.create_task(engine.generate([1], Sampling(100), session="a"))
        dying = asyncio.create_task(engine.generate([9], Sampling(3), session="b"))
        first = await asyncio.gather(waiting, dying, return_exceptions=True)
        with pytest.raises(EngineError, match="exit code 3"):
            await engine.generate([1], Sampling(3), session="c")
        return first

    for error in asyncio.run(run()):
        assert "exit code 3" in str(error)
        assert "out of everything" in str(error)


def test_cancellation_ends_only_its_own_request(engine):
    async def run():
        await labelled(engine)
        long = [asyncio.create_task(engine.generate([1], Sampling(100), session=str(i))) for i in range(2)]
        await asyncio.sleep(0.05)
        long[0].cancel()
        done = await asyncio.gather(*long, return_exceptions=True)
        return done, dict(engine.process.pending)

    (gone, there), waiting = asyncio.run(run())
    assert isinstance(gone, asyncio.CancelledError)
    assert len(there.tokens) == 100
    assert waiting == {}


def test_a_deadline_ends_a_completion_with_what_there_is(engine):
    async def run():
        await labelled(engine)
        return await engine.generate([1], Sampling(100, seconds=0.1), session="a")

    done = asyncio.run(run())
    assert 0 < len(done.tokens) < 100
    assert done.finish == "abort"


def test_a_model_that_vllm_does_not_know_is_one_message(seedling):
    with pytest.raises(EngineError, match=r"\['SeedlingForCausalLM'\] are not supported"):
        VllmEngine(seedling[0], 128, 13, python=sys.executable)


def test_an_interpreter_that_is_not_there_is_one_message(seedling):
    with pytest.raises(EngineError, match="/no/such/python cannot be started: No such file"):
        VllmEngine(seedling[0], 128, python="/no/such/python")


def test_closing_ends_the_process_and_leaves_no_files(seedling):
    """Nor what vLLM itself has put into shared memory, and forgets when its own processes are ended."""
    made = VllmEngine(seedling[0], 128, 8, python=sys.executable)
    memory, folder, pid, shared = made.memory.path, made.folder, made.process.child.pid, Path("/dev/shm")
    assert list(shared.glob("stand-in-*")) or not shared.exists()
    asyncio.run(made.close())
    assert not memory.exists()
    assert not folder.exists()
    assert not list(shared.glob("stand-in-*"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
