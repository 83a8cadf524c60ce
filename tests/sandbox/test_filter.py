import importlib.util
import re
import sys
from pathlib import Path

import pytest

from arborl.sandbox.process import INSIDE

HEADERS = {"aarch64": Path("/usr/include/asm-generic/unistd.h")}
HEADERS["x86_64"] = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@pytest.fixture(scope="module")
def calls():
    spec = importlib.util.spec_from_file_location("sandbox_calls", INSIDE / "calls.py")
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernels_headers(calls, machine):
    if not HEADERS[machine].exists():
        pytest.skip("no headers of this machine here")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    column = calls.MACHINES[machine][0]
    table = {**calls.DENIED, **calls.ALONE, "clone": calls.CLONE, "clone3": calls.CLONE3, "prlimit64": calls.PRLIMIT}
    names = ("prctl", "fcntl", "ioctl", "ioctl")
    table |= {name: rule[0] for name, rule in zip(names, calls.REFUSED_ARGUMENTS, strict=True)}
    newest = max(map(int, numbers.values()))  # calls that came later are in no header here
    here = {name: pair[column] for name, pair in table.items() if (pair[column] or 0) <= newest}
    wrong = {name: number for name, number in here.items() if str(number or "") != numbers.get(name, "")}
    assert wrong == {}


def decide(lines, number: int, first: int, architecture: int, second: int = 0) -> int:
    """What the kernel would answer: an independent reading of the filter's instructions."""
    words = {0: number, 4: architecture, 16: first & 0xFFFFFFFF, 24: second & 0xFFFFFFFF}
    held, place = 0, 0
    while True:
        code, yes, no, k = lines[place]
        place += 1
        if code == 0x20:
            held = words[k]
        elif code == 0x06:
            return k
        else:
            true = {0x15: held == k, 0x35: held >= k, 0x45: bool(held & k)}[code]
            place += yes if true else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("alone", [False, True])
def test_the_filter_refuses_what_the_table_says_and_nothing_else(calls, machine, alone, monkeypatch):
    monkeypatch.setattr(calls.os, "uname", lambda: type("U", (), {"machine": machine}))
    column, architecture = calls.MACHINES[machine]
    lines = calls.program(alone)
    refused = {pair[column] for pair in {**calls.DENIED, **(calls.ALONE if alone else {})}.values()}
    special = {calls.CLONE[column], calls.CLONE3[column], calls.PRLIMIT[column]}
    for number in range(600):
        if number not in special:
            allowed = decide(lines, number, 0, architecture) == calls.ALLOW
            assert allowed == (number not in refused), number
    allow, refuse = calls.ALLOW, calls.REFUSE | calls.NOT_PERMITTED
    thread, fork, user = 0x10000, 17, 0x10000000
    assert decide(lines, calls.CLONE[column], thread, architecture) == allow
    assert decide(lines, calls.CLONE[column], fork, architecture) == (refuse if alone else allow)
    assert decide(lines, calls.CLONE[column], thread | user, architecture) == refuse
    assert decide(lines, calls.CLONE3[column], 0, architecture) == calls.REFUSE | calls.NO_SUCH_CALL
    assert decide(lines, calls.PRLIMIT[column], 0, architecture) == allow
    assert decide(lines, calls.PRLIMIT[column], 1234, architecture) == refuse
    for pair, argument, value in calls.REFUSED_ARGUMENTS:
        given = (value, 0) if argument == 0 else (0, value)
        assert decide(lines, pair[column], given[0], architecture, given[1]) == refuse
        assert decide(lines, pair[column], 5, architecture, 5) == allow
    assert decide(lines, 1, 0, 0x40000003) == calls.KILL  # 32-bit calls have other numbers
    assert decide(lines, 0x40000000 + 41, 0, architecture) == refuse
