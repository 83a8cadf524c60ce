"""The maker of the embedded model: transcripts of scripted players, a tokenizer and a small Llama that imitates them.

It teaches from environments, agents and tools, so it stands above them; `arborl.models.seedling` holds what it made.

In reading order:

    make.py                  Make seedling from nothing
    corpus.py                What seedling learned to speak from
    transcript.py            What every writer of transcripts needs
    game_transcripts.py      Transcripts of games
    sum_transcripts.py       Sums with their working, column by column
    tool_transcripts.py      Transcripts of questions that tools answer: a calculator, a search, a piece of code
    document_transcripts.py  Transcripts of players who work through long documents
    rows.py                  Transcripts as rows of a file
"""
