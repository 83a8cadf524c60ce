"""Data that is made here, offline and from a seed; every answer is computed.

In reading order:

    datasets.py    Sets of rows that are made here, offline and from a seed: what `arborl data make` writes
    arithmetic.py  Arithmetic problems, made from a seed: nothing is downloaded, and every answer is computed
    programs.py    Problems for agents that write code
    facts.py       A small world of people and what is true of them
    documents.py   Long documents with questions: made from a seed, with planted facts
    words.py       The words of made documents: few and plain, so that a small tokenizer knows them all
"""
