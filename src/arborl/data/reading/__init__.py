"""Rows from files: opened, numbered, read as tasks, and split into training and held-out rows.

table_files.py   Opens JSON, JSONL, CSV and Parquet files
tables.py        Rows by number; bounded reading of Parquet
row_reader.py    Rows as tasks, and offline rows
train_splits.py  Training, held-out and filtered rows
"""
