"""The learner: token trees and terms in, one optimiser step out. It knows no algorithm, only its needs and its loss.

In reading order:

    learner.py             Optimiser steps from trees and terms
    precompute.py          What policy, reference, critic and teacher say about a batch, without gradient
    packing.py             Trees are laid end to end into micro-batches of bounded size; each term keeps its context
    micro_batches.py       Micro-batches that fit into memory: where they do not, everything again on smaller ones
    memory.py              How much of a device's memory a run will take, and settings with which it fits
    forecast.py            The arithmetic of it, which needs a model's sizes and no torch
    score.py               Run the model once over a micro-batch of trees and read off what it says about every term
    apart.py               Asking once more, tree by tree and episode by episode, where an answer is not a number
    attention_choice.py    Which way to run a model: the quickest that has been shown to be right
    executor.py            Ways to run a model over a micro-batch
    tree_attention.py      Attention over trees: token q sees token k exactly when k <= q < end[k]
    kernel_attention.py    Attention over trees by kernels of our own
    compiled_attention.py  Attention over trees on a CPU by `tree_attention.c`
    tree_plan.py           Which blocks of keys each block of queries must look at
    tree_kernels.py        Attention over trees as three Triton kernels
    fused_layers.py        Layers as they are, without torch's compiler
    layer_kernels.py       What happens between the matrix products of an update, as a few fused Triton kernels
    compiled_layers.py     The same on a CPU by `update_layers.c`
    upload.py              Arrays of the host on their way to the device that computes with them
    teacher.py             Whom a policy is distilled from
    critic.py              The critic: what the state a token was sampled in is worth
    optimizer.py           Gradients become weights
    offload.py             What a GPU need not hold all the time, in the host's memory
    schedule.py            What the learning rates are multiplied by, step by step
    loss_scale.py          What the loss of a float16 model is multiplied by
    trust_region.py        TRPO's step
    files.py               A learner on disk: the policy as a model anyone can load, and what is needed to go on
    optimizer_file.py      `optimizer.pt` of a checkpoint, refused in one line where it is foreign
    host_copy.py           A copy of tensors in the host's memory, made at one moment
    peers.py               Several processes, each with its own trees: sums over all of them
    strategy.py            How a learner's weights, gradients and optimiser lie in one process or in several
    scorer.py              A model and its critic as one module, which whoever shards models can hook into
    fsdp2.py               Every rank holds a part of each weight, its gradient and its moments
    tensor_parallel.py     Every rank holds some heads and some columns of each layer
    zero.py                DeepSpeed's ZeRO
    strategies.py          The strategies by name
    balance.py             Which rank runs which trees
    blueprint.py           What every rank makes its learner of
    run_store.py           The key-value store of the ranks, open to holders of the run's secret alone
    launched_secret.py     How processes that torchrun or Accelerate have started come to share a secret
    rank_connections.py    The connections between ranks: which network they use, and who is at the other end
    rendezvous.py          How ranks find each other, and notice when one is gone
    group.py               A learner in several processes that looks like one
    rank_worker.py         What every rank of such a group does
    launch.py              From a configuration to a learner, with its ranks
    rank.py                A rank other than the first as a process of its own
    sharded_files.py       A sharded learner on disk
    pairs.py               A reward model learns from pairs, by Bradley and Terry's model
    term_log.py            What an update made of each term
    update_metrics.py      Between the columns of `Terms` and numbers worth logging
"""
