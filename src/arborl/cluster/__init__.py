"""Parts of a run on a Ray cluster, behind the protocols they have elsewhere, and what a run would take on devices that
are not here. It knows no algorithm and no agent.

Nothing here is imported where `placement=local`. In reading order:

    connection.py       The cluster: joined, or started and stopped; what is asked of it is compared with what it has
    own_cluster.py      One that is started: on the loopback interface, with a token and a folder of its own
    host.py             What every process on the cluster has in common: its name, its versions
    pulse.py            Signs of life of these processes: one that gives none is ended
    seats.py            Which GPU of which node is whose
    arrays.py           Weights as plain arrays, which the object store shares between processes without a copy
    engine.py           Engines on the cluster, behind `Engine`
    engine_host.py      The other side of it: the process that samples
    environments.py     Environments on the cluster, behind `Env`
    rewards.py          Rewards on the cluster, behind `Reward`
    ranks.py            Further ranks of the learner on the cluster, behind `Launcher`
    from_config.py      What a configuration places on a cluster
    spec.py             The file of a cluster that is started over ssh: hosts, environment, ports
    ssh.py              Hosts over the system's ssh: a request in, an answer out
    on_host/            The other side of it: what is sent to a host and runs there
    fleet.py            Such a cluster: set up, looked at, brought back, removed
    jobs.py             Its jobs and its logs
    plan.py             Ways to place a run on N devices, each with memory, step time, utilisation and staleness
    plan_work.py        What is to be done a step: lengths, turns and tool latencies, given or of an earlier run
    plan_model.py       A model's sizes from its name or its config.json
    plan_memory.py      Memory by part and rank, by the learner's own forecast
    plan_times.py       How long a sampling step, an update and new weights take on a device
    simulate.py         Episodes, engines, tools and a learner as events on one clock
    simulate_engine.py  What is simulated, and one engine of it
    hardware.py         Devices: memory, bandwidth, arithmetic, links
"""
