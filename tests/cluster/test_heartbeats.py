"""Which silent actors are killed, and which are not."""

from __future__ import annotations

from types import SimpleNamespace

from arborl.cluster.placement import actors
from arborl.cluster.placement.actors import INTERVAL, TIMEOUT, ActorHeartbeatMonitor, ActorInfo


class FakeMethod:
    """A method of an actor that returns at once while the actor is alive."""

    def __init__(self, actor, value):
        self.actor, self.value = actor, value

    def options(self, **_):
        return self

    def remote(self):
        return self if self.actor.alive else None


class FakeActor:
    def __init__(self, number, node):
        self.alive = True
        self.info = FakeMethod(self, ActorInfo({}, number, "10.0.0.2", node))
        self.heartbeat = FakeMethod(self, True)


class FakeRay:
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
    """One check per interval, with a simulated clock."""
    began = watch.last_check
    for number in range(1, round(seconds / INTERVAL) + 1):
        watch.check(began + INTERVAL * number)


def watched(monkeypatch, *nodes):
    monkeypatch.setattr(ActorHeartbeatMonitor, "_run", lambda self: None)
    watch, made = ActorHeartbeatMonitor(FakeRay(), "driver"), [FakeActor(*pair) for pair in enumerate(nodes)]
    for actor in made:
        watch.add(actor)
    return watch, made


def test_a_silent_actor_is_killed_and_its_node_avoided(monkeypatch):
    watch, (well, cut) = watched(monkeypatch, "node 0", "node 1")
    rounds(watch, 3 * INTERVAL)
    cut.alive = False
    rounds(watch, TIMEOUT)
    assert watch.ray.killed == []
    monkeypatch.setattr(actors.time, "monotonic", lambda: watch.last_check)
    rounds(watch, 3 * INTERVAL)
    assert watch.ray.killed == [cut]
    assert watch.avoided_nodes == ["node 1"]
    rounds(watch, actors.AVOID_SECONDS)
    assert watch.ray.killed == [cut]
    assert watch.avoided_nodes == []  # by now Ray has given the node up, or it is back
    assert list(watch.monitored) == [well]


def test_a_hanging_actor_is_killed_and_its_reachable_node_stays_in_use(monkeypatch):
    watch, (well, hung, own) = watched(monkeypatch, "node 0", "node 0", "driver")
    rounds(watch, 3 * INTERVAL)
    hung.alive = own.alive = False
    rounds(watch, TIMEOUT + 3 * INTERVAL)
    assert watch.ray.killed == [hung, own]
    assert watch.silent_nodes == {}
    assert list(watch.monitored) == [well]


def test_a_starting_actor_has_no_timeout(monkeypatch):
    watch, (process,) = watched(monkeypatch, "node 0")
    watch.monitored[process].call = None
    rounds(watch, 10 * TIMEOUT)
    assert watch.ray.killed == []
    assert list(watch.monitored) == [process]


def test_no_actor_is_killed_after_the_driver_was_suspended(monkeypatch):
    watch, (process,) = watched(monkeypatch, "node 0")
    rounds(watch, 3 * INTERVAL)
    process.alive = False  # one call is pending
    rounds(watch, INTERVAL)
    watch.check(watch.last_check + 100 * TIMEOUT)  # a laptop that was asleep
    process.alive = True
    assert watch.ray.killed == []
    rounds(watch, INTERVAL)
    assert watch.ray.killed == []
