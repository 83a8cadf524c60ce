"""Rollout: agents play tasks, and what crossed the line between program and model is kept, token by token.

Never computes rewards or gradients. Start with `runner.py` (one episode, many episodes), then `recorder.py` (what an
agent holds in its hands), then `tree.py` (calls become a token tree). `store.py` writes the episode files.
"""
