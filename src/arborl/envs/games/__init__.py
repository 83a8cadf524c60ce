"""Environments of this library.

In reading order:

    frozen_lake.py           FrozenLake on random maps
    sokoban.py               Sokoban
    sokoban_levels.py        Sokoban boards, generated levels, Boxoban files, solver
    shop.py                  Shop: WebShop's pages, actions and reward
    shop_catalogue.py        Products, search, a generated catalogue, WebShop's data files
    rooms.py                 Rooms: find the treasure behind locked doors
    rooms_map.py             Maps of the rooms game, their generation and solution
    countdown.py             Countdown: make the target from the numbers
    question.py              One question, one answer
    documents_env.py         A question about a document that is not in the prompt
    conversation_env.py          A conversation with a scripted or simulated user
    conversation_presets.py  Scenarios, personas, and presets for three domains
    text_game.py             What the games share
    drawing.py               Pictures of the environments
"""
