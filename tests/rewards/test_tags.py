import re

from hypothesis import given
from hypothesis import strategies as st

from arborl.envs.env import parse_answer
from arborl.rewards.answers import final_part, last_tagged
from arborl.rewards.code_tests import final_code

PARTS = st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", "<", "a>", "\n"]), max_size=12)


@given(PARTS)
def test_the_last_tagged_text_is_that_of_the_usual_expression(parts):
    text = "".join(parts)
    both = re.findall(r"<(a|b)>(.*?)</\1>", text, re.DOTALL)
    one = re.findall(r"<a>(.*?)</a>", text, re.DOTALL)
    assert last_tagged(text, "a", "b") == (both[-1][1] if both else None)
    assert last_tagged(text, "a") == (one[-1] if one else None)


def test_tags_that_are_never_closed_are_read_in_one_pass():
    """A million characters: by an expression that looks for the end of each, this takes minutes."""
    text = "<answer><code>" * 70_000 + "\n42"
    assert final_part(text) == "42"
    assert final_code(text) == text
    assert parse_answer(text) is None
    assert parse_answer(text + "</answer>") is not None
