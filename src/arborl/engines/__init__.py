"""Engines: token ids in, sampled ids and their log-probabilities out. They never see a message.

In reading order:

    engine.py         What an engine is: token ids in, sampled ids and their log-probabilities out
    local.py          Sampling in this process, with the learner's own weights: no second copy, nothing to send
    scheduler.py      Who is sampled and who waits
    rows.py           The requests being sampled, as columns: a step then costs no loop over requests
    pages.py          Which page of the cache holds which tokens: a prefix tree over pages, shared by reference
    checks.py         What an engine refuses at its door
    draw_tokens.py    Drawing tokens
    executor.py       Running one step on a device: new tokens in, one sampled token out for each row that asked for one
    executors.py      Which executor a model has on its device
    executor_check.py Whether an executor computes what the library computes
    cache.py          Keys and values of what has been read
    cache_size.py     How many tokens of them, where nobody has said
    lent_memory.py    Memory of a GPU that can be given back and taken again at the same address
    forward.py        The forward pass for sampling
    cpu_step.py       Running steps on a CPU with `sampling_step.c`
    thread_team.py    Threads that run the parts of one job at the same time
    cuda_graphs.py    Running steps on a GPU
    sent.py           What a step on a GPU is sent and gives back
    kernels.py        What happens between the matrix products of a sampling step on a GPU
    token_kernels.py  Tokens into a sampling step and out of it on a GPU
    shared_prefix.py  Rows that share the beginning of their context
    vllm.py           Sampling by vLLM, in a process of its own with its own copy of the weights
    vllm_process.py   The process that vLLM runs in; what runs there, in `vllm_side`, needs vLLM and no arborl
    http/             Sampling by servers that run already
    copies.py         What engines with a copy of the weights are sent, and how it is known to have arrived
    shared_memory.py  Weights on their way to a process of this machine
    padded_heads.py   The same model with larger attention heads, for kernels that lack its own
    replicas.py       Several places that answer the same: which a request goes to, and what happens when one goes
    absent.py         No engine: for runs that learn from given rows
    scripted.py       Fixed replies, for stub mode and tests: the whole loop without a model
"""

from arborl.engines.engine import Engine, Weights
from arborl.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "local": "arborl.engines.local:LocalEngine",
        "vllm": "arborl.engines.vllm:VllmEngine",
        "http": "arborl.engines.http:HttpEngine",
        "none": "arborl.engines.absent:NoEngine",
        "scripted": "arborl.engines.scripted:ScriptedEngine",
    },
)

__all__ = ["ENGINES", "Engine", "Weights"]
