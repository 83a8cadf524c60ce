"""Every tool-call format: what is written is read back, and no text breaks the reading."""

import ast
import json
import keyword
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arborl.chat import PARSERS, FileTokenizer, Renderer
from arborl.chat.formats import detect_format, make_parser
from arborl.chat.formats.text_formats import final_answer
from arborl.types import ToolCall

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"
NAMES = sorted(PARSERS)
MARKS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "[TOOL_CALLS]",
    "[ARGS]", "<|python_tag|>", '{"name": "f"', '{"type": "function"', '"parameters": {', "[f(", "x=", ")]", "]", "}",
    "'", '"', "\\", "\nAction: f\n", "Action:", "Action Input:", "\nObservation:", "Final Answer:", "```python\n",
    "\n```", "```", "**{", "\x00", "\ud800", "[" * 80, "9" * 5000, " ", "\n", "x", "ä",
]  # fmt: skip
TEXT = st.text() | st.sampled_from([mark for mark in MARKS if mark != "\ud800"])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=3)
IDENTIFIER = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,10}", fullmatch=True).filter(lambda n: not keyword.iskeyword(n))
LINE = st.text(min_size=1).filter(lambda name: "\n" not in name and name == name.strip())
CALLS = {
    "hermes": (TEXT.filter(bool), ARGUMENTS),
    "llama3": (TEXT.filter(bool), ARGUMENTS),
    "mistral": (TEXT.filter(bool), ARGUMENTS),
    "pythonic": (IDENTIFIER | st.builds("{}.{}".format, IDENTIFIER, IDENTIFIER), ARGUMENTS),
    "react": (LINE, ARGUMENTS),
    "qwen_xml": (IDENTIFIER, st.dictionaries(IDENTIFIER, st.text(), max_size=3)),
    "fence": (st.just("python"), st.fixed_dictionaries({"code": TEXT})),
}
"""What each format can say: names and arguments."""


def plain(calls):
    return [(call.name, call.arguments, call.error) for call in calls]


def some_calls(format):
    name, arguments = CALLS[format]
    return st.lists(st.builds(ToolCall, st.just("id"), name, arguments), min_size=1, max_size=3)


@pytest.mark.parametrize("format", NAMES)
def test_calls_survive_being_written_and_read(format):
    parser = PARSERS[format]()

    @given(some_calls(format))
    def check(calls):
        written = parser.format(*calls)
        assert plain(parser.parse(written)) == plain(calls)
        assert plain(parser.parse(f"I think so.\n{written}\n")) == plain(calls)

    check()


@pytest.mark.parametrize("format", NAMES)
def test_no_text_breaks_a_parser(format):
    parser = PARSERS[format]()

    @settings(max_examples=100)
    @given(st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=12).map("".join))
    @example("[f(" + "(" * 50_000)
    @example("[f(x=" + "-" * 10_000 + "1)]")
    @example("[f(x=" + "9" * 10_000 + ")]")
    @example("[f(x='\x00')]")
    @example('[TOOL_CALLS] [{"name": "f"}, 3]')
    def check(text):
        calls = parser.parse(text)
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            assert call.error or call.name
            assert call.error is None or not call.arguments
            json.dumps(call.arguments, allow_nan=False)

    check()


@pytest.mark.parametrize("format", NAMES)
def test_no_text_takes_long(format):
    start = time.thread_time()
    for mark in [mark for mark in MARKS if len(mark) < 30] + [
        "[f('",
        "```python\n",
        '<tool_call>{"a":"',
        "<parameter=x>",
    ]:
        for text in (mark * 2_000, "<function=f>" + mark * 2_000 + "</function>", "[TOOL_CALLS]" * 99 + mark * 2_000):
            PARSERS[format]().parse(text)
    assert time.thread_time() - start < 10


@pytest.mark.parametrize("format", NAMES)
def test_prose_and_json_answers_hold_no_calls(format):
    for text in ("", "It is 42 [see above] (really).", '{"answer": 42}', "I act: quickly.", "<answer>4</answer>"):
        assert PARSERS[format]().parse(text) == ()


