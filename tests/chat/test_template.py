from datetime import datetime
from pathlib import Path

import pytest

from arborl.chat import Template
from arborl.chat.control_tokens import NO_ESCAPING
from arborl.errors import ConfigError
from arborl.types import Message, ToolCall, ToolSpec

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
FAMILIES = {
    "chatml_hermes": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "thinking": {"eos_token": "<|im_end|>"},
}
TOOLS = [
    ToolSpec("add", "Add <two> numbers & more: Größe.", {"type": "object", "properties": {"a": {"type": "number"}}}),
    ToolSpec("now", "The time.", {"type": "object", "properties": {}}),
]
USER = Message("user", "  What's 1 + 2 < 4?\nGrüße, 日本\n")
CALL = Message("assistant", tool_calls=(ToolCall("call_0", "add", {"a": 1, "b": [None, "ü<&>"]}),))
SAMPLED = Message(
    "assistant",
    '<think>\nhm\n</think>\n\n Let me see <tool_call>{"name": "now"}</tool_call> ',
    tool_calls=(ToolCall("call_0", "now"),),
    sampled=True,
)
RESULT = Message("tool", "3", tool_call_id="call_0", name="add")
CONVERSATIONS = {
    "one user": [USER],
    "system": [Message("system", "Be brief. "), USER],
    "written by hand": [USER, CALL, RESULT, Message("assistant", "Three."), USER],
    "sampled": [Message("system", "Be brief."), USER, SAMPLED, RESULT, RESULT, SAMPLED, USER],
    "ends with assistant": [USER, SAMPLED],
}


def ours(family: str) -> Template:
    names = FAMILIES[family]
    return Template((TEMPLATES / f"{family}.jinja").read_text(), names.get("bos_token"), names["eos_token"])


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_one_transformers_renders(family, conversation, tools, generation, tokenizer):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **FAMILIES[family])
    theirs.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    messages = CONVERSATIONS[conversation]
    expected = theirs.apply_chat_template(
        [NO_ESCAPING.message(message) for message in messages],
        tools=NO_ESCAPING.tools(tools) or None,
        add_generation_prompt=generation,
        tokenize=False,
    )
    assert ours(family).render(messages, tools, generation) == expected
    assert expected


def test_white_space_around_blocks_is_treated_as_transformers_treats_it(tokenizer):
    from transformers import PreTrainedTokenizerFast

    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, chat_template=source)
    expected = theirs.apply_chat_template(
        [NO_ESCAPING.message(message) for message in (USER, CALL, USER)], tokenize=False
    )
    assert Template(source, None, None).render([USER, CALL, USER], (), generation=False) == expected


def test_messages_are_shown_as_sampled_or_with_their_calls():
    assert NO_ESCAPING.message(SAMPLED) == {"role": "assistant", "content": SAMPLED.content}
    function = {"name": "add", "arguments": {"a": 1, "b": [None, "ü<&>"]}}
    assert NO_ESCAPING.message(CALL)["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    assert NO_ESCAPING.message(RESULT) == {"role": "tool", "content": "3", "tool_call_id": "call_0", "name": "add"}
    assert f"<|im_start|>assistant\n{SAMPLED.content}<|im_end|>\n" in ours("chatml_hermes").render(
        [USER, SAMPLED, USER], TOOLS, generation=True
    )
    assert Template("[{{ bos_token }}]", None, None).render([USER], (), generation=False) == "[]"


def test_errors_name_roles_and_lines_and_the_sandbox_holds():
    with pytest.raises(
        ValueError, match=r"refused the messages \(user, system\): a system message can only come first"
    ):
        ours("mistral").render([USER, Message("system", "x")], (), generation=True)

    with pytest.raises(ConfigError, match="line 2"):
        Template("fine\n{% if %}", None, None)

    with pytest.raises(ValueError, match="refused"):
        Template("{{ messages.append(1) }}", None, None).render([USER], (), generation=True)


def test_dates_are_fixed_and_generation_marks_change_nothing():
    template = Template("{{ strftime_now('%d %b %Y') }}", None, None, now=datetime(2024, 7, 26))
    assert template.render([USER], (), generation=True) == "26 Jul 2024"
    clock = Template("{{ strftime_now('%H:%M:%S.%f') }}", None, None)
    assert clock.render([USER], (), generation=True) == clock.render([USER], (), generation=True)
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert Template(source, None, None).render([Message("user", "a"), USER], (), generation=True) == "a"
