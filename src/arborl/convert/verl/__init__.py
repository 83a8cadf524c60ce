"""verl: its keys, those of its mixed-training and StateLM forks included.

In reading order:

    keys.py      What becomes of each key, and what only all of them together say
    rules.py     Keys that are not simply another name: rows, lengths, batches, schedules, the run itself
    losses.py    Advantages, losses and penalties as they are said here
    parts.py     Who plays, with what, and who judges: agent loops, tools and rewards, StateLM's included
    defaults.py  What verl does where nothing is said
    ignored.py   Keys that change no result here, and why
"""
