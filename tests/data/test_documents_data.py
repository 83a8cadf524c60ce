from __future__ import annotations

import json

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.data.generated.document_problems import PEOPLE, count_words, make_document_problem, make_documents
from arborl.data.longbench import prepare_longbench, prepare_novelqa
from arborl.data.reading.row_reader import RowReader
from arborl.errors import ConfigError

LONGBENCH = [
    {
        "_id": f"id{number}", "domain": "Law", "sub_domain": "Case", "difficulty": "hard", "length": "long",
        "question": f"Who did it {number}?", "choice_A": "Anna", "choice_B": "Boris", "choice_C": "Clara",
        "choice_D": "David", "answer": "BDAC"[number % 4], "context": f"Long text {number}. " * 50,
    }
    for number in range(40)
]  # fmt: skip


@settings(max_examples=40)
@given(st.integers(0, 2**62), st.integers(150, 2000), st.integers(1, 6), st.booleans())
def test_a_problem_has_its_facts_in_the_document_and_a_way_from_question_to_answer(seed, tokens, hops, choices):
    problem = make_document_problem(seed, tokens, hops, distractors=3, choices=choices)
    assert problem == make_document_problem(seed, tokens, hops, distractors=3, choices=choices)
    assert len(problem.hops) == hops
    assert problem.hops[0].subject in problem.question
    for hop, following in zip(problem.hops, problem.hops[1:], strict=False):
        assert hop.found == following.subject
    assert problem.hops[-1].found == problem.answer
    for hop in problem.hops:
        assert problem.document.count(hop.fact) == 1
        assert hop.subject in hop.fact
        assert hop.found in hop.fact
    assert problem.answer not in problem.question
    if choices:
        assert problem.choices["ABCD".index(problem.letter)] == problem.answer
        assert len(set(problem.choices)) == 4


def test_only_one_sentence_says_what_a_hop_needs():
    for seed in range(30):
        problem = make_document_problem(seed, 3000, 3, distractors=24, lures=2)
        thing, person = problem.hops[0].subject, problem.hops[1].subject
        keeps = [
            s for s in problem.document.replace("\n", " ").split(". ") if thing in s and ("keeps" in s or "kept" in s)
        ]
        taught = [s for s in problem.document.replace("\n", " ").split(". ") if f"teacher of {person}" in s]
        assert len(keeps) == 1
        assert len(taught) == 1


def test_documents_are_about_as_long_as_requested_and_any_length_will_do():
    for tokens in (200, 4000, 50_000):
        assert count_words(make_document_problem(1, tokens).document) == pytest.approx(tokens, rel=0.02, abs=15)
    assert count_words(make_document_problem(1, 10).document) > 10  # the facts are in it whatever the length


def test_rows_are_the_same_for_the_same_seed_and_others_for_another():
    rows = make_documents(6, seed=3, tokens=(200, 400), hops=(1, 3), kind="choice")
    assert rows == make_documents(6, seed=3, tokens=(200, 400), hops=(1, 3), kind="choice")
    assert rows != make_documents(6, seed=4, tokens=(200, 400), hops=(1, 3), kind="choice")
    assert len({row["id"] for row in rows}) == 6
    assert {row["hops"] for row in rows} <= {1, 2, 3}
    for row in rows:
        assert row["answer"] in "ABCD"
        assert row["question"].endswith("Select the best option from the choices above.")
        assert row["document_content"] not in row["question"]
        assert RowReader("made").task(row, "row").fields["document_content"] == row["document_content"]


