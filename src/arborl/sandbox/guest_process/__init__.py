"""Code of the sandboxed process: standard library only, started by path, with an empty environment.

In reading order:

    guest_supervisor.py  Starts one sandboxed process, and ends it with everything that it started
    mounts.py            Name spaces and a file system of read-only system folders
    guest_resources.py   The memory cgroup and the folder of a sandboxed process
    restrictions.py      Resource limits, users, capabilities, Landlock
    seccomp_filter.py    The filter of system calls
    interpreter.py       Runs the code

The modules import little: a process is started for every lease, and imports are half of its start time.
"""
