"""Document tools: exact slices, searches that cannot be wrong, and an error in words for whatever goes wrong."""

import asyncio
import itertools
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborl.tools.core.tool_context import ToolContext, count_tokens
from arborl.tools.library import document_tools
from arborl.tools.library.document_index import (
    MARKS,
    DocumentIndex,
    IndexCache,
    cut_into_chunks,
    highlights,
    match_expression,
)
from arborl.tools.library.document_tools import (
    SHORT_FORMS,
    WORKSPACE,
    DocumentSettings,
    format_tool_list,
    shorten_result,
)
from arborl.types import Task

TEXT = (
    "The village was quiet. " * 8
    + "Mira keeps the silver lamp. "
    + "A fox slept near the mill. " * 8
    + "The lamp of silver and gold is not here. "
    + "Mira lives in Oslo. "
    + "The wind went past the tower. " * 8
)


class Letters:
    """Every character is a token."""

    def encode(self, text):
        return [ord(c) for c in text]


def run(*calls, document=TEXT, tokenizer=None, reading=None):
    """The answers to these calls of one episode, as objects."""

    async def main():
        fields = {} if document is None else {"document_content": document}
        async with ToolContext(Task("t", fields=fields), tokenizer) as context:
            if reading:
                context.state(WORKSPACE, WORKSPACE.make).settings = DocumentSettings(**reading)
            return [await tool.run(arguments, context) for tool, arguments in calls]

    return [json.loads(result.content) for result in asyncio.run(main())]


BUILD = (document_tools.build_index, {"chunk_size": 20})


def test_the_document_is_measured_and_loaded_whole():
    about, whole = run((document_tools.analyze_text, {}), (document_tools.load_document, {}))
    assert about["file_name"] == "attached_document.txt"
    assert about["total_tokens"] == pytest.approx(count_tokens(TEXT, None), rel=0.1)
    assert whole == {"document_content": TEXT}


def test_chunks_are_slices_of_the_text_and_say_where_they_are():
    built, first, last = run(
        BUILD, (document_tools.read_chunk, {"chunk_id": 0}), (document_tools.read_chunk, {"chunk_id": 1})
    )
    assert built["index_id"] == "document_index"
    assert built["first_chunk_id"] == 0
    assert built["last_chunk_id"] == built["total_chunks"] - 1
    (chunk,) = first["retrieved_chunk"]
    assert chunk["content"] == TEXT[chunk["start_pos"] : chunk["end_pos"]]
    assert last["retrieved_chunk"][0]["start_pos"] == chunk["end_pos"]


@given(st.text(max_size=300), st.integers(1, 40), st.integers(0, 39), st.booleans())
def test_any_text_is_cut_without_loss(text, size, overlap, letters):
    tokenizer = Letters() if letters else None
    overlap = min(overlap, size - 1)
    spans, total = cut_into_chunks(text, size, overlap, tokenizer)
    assert (total == 0) == (text == "")
    covered = 0
    for begin, end in spans:
        assert begin <= covered < end  # nothing is left out, and each chunk goes on
        assert overlap or begin == covered
        covered = end
    assert covered == len(text)


def test_chunks_hold_at_most_so_many_tokens_and_overlap_by_at_most_so_many():
    spans, _ = cut_into_chunks(TEXT, 100, 30, Letters())
    assert all(end - begin <= 100 for begin, end in spans)
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert 0 < end - begin <= 30


def test_a_scan_reads_on_until_the_end_and_tells_how_far_it_is():
    answers = run(BUILD, (document_tools.read_chunk, {"enable_scan": True}), *[(document_tools.read_chunk, {})] * 20)
    total = answers[0]["total_chunks"]
    assert [a.get("reading_progress") for a in answers[1 : total + 1]] == [f"{i + 1}/{total}" for i in range(total)]
    assert answers[total + 1] == {"error": f"all {total} chunks have been read"}
    assert "".join(a["retrieved_chunk"][0]["content"] for a in answers[1 : total + 1]) == TEXT
    stopped = run(
        BUILD, (document_tools.read_chunk, {"enable_scan": True}), (document_tools.read_chunk, {"enable_scan": False})
    )
    assert stopped[2] == {"error": "give chunk_id, or enable_scan=true"}


