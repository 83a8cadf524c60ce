"""Text is certain when it is said: the pieces joined are the whole, and no piece has half of anything in it."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from arborl.chat import Renderer
from arborl.models.find import resolve
from arborl.serve.choices import Detokenizer, StopMatcher


@cache
def renderer() -> Renderer:
    return Renderer.from_folder(resolve("seedling"))


ids = st.lists(st.integers(3, 1000).map(lambda number: number % renderer().tokenizer.vocab_size), max_size=40)


def cut(items, sizes):
    for size in sizes:
        yield items[:size]
        items = items[size:]
    yield items


@given(tokens=ids, sizes=st.lists(st.integers(0, 5), max_size=20))
def test_pieces_of_any_tokens_in_any_sizes_are_the_whole(tokens, sizes):
    words = Detokenizer(renderer())
    said = "".join(words.add(piece) for piece in cut(tokens, sizes)) + words.flush()
    assert said == renderer().decode(tokens)


@given(text=st.text(max_size=12))
def test_no_piece_ends_in_half_a_character(text):
    tokens = renderer().tokenizer.encode(text)
    words = Detokenizer(renderer())
    pieces = [words.add([token]) for token in tokens]
    assert "".join(pieces) + words.flush() == renderer().decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    text=st.text("ab<", max_size=20),
    sizes=st.lists(st.integers(0, 4), max_size=20),
    ends=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_let_through_up_to_the_first_of_its_ends(text, sizes, ends):
    until = StopMatcher(ends)
    said = ""
    for piece in cut(text, sizes):
        said += until.add(piece)
        if until.found is not None:
            break
    places = [place for end in ends if (place := text.find(end)) >= 0]
    if until.found is None:
        assert not places
        assert said + until.release() == text
    else:
        assert said == text[: min(places)]
