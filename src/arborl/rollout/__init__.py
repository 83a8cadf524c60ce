"""Rollout: agents run episodes of tasks, and every token id that the model reads or writes is recorded.

It computes neither rewards nor gradients.

    runner.py            Runs episodes concurrently: admission, agents, environments, metrics
    part_factories.py    Factories of agents and environments; parts and overrides of each data source
    groups.py            Groups of a batch: redundancy, timeout, filter, spare tasks
    accounting.py        Every started training episode: trained, dropped for a reason, or pending
    pipeline.py          Batches sampled ahead of their updates, within a bound on staleness
    recorder.py          The model and the environment that an agent sees; both record the episode
    deadlines.py         Calls under a deadline, and a watchdog for code that blocks the event loop
    env_workers.py       Where environments run: event loop, threads or processes
    env_threads.py       Environments in threads
    env_processes.py     Environments in processes that can be killed
    token_trees.py       Token trees of groups, terms of the loss, downsampling of branches
    episode_store.py     Episode files, recordings and their replay
    term_store.py        The terms file: one row for each sampled token of an update
    offline_episodes.py  Episodes of offline data: transcripts, preference pairs, labels
"""
