"""Instructions that rules can check, as in IFEval."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.rewards import find_reward
from arborl.rewards.reward import Rewards
from arborl.rewards.text.ifeval import (
    CHECKS,
    RLVR_FUNCTIONS,
    Instruction,
    InstructionFollowingReward,
    count_ended_sentences,
    read_instructions,
)
from arborl.types import Episode, Group, Message, Task, Turn


def english(text):
    return None if not any(c.isalpha() for c in text) else "de" if "ist" in text.lower().split() else "en"


def follows(text, name, **args):
    return Instruction(name, args).check(text, english)


def score(reply, fields, **args):
    task = Task("t", (Message("user", "Write."),), fields)
    episode = Episode("e", task, turns=[Turn(Message("assistant", reply))])
    args = {"detector": english} | args
    return asyncio.run(InstructionFollowingReward(**args)(episode))


@pytest.mark.parametrize(
    ("name", "args", "good", "bad"),
    [
        ("keywords:existence", {"keywords": ["Cat", "C++"]}, "A category of c++.", "A cat in C."),
        ("keywords:forbidden_words", {"forbidden_words": ["cat", "c++"]}, "A category.", "The Cat!"),
        ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "Cat, category", "a cat"),
        ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "a cat", "Cat, category"),
        ("keywords:letter_frequency", {"letter": "A", "let_frequency": 2, "let_relation": "at least"}, "Aa", "a"),
        ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "less than"}, "#", "##"),
        ("language:response_language", {"language": "de"}, "das ist es", "that is it"),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Go. Why?", "Dr. A came"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "don't go"),
        ("length_constraints:number_words", {"num_words": 3.0, "relation": "at least"}, "don't go", "one two"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n***\n***\nb"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na ***b\n***", "a\n\nb"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
            "One.\n\n'then, two.",
            "Then.\n\nTwo.",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", "[a [b] c]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. Call!", "Bye. PS call"),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s again", "P.S. again"),
        ("detectable_content:postscript", {"postscript_marker": "N.B."}, "n.b. this", "nxbx this"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b\n**c**", "* a\n* b\n* c"),
        ("detectable_format:constrained_response", {}, "Well: My answer is no.", "No."),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ****"),
        (
            "detectable_format:multiple_sections",
            {"num_sections": 2, "section_spliter": "Section"},
            "Section 1\nx\nSection 2\ny",
            "Section one\nSection 2",
        ),
        ("detectable_format:json_format", {}, '```JSON\n{"a": [1]}\n```', "{a: 1}"),
        ("detectable_format:title", {}, "<<Joy>>\nverse", "<< >>\n<<a\n>>"),
        ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi. "}, " say HI. Hi!", "Hi! Say hi."),
        ("startend:end_checker", {"end_phrase": "That is all."}, '"x. THAT IS ALL."', "That is all. Bye"),
        ("startend:quotation", {}, ' "a" ', '"'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "at least"},
            "The WELL-KNOWN U.S.A.",
            "The WELL-KNOWN Usa",
        ),
        ("change_case:english_capital", {}, "THAT IS IT 1!", "DAS IST ES"),
        ("change_case:english_lowercase", {}, "that is it", "That is it"),
        ("punctuation:no_comma", {}, "a; b", "a, b"),
    ],
)
def test_every_instruction_is_told_from_its_violation(name, args, good, bad):
    assert follows(good, name, **args)
    assert not follows(bad, name, **args)


def test_all_instructions_of_the_paper_are_known_and_each_has_a_function_of_rlvr_ifeval():
    assert len(CHECKS) == 25
    assert {name for name, _, _ in RLVR_FUNCTIONS.values()} == set(CHECKS)


TWO = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 3, "relation": "at least", "letter": None}],
}


def test_the_score_is_the_share_of_followed_instructions_or_1_for_all():
    assert score("one, two", TWO) == 0.0
    assert score("one, two three", TWO) == 0.5
    assert score("one two three", TWO) == 1.0
    assert score("one, two three", TWO, all=True) == 0.0
    assert score("one two three", TWO, all=True) == 1.0


def test_thinking_is_not_part_of_the_reply_and_an_empty_reply_follows_nothing():
    assert score("<think>one, two</think>one two three", TWO) == 1.0
    assert score("<think>one two three", TWO) == score("  ", TWO) == 0.0


def test_loose_also_accepts_a_reply_without_first_line_last_line_or_asterisks():
    fields = {"instruction_id_list": ["startend:quotation"]}
    for reply in ('Sure:\n"a"', '"a"\nBye', 'Sure:\n"a"\nBye', '*"a"*', 'Sure:\n*"a"*'):
        assert (score(reply, fields), score(reply, fields, mode="loose")) == (0.0, 1.0)
    assert score('Sure:\nyes:\n"a"', fields, mode="loose") == 0.0


def test_columns_and_ground_truth_may_be_json_text_or_nested():
    as_text = {"instruction_id_list": json.dumps(TWO["instruction_id_list"]), "kwargs": json.dumps(TWO["kwargs"])}
    assert score("one two three", as_text) == score("one two three", {"answer": json.dumps(TWO)}) == 1.0
    assert score("one two three", {"truth": TWO}, field="truth") == 1.0


def test_a_row_of_rlvr_ifeval_is_read_as_the_instruction_of_the_same_meaning():
    truth = {"func_name": "verify_keyword_frequency", "word": "cat", "N": 2, "letter": None}
    assert score("A cat, a category, a Cat.", {"answer": json.dumps(truth)}) == 1.0  # exactly, and whole words
    assert score("A cat, a cat, a cat.", {"answer": truth}) == 0.0
    about = {"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}
    assert [score("w " * count, {"answer": about}) for count in (17, 18, 22, 23)] == [0.0, 1.0, 1.0, 0.0]
    parts = {"func_name": "verify_paragraph_count", "N": 2}
    assert score("a\n* * *\nb", {"answer": parts}) == 1.0
    choice = {"func_name": "validate_choice", "options": "Option A, Option B"}
    assert (score("I take Option B.", {"answer": choice}), score("Option", {"answer": choice})) == (1.0, 0.0)
    assert score("DAS IST ES", {"answer": {"func_name": "validate_uppercase"}}) == 1.0  # there in any language


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"answer": "42"}, "needs the columns 'instruction_id_list' and 'kwargs'"),
        ({"answer": "yes"}, "answer is not JSON"),
        ({}, "the task has: no columns"),
        ({"instruction_id_list": []}, "at least one id"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "Did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "one mapping for each of 1"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [3]}, "write a mapping"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": 3}]}, "has no argument 'n'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "needs the argument 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "cat"}]}, "a list of words"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": "3", "relation": "at least"}],
            },
            "write a whole number",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "more than"}],
            },
            "write one of less than, at least",
        ),
        ({"answer": {"func_name": "validate_rhyme"}}, "func_name='validate_rhyme': unknown"),
    ],
)
def test_a_row_without_valid_instructions_fails_the_episode_and_says_why(fields, says):
    task = Task("t", (Message("user", "Write."),), fields)
    episode = Episode("e", task, turns=[Turn(Message("assistant", "one two three"))])
    rewards = Rewards([("ifeval", find_reward("ifeval", {}, "args"), 1.0)], 5)
    asyncio.run(rewards.score([Group(task, [episode])]))
    assert says in str(episode.failure)


def test_without_a_language_detector_only_instructions_that_need_it_fail(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    upper = {"instruction_id_list": ["change_case:english_capital"]}
    assert score("one two three", TWO, detector="langdetect") == 1.0
    assert score("one", upper, detector="langdetect") == 0.0  # small letters need no language
    with pytest.raises(LookupError, match="pip install langdetect, or write rewards="):
        score("ONE", upper, detector="langdetect")


def test_the_detector_may_be_named_and_modes_are_checked():
    named = InstructionFollowingReward(detector=f"{__name__}:english")
    assert named.detect("das ist es") == "de"
    with pytest.raises(ValueError, match="give strict or loose"):
        InstructionFollowingReward(mode="lax")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0), ("One", 1), ("One.", 1), ("One. Two! Three?", 3), ('He said "Go." Then he went.', 2),
        ("Dr. Smith and J. Doe, e.g. here, paid 3.50 (approx. 4).", 1), ("Wait... what? Yes… No.", 3),
        ("all small. letters too.", 2), ("1. Milk\n2. Eggs", 1), ("她来了。他走了！", 2), ("Hm...\n\nWell", 2),
    ],
)  # fmt: skip
def test_sentences_end_with_a_mark_unless_it_belongs_to_an_abbreviation(text, count):
    assert count_ended_sentences(text) == count


ARGS = {
    "keywords": ["a"], "forbidden_words": ["a"], "keyword": "a", "letter": "a", "language": "en", "first_word": "a",
    "postscript_marker": "P.S.", "section_spliter": "Section", "prompt_to_repeat": "a", "end_phrase": "a",
    "relation": "at least", "let_relation": "at least", "capital_relation": "at least",
}  # fmt: skip


def some_instruction(name):
    known = inspect.signature(CHECKS[name]).parameters.values()
    needed = [one.name for one in known if one.name not in ("text", "detect") and one.default is one.empty]
    return Instruction(name, {key: ARGS.get(key, 1) for key in needed})


@settings(max_examples=40)
@given(st.sampled_from(sorted(CHECKS)), st.text(max_size=30))
def test_any_text_is_either_followed_or_not(name, text):
    assert some_instruction(name).check(text, english) in (True, False)


@pytest.mark.parametrize("piece", ["[", "<<", "*", "* ", "\n", "!", "-", '"', "P. ", "Section ", "A-", "```", "[[1,"])
def test_long_repetitions_are_checked_in_linear_time(piece):
    """A quadratic rule would need minutes for 100,000 characters."""
    for name in CHECKS:
        some_instruction(name).check(piece * (100_000 // len(piece)), english)


def test_the_columns_of_a_row_come_first():
    (one,) = read_instructions({"instruction_id_list": ["startend:quotation"], "answer": "free text"})
    assert one == Instruction("startend:quotation", {})
