"""Runs on several hosts: parts of a run on a Ray cluster, clusters started over ssh, and the planner.

Not imported with `placement=local`.

    placement/  Engines, environments, rewards and learner ranks as Ray actors
    launcher/   `arborl cluster`: a Ray cluster on hosts that ssh reaches
    planner/    `arborl plan`: memory and step time on devices that are not here
"""
