"""What is no model that can be trained is refused in one sentence, with exit code 2 and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_families import made
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from arborl.cli.main import app
from arborl.models.model_files import SEEDLING_DIR

SIZES = {"vocab_size": 2048, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SIZES, "intermediate_size": 16, "tie_word_embeddings": False}


def with_tokenizer(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SEEDLING_DIR / name, folder)
    return folder


def changed(folder: Path, **more: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def config_alone(folder: Path) -> None:
    LlamaConfig(**LLAMA).save_pretrained(folder)


def corrupt(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")


def cut_short(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_head(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def of_another_size(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    changed(folder, intermediate_size=24)


def t5(folder: Path) -> None:
    config = T5Config(vocab_size=2048, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def t5_that_says_nothing(folder: Path) -> None:
    t5(folder)
    changed(folder, architectures=None)


def mamba(folder: Path) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=2048, hidden_size=16, num_hidden_layers=2, state_size=4)).save_pretrained(
        folder
    )


def classifier(folder: Path) -> None:
    GPT2ForSequenceClassification(GPT2Config(vocab_size=2048, n_embd=16, n_layer=1, n_head=2)).save_pretrained(folder)


def quantised(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    changed(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def remote_code(folder: Path) -> None:
    config_alone(folder)
    changed(folder, model_type="wonder", architectures=["WonderForCausalLM"], auto_map={"AutoConfig": "wonder.Wonder"})


def unheard_of(folder: Path) -> None:
    config_alone(folder)
    changed(folder, model_type="wonder", architectures=["WonderForCausalLM"])


def alibi(folder: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=16, n_layer=2, n_head=2)).save_pretrained(folder)


def scaled_logits(folder: Path) -> None:
    GraniteForCausalLM(GraniteConfig(**LLAMA, logits_scaling=8.0)).save_pretrained(folder)


def short_positions(folder: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_embd=16, n_layer=1, n_head=2, n_positions=256)).save_pretrained(
        folder
    )


def stretched_positions(folder: Path) -> None:
    config_alone(folder)
    changed(
        folder, original_max_position_embeddings=512, max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    )  # fmt: skip


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def sinks(folder: Path) -> None:
    made(
        "GptOss",
        vocab_size=2048,
        max_position_embeddings=131072,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )().save_pretrained(folder)


def linear_layers(folder: Path) -> None:
    config_alone(folder)
    changed(folder, layer_types=["linear_attention", "full_attention"])


ODD = {
    config_alone: "weights cannot be read",
    corrupt: "weights cannot be read",
    cut_short: "weights cannot be read",
    without_head: "lm_head.weight",
    of_another_size: "mismatched",
    t5: "T5ForConditionalGeneration is no causal language model",
    t5_that_says_nothing: "'t5'",
    mamba: "MambaForCausalLM cannot run over token trees",
    classifier: "GPT2ForSequenceClassification is no causal language model",
    quantised: "quantised (gptq)",
    remote_code: "needs code that comes with it, which is never run",
    unheard_of: "'wonder'",
    alibi: "BloomForCausalLM cannot run over token trees",
    scaled_logits: "GraniteForCausalLM over a token tree differ by",
    short_positions: "reads 256 tokens at most. Write sampling.max_context=256",
    stretched_positions: "past 512 tokens",
    not_json: "config.json: not valid JSON",
    sinks: "s_aux",
    linear_layers: "linear_attention",
}


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_an_odd_folder_is_one_sentence(make, tmp_path, monkeypatch):
    torch.manual_seed(0)
    make(with_tokenizer(tmp_path / "odd"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert_refused(["train", "model=../odd", "model.device=cpu"], ODD[make])
    assert not list((tmp_path / "here").iterdir())


def assert_refused(words: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, (done.output, done.exception)
    assert complaint in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_a_folder_without_tokenizer_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").mkdir()
    config_alone(tmp_path / "odd")
    assert_refused(["train", "model=odd"], "no tokenizer.json")


def test_a_tokenizer_of_another_model_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = with_tokenizer(tmp_path / "odd")
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 100})).save_pretrained(folder)
    assert_refused(["train", "model=odd", "model.device=cpu"], "and the model knows 100")


@pytest.mark.parametrize("name", ["gpt2", "someone/something", "seedlng"])
def test_a_hub_id_with_or_without_owner_is_looked_up_and_a_missing_network_is_reported(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(["train", f"model={name}"], "the Hugging Face hub cannot be reached")
