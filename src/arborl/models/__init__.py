"""Models: load by name, folder or Hugging Face id; run them over trees and caches through one attention hook.

Never samples and never trains. Start with `load.py`; `attention.py` is the hook that engines and learners share.
"""
