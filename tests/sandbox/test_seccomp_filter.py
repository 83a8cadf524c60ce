import re
from pathlib import Path

import pytest
from working_levels import guest_module

HEADERS = {"aarch64": Path("/usr/include/asm-generic/unistd.h")}
HEADERS["x86_64"] = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@pytest.fixture(scope="module")
def calls():
    return guest_module("seccomp_filter")


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernels_headers(calls, machine):
    if not HEADERS[machine].exists():
        pytest.skip("no headers of this machine here")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    column = calls.MACHINES[machine][0]
    numbers |= {"newfstatat": numbers["fstatat"]} if "fstatat" in numbers else {}  # the name without 64 bits
    table = {**calls.ALLOWED, **calls.WITH_NAMESPACES, **calls.READ_ATTRIBUTES, **calls.OF_A_PROCESS, **calls.CHECKED}
    newest = max(map(int, numbers.values()))  # calls that came later are in no header here
    here = {name: pair[column] for name, pair in table.items() if (pair[column] or 0) <= newest}
    wrong = {name: number for name, number in here.items() if number is not None and str(number) != numbers.get(name)}
    wrong |= {name: None for name, number in here.items() if number is None and name in numbers}
    assert wrong == {}


def decide(lines, number: int, *arguments: int, architecture: int) -> int:
    """What the kernel would answer: an independent reading of the filter's instructions."""
    words = {0: number, 4: architecture}
    for place, value in enumerate([*arguments, *[0] * (6 - len(arguments))]):
        words[16 + 8 * place], words[20 + 8 * place] = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
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


OWN = 4321
ALLOW, PERMISSION, NOT_A_TERMINAL, NO_SUCH_CALL, NOT_SUPPORTED, GRANTED = (
    0x7FFF0000, 0x50001, 0x50019, 0x50026, 0x5005F, 0x50000,
)  # fmt: skip


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request, calls, monkeypatch):
    monkeypatch.setattr(calls.os, "uname", lambda: type("U", (), {"machine": request.param}))
    return request.param


@pytest.fixture
def answer(calls, machine):
    """What the filter says to a call by its name, with these arguments."""
    column, architecture = calls.MACHINES[machine]
    tables = {**calls.ALLOWED, **calls.WITH_NAMESPACES, **calls.READ_ATTRIBUTES, **calls.OF_A_PROCESS, **calls.CHECKED}

    def ask(alone: bool, name: str, *arguments: int) -> int:
        return decide(calls.filter_program(alone, OWN), tables[name][column], *arguments, architecture=architecture)

    return ask


@pytest.mark.parametrize("alone", [False, True])
def test_the_filter_allows_what_the_tables_say_and_nothing_else(calls, machine, alone):
    column, architecture = calls.MACHINES[machine]
    lines = calls.filter_program(alone, OWN)
    assert len(lines) < 4096  # the kernel takes no more
    plain = {**calls.ALLOWED, **({} if alone else {**calls.WITH_NAMESPACES, **calls.READ_ATTRIBUTES})}
    allowed = {numbers[column] for numbers in plain.values()} | {n[column] for n in calls.OF_A_PROCESS.values()}
    checked = {numbers[column] for numbers in calls.CHECKED.values()}
    attributes = {numbers[column] for numbers in calls.READ_ATTRIBUTES.values()}
    for number in set(range(600)) - checked:
        received = decide(lines, number, architecture=architecture)
        if number in allowed:
            assert received == ALLOW, number
        elif number in attributes:
            assert received == NOT_SUPPORTED, number
        else:
            assert received == (NO_SUCH_CALL if number >= 424 else PERMISSION), number
    assert decide(lines, 435, 0, architecture=architecture) == NO_SUCH_CALL  # clone3
    assert decide(lines, 1, architecture=0x40000003) == calls.KILL  # 32-bit calls have other numbers
    assert decide(lines, 0x40000000 + 1, architecture=architecture) == PERMISSION


def test_threads_are_allowed_processes_only_with_name_spaces_and_new_name_spaces_never(answer):
    thread, files, fork, user = 0x10000, 0x400, 17, 0x10000000
    for alone in (False, True):
        assert answer(alone, "clone", thread | files) == ALLOW
        assert answer(alone, "clone", thread) == PERMISSION  # its descriptors would be in no list
        assert answer(alone, "clone", thread | files | user) == PERMISSION
        assert answer(alone, "clone", fork) == (PERMISSION if alone else ALLOW)


def test_without_name_spaces_no_other_process_can_be_looked_at(answer):
    for name in ("getpgid", "sched_getaffinity", "prlimit64"):
        assert [answer(True, name, pid) for pid in (0, OWN, 1, OWN + 2**31)] == [ALLOW, ALLOW, PERMISSION, PERMISSION]
    assert answer(True, "getpriority", 0, 0) == answer(True, "getpriority", 0, OWN) == ALLOW
    assert answer(True, "getpriority", 0, 1) == answer(True, "getpriority", 2, 0) == PERMISSION
    assert answer(False, "getpriority", 0, 1) == answer(False, "getpgid", 1) == ALLOW
    assert answer(False, "prlimit64", 1) == PERMISSION


@pytest.mark.parametrize("alone", [False, True])
def test_arguments_decide_on_descriptors_memory_and_sockets(answer, alone):
    assert [answer(alone, "fcntl", 5, command) for command in (2, 4, 1030)] == [ALLOW] * 3
    assert [answer(alone, "fcntl", 5, command) for command in (6, 7, 37, 38)] == [GRANTED] * 4
    assert answer(alone, "flock", 5, 2) == GRANTED
    assert {answer(alone, "fcntl", 5, command) for command in (8, 10, 15, 1024, 1026, 1031)} == {PERMISSION}
    assert answer(alone, "ioctl", 1, 0x5401) == ALLOW
    assert {answer(alone, "ioctl", 1, request) for request in (0x40086602, 0x401C5820, 0x5412)} == {NOT_A_TERMINAL}
    assert answer(alone, "prctl", 15) == ALLOW
    assert {answer(alone, "prctl", option) for option in (1, 4, 22, 35, 36)} == {PERMISSION}
    assert [answer(alone, "mmap", 0, 1, 3, flags) for flags in (0x22, 0x2, 0x1, 0x21, 0x23)] == [
        ALLOW, ALLOW, ALLOW, PERMISSION, PERMISSION,
    ]  # fmt: skip
    assert answer(alone, "socketpair", 1, 0x80801) == ALLOW  # a stream that does not block and is closed on exec
    assert {answer(alone, "socketpair", *of) for of in ((1, 2), (1, 5), (1, 3), (2, 1), (30, 1))} == {PERMISSION}
    assert answer(alone, "sendto", 5, 1, 1, 0, 0) == ALLOW
    for address in (0x7FFF00001000, 2**40):
        assert answer(alone, "sendto", 5, 1, 1, 0, address) == PERMISSION
