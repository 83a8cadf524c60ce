"""What runs on a host of a cluster, asked over ssh: it starts Ray there, looks after it and ends it.

These files are sent over ssh's standard input and run by the host's Python, so they import each other and the standard
library, and nothing of them is installed. A request is one line of JSON on standard input; whatever is answered is a
line of JSON behind a mark, for a login shell may say things of its own. Secrets are in the request, and from there in
the environment of Ray's processes: never on a command line, in a file or in a log.

All that a cluster has on a host is one folder, with a record of who started it, and the processes below one keeper.
The keeper inherits what loses its parent, so that none of them can get away; each has the record's mark in its
environment as well, for the case that the keeper itself was killed.

    answers.py    A line to whoever asked, and what is refused
    folder.py     The cluster's folder, and the record in it
    processes.py  The keeper, and how processes of a cluster are known
    logs.py       Files that grow
    head.py       Nodes and jobs, as Ray's dashboard on the head knows them
    start.py      What a host has; Ray started there, and ended
    main.py       The requests
"""
