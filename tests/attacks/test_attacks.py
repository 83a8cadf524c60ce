"""The attacks of `attack_list.py`, at every level that works here; and the page that says what came of them."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attack_list import ATTACKS
from attack_runner import HELD, OPEN, available, fuzz, fuzz_reader, outcomes
from attack_table import PAGE, cells, shown

from arborl.sandbox import LEVELS

HERE = available()


@pytest.mark.parametrize("level", HERE)
def test_every_attack_is_held_or_known_and_the_page_says_so(level):
    found = outcomes(level)
    known = {attack.name for attack in ATTACKS if level in attack.open_at}
    wrong = {name: why for name, (state, why) in found.items() if (state == OPEN) != (name in known)}
    assert wrong == {}
    page = cells(PAGE.read_text())
    received = {name: page.get(name, {}).get(level) for name in found if name != "the world is as it was"}
    assert received == {name: shown(found[name]) for name in received}


def test_the_page_has_every_attack_and_no_other():
    assert list(cells(PAGE.read_text())) == [attack.name for attack in ATTACKS]
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 65
    assert all(level in LEVELS for attack in ATTACKS for level in attack.open_at)
    assert re.search(r"\| held \|", PAGE.read_text())


@pytest.mark.parametrize("level", HERE)
def test_random_frames_neither_hang_nor_fool_the_host(level):
    counts = fuzz(level, 8, seed=1)
    assert sum(counts.values()) == 16


def test_the_reader_takes_any_bytes():
    counts = fuzz_reader(5_000, seed=1)
    assert sum(counts.values()) == 5_000
    assert min(counts.values()) > 100


def test_what_the_runner_calls_held_is_not_everything():
    """An attack that says it fell is open: the runner can tell."""
    from attack_list import Attack

    one = Attack("files", "a sure thing", "nothing", "fell('here')")
    assert outcomes(HERE[-1], [one])["a sure thing"][0] != HELD
