"""Several sources in one batch: exact proportions, every row once per pass, resumable.

mixture.py     Batches from several sources; allocation; `arborl data mix`
quarantine.py  Tasks that fail again and again are replaced for a while
task_pools.py  Tasks of one source, and the order of rows
"""
