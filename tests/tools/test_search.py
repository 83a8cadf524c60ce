import asyncio
import json
import math
import multiprocessing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.errors import ConfigError
from arborl.tools.library.search import Retrieve, Search, build_index, match_expression

TEXTS = {
    "lake": "The frozen lake lies in the north. In winter the lake is cold.",
    "desert": "The desert is dry and hot; no lake is frozen there.",
    "tea": "Tea is best hot. Cold tea is for summer.",
    "long": "winter " * 3 + "and then a great many other words about nothing in particular that go on and on",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    rows = [{"id": name, "title": name.title(), "text": text} for name, text in TEXTS.items()]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return file


@pytest.fixture(scope="module")
def search(corpus, tmp_path_factory):
    return Search(corpus, index=tmp_path_factory.mktemp("index"))


def found(text):
    return [line.partition("[")[2].partition("]")[0] for line in text.splitlines()]


def test_results_are_numbered_and_mark_words_phrases_and_forms(search):
    result = asyncio.run(search.run({"query": "frozen winter"}))
    assert result.ok
    first = result.content.splitlines()[0]
    assert first.startswith("1. [lake] Lake: ")
    assert "[[frozen]]" in first
    assert "[[winter]]" in first
    assert found(search.search('"frozen lake"')) == ["lake"]
    assert set(found(search.search("frozen lake"))) == {"lake", "desert"}
    assert "Nothing found" in search.search('"lake frozen"')
    assert found(search.search("deserts")) == ["desert"]


def test_the_number_of_results_is_limited(corpus, tmp_path):
    assert len(found(Search(corpus, top_k=1, index=tmp_path).search("the lake is hot"))) == 1
    with pytest.raises(ValueError, match="top_k=0"):
        Search(corpus, top_k=0, index=tmp_path)


@settings(max_examples=60)
@given(
    st.text()
    | st.lists(st.sampled_from(['"', "AND", "NOT", "*", "(", "lake", "^", "-", ":", "NEAR(", "\x00"])).map(" ".join)
)
def test_any_query_is_answered(search, query):
    assert isinstance(search.search(query), str)
    assert match_expression(query) == match_expression(match_expression(query).replace(" OR ", " "))


def test_the_order_is_that_of_bm25(tmp_path):
    """Against the formula itself, over words that stemming leaves alone and documents without titles."""
    words = ["red", "sun", "map", "oak"]
    texts = {str(i): " ".join(words[(i * k + k) % 4] for k in range(1, 4 + i % 5)) + " p" * (i % 7) for i in range(12)}
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"id": name, "text": text}) for name, text in texts.items()))
    tool = Search(file, top_k=50, index=tmp_path / "index")
    split = {name: text.split() for name, text in texts.items()}
    mean = sum(map(len, split.values())) / len(split)

    def score(name, query):
        total = 0.0
        for word in query:
            has = sum(word in document for document in split.values())
            rarity = max(math.log((len(split) - has + 0.5) / (has + 0.5)), 1e-6)
            times, length = split[name].count(word), len(split[name])
            total += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * length / mean))
        return total

    for query in (["red"], ["map", "oak"], ["sun", "pad"]):
        matching = [name for name in split if set(query) & set(split[name])]
        wanted = sorted(matching, key=lambda name: (-round(score(name, query), 9), int(name)))
        assert found(tool.search(" ".join(query))) == wanted


def _index(pair):
    return str(build_index(*pair))


def test_processes_that_want_an_index_at_once_make_one(corpus, tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = set(pool.map(_index, [(corpus, tmp_path)] * 8))
        pool.close()
        pool.join()  # they end by themselves: a signal to end would be handled by any caller has a handler here
    assert len(made) == 1
    assert len(list(tmp_path.glob("*.sqlite"))) == 1
    assert not list(tmp_path.glob("*.part"))


def test_a_changed_corpus_is_indexed_anew(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a_page.txt").write_text("zebra")
    assert found(Search(folder, index=tmp_path / "i").search("zebra")) == ["a_page"]
    (folder / "b.md").write_text("quagga")
    assert found(Search(folder, index=tmp_path / "i").search("quagga")) == ["b"]


def test_a_bad_corpus_says_where(tmp_path):
    with pytest.raises(ConfigError, match="no corpus"):
        Search(tmp_path / "none.jsonl", index=tmp_path)
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 2: no text"):
        Search(file, index=tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 1: not valid JSON"):
        Search(file, index=tmp_path)


def letters(texts):
    return [[text.lower().count(letter) + 1e-3 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


def test_dense_retrieval_finds_the_nearest_by_any_embedding(corpus):
    tool = Retrieve(corpus, letters, top_k=2)
    result = asyncio.run(tool.run({"query": TEXTS["desert"]}))
    assert found(result.content)[0] == "desert"
    assert len(found(result.content)) == 2
    with pytest.raises(ConfigError, match="sentence-transformers"):
        Retrieve(corpus, "some/model")
    with pytest.raises(ValueError, match="one row of finite numbers"):
        Retrieve(corpus, lambda texts: [1.0])
