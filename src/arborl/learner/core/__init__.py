"""The learner of one process.

In reading order:

    interface.py         The interface that `Learner` and `LearnerGroup` share
    learner.py           Scores terms and takes optimizer steps
    packing.py           Packs trees into micro-batches of bounded size
    tree_forward.py      Log-probability, entropy and value of every term; the critic; micro-batches that fit
    update_metrics.py    Columns as tensors, metrics of an update, per-token log
    optimizer.py         AdamW, master weights, loss scaling, learning-rate schedule
    trust_region.py      TRPO's step
    teacher.py           The teacher of on-policy distillation
    offload.py           Offloaded state, and copies for checkpoints, in host memory
    checkpoint_files.py  Checkpoint files, of one process or sharded
    memory_forecast.py   Forecast of GPU memory, and settings that fit; needs no torch
    memory_plan.py       The memory plan of a run
    pairwise.py          Trains a reward model on preference pairs
"""
