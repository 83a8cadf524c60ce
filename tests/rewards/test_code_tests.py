import asyncio
import json

import pytest

from arborl.rewards import REWARDS
from arborl.rewards.code_tests import CodeTests, final_code, read_cases, same_output, same_value
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
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b"), ("<code>\na\n</code>", "a"),
        ("<code>a</code><answer>b</answer>", "b"), ("x = 1", "x = 1"),
        ("```python\nnot closed", "```python\nnot closed"),
    ],
)  # fmt: skip
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


# ------------------------------------------------------------------------------------------------ odd values


HUGE = "def f(): return 10 ** 400"
DEEP = "def f():\n    x = []\n    for _ in range(3000): x = [x]\n    return x"
ODD = {
    "an int beyond floats": (HUGE, 1.5),
    "beyond floats, an int wanted": (HUGE, 7),
    "nested": (DEEP, []),
    "digits": ("def f(): return 10 ** 5000", 1),
    "nan": ("def f(): return float('nan')", 1.0),
    "an endless object": ("class E:\n    def __iter__(self): return self\n    def __next__(self): return 1\nf = E", 1),
    "keys": ("def f(): return {(1, 2): 3, None: 4, 10 ** 5000: 5}", {"a": 1}),
    "a mixed set": ("def f(): return {1, 'a', None}", [1]),
    "itself": ("def f():\n    x = []\n    x.append(x)\n    return x", [1]),
    "surrogates": ("def f(): return '\\ud800'", "x"),
    "an object": ("f = object", 1),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_compared_or_printed_is_wrong_and_costs_nothing_else(name):
    code, wanted = ODD[name]
    tests = [{"function": "f", "returns": wanted}, f"assert f() == {wanted!r}"]
    assert score(fenced(code), tests, partial=True) == 0.0


def test_large_numbers_are_compared_exactly():
    tests = [{"function": "f", "returns": 10**400}, f"assert f() == {10**400}", "assert f() == 10 ** 400"]
    assert score(fenced(HUGE), tests) == 1.0
    assert score(fenced("def f(): return 10 ** 400 + 1"), tests, partial=True) == 0.0


FORGE = """
import sys, gc
def marks():
    frame = sys._getframe()
    while frame:
        if "mark" in frame.f_locals: return frame.f_locals["mark"]
        frame = frame.f_back
for line in ("x", "x y", "1", "0 {}", "0 [", "0 " + "[" * 50_000, "0 " + "9" * 9_000, "-1 [1]",
             "0 [{\\"int\\": 3}]", "0 [{\\"dict\\": 1}]", "0 [{\\"a\\": 1, \\"b\\": 2}]", "0 [{\\"bytes\\": \\"zz\\"}]",
             "0 [{\\"set\\": [[]]}]"):
    print(f"\\n{marks()} {line}")
"""


def test_malformed_marks_are_wrong_answers():
    tests = [{"function": "f", "returns": 1}, "assert f() == 1"]
    assert score(fenced(FORGE), tests, partial=True) == 0.0
    assert score(fenced(FORGE + "\ndef f(): return 1"), tests, partial=True) == 1.0


# ------------------------------------------------------------------------------------------------ asserts


CHEATS = {
    "equal to all": "class Any:\n    __eq__ = __lt__ = __le__ = lambda *a: True\n"
    "    def __getattr__(self, n): return self\ndef f(*a): return Any()",
    "reads the mark": FORGE + "\nfor n in range(9): print(f'\\n{marks()} {n} [true]')",
    "patches exec": "import builtins\nbuiltins.exec = builtins.eval = lambda *a: True\ndef f(*a): return True",
    "patches compile": "import builtins\nkeep = builtins.compile\n"
    "builtins.compile = lambda s, *a, **k: keep('True', *a, **k)\ndef f(*a): pass",
    "reads constants": """
import gc, sys
def f(*a):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_code.co_consts, *frame.f_locals.values()]
        frame = frame.f_back
    for each in gc.get_objects():
        if isinstance(each, (list, tuple)) and len(each) < 50: seen += each
    return next((x for x in seen if type(x) is int and x // 1000 == 271), 0)
""",
    "leaves": "import os\ndef f(*a): os._exit(0)",
    "raises nothing": "def f(*a): return None\nimport builtins\nbuiltins.AssertionError = KeyError",
}


@pytest.mark.parametrize("name", CHEATS)
def test_no_trick_passes_an_assert(name):
    tests = ["assert f(1) == 271828", "assert f(2) == 27.5", "assert f(3) == [1, 2, 3]", "assert len(f(1)) == 77"]
    assert score(fenced(CHEATS[name]), tests, partial=True) == 0.0


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("assert f(2) == (1, 'a')", "(1, 'a')", "[1, 'a']"),
        ("assert {1: [2]} == f(2)", "{1: [2]}", "{1: (2,)}"),
        ("assert f(2) is None", "None", "0"),
        ("assert f(2) is not None", "3", "None"),
        ("assert f(2) is True, 'said so'", "True", "1"),
        ("assert f(2)", "[0]", "[]"),
        ("assert not f(2)", "''", "'x'"),
        ("assert f(2) != 4", "3", "4.0"),
        ("assert 1 < f(2) <= 3", "3", "1"),
        ("assert f(2) in [3, 4]", "4", "5"),
        ("assert sorted(f(2)) == [1, 2]", "{2, 1}", "{1, 3}"),
        ("assert set(f(2)) == {1, 2} and len(f(2)) == 3", "[1, 2, 2]", "[1, 2]"),
        ("assert list(f(2)) == [0, 1]", "range(2)", "range(3)"),
        ("assert abs(f(2) - 0.3) < 1e-6", "0.1 + 0.2", "0.31"),
        ("import math\nassert math.isclose(f(2), math.pi, rel_tol=1e-3)", "3.1416", "3.2"),
        ("assert round(f(2), 2) == 0.33", "1 / 3", "0.3"),
        ("assert f(2) == 2 ** 10 - 1", "1023", "1024"),
        ("assert isinstance(f(2), list) and type(f(2)) == list", "[]", "()"),
        ("x = [1, 2]\nassert f(x) == [2, 1]", "n[::-1]", "n"),
        ("want = 5\nassert f(1) == want", "5", "4"),
        ("assert f(1) == -1 or f(1) == 1", "-1", "0"),
        ("def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 2\ncheck(f)", "n", "1"),
        ("for a, b in [(1, 2), (2, 4)]:\n    assert f(a) == b", "2 * n", "2"),
        ("y = f(3)\ny.append(1)\nassert y == [1]", "[]", "[0]"),
        ("assert f(2) == b'a'", "b'a'", "'a'"),
        ("assert f(2) == 0.5", "__import__('fractions').Fraction(1, 2)", "0.4"),
        ("assert [x * 2 for x in f(2)] == [2, 4]", "[1, 2]", "[1, 3]"),
    ],
)
def test_asserts_are_checked_outside_with_pythons_own_equality(test, right, wrong):
    assert score(fenced(f"def f(n): return {right}"), [test]) == 1.0
    assert score(fenced(f"def f(n): return {wrong}"), [test]) == 0.0