def found(keyword, **more):
    _, answer = run(BUILD, (document_tools.search_engine, {"keyword": keyword, **more}))
    return answer


def test_search_finds_keywords_phrases_and_at_most_twenty_chunks():
    answer = found("Mira, fox")
    assert answer["keywords"] == ["Mira", "fox"]
    marked = " ".join(text for hit in answer["retrieved_chunks"] for text in hit["highlights"])
    assert "<em>Mira</em>" in marked
    assert "<em>fox</em>" in marked
    scores = [hit["relevance_score"] for hit in answer["retrieved_chunks"]]
    assert scores == sorted(scores, reverse=True)
    silver = {hit["chunk_id"] for hit in found("silver lamp")["retrieved_chunks"]}
    exact = {hit["chunk_id"] for hit in found('"silver lamp"')["retrieved_chunks"]}
    assert len(exact) == 1
    assert exact < silver  # 'lamp of silver' is near enough; in quotes it is not
    assert found('"lamp silver"')["message"] == "No matching content found."
    assert found("Mira, Oslo", mode="and")["retrieved_chunks"]
    assert found("village, Oslo", mode="and")["retrieved_chunks"] == []
    assert found("village, Oslo")["retrieved_chunks"]
    (_, answer) = run(
        (document_tools.build_index, {"chunk_size": 5}), (document_tools.search_engine, {"keyword": "the"})
    )
    assert len(answer["retrieved_chunks"]) == 20
    assert answer["message"].startswith("Showing the most relevant 20/")


@given(st.lists(st.text(max_size=12), max_size=4), st.sampled_from(["or", "and"]))
def test_no_keyword_is_a_syntax_error(keywords, mode):
    index = DocumentIndex("alpha beta gamma", 2, 0, None)
    total, hits = index.search(keywords, mode, 20)
    assert total == len(hits)
    assert bool(match_expression(keywords, mode)) or not hits


@given(st.text(alphabet="ab \n", max_size=80), st.integers(1, 40), st.integers(0, 4))
def test_highlights_are_few_short_and_balanced(text, size, most):
    marked = text.replace("ab", f"{MARKS[0]}ab{MARKS[1]}")
    pieces = highlights(marked, size, most)
    assert len(pieces) <= most
    for piece in pieces:
        assert piece.count("<em>") == piece.count("</em>")
        assert not set(MARKS) & set(piece)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "no document is attached"),
        ("", "the attached document is empty"),
        (" \n", "the attached document is empty"),
        (b"\x89PNG", "is not text (binary data)"),
        ("a\x00b", "is not text (binary data)"),
        (17, "is not text (binary data)"),
    ],
)
def test_a_document_that_cannot_be_read_is_an_error_for_every_tool(document, words):
    answers = run(
        (document_tools.analyze_text, {}), (document_tools.load_document, {}), (document_tools.build_index, {}),
        (document_tools.read_chunk, {"chunk_id": 0}), (document_tools.search_engine, {"keyword": "x"}),
        document=document,
    )  # fmt: skip
    for answer in answers:
        assert set(answer) == {"error"}
        assert words in answer["error"]


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        (document_tools.read_chunk, {"chunk_id": 0}, "the index is not built; call buildIndex first"),
        (document_tools.search_engine, {"keyword": "x"}, "the index is not built; call buildIndex first"),
        (document_tools.build_index, {"chunk_size": 0}, "chunk_size=0: give 1 or more"),
        (document_tools.build_index, {"chunk_size": 5, "overlap": 5}, "overlap=5: give 0 or more, and less"),
        (document_tools.build_index, {"chunk_size": 5, "overlap": -1}, "overlap=-1: give 0 or more"),
        (document_tools.build_index, {"chunk_size": "many"}, "argument 'chunk_size'"),
        (document_tools.read_note, {"key": "a"}, "Note 'a' not found!"),
        (document_tools.update_note, {"mode": "append", "key": "a", "new_content": "x"}, "Note 'a' not found!"),
        (document_tools.merge_notes, {"keys": ["a"]}, "give the keys of two notes or more"),
        (document_tools.delete_context, {"msg_id": 1}, "the context of this agent cannot be edited"),
        (document_tools.summarize, {"summary": " "}, "the summary is empty"),
        (document_tools.finish, {}, "argument 'answer' is missing"),
    ],
)
def test_calls_that_cannot_be_answered_are_errors_in_words(tool, arguments, words):
    (answer,) = run((tool, arguments))
    assert set(answer) == {"error"}
    assert words in answer["error"]


