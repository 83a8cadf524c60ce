import json
import subprocess
import sys

import pytest

from arborl.chat import PARSERS, FileTokenizer, HermesParser, Renderer
from arborl.errors import ConfigError, UnknownPartError
from arborl.types import Message, ToolSpec

TOOL = ToolSpec("add", "Add.", {"type": "object", "properties": {}})


def test_special_tokens_are_parsed_and_nothing_is_added_or_cut(tokenizer):
    ids = tokenizer.encode("<|im_start|>user")
    assert ids[0] == tokenizer.token_id("<|im_start|>")
    assert tokenizer.encode("") == []
    assert tokenizer.decode(ids) == "<|im_start|>user"
    text = "The lake is frozen and the goal is to the right. " * 9
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.token_id("<|nobody|>") is None
    assert tokenizer.vocab_size == tokenizer._tokenizer.get_vocab_size() > 256


def test_missing_and_broken_tokenizer_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json.*save_pretrained"):
        FileTokenizer(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        FileTokenizer(tmp_path)


def test_wrong_settings_and_templates_are_named(model_folder):
    folder = model_folder()
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not valid JSON"):
        FileTokenizer(folder)

    folder = model_folder(tokenizer_config={"eos_token": "<|nobody|>", "chat_template": "x"})
    with pytest.raises(ConfigError, match=r"'<\|nobody\|>' is not in tokenizer\.json"):
        Renderer.from_folder(folder)

    folder = model_folder(tokenizer_config={"eos_token": "</s>", "chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(ConfigError, match="only templates named rag"):
        Renderer.from_folder(folder)


def test_a_folder_that_names_no_end_token_says_where_to_write_one(tokenizer_folder, tmp_path):
    made = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    made["added_tokens"] = []
    made["model"]["vocab"] = {
        token: i
        for i, token in enumerate(t for t in made["model"]["vocab"] if not t.startswith(("<", "[")) or len(t) == 1)
    }
    made["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="eos_token"):
        Renderer.from_folder(tmp_path)


def test_special_tokens_are_read_bare_as_objects_and_from_the_second_file(model_folder):
    found = FileTokenizer(
        model_folder(
            tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None},
            special_tokens_map={"eos_token": "</s>", "bos_token": "<|im_start|>"},
        )
    )
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")


def test_stop_ids_come_from_every_file_and_from_known_end_of_turn_tokens(model_folder, tokenizer):
    folder = model_folder(
        tokenizer_config={"eos_token": "</s>", "chat_template": "x"},
        generation_config={"eos_token_id": [7, 3]},
        config={"eos_token_id": 9},
    )
    turns = [tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|eot_id|>")]
    expected = [tokenizer.token_id("</s>"), 7, 3, 9, *turns]
    assert list(Renderer.from_folder(folder).stop) == list(dict.fromkeys(expected))


def test_the_template_file_is_taken_before_the_key_in_the_settings(model_folder):
    folder = model_folder(tokenizer_config={"eos_token": "</s>", "chat_template": "key"})
    assert Renderer.from_folder(folder).text([Message("user", "x")]) == "key"
    (folder / "chat_template.jinja").write_text("file")
    assert Renderer.from_folder(folder).text([Message("user", "x")]) == "file"


@pytest.mark.parametrize("as_files", [True, False])
def test_a_model_with_a_second_template_for_tools_uses_it_when_there_are_tools(model_folder, as_files):
    two = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools|length }}"}]
    folder = model_folder(tokenizer_config={"eos_token": "</s>", "chat_template": None if as_files else two})
    if as_files:
        (folder / "chat_template.jinja").write_text("plain")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools|length }}")
    renderer = Renderer.from_folder(folder)
    assert renderer.text([Message("user", "x")]) == "plain"
    assert renderer.text([Message("user", "x")], [TOOL]) == "with 1"


def test_parsers_are_found_by_name():
    assert PARSERS["hermes"] is HermesParser
    with pytest.raises(UnknownPartError, match="no tool-call format is called 'herms'"):
        PARSERS["herms"]


def test_talking_needs_neither_torch_nor_transformers():
    code = "import sys, arborl.chat; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