def test_objects_keep_their_state_from_one_assert_to_the_next():
    stack = "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
    stack += "    def pop(self): return self.x.pop()"
    test = "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\ns.push(3)\nassert s.pop() == 3\nassert s.pop() == 1"
    assert score(fenced(stack), [test]) == 1.0


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("assert f(1) == f(2)", "both sides are the code's own"),
        ("want = g()\nassert f(1) == want", "both sides"),
        ("assert all(f(x) == y for x, y in [(1, 2)])", "compares inside"),
        ("assert f(1) is 'x'", "write =="),
        ("assert 1 == 1", "does not use the code"),
        ("assert f(1) == 'a'.upper()", "write its value"),
        ("try:\n    assert f(1) == 2\nexcept ValueError: pass", "more than an assert"),
        ("f(1)", "no assert"),
        ("assert f(1", "not a test"),
    ],
)
def test_an_assert_that_would_bring_the_answer_inside_is_refused_with_a_sentence(test, why):
    with pytest.raises(ValueError, match=why):
        read_cases([test])


def test_conditions_cannot_be_made_to_take_forever():
    for test, answer in (
        ("assert 2 ** f(1) == 1", "10 ** 12"),
        ("assert f(1) ** 2 == 1", "10 ** 30_000"),
        ("assert [0] * f(1) == [0]", "10 ** 10"),
        ("assert round(5, f(1)) == 5", "-10 ** 10"),
        ("assert f(1) % 3 == ''", "'%1000000000d'"),
        ("assert list(range(f(1))) == [0]", "10 ** 10"),
        ("assert str(f(1)) == '1'", "10 ** 20_000"),
        ("assert int(f(1)) == 1", "'9' * 50_000"),
    ):
        assert score(fenced(f"def f(n): return {answer}"), [test]) == 0.0
