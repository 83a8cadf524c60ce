from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from arborl.chat import Conversations, HermesParser, Renderer, Template
from arborl.types import Completion, FinishReason, Message, ToolSpec

FAMILIES = ("chatml_hermes", "llama3", "mistral", "thinking")
BEGIN = ("<s>", "<|begin_of_text|>")
TOOL = ToolSpec("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "number"}}})
SYSTEM, USER, RESULT = Message("system", "Be brief."), Message("user", "One and two?"), Message("tool", "3")


def completion(ids: Sequence[int], finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(tuple(ids), (0.0,) * len(ids), finish)


def say(renderer: Renderer, text: str) -> Completion:
    """A completion that writes `text` in canonical tokens and stops."""
    return completion([*renderer.tokenizer.encode(text), renderer.stop[0]])


def answer(conversations: Conversations, messages: list[Message], sampled: Completion, tools=()):
    """One turn: ask, record what was sampled, put it into the messages; the prompt that was used."""
    prompt = conversations.prompt(messages, tools)
    conversations.record(prompt, sampled)
    messages.append(conversations.renderer.read(sampled))
    return prompt


TEXT = st.text(max_size=12) | st.sampled_from(["", "\n\n", " The answer ", "Grüße, 日本語", "a\n", "  ", "<tool_call>"])
REPLY = TEXT.map(lambda text: text.lstrip())  # white space would merge with the end of the generation prompt
THOUGHT = st.tuples(REPLY, REPLY).map(lambda parts: f"<think>\n{parts[0]}\n</think>\n\n{parts[1]}")
TURN = st.tuples(REPLY | THOUGHT, st.lists(TEXT.map(lambda text: Message("tool", text)), min_size=1, max_size=3))
ROUND = st.tuples(TEXT.map(lambda text: Message("user", text)), st.lists(TURN, max_size=2), REPLY | THOUGHT)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(system=st.booleans(), tools=st.booleans(), rounds=st.lists(ROUND, min_size=1, max_size=3))
def test_incremental_ids_equal_the_full_render(family, renderer_for, tokenizer, system, tools, rounds):
    renderer = renderer_for(family, tokenizer)
    conversations, messages = Conversations(renderer), [SYSTEM] if system else []
    given_tools = [TOOL] if tools else []
    earlier: tuple[int, ...] = ()  # all tokens of the conversation so far
    appends = True  # whether the template must have kept all of that in the next prompt
    rewrites_on_user = family == "thinking" or (family == "mistral" and (system or tools))
    for user, turns, last in rounds:
        messages.append(user)
        appends = appends and not (earlier and rewrites_on_user)
        for text, results in [*turns, (last, [])]:
            prompt = conversations.prompt(messages, given_tools)
            assert prompt.tokens == tuple(tokenizer.encode(renderer.text(messages, given_tools)))
            assert prompt.text == renderer.text(messages, given_tools)
            if appends:
                assert prompt.tokens[: len(earlier)] == earlier
                assert prompt.reused == len(earlier)
            sampled = say(renderer, text)
            # Canonical in its context: no token of the text merges with one of the prompt.
            assume((*prompt.tokens, *sampled.tokens) == (*tokenizer.encode(prompt.text + text), renderer.stop[0]))
            conversations.record(prompt, sampled)
            earlier = (*prompt.tokens, *sampled.tokens)
            messages += [renderer.read(sampled), *results]
            appends = family != "llama3" or text == text.strip()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_consecutive_tool_results_extend_the_call_before_them(family, tools, renderer_for, tokenizer):
    renderer = renderer_for(family, tokenizer)
    conversations, messages = Conversations(renderer), [SYSTEM, USER]
    sampled = say(renderer, '<tool_call>{"name": "add"}</tool_call>')
    first = answer(conversations, messages, sampled, tools)
    messages += [RESULT, Message("tool", "4"), Message("tool", "5")]
    second = conversations.prompt(messages, tools)
    assert second.tokens[: second.reused] == first.tokens + sampled.tokens
    assert second.tokens == tuple(tokenizer.encode(renderer.text(messages, tools)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_begin_token_stands_once_and_first(family, renderer_for, tokenizer):
    renderer = renderer_for(family, tokenizer)
    begin = {tokenizer.token_id(text) for text in BEGIN}
    conversations, messages = Conversations(renderer), [USER]
    for _ in range(3):
        prompt = answer(conversations, messages, say(renderer, "Three."))
        places = [i for i, token in enumerate(prompt.tokens) if token in begin]
        assert places == ([0] if family in ("llama3", "mistral") else [])
        messages += [RESULT, USER]


def test_a_tokenizer_that_marks_the_start_of_a_text_does_not_mark_the_start_of_an_increment(metaspace):
    bare = "<s>{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    renderer = Renderer(metaspace, Template(bare, None, "</s>"), HermesParser(), (metaspace.token_id("</s>"),))
    conversations, messages = Conversations(renderer), [Message("user", "the goal")]
    answer(conversations, messages, completion(metaspace.encode("</s>The answer</s>")[1:]))
    messages.append(Message("user", "right"))
    prompt = conversations.prompt(messages)
    assert prompt.reused > 0
    assert prompt.tokens == tuple(metaspace.encode("<s>the goalThe answer</s>right"))
    assert metaspace.encode("</s>right")[1:] != metaspace.encode("right")


def test_a_space_that_was_sampled_first_is_kept_in_the_content(renderer_for, metaspace):
    renderer = renderer_for("mistral", metaspace)
    spaced = completion([*metaspace.encode("The answer"), renderer.stop[0]])  # this tokenizer's first word has a space
    assert metaspace.decode(spaced.tokens[:-1]) == "The answer"
    assert renderer.read(spaced).content == " The answer"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_cut_by_length_gets_its_end_of_turn_as_context(family, renderer_for, tokenizer):
    renderer = renderer_for(family, tokenizer)
    conversations, messages = Conversations(renderer), [USER]
    cut = completion(tokenizer.encode("The answer is thr")[:-1], FinishReason.LENGTH)
    first = answer(conversations, messages, cut)
    messages.append(Message("user", "Go on."))
    second = conversations.prompt(messages)
    assert second.reused == len(first.tokens) + len(cut.tokens)
    assert second.tokens[: second.reused] == first.tokens + cut.tokens
    assert second.tokens[second.reused] == renderer.stop[0]
    assert tokenizer.decode(second.tokens) == second.text


def test_a_completion_cut_inside_a_character_is_kept(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    conversations, messages = Conversations(renderer), [USER]
    half = next(i for i in tokenizer.encode("\U0001f9ca") if tokenizer.decode([i]) == "\ufffd")
    cut = completion([*tokenizer.encode("Ice "), half], FinishReason.LENGTH)
    first = answer(conversations, messages, cut)
    assert messages[-1].content == "Ice \ufffd"
    messages.append(USER)
    assert conversations.prompt(messages).tokens[: len(first.tokens) + len(cut.tokens)] == first.tokens + cut.tokens


def test_a_deleted_message_opens_a_new_branch_and_the_old_one_can_be_taken_up_again(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    conversations, messages = Conversations(renderer), [SYSTEM, USER]
    answer(conversations, messages, say(renderer, "Two."))
    messages.append(Message("user", "Sure?"))
    answer(conversations, messages, say(renderer, "Three."))
    edited = [*messages[:2], *messages[3:], USER]
    prompt = conversations.prompt(edited)
    assert prompt.reused == 0
    assert prompt.tokens == tuple(tokenizer.encode(renderer.text(edited)))
    assert conversations.prompt([*messages, USER]).reused > 0


def test_a_template_that_strips_thinking_branches_when_the_user_speaks_and_not_before(renderer_for, tokenizer):
    renderer = renderer_for("thinking", tokenizer)
    conversations, messages = Conversations(renderer), [USER]
    answer(conversations, messages, say(renderer, "<think>\nhm\n</think>\n\nA tool."))
    messages.append(RESULT)
    assert answer(conversations, messages, say(renderer, "<think>\nso\n</think>\n\nThree.")).reused > 0
    messages.append(USER)
    prompt = conversations.prompt(messages)
    assert prompt.reused == 0
    assert "<think>" not in prompt.text


def test_a_template_that_trims_branches_only_where_there_is_something_to_trim(renderer_for, tokenizer):
    renderer = renderer_for("llama3", tokenizer)
    for text, extends in (("Three.", True), ("Three. \n", False)):
        conversations, messages = Conversations(renderer), [USER]
        answer(conversations, messages, say(renderer, text))
        assert messages[-1].content == text
        messages.append(USER)
        assert (conversations.prompt(messages).reused > 0) is extends


def test_a_completion_that_ended_with_another_stop_token_starts_a_branch(renderer_for, tokenizer):
    plain = renderer_for("chatml_hermes", tokenizer)
    other = tokenizer.token_id("</s>")
    renderer = Renderer(tokenizer, plain.template, plain.parser, (*plain.stop, other))
    conversations, messages = Conversations(renderer), [USER]
    answer(conversations, messages, completion([*tokenizer.encode("Three."), other]))
    assert messages[-1].content == "Three."
    messages.append(USER)
    assert conversations.prompt(messages).reused == 0


def test_interleaved_conversations_each_extend_their_own(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    conversations = Conversations(renderer)
    talks = {name: [Message("system", f"You are {name}."), USER] for name in ("Ada", "Bob")}
    seen: dict[str, tuple[int, ...]] = dict.fromkeys(talks, ())
    for turn in range(3):
        for name, messages in talks.items():
            sampled = say(renderer, f"{name} says {turn}.")
            prompt = answer(conversations, messages, sampled)
            assert prompt.reused == len(seen[name])
            assert prompt.tokens[: prompt.reused] == seen[name]
            seen[name] = prompt.tokens + sampled.tokens
            messages.append(RESULT)


def test_two_answers_to_one_prompt_are_two_branches(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    conversations = Conversations(renderer)
    for text in ("Two.", "Three."):
        answer(conversations, [USER], say(renderer, text))
    for text in ("Two.", "Three."):
        prompt = conversations.prompt([USER, Message("assistant", text, sampled=True), USER])
        assert tokenizer.decode(prompt.tokens[: prompt.reused]).endswith(f"{text}<|im_end|>")


def test_of_two_tokenisations_of_one_answer_the_latest_is_taken(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    conversations, messages = Conversations(renderer), [USER]
    letters = [token for letter in "The answer" for token in tokenizer.encode(letter)]
    for ids in (letters, tokenizer.encode("The answer")):
        answer(conversations, [USER], completion([*ids, renderer.stop[0]]))
    assert letters != tokenizer.encode("The answer")
    messages += [Message("assistant", "The answer", sampled=True), USER]
    prompt = conversations.prompt(messages)
    assert prompt.tokens == tuple(tokenizer.encode(prompt.text))


def test_a_prompt_that_adds_nothing_is_the_branch_itself(tokenizer):
    template = Template("{% for m in messages %}{{ m.content }}{% endfor %}", None, None)
    renderer = Renderer(tokenizer, template, HermesParser(), (tokenizer.token_id("</s>"),))
    conversations, messages = Conversations(renderer), [USER]
    cut = completion(tokenizer.encode("Three"), FinishReason.LENGTH)
    first = answer(conversations, messages, cut)
    again = conversations.prompt(messages)
    assert again.tokens == first.tokens + cut.tokens
    assert again.reused == len(again.tokens)


class ManyToOne:
    """A tokenizer no text survives: four ids write each letter, and encoding always picks the lowest."""

    letters = "abcdefgh\n "
    stop = 1000
    vocab_size = 1001
    control = tags = frozenset()

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in text.split("#"):
            ids += [*(4 * self.letters.index(letter) for letter in part), self.stop]
        return ids[:-1]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("#" if i == self.stop else self.letters[i // 4] for i in ids)

    def token_id(self, text: str) -> int | None:
        return self.stop if text == "#" else None


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 39), max_size=6), st.booleans(), st.text("abc\n", max_size=5)), max_size=5
    )
)
def test_no_sampled_id_changes_whatever_the_tokenizer_would_have_made_of_its_text(turns):
    source = (
        "{% for m in messages %}{{ 'abc'[0 if m.role == 'user' else 1] + '\n' + m.content + '#' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'b\n' }}{% endif %}"
    )
    tokenizer = ManyToOne()
    renderer = Renderer(tokenizer, Template(source, None, None), HermesParser(), (tokenizer.stop,))
    conversations, messages = Conversations(renderer), [Message("user", "a")]
    recorded: list[tuple[int, tuple[int, ...]]] = []  # where each completion began, and its ids
    for ids, stops, reply in turns:
        sampled = completion(
            [*ids, tokenizer.stop] if stops else ids, FinishReason.STOP if stops else FinishReason.LENGTH
        )
        prompt = answer(conversations, messages, sampled)
        recorded.append((len(prompt.tokens), sampled.tokens))
        messages.append(Message("user", reply))
    final = conversations.prompt(messages)
    for start, ids in recorded:
        assert final.tokens[start : start + len(ids)] == ids
    assert tokenizer.decode(final.tokens) == final.text == renderer.text(messages)


@given(data=st.data())
def test_no_sampled_id_changes_with_any_ids_of_a_real_vocabulary(data, renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    conversations, messages = Conversations(renderer), [USER]
    ordinary = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in renderer.template_only)
    context: tuple[int, ...] = ()
    for ids in data.draw(st.lists(st.lists(ordinary, max_size=8), min_size=1, max_size=3)):
        sampled = completion([*ids, renderer.stop[0]])
        prompt = answer(conversations, messages, sampled)
        assert prompt.tokens[: len(context)] == context
        context = prompt.tokens + sampled.tokens
        messages.append(RESULT)
    assert conversations.prompt(messages).tokens[: len(context)] == context


def test_the_message_read_from_a_completion_keeps_its_text_and_has_its_calls(renderer_for, tokenizer):
    renderer = renderer_for("chatml_hermes", tokenizer)
    text = ' \nI add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n '
    message = renderer.read(say(renderer, text))
    assert message.content == text
    assert message.sampled
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [("call_0", "add", {"a": 1})]
    assert renderer.read(completion([], FinishReason.ABORT)).content == ""
