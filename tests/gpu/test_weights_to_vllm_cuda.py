"""Weights of a learner on a GPU, read there by the process of `engine=vllm` (with a stand-in for vLLM)."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch
from vllm_stand_in import check_weights, stand_in_for_vllm

from arborl.engines.remote.vllm_engine import VllmEngine
from arborl.errors import EngineError
from arborl.models.model_loading import load_model, resolve

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_read_on_the_gpu_after_every_update(tmp_path, dtype):
    with stand_in_for_vllm(tmp_path) as file:
        model = load_model(resolve("seedling"), dtype, device="cuda")
        engine = VllmEngine(model, 128, 8, python=sys.executable)
        try:
            assert engine.gpu == str(torch.cuda.get_device_properties(0).uuid)
            for version in range(1, 4):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
                with pytest.raises(EngineError, match="vLLM does not match the learner's model"):
                    asyncio.run(engine.load(model.state_dict(), version))
                check_weights(file, model, "cuda")
        finally:
            asyncio.run(engine.close())


def test_a_process_that_does_not_see_the_gpu_gets_weights_through_host_memory(tmp_path, monkeypatch):
    with stand_in_for_vllm(tmp_path) as file:
        model = load_model(resolve("seedling"), "float32", device="cuda")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the new process; CUDA is initialized in this one
        engine = VllmEngine(model, 128, 8, python=sys.executable)
        try:
            assert engine.gpu is None
            with pytest.raises(EngineError, match="vLLM does not match"):
                asyncio.run(engine.load(model.state_dict(), 1))
            check_weights(file, model, "cpu")
        finally:
            asyncio.run(engine.close())
