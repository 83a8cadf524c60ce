"""The history only grows, edits say how it is shown, and the view is a pure function of both."""

import copy
import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.agents.context.history import (
    STUB,
    ContextError,
    Delete,
    Fold,
    History,
    Restore,
    Truncate,
    ViewStyle,
    Window,
    append_edit,
    visible_messages,
)
from arborl.types import Message, ToolCall

OPENING = (Message("system", "Be brief."), Message("user", "Where?"))


def output(text, *names):
    calls = tuple(ToolCall(f"call_{i}", name, {"x": i}) for i, name in enumerate(names))
    return Message("assistant", text, tool_calls=calls, sampled=True)


def answered(text, name="readChunk", call="call_0"):
    return Message("tool", text, tool_call_id=call, name=name)


def three_rounds(opening=OPENING):
    history = History.open(opening)
    for number in range(3):
        history = history.add(output(f"round {number}", "readChunk"))
        history = history.add(answered(f'{{"text": "chunk {number}"}}'), caller=history.last, room=900 - number)
    return history


def contents(messages):
    return [message.content for message in messages]


def test_numbers_do_not_depend_on_whether_there_is_a_system_message():
    for opening in (OPENING, OPENING[1:]):
        assert [entry.id for entry in three_rounds(opening).entries if entry.id] == [1, 2, 3, 4, 5, 6]
        assert three_rounds(opening).find(1).message.content == "round 0"


def test_ids_notes_and_budget_are_shown_from_the_first_turn():
    first = visible_messages(History.open(OPENING), (), {}, ViewStyle(budget="1024 tokens, 9 rounds"))
    assert "No notes recorded." in first[1].content
    assert "1024 tokens, 9 rounds" in first[1].content
    shown = visible_messages(three_rounds(), (), {"lamp": "Mira keeps it"})
    assert "- **lamp**: Mira keeps it" in shown[1].content
    assert [json.loads(m.content)["msg_id"] for m in shown if m.role == "tool"] == [2, 4, 6]
    assert [json.loads(m.content)["msg_id(invoking_assistant)"] for m in shown if m.role == "tool"] == [1, 3, 5]
    assert [json.loads(m.content)["available_tokens"] for m in shown if m.role == "tool"] == [900, 899, 898]


def test_a_deleted_answer_leaves_a_stub_with_its_number_and_tool():
    history = three_rounds()
    shown = visible_messages(history, append_edit(history, (), Delete(2)))
    assert json.loads(shown[3].content) == {
        "msg_id": 2,
        "msg_id(invoking_assistant)": 1,
        "status": "success",
        "message": STUB,
        "original_tool": "readChunk",
    }
    assert "chunk 1" in shown[5].content


def test_deleted_calls_and_results_leave_stubs_and_can_be_restored():
    history = three_rounds()
    message = visible_messages(history, append_edit(history, (), Delete(3)))[4]
    assert message.content == STUB
    assert message.tool_calls == (ToolCall("call_0", "readChunk", {"message": STUB}),)
    assert not message.sampled
    history = History.open(OPENING).add(output("x", "readChunk")).add(answered("{}"), caller=1, tag="3/9")
    shown = visible_messages(history, (Delete(2),))
    assert json.loads(shown[-1].content)["reading_progress"] == "3/9"
    assert visible_messages(history, (Delete(2),), style=ViewStyle(form="brief"))[-1].content == f"#2 3/9: {STUB}"
    history = three_rounds()
    edits = append_edit(history, append_edit(history, (), Delete(2)), Restore(2))
    assert visible_messages(history, edits) == visible_messages(history)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (Delete(0), "message 0 is the question"),
        (Delete(9), "there is no message 9; the latest is 7"),
        (Delete(-1), "there is no message -1"),
        (Delete(7), "message 7 is a user message"),
        (Delete(4), "message 4 is already deleted"),
        (Restore(2), "message 2 is not deleted"),
        (Fold(3, 2, "x"), "messages 3 to 2"),
        (Fold(1, 2, " "), "the summary is empty"),
        (Truncate(0), "before=0"),
        (Window(0), "size=0"),
    ],
)
def test_edits_that_make_no_sense_are_refused_and_change_nothing(edit, words):
    history = three_rounds().add(Message("user", "go on"))
    edits = (Delete(4),)
    before = visible_messages(history, edits)
    with pytest.raises(ContextError, match=words):
        append_edit(history, edits, edit)
    assert visible_messages(history, edits) == before


