"""Rollout: agents play tasks, and what crossed the line between program and model is kept, token by token.

Never computes rewards or gradients.

In reading order:

    runner.py        Episodes are played concurrently
    part_maker.py    Makers of the agents and environments of a run
    groups.py        Groups: which episodes are played for a batch, which of them count, and which groups are kept
    pipeline.py      Groups are played ahead of the updates that train on them, within a bound on how old a token may be
    filters.py       Which groups are worth training on: functions of a scored group
    slots.py         How many episodes are in play: as many as was said, or as many as the engine can serve
    recorder.py      What an agent holds in its hands: a model and an environment that write down everything that passes
    rivals.py        What else the model might have said: the likeliest tokens beside each one that was sampled
    call_order.py    Which call of an episode is which, when several are asked at once: their chance and their order
    deadlines.py     Calls that cross the border to somebody else's code: an environment, an engine
    watchdog.py      Says who holds the event loop while they do: from inside the loop nobody could
    workers.py       Where environments run: in the event loop, in threads, or in processes
    threads.py       Environments in threads: one that blocks, or sleeps, keeps nobody else from playing
    holder.py        What holds environments, wherever that is: what it has been asked, and what happens when it is gone
    processes.py     Environments in processes: they use other cores, and one that hangs or crashes can be killed
    process_main.py  The other side of `processes.py`: a process that holds environments, each in a thread of its own
    tree.py          Calls become token trees: each token of a group once, each sampled token one loss term
    downsample.py    Training on some of an episode's branches only, without changing what is learned on average
    store.py         The episode file: every episode of a step, one JSON object a line, nothing lost
    term_store.py    The terms file: what became of each sampled token in a step's update, as columns
    replay.py        Rollouts on file: played once, trained on as often as one likes
    given.py         Given tasks as episodes: what was said, in the ids that a rollout would have recorded
    by_source.py     What the tasks of some sources have otherwise than the run's: who plays them, how, within what
"""
