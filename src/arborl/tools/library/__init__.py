"""Tools that ship, by the names in `arborl.tools.TOOLS`.

In reading order:

    calculator.py  A calculator that walks the syntax tree itself
    python.py      Python that cannot reach anything: the model's code runs in the sandbox
    search.py      Full-text search over a local corpus
    retrieve.py    Dense retrieval over a local corpus: documents near a query in an embedding space that you bring
    corpus.py      Documents out of files: what `search` and `retrieve` look through
    fetch.py       HTTP for a model: pages of listed hosts, so much of them, so long, and nowhere else
    check.py       A tool that tells the model whether its answer is right, before it gives it: the task knows
    finish.py      Ways to say that the work is done: a call that ends the episode with the answer it was given
    context/       Tools for a context that is too small for the document: look, search and read; keep notes; delete
"""
