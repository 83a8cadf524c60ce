"""Public sets in their own layouts.

In reading order:

    longbench.py  LongBench-v2, and NovelQA in its likeness: rows with the document beside the prompt, as Parquet files
"""
