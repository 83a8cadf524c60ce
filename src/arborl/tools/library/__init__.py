"""Tools of this library, by the names in `arborl.tools.TOOLS`.

In reading order:

    calculator.py      Arithmetic on the syntax tree, without eval
    python.py          Python in the sandbox
    search.py          Full-text search and dense retrieval over a local corpus
    fetch.py           Web pages of an allow-list of hosts
    finish.py          Tools that end the episode with an answer, or check one
    document_tools.py  Tools for documents larger than the context: search, read, notes, context edits
    document_index.py  Chunks of a document and their full-text index
"""
