"""What runs on the other side: standard library only, started by path, with an empty environment.

`keeper.py` starts one guest and outlives it by an instant; `mounts.py` gives it a file system of its own;
`memory_group.py` a cgroup that counts its memory; `confine.py` and `calls.py` take away what it does not need;
`guest.py` runs the code; `clear.py` removes what it left. They import little: a guest is made for every lease, and half
of what making one costs is imports.
"""
