"""Several sources in one batch: exact proportions, every row once per pass, resumable.

mixture.py     Batches from several sources; allocation; `arborl data mix`
task_pools.py  Tasks of one source, and the order of rows
"""
