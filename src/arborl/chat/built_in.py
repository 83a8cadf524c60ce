"""Chat templates for models that come with none, or whose own is not wanted.

`chatml` marks turns by the tokens `<|im_start|>` and `<|im_end|>`. `plain` needs no tokens but the one that ends a
text, which any model has: roles are words, and an answer ends with that token. In both, what the model wrote and its
end of turn stand as they were sampled, so a conversation only grows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from arborl.chat.tokenizer import FileTokenizer
from arborl.errors import ConfigError, did_you_mean

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PLAIN = """{%- for message in messages %}
{{- message.role | capitalize + ':\\n' + message.content + (END if message.role == 'assistant' else '') + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:\\n' }}
{%- endif %}
"""
MARKS = ("<|im_start|>", "<|im_end|>")


def _plain(tokenizer: FileTokenizer) -> str:
    if not tokenizer.eos_ids:
        raise ConfigError(
            f"{tokenizer.folder}: nothing says which token ends a text, and the chat template plain needs one. Write "
            "eos_token in tokenizer_config.json."
        )
    return PLAIN.replace("END", json.dumps(tokenizer.decode(tokenizer.eos_ids[:1]), ensure_ascii=False))


BUILT_IN: dict[str, Callable[[FileTokenizer], str]] = {"chatml": lambda tokenizer: CHATML, "plain": _plain}


def usual(tokenizer: FileTokenizer) -> str:
    """The name of the template for a model that has none: ChatML where it has the tokens, else plain."""
    return "chatml" if all(tokenizer.token_id(mark) is not None for mark in MARKS) else "plain"


def chosen(asked: str, tokenizer: FileTokenizer) -> str:
    """The Jinja source that `model.chat_template` asks for: a name of the above, a file, or the source itself."""
    if asked in BUILT_IN:
        return BUILT_IN[asked](tokenizer)
    if "{{" in asked or "{%" in asked:
        return asked
    file = Path(asked).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.chat_template={asked}: neither a built-in template nor a file that can be read "
            f"({type(error).__name__}).{did_you_mean(asked, BUILT_IN)} Write {' or '.join(BUILT_IN)}, a file, or Jinja."
        ) from error
