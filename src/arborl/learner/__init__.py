"""The learner: token trees and terms in, optimizer steps out. It is independent of the algorithm, which gives the loss.

In reading order:

    core/           The learner of one process: packing, forward pass, optimizer, checkpoints, memory plan
    attention/      Attention over trees, fused layers, and the choice of execution path
    distributed/    Several ranks: rendezvous, strategies, launch
"""
