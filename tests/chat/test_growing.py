"""A conversation that grows is rendered at the cost of what is new, and the text is always that of the whole."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.chat import Conversations, HermesParser, Renderer, Template
from arborl.chat.builtin_templates import CHATML, add_tool_section, template_support
from arborl.chat.control_tokens import DIVIDER, TextParts
from arborl.chat.incremental import IncrementalRenderer
from arborl.models.model_files import resolve
from arborl.types import Completion, FinishReason, Message, ToolCall, ToolSpec

FOLDER = Path(__file__).parent.parent / "fixtures" / "templates"
SEEDLING = Path(__file__).parents[2] / "src" / "arborl" / "seedling" / "weights" / "chat_template.jinja"
TOOLS = (ToolSpec("add", "Add <|im_end|>.", {"type": "object", "properties": {"a": {"type": "number"}}}),)


def loop(body: str, before: str = "", behind: str = "{% if add_generation_prompt %}a:{% endif %}") -> str:
    return f"{before}{{% for m in messages %}}{body}{{% endfor %}}{behind}"


SHORT = "{{ m.role + ':' + m.content + '<|im_end|>' }}"
SAVED = "{% set ns = namespace(a=0, b='') %}"
ODD = {
    "reads the end": loop(SHORT + "{{ messages[-1].role }}"),
    "counts": loop(SHORT + "{{ loop.length }}{{ loop.revindex }}{{ messages | length }}"),
    "knows the last": loop(SHORT + "{% if loop.last %}!{% endif %}"),
    "looks ahead": loop(SHORT + "{{ (loop.nextitem or m).role }}"),
    "looks two ahead": loop(SHORT + "{{ (messages[loop.index0 + 2] or m).content }}"),
    "looks back": loop(SHORT + "{{ (loop.previtem or m).role + messages[loop.index0 - 1].role + messages[0].role }}"),
    "looks from a beginning": loop(SHORT + "{{ (rest[loop.index0] or m).role }}", "{% set rest = messages[1:] %}"),
    "looks from an end": loop(SHORT + "{{ rest[0].role }}", "{% set rest = messages[::-1] %}"),
    "looks through a copy": loop(SHORT + "{{ rest[-1].role }}", "{% set rest = messages | list %}"),
    "changes": loop(SHORT + "{% if loop.changed(m.role) %}new{% endif %}"),
    "cycles": loop(SHORT + "{{ loop.cycle('x', 'y', 'z') }}"),
    "prints the loop": loop(SHORT + "{{ loop }}"),
    "prints them all": loop(SHORT + "{{ messages }}{{ messages | tojson }}"),
    "asks for one": loop(SHORT + "{% if messages[0] in messages and m in messages %}in{% endif %}"),
    "counts in a namespace": loop("{% set ns.a = ns.a + 1 %}" + SHORT + "{{ ns.a }}", SAVED, "{{ ns.a }}{{ ns.c }}"),
    "notes some": loop(
        "{% if m.role == 'user' %}{% set ns.b = m.content %}{% endif %}{{ ns.b if ns.b }}" + SHORT, SAVED
    ),
    "notes from afar": loop(
        "{% if loop.last %}{% set ns.a = 5 %}{% endif %}" + SHORT + "{{ ns.a }}", SAVED, "{{ ns.a }}"
    ),
    "collects": loop("{% set ns.b = ns.b + m.content %}" + SHORT + "{{ ns.b | length }}", SAVED),
    "collects a list": loop("{% set ns.b = [m.content] + (ns.b or []) %}" + SHORT + "{{ ns.b | length }}", SAVED),
    "breaks": loop("{% if m.content == 'stop' %}{% break %}{% endif %}" + SHORT, SAVED, "|{{ messages | length }}"),
    "passes over": loop("{% if m.role == 'tool' %}{% continue %}{% endif %}" + SHORT),
    "has macros": loop(
        "{{ shown(m) }}{{ ahead() }}",
        "{% set size = messages | length %}{% macro shown(m) %}{{ m.content }}{{ messages[0].role }}{% endmacro %}"
        "{% macro ahead() %}{{ (messages[1] or messages[0]).content }}{{ size > 3 }}{% endmacro %}",
    ),
    "loops within": loop("{% for c in m.content %}{{ loop.index }}{% else %}{{ loop.last }}{% endfor %}" + SHORT),
    "loops twice": loop(SHORT) + loop("{{ loop.index }}{{ m.content }}"),
    "loops or not": "{% if messages[0].role == 'tool' %}" + loop(SHORT) + "{% else %}" + loop("!") + "{% endif %}",
    "picks": "{% for m in messages if m.role != 'tool' %}{{ loop.index }}{{ m.content }}{% endfor %}",
    "reverses": "{% for m in messages | reverse %}{{ m.content }}{{ loop.index }}{% endfor %}",
    "slices": "{% for m in messages[:-1] %}{{ m.content }}{{ loop.last }}{% endfor %}{{ messages[-1].content }}",
    "captures": "{% set x %}" + loop(SHORT) + "{% endset %}{{ x | upper }}",
    "hides": "{% filter upper %}" + loop(SHORT) + "{% endfilter %}",
    "trims": "{% for m in messages -%} {{ m.content | trim }}\n{{ '' if loop.last else '\n' }}{%- endfor %}",
    "refuses": loop("{% if m.content == 'stop' %}{{ raise_exception('no') }}{% endif %}" + SHORT),
    "writes no text": "{% for m in messages %}{% endfor %}hello",
    "is bare": loop("{{ m.content }}"),
    "writes it twice": loop("{{ m.content ~ '|' + (m.content or '') }}{{ m['content'] }}"),
    "looks into it": loop("{% if 'a' in m.content %}!{% endif %}" + SHORT),
    "chooses by it": loop("{{ m.content if m.content else '-' }}{{ 'x' if m.role == 'user' else m.content }}"),
    "alternates": loop("{% if loop.index0 % 2 %}!{% endif %}" + SHORT),
    "names a copy": loop("{% set c = m.content %}{{ c }}{{ c | length }}"),
    "says what it is": loop("{{ 's' if m.content is string }}" + SHORT + "{{ 'k' if 'tool_calls' in m else m.name }}"),
    "prints the item": loop(SHORT + "{{ m }}{{ m.get('content') }}"),
    "filters the text": loop("{% filter upper %}{{ m.content }}{% endfilter %}" + SHORT),
    "begins with another": loop("{{ first }}" + SHORT, "{% set first = messages[0].content %}"),
    "says it behind": loop(SHORT, "", "{{ messages[0].content }}{{ messages[-1].role }}"),
}  # fmt: skip
SOURCES = {path.stem: path.read_text() for path in FOLDER.glob("*.jinja")} | {"seedling": SEEDLING.read_text()} | ODD
HERMES = HermesParser()


@cache
def source_of(name: str) -> str:
    """`chatml+` is ChatML with a place for tools put in front of it."""
    if not name.endswith("+"):
        return SOURCES[name]
    bare = {"chatml+": CHATML, "two ahead+": ODD["looks two ahead"]}[name]
    return add_tool_section(bare, template_support(Template(bare, None, None)), HERMES)


@cache
def renderer_of(name: str, tokenizer) -> Renderer:
    template = Template(source_of(name), "<s>", "<|im_end|>")
    return Renderer(tokenizer, template, HERMES, (tokenizer.token_id("<|im_end|>"),))


NAMES = [*SOURCES, "chatml+", "two ahead+"]
WORDS = ["", "a", "stop", " b\n", "<|im_end|>", "<|im", "_end|>", DIVIDER, "<", "<tool_call>", "é", "<think>x</think>y"]
TEXT = st.sampled_from(WORDS)
CALLS = st.sampled_from([(), (), (), (ToolCall("1", "add", {"a": 1}),), (ToolCall("1", "add", {"a": True}),)])
MESSAGE = st.builds(
    Message, st.sampled_from(["user", "assistant", "tool", "tool", "system"]), TEXT, CALLS, sampled=st.booleans()
)
EDIT = st.sampled_from(["grow", "grow", "grow", "delete", "change", "back", "copy", "alter"])


def edited(data: st.DataObject, edit: str, messages: list[Message], earlier: list[list[Message]]) -> list[Message]:
    """The next thing an agent might ask with."""
    at = data.draw(st.integers(0, max(len(messages) - 1, 0)))
    if edit == "delete" and len(messages) > 1:
        return messages[:at] + messages[at + 1 :]
    if edit == "change" and messages:
        return [*messages[:at], data.draw(MESSAGE), *messages[at + 1 :]]
    if edit == "back":
        return data.draw(st.sampled_from(earlier))
    if edit == "copy":
        return [replace(message) for message in messages]
    if edit == "alter":
        for message in messages:  # an agent's own, in place
            for call in message.tool_calls:
                call.arguments["b"] = len(earlier)
    return messages + data.draw(st.lists(MESSAGE, min_size=1, max_size=3))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(data=st.data())
def test_whatever_is_added_deleted_changed_or_taken_up_again_the_text_is_that_of_the_whole(name, data, tokenizer):
    renderer = renderer_of(name, tokenizer)
    tools = data.draw(st.sampled_from([(), TOOLS]))
    conversations, earlier = Conversations(renderer), [[]]
    for _ in range(data.draw(st.integers(2, 7))):
        messages = edited(data, data.draw(EDIT), earlier[-1], earlier)
        earlier.append(messages)
        whole, prompt = tried(renderer.render, messages, tools), tried(conversations.prompt, messages, tools)
        if isinstance(whole, str):
            assert prompt == whole
            continue
        assert prompt.shown == whole
        assert prompt.tokens[prompt.reused :] == tuple(prompt.tokens)[prompt.reused :]
        if not prompt.reused:
            assert prompt.tokens == tuple(renderer.encode(whole))
        assert conversations.count(messages, tools) == len(prompt.tokens)
        if messages and data.draw(st.booleans()):
            ids = tokenizer.encode(data.draw(TEXT))
            completion = Completion((*ids, renderer.stop[0]), (0.0,) * (len(ids) + 1), FinishReason.STOP)
            conversations.record(prompt, completion)
            earlier.append([*messages, renderer.read(completion)])


def tried(work, *arguments):
    """What it makes of them, or the words in which the template refuses."""
    try:
        return work(*arguments)
    except ValueError as refused:
        return str(refused)


class Whole(Conversations):
    """Renders all of it each time."""

    def __init__(self, renderer: Renderer):
        super().__init__(renderer)
        self._incremental = self

    def render(self, messages, tools=()):
        return TextParts([self.renderer.render(messages, tools)])

    def _first_prompt(self, messages, tools):
        return None


@pytest.mark.parametrize("name", ["chatml_hermes", "llama3", "mistral", "thinking", "seedling", "chatml+"])
@settings(max_examples=15)
@given(data=st.data())
def test_branches_start_and_go_on_where_they_do_when_all_is_rendered_and_compared(name, data, tokenizer):
    renderer = renderer_of(name, tokenizer)
    one, other, earlier = Conversations(renderer), Whole(renderer), [[Message("user", "Hi")]]
    for _ in range(data.draw(st.integers(2, 8))):
        messages = edited(data, data.draw(EDIT), earlier[-1], earlier)
        prompt, same = tried(one.prompt, messages, TOOLS), tried(other.prompt, messages, TOOLS)
        if isinstance(same, str):
            assert prompt == same
            continue
        assert (prompt.tokens, prompt.shown, prompt.reused) == (same.tokens, same.shown, same.reused)
        ids = tokenizer.encode(data.draw(TEXT))
        completion = Completion((*ids, renderer.stop[0]), (0.0,) * (len(ids) + 1), FinishReason.STOP)
        reply = renderer.read(completion)
        one.record(prompt, completion, reply=reply)
        other.record(same, completion, reply=reply)
        earlier.append([*messages, reply])


USED = [
    "chatml_hermes", "llama3", "seedling", "thinking", "chatml+", "looks ahead", "looks back", "counts in a namespace",
]  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_a_turn_goes_through_what_is_new_and_the_message_before_it(name, tokenizer):
    renderer = renderer_of(name, tokenizer)
    growing, messages = IncrementalRenderer(renderer), [Message("system", "Be brief."), Message("user", "Hi")]
    before = growing.render(messages, TOOLS)
    for turn in range(12):
        messages += [Message("assistant", f"say {turn}", sampled=True), Message("tool", f"hear {turn}")]
        after = growing.render(messages, TOOLS)
        assert after.joined == renderer.render(messages, TOOLS)
        new = {id(part) for part in after.parts} - {id(part) for part in before.parts}
        assert len(new) <= 4  # what was last, the two messages, and what is behind them
        before = after


def test_conversations_that_are_gone_through_in_turns_are_each_kept(tokenizer):
    renderer = renderer_of("seedling", tokenizer)
    growing = IncrementalRenderer(renderer)
    talks = {name: [Message("system", f"You are {name}."), Message("user", "Hi")] for name in ("Ada", "Bob", "Cy")}
    before = {name: growing.render(messages) for name, messages in talks.items()}
    for turn in range(5):
        for name, messages in talks.items():
            messages += [Message("assistant", f"{turn}", sampled=True), Message("user", name)]
            after = growing.render(messages)
            assert len({id(part) for part in after.parts} - {id(part) for part in before[name].parts}) <= 4
            before[name] = after


def test_the_first_prompt_of_a_group_is_rendered_and_tokenised_once(monkeypatch):
    renderer = Renderer.from_folder(resolve("seedling"))
    encode_calls = []
    monkeypatch.setattr(type(renderer.tokenizer), "encode", counted(encode_calls, type(renderer.tokenizer).encode))
    opening = (Message("system", "Play."), Message("user", "A board."))
    prompts = [Conversations(renderer).prompt(opening) for _ in range(5)]
    assert len(encode_calls) == 1
    assert all(prompt.tokens == prompts[0].tokens for prompt in prompts)
    assert len({id(prompt.tokens.line) for prompt in prompts}) == 5  # no episode's ids are on another's line


def counted(calls, function):
    return lambda *args, **more: calls.append(args) or function(*args, **more)


def test_conversations_that_begin_alike_go_their_own_ways():
    renderer = Renderer.from_folder(resolve("seedling"))
    opening = (Message("user", "Which way?"),)
    for text in ("Left", "Right", "Left"):
        conversations = Conversations(renderer)
        prompt = conversations.prompt(opening)
        ids = (*renderer.encode(renderer.escape_reply(text)), renderer.stop[0])
        completion = Completion(ids, (0.0,) * len(ids), FinishReason.STOP)
        reply = renderer.read(completion)
        conversations.record(prompt, completion, reply=reply)
        later = (*opening, reply, Message("user", "And now?"))
        following = conversations.prompt(later)
        assert following.text == renderer.text(later)
        assert following.reused == len(prompt.tokens) + len(completion.tokens)