@pytest.mark.parametrize("format", [name for name in NAMES if name not in ("hermes", "mistral", "llama3")])
def test_what_a_format_cannot_say_is_refused_when_written(format):
    with pytest.raises(ValueError, match=r"."):
        PARSERS[format]().format(ToolCall("1", "\n", {"code": "x", "more": 1}))


def test_llama_writes_parameters_and_reads_its_known_variants():
    parser = PARSERS["llama3"]()
    add = ToolCall("call_0", "add", {"a": 1})
    assert parser.format(add) == '{"name": "add", "parameters": {"a": 1}}'
    for text in (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}',
        '{"type": "function", "function": "add", "parameters": {"a": 1}}',
        'Let me add. {"name": "add", "arguments": {"a": 1}}',
    ):
        assert parser.parse(text) == (add,)
    (call,) = parser.parse("<|python_tag|>add(1)")
    assert "there is no call" in (call.error or "")
    (call,) = parser.parse('{"name": "add", "parameters": {"a": 1}')
    assert "not valid JSON" in (call.error or "")


def test_mistral_ids_fit_its_templates_and_both_of_its_forms_are_read():
    parser = PARSERS["mistral"]()
    first, second = parser.parse('[TOOL_CALLS] [{"name": "f", "id": "abcdefghi"}, {"name": "g", "id": "short"}]')
    assert (first.id, second.id) == ("abcdefghi", "call00001")
    assert parser.parse('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}') == (
        ToolCall("call00000", "f", {"a": 1}),
        ToolCall("call00001", "g", {"b": 2}),
    )
    assert "empty" in (parser.parse("[TOOL_CALLS] []")[0].error or "")


def test_pythonic_reads_what_python_reads():
    parser = PARSERS["pythonic"]()

    @given(st.dictionaries(IDENTIFIER, VALUE, max_size=3))
    def check(arguments):
        text = f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
        keywords = ast.parse(text, mode="eval").body.elts[0].keywords
        assert parser.parse(text)[0].arguments == {word.arg: ast.literal_eval(word.value) for word in keywords}

    check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[f(1)]", "every argument is written NAME=VALUE"),
        ("[f(x=open('/etc/passwd'))]", "is not a number, a string"),
        ("[f(x=1e999)]", "is not a number, a string"),
        ("[f(x={1: 2})]", "keys of an object are strings"),
        ("[f(x=1), 3]", "is not a call"),
        ("[f(x=)]", "is not a list of calls"),
        ("[f(x=1", "not closed"),
        ("[f(x=b'1')]", "is not a number, a string"),
        ("[f(x='\\ud800')]", "surrogate"),
    ],
)
def test_a_malformed_pythonic_call_says_what_to_write(text, message):
    calls = PARSERS["pythonic"]().parse(text)
    assert message in (calls[-1].error or "")
    assert 'NAME="VALUE"' in (calls[-1].error or "")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": {"a": 1, "a": 1}}}</tool_call>'),
        ("hermes", '<tool_call>{"a": "f", "name": "f", "a": {}}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"a": 1, "a": 2}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "a": 2}}]'),
        ("react", 'Action: f\nAction Input: {"a": 1, "a": 2}'),
        ("pythonic", '[f(b={"a": 1, "a": 2})]'),
        ("pythonic", '[f(a=1, **{"a": 2})]'),
        ("qwen_xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
    ],
)  # fmt: skip
def test_an_argument_given_twice_is_an_error_and_not_the_last_of_them(format, text):
    (call,) = PARSERS[format]().parse(text)
    assert call.arguments == {}
    assert "'a' is given twice" in call.error


