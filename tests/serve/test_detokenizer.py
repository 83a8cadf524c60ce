"""Detokenizer and StopMatcher: the pieces joined equal the whole, without partial characters or stop texts."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from arborl.chat import Renderer
from arborl.models.model_files import resolve
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
def test_pieces_of_any_size_join_to_the_whole_text(tokens, sizes):
    detokenizer = Detokenizer(renderer())
    text_out = "".join(detokenizer.add(piece) for piece in cut(tokens, sizes)) + detokenizer.flush()
    assert text_out == renderer().decode(tokens)


@given(text=st.text(max_size=12))
def test_no_piece_contains_a_partial_character(text):
    tokens = renderer().tokenizer.encode(text)
    detokenizer = Detokenizer(renderer())
    pieces = [detokenizer.add([token]) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == renderer().decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    text=st.text("ab<", max_size=20),
    sizes=st.lists(st.integers(0, 4), max_size=20),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_passes_up_to_the_first_stop_text(text, sizes, stops):
    matcher = StopMatcher(stops)
    text_out = ""
    for piece in cut(text, sizes):
        text_out += matcher.add(piece)
        if matcher.found is not None:
            break
    positions = [position for stop in stops if (position := text.find(stop)) >= 0]
    if matcher.found is None:
        assert not positions
        assert text_out + matcher.release() == text
    else:
        assert text_out == text[: min(positions)]
