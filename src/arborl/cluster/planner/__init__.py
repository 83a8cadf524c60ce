"""`arborl plan`: memory, step time, utilisation and staleness of a run on 1 to 4,096 devices. Needs no torch.

hardware.py      Devices, and the time of a sampling step, an update and a weight transfer on them
model_shape.py   Parameter counts of a model, from its name or its `config.json`
rank_memory.py   Memory of a learner's rank and of an engine, by part
workload.py      Lengths, turns and tool latencies of episodes: from options or from an earlier run
step_time.py     Duration of a step, in closed form
run_planner.py   Synchronous and asynchronous placements of a run on N devices
"""
