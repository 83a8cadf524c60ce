"""Tools for a context that is too small for the document: look, search and read; keep notes; delete.

In reading order:

    workspace.py  What the document tools of one episode share
    chunks.py     A long text cut into chunks of so many tokens
    documents.py  Tools to work through a document that does not fit the context: look, index, read a chunk, search
    notes.py      Tools to keep what matters and let go of the rest
    brief.py      The document tools for small windows
"""
