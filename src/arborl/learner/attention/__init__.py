"""Attention over trees and the layers around it, with several implementations of the same computation.

In reading order:

    path_selection.py    Execution paths, their check, and their selection
    tree_attention.py    Causal, dense and block attention with torch
    kernel_attention.py  Attention with Triton kernels, as differentiable torch operations
    tree_plan.py         Which blocks of keys each block of queries attends to
    tree_kernels.py      The Triton kernels of tree attention
    cpu_kernels.py       Attention and layers in C, for float32 on a CPU
    fused_layers.py      Fused layers as differentiable torch operations
    layer_kernels.py     The Triton kernels of the fused layers
"""
