"""The command line: each verb parses, calls and prints. Whatever is heavy is imported by the verb that needs it.

Start with `main.py`; a verb's file has its name.
"""
