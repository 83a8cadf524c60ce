"""Reading: keys and values out of shell scripts, lists of overrides and Hydra's YAML. Nothing is run or imported.

In reading order:

    collect.py    What files say, all of them together: `defaults` composed, `${…}` filled in
    scripts.py    The training that a shell script starts, with its overrides
    shell.py      A shell script read and never run: its variables, and the commands it would start
    words.py      A shell script's text as words, and what is in a word once variables are filled in
    overrides.py  Hydra's overrides: `a.b=1`, `+a.b=[x, y]`, `++a.b={c: 2}`, `~a.b`
"""
