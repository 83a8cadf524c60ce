"""Checks before a run: the installation, a model with its chat template, and one small training step.

Nothing is written. Runs are examined by `arborl.diagnosis`.

    installation.py         Checks of the machine and the installed packages
    chat_template_check.py  Checks of tokenizer, chat template and tool format
    model_check.py          examine_model: all checks of a configuration, with one training step
"""
