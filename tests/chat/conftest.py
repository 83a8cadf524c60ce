"""Small real tokenizers in real model folders, and the four template families on top of them."""

import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from arborl.chat import FileTokenizer, HermesParser, Renderer, Template

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]  # fmt: skip
SENTENCES = [
    "The lake is frozen and the goal is to the right.\n\n",
    "You can call these tools:\n<tools>\n</tools>\nassistant\nuser\nsystem\ntool\n",
    '{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}',
    "<think>\nI should add the numbers first.\n</think>\n\nThe answer is three. ",
    "<tool_call>\n</tool_call><tool_response>\n</tool_response>",
    "Grüße aus Köln, 日本語 ひらがな",
]
FAMILIES = {
    "chatml_hermes": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "thinking": (None, "<|im_end|>"),
}
"""Begin and end token of each template."""


def train_byte_level() -> tokenizers.Tokenizer:
    """Like those of Llama 3 and Qwen: any text has ids, and line ends are the same ids whatever comes after them."""
    made = tokenizers.Tokenizer(models.BPE())
    words = tokenizers.Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES * 3,
        trainers.BpeTrainer(
            vocab_size=480, special_tokens=SPECIAL, initial_alphabet=alphabet, min_frequency=2, show_progress=False
        ),
    )
    return made


def train_metaspace() -> tokenizers.Tokenizer:
    """Like SentencePiece: a text's first word gets a space that is not there, and decoding takes it off again."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    made.train_from_iterator(SENTENCES * 3, trainer)
    return made


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A model folder with nothing but a tokenizer, with all that could add or cut tokens left on, as often found."""
    folder = tmp_path_factory.mktemp("byte_level")
    made = train_byte_level()
    begin = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    made.enable_truncation(max_length=5)
    made.enable_padding(length=7)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return FileTokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metaspace")
    train_metaspace().save(str(folder / "tokenizer.json"))
    return FileTokenizer(folder)


@pytest.fixture(scope="session")
def renderer_for():
    """`renderer_for("llama3", tokenizer)` talks Llama 3 with that tokenizer."""

    @cache
    def make(family, tokenizer):
        bos, eos = FAMILIES[family]
        template = Template((TEMPLATES / f"{family}.jinja").read_text(), bos, eos)
        return Renderer(tokenizer, template, HermesParser(), (tokenizer.token_id(eos),))

    return make


@pytest.fixture
def model_folder(tokenizer_folder, tmp_path):
    """`model_folder(name={...})` is a model folder with these JSON files beside its tokenizer."""

    def make(**files):
        (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make
