"""Adapters for environments of other packages.

In reading order:

    gymnasium_adapter.py  Gymnasium in both directions: `from_gymnasium`, `to_gymnasium`
    other_packages.py     reasoning_gym, textarena, OpenEnv servers
    text_games.py         TextWorld, ALFWorld, ScienceWorld
    verifiers_adapter.py  verifiers in both directions: `VerifiersEnv`, `as_verifiers`
    gem_adapter.py        GEM: games, reasoning_gym, mathematics, code, questions
    miniwob_adapter.py    MiniWoB++: small web tasks in a headless browser
    chess_puzzles.py      Chess puzzles, with python-chess and optionally a UCI engine
"""
