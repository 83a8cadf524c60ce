"""Agents that edit their own context: an append-only history, edits, and the messages that the model sees.

history.py               The history, its edits, and the visible messages as a function of both
managed_conversation.py  A conversation within a context window, and the policies that shorten it
statelm.py               The agent that manages its own context
"""