def test_people_of_the_question_are_no_part_of_other_facts():
    problem = make_document_problem(11, 2000, 2, distractors=20, lures=0)
    keeper = problem.hops[0].found
    assert keeper in PEOPLE
    sentences = problem.document.replace("\n", " ").split(". ")
    assert sum(keeper in sentence for sentence in sentences) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"count": 0}, "count=0"), ({"kind": "essay"}, "kind='essay'"), ({"tokens": (5, 2)}, "tokens="),
        ({"hops": 9}, "hops=9"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(args, words):
    with pytest.raises(ValueError, match=words):
        make_documents(**{"count": 1, "tokens": 200} | args)


# ------------------------------------------------------------------------------------------------ public sets


def written(tmp_path, rows, **args):
    file = tmp_path / "data.json"
    file.write_text(json.dumps(rows))
    counts = prepare_longbench(file, tmp_path / "out", **args)
    read = {}
    for side in ("train", "val"):
        read[side] = pyarrow.parquet.read_table(tmp_path / "out" / f"{side}.parquet").to_pylist()
        assert len(read[side]) == counts[side]
    return read


def test_longbench_rows_keep_the_document_out_of_the_prompt(tmp_path):
    read = written(tmp_path, LONGBENCH)
    assert len(read["train"]) + len(read["val"]) == 40
    assert not {row["id"] for row in read["train"]} & {row["id"] for row in read["val"]}
    row = next(row for row in read["train"] if row["id"] == "id1")
    source = LONGBENCH[1]
    assert row["document_content"] == source["context"]
    assert row["messages"][1]["content"] == (
        "Who did it 1?\nA. Anna\nB. Boris\nC. Clara\nD. David\nSelect the best option from the choices above."
    )
    assert row["answer"] == row["reward_model"]["ground_truth"] == source["answer"]
    assert row["answer_text"] == "David"
    assert row["agent_name"] == "statelm"
    assert row["domain"] == "Law"
    assert "Long text" not in json.dumps(row["messages"])
    assert RowReader("longbench").task(row, "row").agent == "statelm"


def test_choices_become_short_answers_for_all_or_by_row(tmp_path):
    rows = [{**LONGBENCH[0], "mc_to_sa": "true"}, *LONGBENCH[1:]]
    read = written(tmp_path, rows)
    made = {row["id"]: row for side in read.values() for row in side}
    assert made["id0"]["answer"] == "Boris"
    assert made["id0"]["choices"] == []
    assert made["id1"]["answer"] == "D"
    all_short = written(tmp_path, rows, mc_to_sa=True)
    assert {row["answer"] for side in all_short.values() for row in side} == {"Anna", "Boris", "Clara", "David"}


def test_a_novel_is_on_one_side_only(tmp_path):
    books = tmp_path / "books"
    books.mkdir()
    rows = []
    for book in range(12):
        (books / f"B{book:02}.txt").write_text(f"Novel {book}. " * 20)
        rows += [
            {"book_id": f"B{book:02}", "question_id": f"Q{q}", "question_type": "detail", "question": "Who?",
             "options": {"A": "x", "B": "y", "C": "z", "D": "w"}, "answer": "B"}
            for q in range(3)
        ]  # fmt: skip
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(rows))
    prepare_novelqa(file, tmp_path / "out", books, val_share=0.3)
    sides = [pyarrow.parquet.read_table(tmp_path / "out" / f"{side}.parquet").to_pylist() for side in ("train", "val")]
    assert not {row["book_id"] for row in sides[0]} & {row["book_id"] for row in sides[1]}
    assert sum(map(len, sides)) == 36
    assert sides[0][0]["answer_text"] == "y"
    assert sides[0][0]["document_content"].startswith("Novel")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": "E"}, r"row 3, answer: 'E' is no choice"),
        ({"context": None}, r"row 3: no column 'context'"),
        ({"context": " "}, r"row 3, context: empty"),
        ({"choice_C": None}, r"row 3: no column 'choice_C'"),
    ],
)
def test_rows_that_are_wrong_are_named(tmp_path, change, words):
    rows = [*LONGBENCH[:2], {**LONGBENCH[2], **change}, *LONGBENCH[3:]]
    with pytest.raises(ConfigError, match=words):
        written(tmp_path, rows)
    assert not (tmp_path / "out").exists()
