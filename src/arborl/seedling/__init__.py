"""Seedling, the embedded model: its weights, and the program that makes them.

A 2M-parameter Llama with its own tokenizer and chat template. It knows every format that Arbor uses and plays badly, so
that reinforcement learning has something to improve. The package imports environments, agents and tools; the path of
the weights is `arborl.models.model_files.SEEDLING_DIR`.

    make.py                  Trains tokenizer and model: `python -m arborl.seedling.make`
    transcript_rows.py       The mixture of transcripts, and transcripts as rows for imitation
    transcript_base.py       `Transcript`, and what all writers share
    game_transcripts.py      FrozenLake, Sokoban, Rooms, Shop
    problem_transcripts.py   Calculator, code, search, small talk, worked sums
    document_transcripts.py  Long documents with the context-managing agent

`weights/` holds weights, tokenizer, chat template and `record.json` of the training run.
"""
