"""Rollout: agents play tasks, and what crossed the line between program and model is kept, token by token.

Never computes rewards or gradients. Start with `runner.py` (one episode, many episodes), then `manager.py` (which of
them make a group), `recorder.py` (what an agent holds in its hands) and `tree.py` (calls become a token tree).
`workers.py` says where environments run, `threads.py` and `processes.py` are two such places. `store.py` writes the
episode files, `replay.py` records whole batches and plays them back.
"""
