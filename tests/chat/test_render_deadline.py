"""A chat template is a program of its author's: one that does not end is ended, and no other render notices."""

import os
import threading
import time

import pytest

from arborl.chat import chat_template
from arborl.chat.chat_template import RenderDeadline, RenderTimeout, Template
from arborl.errors import ConfigError
from arborl.types import Message

TALK = [Message("user", "Hello.")]
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a filter in a loop": "{% for a in range(99999) %}{% set x = range(99999) | list | length %}{% endfor %}",
    "a loop whose test is never true": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a loop over letters": "{% set x = 'ab' * 400000 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
}


@pytest.fixture
def soon(monkeypatch):
    """The deadline of a template, short."""
    monkeypatch.setattr(chat_template.DEADLINE, "seconds", 0.2)
    monkeypatch.setattr(chat_template.DEADLINE, "check_seconds", 0.05)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_stopped_with_a_one_line_error(source, soon):
    template = Template(source, None, None)
    with pytest.raises(ConfigError, match=r"model\.chat_template: .* more than 0\.2 s of processor time") as caught:
        template.render(TALK, (), True)
    assert "\n" not in str(caught.value)
    assert Template("{{ messages[0].content }}", None, None).render(TALK, (), True) == "Hello."


@pytest.mark.parametrize(
    "source", ["{{ 9 ** 9 ** 9 ** 9 }}", "{{ 'x' * 10 ** 9 * 10 }}", "{{ [1] * 999 ** 9 }}", "{{ 999 ** 9 * 'x' }}"]
)
def test_one_instruction_without_end_is_refused_also_while_it_is_compiled(source):
    with pytest.raises(ValueError, match=r"beyond 1,000|more than 1,000,000"):
        Template(source, None, None).render(TALK, (), True)


def test_what_templates_do_with_numbers_is_allowed():
    source = "{{ '-' * 10 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ [1] * 2 }}"
    assert Template(source, None, None).render(TALK, (), True) == "----------1024123.0[1, 1]"


def test_only_the_render_that_is_late_is_ended(soon):
    """Sixteen honest threads beside four that never end."""
    endless = Template(ENDLESS["loops in loops"], None, None)
    honest = Template("{% for m in messages %}{{ m.content }}{% endfor %}", None, None)
    wrong: list[object] = []
    ended: list[str] = []
    stop = threading.Event()

    def render() -> None:
        while not stop.is_set():
            try:
                if honest.render(TALK * 50, (), True) != "Hello." * 50:
                    wrong.append("text")
            except BaseException as error:
                wrong.append(error)

    def hang() -> None:
        try:
            endless.render(TALK, (), True)
        except ConfigError as error:
            ended.append(str(error))

    others = [threading.Thread(target=render) for _ in range(16)]
    bad = [threading.Thread(target=hang) for _ in range(4)]
    for thread in (*others, *bad):
        thread.start()
    for thread in bad:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    assert wrong == []
    assert len(ended) == 4


def test_a_deadline_after_the_render_raises_no_exception():
    """The render has ended when the deadline strikes, or ends at that moment: nothing is raised behind it."""
    deadline = RenderDeadline()
    came = 0
    for _ in range(300):
        mark = deadline.begin()
        striking = threading.Thread(target=deadline.interrupt, args=(mark,))
        try:
            try:
                striking.start()
            finally:
                deadline.end(mark)
        except RenderTimeout:
            came += 1
        for _ in range(10):  # what was left over would be raised here
            sum(range(100))
        striking.join()
        deadline.interrupt(mark)  # it is over: nothing happens
    assert 0 <= came <= 300
    assert deadline._renders == {}


def test_waiting_is_not_counted():
    """Processor time is: a machine that is busy with other things ends no honest render."""
    deadline = RenderDeadline(seconds=0.2, check_seconds=0.02)
    mark = deadline.begin()
    time.sleep(0.6)
    deadline.end(mark)


def test_a_forked_process_has_a_deadline_of_its_own(soon):
    Template("{{ messages[0].content }}", None, None).render(TALK, (), True)  # its thread is running
    child = os.fork()
    if child == 0:
        try:
            Template(ENDLESS["loops in loops"], None, None).render(TALK, (), True)
        except ConfigError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
