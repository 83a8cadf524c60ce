"""The program that runs on a host of a cluster: it starts Ray, watches it and ends it.

The files are sent over ssh's standard input and run by the host's Python. They import only each other and the standard
library; nothing is installed. A request is one line of JSON on standard input; a reply is a line of JSON after a
marker, because a login shell may print lines too. Secrets are in the request and in the environment of Ray's
processes, never on a command line, in a file or in a log.

On a host a cluster has one folder with a record, and one supervisor process with all of Ray's processes below it. The
supervisor is a child subreaper, so no process can escape; each process also has the record's id in its environment, for
the case that the supervisor was killed.

    cluster_folder.py  Replies to the caller; the cluster's folder and its record
    supervisor.py      The supervisor process
    dashboard.py       Nodes and jobs, by Ray's dashboard on the head; log files
    host_commands.py   Inspection of a host, start and stop of Ray; table of requests
"""
