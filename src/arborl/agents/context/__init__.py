"""Agents that edit their own context: a history that only grows, edits of it, and what the model is shown of both.

In reading order:

    history.py  What the model is shown of its past: an immutable history, a list of edits, and a pure view of the two
    talk.py     A conversation with the model that may outgrow its window
    policy.py   What is done about a context that grows: nothing, a window, a cut, a summary, or the model's own edits
    session.py  One episode of an agent that edits its context
    statelm.py  The agent that manages its own context
    dump.py     Episodes of a context-managing agent as JSON files for people
"""
