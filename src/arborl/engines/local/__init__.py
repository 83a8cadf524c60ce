"""The local engine: batched sampling in this process with the learner's weights.

local_engine.py       `LocalEngine`: requests in, batched steps, completions out
scheduler.py          Which requests run and which wait; the batch as columns
block_pool.py         Allocation of KV-cache blocks and the prefix cache
kv_cache.py           Keys and values in blocks, and attention over them with torch
sleepable_memory.py   GPU memory that is freed in sleep mode and mapped again at the same address
sampler.py            Drawing tokens by seed and position
fused_forward.py      Forward pass of Llama and related models with fused projections
model_runner.py       `ModelRunner`, the interface of one step on a device, and the torch implementation
runner_selection.py   Selects the fastest model runner whose results match the library's
cpu_runner.py         Steps on a CPU by compiled C code (`sampling_step.c`)
cuda_graph_runner.py  Steps on a GPU: Triton kernels in CUDA graphs
step_buffers.py       Memory layout of the inputs and outputs of a GPU step
shared_prefix.py      Groups of rows whose attention reads a shared prefix once
engine_kernels.py     Triton kernels of a GPU step: norms, rotary embedding, attention, sampling
"""

from arborl.engines.local.local_engine import LocalEngine

__all__ = ["LocalEngine"]
