"""The viewer: a local web application that reads run folders while they are written. It writes an index and no more.

In reading order:

    app.py        The application: what a browser may ask for, and the door in front of it
    serve.py      The application behind a socket of this machine, until a signal
    folders.py    Run folders below a folder: which there are, how they stand, how their configurations differ
    metrics.py    The numbers of a run, as series that a chart can draw
    index.py      The index of a run's episodes: one row an episode, found without reading the files
    rows.py       A line of an episode file as a row of the index
    search.py     What to show of the index: filters, order, a page
    episode.py    One episode to be read: conversation, tokens and everything that is known of each
    group.py      The episodes of one task: their tree of tokens, and where two of them part
    gradient.py   The tokens that moved the weights most in a step
    words.py      Token ids as text, by the tokenizer that a run has
"""

from arborl.view.web.folders import RunFolders

__all__ = ["RunFolders"]
