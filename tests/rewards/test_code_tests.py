import asyncio
import json

import pytest

from arborl.rewards import REWARDS
from arborl.rewards.code import CodeTests, final_code, read_cases, same_output, same_value
from arborl.types import Episode, Message, Task, Turn

ADD = [
    {"function": "add", "args": [1, 2], "returns": 3},
    {"function": "add", "args": [0.1], "kwargs": {"b": 0.2}, "returns": 0.3},
]
DOUBLE = [{"input": "21\n", "output": "42\n"}, {"input": "0", "output": "0"}]


def score(text, tests, **args):
    episode = Episode("e", Task("t", fields={"tests": tests}), turns=[Turn(Message("assistant", text))])
    return asyncio.run(CodeTests(**{"seconds": 1.0} | args)(episode))


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\n"


@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return 3", ADD, 0.5),
        ("def add(a, b): raise ValueError", ADD, 0.0),
        ("def sub(a, b): return a + b", ADD, 0.0),
        ("class Solution:\n    def add(self, a, b): return a + b", ADD, 1.0),
        ("print('hello')\ndef add(a, b):\n    print('hm')\n    return a + b", ADD, 1.0),
        ("def add(a, b: return", ADD, 0.0),
        ("import sys\ndef add(a, b): return a + b\nsys.exit()", ADD, 1.0),
        ("import os\nos._exit(0)", ADD, 0.0),
        ("def add(a, b):\n    if b == 2: return 3\n    while True: pass", ADD, 0.5),
        ("class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()", ADD, 0.0),
        ("print(int(input()) * 2)", DOUBLE, 1.0),
        ("print(42)", DOUBLE, 0.5),
        ("if __name__ == '__main__':\n    print(int(input()) * 2)\n    exit()", DOUBLE, 1.0),
        ("print(int(input()) * 2)\n1 / 0", DOUBLE, 0.0),
        ("while True: print('x' * 1000)", DOUBLE, 0.0),
        ("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], 0.5),
        ("def f(): return {1: (2, 3)}, {3, 1}", [{"function": "f", "returns": [{"1": [2, 3]}, [1, 3]]}], 1.0),
    ],
)
def test_code_is_judged_by_what_it_does(code, tests, share):
    assert score(fenced(code), tests, partial=True) == share
    assert score(fenced(code), tests) == float(share == 1.0)


@pytest.mark.parametrize("wrap", [json.dumps, lambda value: value])
def test_the_forms_of_taco_are_read(wrap):
    program = wrap({"inputs": ["21", ["1", "9"]], "outputs": ["42", ["2"]]})
    assert score(fenced("print(int(input()) * 2)"), program) == 1.0
    function = wrap({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]})
    assert score(fenced("def add(a, b): return a + b"), function) == 1.0


def test_only_so_many_cases_are_run():
    many = [{"function": "one", "args": [], "returns": 1}] * 3 + [{"function": "one", "args": [], "returns": 2}]
    assert score(fenced("def one(): return 1"), many, max_cases=3) == 1.0
    assert score(fenced("def one(): return 1"), many) == 0.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b"),
        ("<code>\na\n</code>", "a"),
        ("<code>a</code><answer>b</answer>", "b"),
        ("x = 1", "x = 1"),
        ("```python\nnot closed", "```python\nnot closed"),
    ],
)
def test_where_the_code_is(text, code):
    assert final_code(text) == code


@pytest.mark.parametrize("given", [[], {}, [3], [{"input": "1"}], 7, None])
def test_what_is_no_test_is_refused(given):
    with pytest.raises((ValueError, TypeError)):
        read_cases(given)


def test_outputs_and_values_are_compared_without_what_does_not_matter():
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a\n\nb", "a\nb")
    assert same_value([1, 2.0000000001, "x"], (1, 2, "x"))
    assert not same_value(True, 1)
    assert not same_value([1], [1, 2])
    assert not same_value(None, False)
    assert not same_value("1", 1)
    assert REWARDS["code_tests"] is CodeTests
