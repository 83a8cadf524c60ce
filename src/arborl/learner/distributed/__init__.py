"""A learner on several ranks.

In reading order:

    launch.py            Creates the learner of a run and starts its ranks
    learner_group.py     The learner of rank 0, which divides batches and calls all ranks
    rank_worker.py       What each rank runs
    rank_process.py      A rank as a process
    rank_group.py        Collective operations; network interface and authentication of connections
    rendezvous.py        How ranks find each other; heartbeats
    run_store.py         The authenticated key-value store of the ranks
    strategy.py          How weights and state are distributed: the interface
    sharding.py          Fully sharded and tensor-parallel strategies, DeepSpeed's ZeRO
"""
