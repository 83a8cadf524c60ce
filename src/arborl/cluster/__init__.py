"""The cluster: what a run would take and how long it would take on devices that are not here. It starts nothing.

In reading order:

    plan.py             Ways to place a run on N devices, each with memory, step time, utilisation and staleness
    plan_work.py        What is to be done a step: lengths, turns and tool latencies, given or of an earlier run
    plan_model.py       A model's sizes from its name or its config.json
    plan_memory.py      Memory by part and rank, by the learner's own forecast
    plan_times.py       How long a sampling step, an update and new weights take on a device
    simulate.py         Episodes, engines, tools and a learner as events on one clock
    simulate_engine.py  What is simulated, and one engine of it
    hardware.py         Devices: memory, bandwidth, arithmetic, links
"""
