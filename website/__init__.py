"""The documentation site: pages that are written from the source, and what MkDocs needs beside them.

In reading order:

    __main__.py  `python -m website` writes the generated pages of docs/
    commands.py  The page of the command line's verbs and options
    public.py    The page of the public names of `arborl`
    rooms.py     The page of the rooms of the source
    links.py     MkDocs' hook: links out of docs/ lead somewhere on the site too
"""
