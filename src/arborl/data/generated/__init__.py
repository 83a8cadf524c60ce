"""Data sets generated from a seed, without downloads; every answer is computed.

datasets.py           The data sets of `arborl data make`; facts about people
problems.py           Arithmetic and programming problems
document_problems.py  Long documents with questions
"""