def test_react_ignores_what_the_model_imagines_after_an_observation():
    parser = PARSERS["react"]()
    text = 'Thought: add.\nAction: add\nAction Input: {"a": 1}\nObservation: 2\nAction: rm\nAction Input: {}'
    assert parser.parse(text) == (ToolCall("call_0", "add", {"a": 1}),)
    assert parser.parse('Action: add\nAction Input:\n```json\n{"a": 1}\n```')[0].arguments == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Action: add", "has no input"),
        ("Action: add\nAction Input: 2 plus 2", "text after the input"),
        ("Action: add\nAction Input: [2]", "is a list, not an object"),
        ("Action: add\nAction Input: two", "not valid JSON"),
        ("Action:\nAction Input: {}", "has no name"),
        ("Action Input: {}", "no action before it"),
        ("Action: add\nObservation: 3", "has no input"),
    ],
)
def test_a_malformed_action_says_what_to_write(text, message):
    (call,) = PARSERS["react"]().parse(text)
    assert message in (call.error or "")
    assert "Action Input: {" in (call.error or "")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Thought: I know.\nFinal Answer: 42", "42"),
        ("Final Answer: two\nlines", "two\nlines"),
        ("final answer : 42\nObservation: ok", "42"),
        ("Action: add\nAction Input: {}\nFinal Answer: 42", None),
        ("Observation: 42\nFinal Answer: 42", None),
        ("42", None),
    ],
)
def test_a_final_answer_counts_unless_something_comes_before_it(text, answer):
    assert final_answer(text) == answer


def test_a_fence_is_code_in_its_language_only():
    parser = PARSERS["fence"]()
    text = "See:\n```\noutput\n```\n```py\nx = 1\nprint(x)\n```\n````python\ns = '''\n```\n'''\n````"
    assert [call.arguments for call in parser.parse(text)] == [
        {"code": "x = 1\nprint(x)"},
        {"code": "s = '''\n```\n'''"},
    ]
    (call,) = parser.parse("```python\nprint(1)")
    assert "not closed" in (call.error or "")


def test_qwen_xml_values_are_text_as_written():
    parser = PARSERS["qwen_xml"]()
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n x\n\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert parser.parse(text) == (ToolCall("call_0", "add", {"a": "1", "b": " x\n"}),)
    assert parser.format(ToolCall("", "add", {"a": 1, "b": " x\n"})) == text
    broken = {
        "<function=f>": "not closed",
        "<function=f>hm</function>": "text outside parameters",
        "<tool_call>f</tool_call>": "no function",
        "<function=></function>": "no name",
    }
    for text, message in broken.items():
        assert message in (parser.parse(text)[0].error or "")


@pytest.mark.parametrize(
    ("template", "format"),
    [("chatml_hermes", "hermes"), ("thinking", "hermes"), ("llama3", "llama3"), ("mistral", "mistral")],
)
def test_a_template_shows_its_format_and_the_format_reads_what_the_template_writes(template, format):
    from arborl.chat import Template
    from arborl.types import Message

    source = (TEMPLATES / f"{template}.jinja").read_text()
    assert detect_format([source]) == format
    call = ToolCall("call00000", "add", {"a": 1, "b": ["x", None]})
    reply = Message("assistant", tool_calls=(call,))
    text = Template(source, "", "").render([Message("user", "go"), reply], (), generation=False)
    assert plain(make_parser("auto", [source]).parse(text)) == plain([call])


@pytest.mark.parametrize(
    ("template", "format"),
    [("x <function=name> <tool_call>", "qwen_xml"), ("[func_name1(params_name1=", "pythonic"), ("plain", "hermes")],
)
def test_other_signs_of_a_format(template, format):
    assert detect_format([template]) == format


def test_a_renderer_takes_the_format_from_the_template_or_by_name(model_folder):
    source = (TEMPLATES / "mistral.jinja").read_text()
    folder = model_folder(tokenizer_config={"chat_template": source, "eos_token": "</s>"})
    assert type(Renderer.from_folder(folder).parser) is PARSERS["mistral"]
    assert type(Renderer.from_folder(folder, "pythonic").parser) is PARSERS["pythonic"]
    mine = PARSERS["fence"]()
    assert Renderer.from_folder(folder, mine).parser is mine
    assert isinstance(Renderer.from_folder(folder).tokenizer, FileTokenizer)
