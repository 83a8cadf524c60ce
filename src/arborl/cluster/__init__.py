"""Parts of a run on a Ray cluster, behind the protocols they have elsewhere. It knows no algorithm and no agent.

Nothing here is imported where `placement=local`. In reading order:

    connection.py    The cluster: joined, or started and stopped; what is asked of it is compared with what it has
    host.py          What every process on the cluster has in common: its name, its versions
    seats.py         Which GPU of which node is whose
    arrays.py        Weights as plain arrays, which the object store shares between processes without a copy
    engine.py        Engines on the cluster, behind `Engine`
    engine_host.py   The other side of it: the process that samples
    environments.py  Environments on the cluster, behind `Env`
    rewards.py       Rewards on the cluster, behind `Reward`
    from_config.py   What a configuration places on a cluster
"""