def test_what_was_folded_cannot_be_deleted_but_restored():
    history = three_rounds()
    edits = append_edit(history, (), Fold(1, 4, "two chunks read"))
    with pytest.raises(ContextError, match="no longer in your context"):
        append_edit(history, edits, Delete(2))
    restored = append_edit(history, edits, Restore(4))
    assert [message.role for message in visible_messages(history, restored)] == [
        "system",
        "user",
        *["assistant", "tool"] * 2,
    ]
    assert "chunk 1" in contents(visible_messages(history, restored))[3]


def test_folds_stand_beside_the_question_and_cover_earlier_ones():
    history = three_rounds()
    shown = visible_messages(history, append_edit(history, (), Fold(1, 3, "read two chunks")))
    assert contents(shown)[1].startswith("Where?\n\n[Previous Summary]: read two chunks")
    assert [message.role for message in shown] == ["system", "user", "assistant", "tool"]
    assert shown[2].content == "round 2"
    history = three_rounds()
    edits = append_edit(history, append_edit(history, (), Fold(1, 2, "first")), Fold(1, 6, "all"))
    shown = visible_messages(history, edits)
    assert len(shown) == 2
    assert "all" in shown[1].content
    assert "first" not in shown[1].content


def test_windows_and_truncation_hide_the_beginning():
    history = three_rounds()
    assert [m.role for m in visible_messages(history, (Window(3),))] == ["system", "user", "assistant", "tool"]
    assert [m.role for m in visible_messages(history, (Window(4),))] == ["system", "user", *["assistant", "tool"] * 2]
    history = three_rounds()
    assert contents(visible_messages(history, (Truncate(5),)))[2] == "round 2"


def test_tidy_hides_rounds_with_only_successful_context_editing():
    history = History.open(OPENING).add(output("a", "note", "deleteContext"))
    history = history.add(answered("{}", "note"), caller=1).add(answered("{}", "deleteContext"), caller=1, ok=True)
    assert len(visible_messages(history, style=ViewStyle(tidy=True))) == 2
    assert len(visible_messages(history)) == 5
    failed = dataclasses.replace(history.entries[-1], ok=False)
    assert len(visible_messages(History((*history.entries[:-1], failed)), style=ViewStyle(tidy=True))) == 5


def test_brief_says_the_same_in_fewer_characters():
    history, style = three_rounds(), ViewStyle(form="brief", stub="deleted", budget="1024 tokens, 9 rounds")
    shown = visible_messages(history, (Delete(2),), {"lamp": "Mira"}, style)
    assert shown[1].content == "Where?\nNotes: lamp: Mira\nBudget: 1024 tokens, 9 rounds"
    assert shown[3].content == "#2 deleted"
    assert shown[5].content == '#4 {"text": "chunk 1"} (899 left)'


NUMBERS = st.integers(-1, 9)
EDITS = st.one_of(
    st.builds(Delete, NUMBERS),
    st.builds(Restore, NUMBERS),
    st.builds(Fold, NUMBERS, NUMBERS, st.sampled_from(["so far", "more", ""])),
    st.builds(Truncate, NUMBERS),
    st.builds(Window, st.integers(0, 6)),
)


@settings(max_examples=120)
@given(st.lists(EDITS, max_size=8), st.dictionaries(st.sampled_from("abc"), st.text(max_size=5)), st.booleans())
def test_the_view_is_pure_and_whole_whatever_is_edited(tried, notes, tidy):
    history, edits = three_rounds(), ()
    for edit in tried:
        try:
            edits = append_edit(history, edits, edit)
        except ContextError:
            continue
    style = ViewStyle(tidy=tidy)
    frozen = copy.deepcopy((history, edits, notes))
    shown = visible_messages(history, edits, notes, style)
    assert visible_messages(history, edits, notes, style) == shown
    assert (history, edits, notes) == frozen
    assert shown[0] == OPENING[0]
    assert shown[1].content.startswith("Where?")
    for before, message in itertools.pairwise(shown):
        if message.role == "tool":  # an answer never stands without its call
            assert before.role in ("assistant", "tool")
    kept = [message for message in shown if message.sampled]
    assert all(message in [entry.message for entry in history.entries] for message in kept)
