"""Keys and values of shell scripts, Python scripts, override lists and Hydra YAML. Nothing is executed or imported.

source_files.py      All files of a conversion: `defaults` composed, `${…}` resolved
training_scripts.py  The training command of a shell script; Hydra's overrides; arguments of Python scripts
python_scripts.py    Values of constant expressions of a Python script
bash_scripts.py      Commands and variables of a shell script
bash_words.py        Tokens of a shell script, and expansion of words
"""
