import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arborl.chat import HermesParser
from arborl.types import ToolCall

PARSER = HermesParser()
TEXT = st.text() | st.sampled_from(
    ["</tool_call>", "<tool_call>", '"}}</tool_call>', "\\/", "<\\/tool_call>", "\u2028"]
)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=4)
NAME = TEXT.filter(bool)


@given(NAME, ARGUMENTS)
@example("</tool_call>", {"</tool_call>": "a</tool_call><tool_call>"})
def test_a_call_survives_being_written_and_read(name, arguments):
    call = ToolCall("call_0", name, arguments)
    written = PARSER.format(call)
    assert PARSER.parse(written) == (call,)
    assert written.count("</tool_call>") == 1


@given(st.lists(st.tuples(NAME, ARGUMENTS, st.text()), max_size=4))
def test_calls_are_read_in_order_between_other_text(parts):
    calls = tuple(ToolCall(f"call_{i}", name, arguments) for i, (name, arguments, _) in enumerate(parts))
    between = [text for _, _, text in parts]
    written = "".join(PARSER.format(call) + text for call, text in zip(calls, between, strict=True))
    assert PARSER.parse("Let me see. " + written) == calls


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"', "}", '"', "[", " ", "x", "\ud800", "9" * 5000])
    )
)
def test_no_text_breaks_the_parser_and_every_opening_outside_json_is_a_call(pieces):
    text = "".join(pieces)
    calls = PARSER.parse(text)
    assert len(calls) <= text.count("<tool_call>")
    assert bool(calls) == ("<tool_call>" in text)
    assert [call.id for call in calls] == [f"call_{i}" for i in range(len(calls))]
    for call in calls:
        assert (call.error is None) == bool(call.name)


def test_calls_are_read_with_spaces_tags_in_strings_and_text_arguments():
    assert PARSER.parse("Just text, and </tool_call> alone.") == ()
    assert PARSER.parse('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>') == (ToolCall("call_0", "f"),)
    text = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
    assert PARSER.parse(text) == (ToolCall("call_0", "f", {"x": "</tool_call>"}),)
    assert PARSER.parse('<tool_call>{"name": "f"}</tool_call>') == (ToolCall("call_0", "f"),)
    quoted = json.dumps({"name": "f", "arguments": json.dumps({"a": [1]})})
    assert PARSER.parse(f"<tool_call>{quoted}</tool_call>") == (ToolCall("call_0", "f", {"a": [1]}),)


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ('{"name": "f", "arguments": {}', "", "not valid JSON (expecting ',' delimiter at character 29)"),
        ("", "", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "", "NaN is not a JSON number"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "", "'1e999' is too large a number"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "", "half of a surrogate pair"),
        ("[" * 100_000, "", "too deeply nested"),
        ('{"name": "f"} and more', "", "text after the JSON object: 'and more'"),
        ('["f"]', "", "is a list, not an object"),
        ('{"arguments": {}}', "", 'has no "name"'),
        ('{"name": "", "arguments": {}}', "", 'has no "name"'),
        ('{"name": 3, "arguments": {}}', "", 'has no "name"'),
        ('{"name": "f", "arguments": [1]}', "f", '"arguments" is a list, not an object'),
        ('{"name": "f", "arguments": null}', "f", '"arguments" is null, not an object'),
        ('{"name": "f", "arguments": "a b"}', "f", '"arguments" is a string, not an object'),
        ('{"name": "f", "arguments": "[1]"}', "f", '"arguments" is a string, not an object'),
        ('{"name": "f", "arguments": "{} x"}', "f", '"arguments" is a string, not an object'),
    ],
)
def test_a_malformed_call_is_a_call_whose_error_says_what_to_write(body, name, message):
    (call,) = PARSER.parse(f"x <tool_call>{body}</tool_call> y")
    assert (call.id, call.name, call.arguments) == ("call_0", name, {})
    assert message in (call.error or "")
    assert f'<tool_call>{{"name": "{name or "TOOL"}", "arguments": {{' in (call.error or "")


@pytest.mark.parametrize("cut", ['{"name": "f", "arguments": {}}', '{"name": "f", "argum', "", "text"])
def test_a_call_left_open_at_the_end_is_a_call_with_an_error(cut):
    good, call = PARSER.parse('<tool_call>{"name": "f"}</tool_call><tool_call>' + cut)
    assert good.error is None
    assert call.id == "call_1"
    assert "End it with </tool_call>" in (call.error or "")


def test_a_bad_call_does_not_affect_the_next():
    first, second = PARSER.parse('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>')
    assert "not closed" in (first.error or "")
    assert second == ToolCall("call_1", "g")
    first, second = PARSER.parse('<tool_call>{oops}</tool_call><tool_call>{"name": "g"}</tool_call>')
    assert "not valid JSON" in (first.error or "")
    assert second == ToolCall("call_1", "g")


def test_arguments_that_are_not_json_cannot_be_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        PARSER.format(ToolCall("call_0", "f", {"x": float("nan")}))
