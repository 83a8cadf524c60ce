"""Who is given up for being silent, and who is not."""

from __future__ import annotations

from types import SimpleNamespace

from arborl.cluster import pulse
from arborl.cluster.host import Told
from arborl.cluster.pulse import BEAT, SILENT, Pulse


class Answers:
    """A method of a process: what it is asked is answered at once, as long as the process is there."""

    def __init__(self, process, value):
        self.process, self.value = process, value

    def options(self, **_):
        return self

    def remote(self):
        return self if self.process.there else None


class Process:
    def __init__(self, number, node):
        self.there = True
        self.told = Answers(self, Told({}, number, "10.0.0.2", node))
        self.present = Answers(self, True)


class Ray:
    """As much of the module as is used."""

    exceptions = SimpleNamespace(RayError=KeyError)

    def __init__(self):
        self.killed = []

    def wait(self, answers, timeout):
        return [one for one in answers if one is not None], []

    def get(self, answer):
        return answer.value

    def kill(self, actor, no_restart):
        self.killed.append(actor)


def rounds(watch, seconds):
    """Looks, one a beat, on a clock of their own."""
    began = watch.looked
    for number in range(1, round(seconds / BEAT) + 1):
        watch.look(began + BEAT * number)


def watched(monkeypatch, *nodes):
    monkeypatch.setattr(Pulse, "_watch", lambda self: None)
    watch, processes = Pulse(Ray(), "mine"), [Process(number, node) for number, node in enumerate(nodes)]
    for process in processes:
        watch.add(process)
    return watch, processes


def test_a_process_that_was_there_and_is_silent_is_ended_and_its_node_shunned(monkeypatch):
    watch, (well, cut) = watched(monkeypatch, "node 0", "node 1")
    rounds(watch, 3 * BEAT)
    cut.there = False
    rounds(watch, SILENT)
    assert watch.ray.killed == []
    monkeypatch.setattr(pulse.time, "monotonic", lambda: watch.looked)
    rounds(watch, 3 * BEAT)
    assert watch.ray.killed == [cut]
    assert watch.shunned == ["node 1"]
    rounds(watch, pulse.SHUNNED)
    assert watch.ray.killed == [cut]
    assert watch.shunned == []  # Ray has given the node up by now, or it is back
    assert list(watch.watched) == [well]


def test_a_process_that_hangs_on_a_node_within_reach_is_ended_and_may_be_replaced_there(monkeypatch):
    watch, (well, hung, own) = watched(monkeypatch, "node 0", "node 0", "mine")
    rounds(watch, 3 * BEAT)
    hung.there = own.there = False
    rounds(watch, SILENT + 3 * BEAT)
    assert watch.ray.killed == [hung, own]
    assert watch.silent == {}
    assert list(watch.watched) == [well]


def test_one_that_is_still_starting_may_take_its_time(monkeypatch):
    watch, (process,) = watched(monkeypatch, "node 0")
    watch.watched[process].answer = None
    rounds(watch, 10 * SILENT)
    assert watch.ray.killed == []
    assert list(watch.watched) == [process]


def test_who_was_stopped_itself_blames_nobody(monkeypatch):
    watch, (process,) = watched(monkeypatch, "node 0")
    rounds(watch, 3 * BEAT)
    process.there = False  # one question is on its way
    rounds(watch, BEAT)
    watch.look(watch.looked + 100 * SILENT)  # a laptop that was asleep
    process.there = True
    assert watch.ray.killed == []
    rounds(watch, BEAT)
    assert watch.ray.killed == []
