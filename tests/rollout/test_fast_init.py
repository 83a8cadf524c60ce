"""`fast_init` changes how quickly a record is made, and nothing else."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from arborl.fast_init import fast_init


@dataclass(frozen=True, slots=True)
class Slow:
    name: str
    size: int = 3
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative")


@fast_init
@dataclass(frozen=True, slots=True)
class Fast:
    name: str
    size: int = 3
    parts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative")


@pytest.mark.parametrize("args", [(), ("a", 1, [], 4), ("a", -1)])
def test_what_a_plain_dataclass_refuses_is_refused(args):
    with pytest.raises((TypeError, ValueError)) as plain:
        Slow(*args)
    with pytest.raises(type(plain.value), match=str(plain.value).split("()")[0].replace("Slow", "Fast")):
        Fast(*args)


def test_arguments_defaults_and_copies_are_those_of_a_dataclass():
    one = Fast("a", size=4)
    assert (one.name, one.size, one.parts) == ("a", 4, [])
    assert Fast("b").parts is not Fast("b").parts
    assert replace(one, size=5) == Fast("a", 5)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert repr(one) == "Fast(name='a', size=4, parts=[])"
    with pytest.raises(FrozenInstanceError):
        one.size = 6
    assert list(inspect.signature(Fast).parameters) == list(inspect.signature(Slow).parameters)


def test_fields_that_are_no_plain_arguments_are_refused():
    with pytest.raises(TypeError, match="only plain fields"):

        @fast_init
        @dataclass(frozen=True, slots=True, kw_only=True)
        class Named:
            name: str
