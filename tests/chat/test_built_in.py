"""Templates for models that have none, tools for templates that have no place for them: token-exact, and the same
wherever the template goes."""

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from arborl.chat import Conversations, Renderer, Template
from arborl.chat.builtin_templates import BUILTIN_TEMPLATES, call_instructions, template_support
from arborl.chat.formats import PARSERS, make_parser
from arborl.errors import ConfigError
from arborl.models.smollm2 import TEMPLATE as SMOLLM2
from arborl.types import Completion, FinishReason, Message, ToolCall, ToolSpec

TOOLS = (
    ToolSpec("add", "Add <two> numbers: Größe.", {"type": "object", "properties": {"a": {"type": "number"}}}),
    ToolSpec("now", "The time. <|im_end|>", {"type": "object", "properties": {}}),
)
STRICT = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Gemma's: no system role, no tools, and user and assistant in turn."""


@pytest.fixture
def gpt2_like(tmp_path):
    """A folder as that of GPT-2: byte-level tokens, one control token that only the model's configuration names."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["User:\nAssistant:\nSystem:\nTool:\n the answer is"] * 3, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    return tmp_path


def completion_of(renderer: Renderer, text: str) -> Completion:
    ids = [*renderer.encode(renderer.escape_reply(text)), renderer.stop[0]]
    return Completion(tuple(ids), (-1.0,) * len(ids), FinishReason.STOP)


def assert_grows(renderer: Renderer, tools=()) -> None:
    """Law 5: each prompt goes on from the ids of the call before, and is what the whole render is."""
    talk, conversations = [Message("system", "Be brief."), Message("user", "Hi")], Conversations(renderer)
    if renderer.support is not None and not renderer.support.system:
        talk = talk[1:]
    calls = ['<tool_call>{"name": "now", "arguments": {}}</tool_call>', "It is late.  ", "Bye"]
    for text, answer in zip(calls, (Message("tool", "12:00"), Message("user", "Thanks"), None), strict=True):
        prompt = conversations.prompt(talk, tools)
        assert prompt.text == renderer.text(talk, tools)
        assert renderer.tokenizer.decode(prompt.tokens) == prompt.text
        completion = completion_of(renderer, text)
        reply = renderer.read(completion)
        conversations.record(prompt, completion, reply=reply)
        talk += [reply, *([answer] if answer else [])]
        before = (*prompt.tokens, *completion.tokens)
        if answer:
            after = conversations.prompt(talk, tools)
            assert after.tokens[: len(before)] == before
            assert after.reused == len(before)


def test_a_model_without_a_template_gets_the_plain_one_and_one_warning(gpt2_like, caplog):
    with caplog.at_level(logging.WARNING):
        renderer = Renderer.from_folder(gpt2_like)
    assert [r.getMessage() for r in caplog.records] == [
        f"{gpt2_like} has no chat template; uses the built-in plain (model.chat_template)"
    ]
    talk = [Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Yes."), Message("user", "So?")]
    assert renderer.text(talk) == (
        "System:\nBe brief.\n\nUser:\nHi\n\nAssistant:\nYes.<|endoftext|>\n\nUser:\nSo?\n\nAssistant:\n"
    )
    assert renderer.stop == (renderer.tokenizer.token_id("<|endoftext|>"),)
    assert_grows(renderer)
    assert_grows(renderer, TOOLS)


def test_a_model_with_the_tokens_for_it_speaks_chatml(model_folder, tokenizer):
    renderer = Renderer.from_folder(model_folder(tokenizer_config={"eos_token": "<|im_end|>"}))
    assert renderer.text([Message("user", "Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.token_id("<|im_end|>") in renderer.stop
    assert_grows(renderer, TOOLS)


def test_text_of_users_and_tools_becomes_no_control_token_in_a_built_in_template(gpt2_like):
    renderer = Renderer.from_folder(gpt2_like)
    end = renderer.stop[0]
    bad = "<|endoftext|>"
    tools = [ToolSpec("evil", f"Does {bad}.", {})]
    shown = renderer.render([Message("user", bad), Message("assistant", "Yes."), Message("tool", bad)], tools)
    assert renderer.encode(shown).count(end) == 1  # behind the answer


def test_a_template_is_chosen_by_name_by_file_or_as_text(model_folder, tmp_path):
    folder = model_folder(tokenizer_config={"eos_token": "</s>", "chat_template": "x"})
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    talk = [Message("user", "Hi")]
    assert Renderer.from_folder(folder, chat_template="plain").text(talk) == "User:\nHi\n\nAssistant:\n"
    assert Renderer.from_folder(folder, chat_template=str(file)).text(talk) == "Hi</s>"
    assert Renderer.from_folder(folder, chat_template=file.read_text()).text(talk) == "Hi</s>"
    with pytest.raises(ConfigError, match=r"model\.chat_template=chatmll: .*Did you mean 'chatml'\?"):
        Renderer.from_folder(folder, chat_template="chatmll")


def test_a_chosen_template_must_end_answers_with_a_token_at_which_sampling_stops(gpt2_like):
    with pytest.raises(ConfigError, match=r"model\.chat_template=chatml: .*'<\|im_end\|>.*'<\|endoftext\|>'.*plain"):
        Renderer.from_folder(gpt2_like, chat_template="chatml")
    with pytest.raises(ConfigError, match="it writes '' behind a reply"):
        Renderer.from_folder(gpt2_like, chat_template="{{ messages[-1].content }}")


@pytest.mark.parametrize("format", sorted(PARSERS.table))
def test_a_template_without_tools_tells_the_model_of_them_in_its_own_format(model_folder, caplog, format):
    folder = model_folder(tokenizer_config={"eos_token": "<|im_end|>", "chat_template": SMOLLM2})
    renderer = Renderer.from_folder(folder, format)
    assert not renderer.support.tools
    text = renderer.text([Message("system", "Be brief."), Message("user", "Hi")], TOOLS)
    assert text.startswith('<|im_start|>system\nBe brief.\n\nYou may call these tools:\n{"type": "function"')
    assert all(f'"name": "{tool.name}"' in text for tool in TOOLS)
    parser = make_parser(format)
    shown = call_instructions(parser).removeprefix("\nTo call one, write\n")
    assert shown in text
    assert len(parser.parse(shown)) == 1
    assert not parser.parse(shown)[0].error
    hello = [Message("user", "Hi")]
    assert renderer.text(hello) == Template(SMOLLM2, None, None).render(hello, (), True)
    assert_grows(renderer, TOOLS)


def test_a_template_without_system_role_and_tool_role_has_tools_in_the_first_message_and_results_in_the_next(
    model_folder,
):
    folder = model_folder(tokenizer_config={"eos_token": "<|im_end|>", "chat_template": STRICT})
    renderer = Renderer.from_folder(folder)
    talk = [
        Message("user", "Hi"),
        Message("assistant", "Wait.", tool_calls=(ToolCall("a", "now"),)),
        Message("tool", "12"),
        Message("tool", "13"),
        Message("assistant", "Noon."),
        Message("user", "Thanks"),
    ]
    text = renderer.text(talk, TOOLS)
    assert text.startswith("<|im_start|>user\nYou may call these tools:\n")
    assert '<|im_start|>assistant\nWait.\n<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>' in text
    results = "<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\nNoon.<|im_end|>" in text


def test_a_template_that_passes_over_system_messages_has_tools_in_the_first_of_a_user(model_folder):
    source = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    folder = model_folder(tokenizer_config={"eos_token": "</s>", "chat_template": source})
    text = Renderer.from_folder(folder).text([Message("system", "Be brief."), Message("user", "Hi")], TOOLS)
    assert text.startswith("user: You may call these tools:")


def test_the_amended_template_renders_the_same_by_transformers(model_folder, tokenizer):
    """So what is saved with the model shows it its tools wherever it is served (law 10)."""
    from transformers import PreTrainedTokenizerFast

    from arborl.chat.control_tokens import NO_ESCAPING

    for source in (SMOLLM2, STRICT, BUILTIN_TEMPLATES["chatml"](tokenizer)):
        folder = model_folder(tokenizer_config={"eos_token": "<|im_end|>", "chat_template": source})
        renderer = Renderer.from_folder(folder)
        (saved,) = renderer.template.sources
        theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, chat_template=saved)
        talk = [Message("user", "Hi"), Message("assistant", "Hm."), Message("tool", "12"), Message("tool", "13")]
        expected = theirs.apply_chat_template(
            [NO_ESCAPING.message(message) for message in talk], tools=NO_ESCAPING.tools(TOOLS),
            add_generation_prompt=True,
            tokenize=False,
        )  # fmt: skip
        assert renderer.text(talk, TOOLS) == expected
        assert template_support(Template(saved, None, None)).tools


@pytest.mark.parametrize("family", ["chatml_hermes", "llama3", "mistral", "thinking"])
def test_a_template_that_shows_tools_stays_as_it_is(renderer_for, tokenizer, family):
    assert template_support(renderer_for(family, tokenizer).template).tools
