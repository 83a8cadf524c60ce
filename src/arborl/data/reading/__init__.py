"""Rows out of files: opened, numbered, read as tasks, and divided into trained and held out.

In reading order:

    files.py    Opens files of rows
    tables.py   Rows by number
    parquet.py  Parquet, a few rows at a time: memory is bounded by what a file unpacks to
    rows.py     A row as a task: its messages (or its question), its columns as fields, its content as its name
    given.py    A row as something that was said: a transcript to imitate, a pair, a good or bad answer
    splits.py   Which rows are trained on, which are held out, and which are left out
"""