@pytest.mark.parametrize("chunk", [-1, 9999])
def test_a_chunk_id_out_of_range_gives_an_error_with_the_range(chunk):
    built, answer = run(BUILD, (document_tools.read_chunk, {"chunk_id": chunk}))
    assert answer == {"error": f"chunk_id={chunk}: give 0 to {built['last_chunk_id']}"}


def test_a_new_index_forgets_what_was_searched_in_the_old():
    async def main():
        async with ToolContext(Task("t", fields={"document_content": TEXT})) as context:
            for tool, arguments in (BUILD, (document_tools.search_engine, {"keyword": "Mira"})):
                await tool.run(arguments, context)
            space = context.state(WORKSPACE, WORKSPACE.make)
            before = list(space.searched)
            await document_tools.build_index.run({"chunk_size": 30}, context)
            return before, space.searched

    assert asyncio.run(main()) == (["Mira"], [])


def test_notes_are_written_changed_merged_and_deleted():
    answers = run(
        (document_tools.note, {"key": "a", "summary": "one", "content": {"x": 1}}),
        (document_tools.read_note, {"key": "a"}),
        (document_tools.update_note, {"mode": "append", "key": "a", "new_content": "more"}),
        (document_tools.read_note, {"key": "a"}),
        (document_tools.update_note, {"mode": "overwrite", "key": "a", "new_content": "new", "new_summary": "1"}),
        (document_tools.note, {"key": "b", "summary": "two"}),
        (document_tools.merge_notes, {"keys": ["a", "b"]}),
        (document_tools.read_note, {"key": "a_b"}),
        (document_tools.update_note, {"mode": "delete", "key": "a_b"}),
        (document_tools.read_note, {"key": "a_b"}),
    )
    assert answers[0] == {"status": "success", "key": "a"}
    assert answers[1] == {"summary": "one", "full_content": '{"x": 1}'}
    assert answers[3]["full_content"] == '{"x": 1}\nmore'
    assert answers[6] == {"status": "success", "new_key": "a_b", "merged_from": ["a", "b"]}
    assert answers[7] == {"summary": "1  two", "full_content": "new\ntwo"}
    assert answers[9] == {"error": "Note 'a_b' not found!"}


def test_episodes_on_one_document_share_its_index_and_forget_the_oldest():
    shelf = IndexCache(chars=len(TEXT) + 10)
    made = []
    threads = [threading.Thread(target=lambda: made.append(shelf.index(TEXT, 9, 0, None))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(index) for index in made}) == 1
    assert shelf.index(TEXT, 8, 0, None) is not made[0]  # two do not fit: the older is forgotten
    assert shelf.index(TEXT, 9, 0, None) is not made[0]


def test_brief_answers_say_the_same_in_few_words():
    assert set(SHORT_FORMS) == {
        tool.name for tool in vars(document_tools).values() if isinstance(tool, document_tools.JsonTool)
    }
    _, read = run(BUILD, (document_tools.read_chunk, {"chunk_id": 1}))
    assert shorten_result("readChunk", json.dumps(read)) == f"1: {read['retrieved_chunk'][0]['content'].strip()}"
    assert shorten_result("searchEngine", json.dumps(found("Mira"))).startswith("4: The village was quiet. <em>")
    _, bare = run(BUILD, (document_tools.search_engine, {"keyword": "Mira"}), reading={"fragments": 0})
    assert shorten_result("searchEngine", json.dumps(bare)).startswith("chunks ")
    assert shorten_result("deleteContext", '{"error": "no. Never."}') == "error: no"
    assert shorten_result("mine", "plain") == "plain"
    assert (
        format_tool_list([document_tools.read_chunk.spec, document_tools.finish.spec])
        == "readChunk(chunk_id), finish(answer)"
    )
