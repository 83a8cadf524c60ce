"""`arborl data`: make, inspect and mix data; wrong input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from arborl.cli.main import app
from arborl.config.load_config import load
from arborl.data.generated.datasets import GENERATORS, make, make_facts
from arborl.rewards.answers import equal, final_part
from arborl.rewards.code_tests import read_cases
from arborl.tools.library.calculator import calculator
from arborl.tools.library.search import Search
from arborl.training_run import train
from arborl.training_run.build import build

ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_data_set_is_reproducible_from_its_seed(name, here):
    assert call("data", "make", "arithmetic", "level=2", "--count", "5").exit_code == 0
    for folder, seed in (("one", "3"), ("two", "3"), ("other", "4")):
        done = call("data", "make", name, "--out", folder, "--count", "12", "--seed", seed)
        assert done.exit_code == 0, done.output
    files = sorted(path.name for path in (here / "one").iterdir())
    assert all((here / "one" / file).read_text() == (here / "two" / file).read_text() for file in files)
    assert any((here / "one" / file).read_text() != (here / "other" / file).read_text() for file in files)


def longbench(count: int) -> list[dict[str, str]]:
    """Rows in the layout LongBench-v2 is published in."""
    about = {"domain": "Law", "sub_domain": "Cases", "difficulty": "easy", "length": "short"}
    choices = {f"choice_{letter}": f"{letter} did" for letter in "ABCD"}
    return [
        {"_id": f"id{n}", **about, "question": f"Who did it {n}?", **choices, "answer": "ABCD"[n % 4],
         "context": f"Document {n}. " * 40}
        for n in range(count)
    ]  # fmt: skip


def test_longbench_is_prepared_inspected_and_trained_on(here):
    (here / "data.json").write_text(json.dumps(longbench(30)))
    done = call("data", "prepare", "longbench-v2", "--input", "data.json", "--out", "data/longbench")
    assert done.exit_code == 0, done.output
    lines = dict(line.split("  ") for line in done.output.splitlines())
    assert sorted(lines) == ["data/longbench/train.parquet", "data/longbench/val.parquet"]
    assert sum(int(rows.split()[0]) for rows in lines.values()) == 30
    assert all((here / path).is_file() for path in lines)
    shown = call("data", "inspect", "data/longbench/train.parquet")
    assert shown.exit_code == 0, shown.output
    assert "document_content" in shown.output
    assert "Select the best option from the choices above." in shown.output
    assert "Document 1. " not in shown.output
    small = ["model=seedling", "model.dtype=float32", "rollout.tasks_per_step=2", "rollout.group_size=2",
             "sampling.max_context=1024", "sampling.max_tokens=64", "trainer.steps=1", "evaluation.tasks=2",
             "output_dir=run"]  # fmt: skip
    recipe = load(ROOT / "recipes/statelm-gpu/longbench.yaml", small)
    assert train(recipe, stub=True).summary["steps"] == 1
    held_out = pyarrow.parquet.read_table("data/longbench/val.parquet")["id"].to_pylist()
    assert {task.fields["document_content"] for task in build(recipe).source.evaluation(2)} <= {
        f"Document {name.removeprefix('id')}. " * 40 for name in held_out
    }


def test_mc_to_sa_asks_for_text_and_a_single_row_is_for_training(here):
    (here / "data.jsonl").write_text(json.dumps(longbench(1)[0]) + "\n")
    done = call("data", "prepare", "longbench-v2", "--input", "data.jsonl", "--out", "one", "--mc-to-sa")
    assert done.exit_code == 0, done.output
    assert done.output == "one/train.parquet  1 rows\n"
    assert [path.name for path in (here / "one").iterdir()] == ["train.parquet"]
    assert "answer: A did" in call("data", "inspect", "one/train.parquet").output


def test_inspect_prints_columns_lengths_sources_and_prompts(here):
    make("mixed", here / "data", count=50)
    done = call("data", "inspect", "data/search.json")
    assert done.exit_code == 0, done.output
    assert "data/search.json: 50 rows" in done.output
    assert "golden_answers" in done.output
    assert "data_source: nq (50)" in done.output
    assert done.output.count("prompt of row") == 3
    assert "<|user|>" in done.output or "user" in done.output
    assert "tokens" in done.output
    (here / "bad.json").write_text('[{"question": "a"}, {"question": 3}]')
    done = call("data", "inspect", "bad.json")
    assert done.exit_code == 2
    assert "bad.json, row 2, question: int, not text" in done.output


def test_mix_prints_the_composition_of_batches(here):
    make("mixed", here / "recipes/mixed/data", count=60)
    recipe = str(ROOT / "recipes/mixed/run.yaml")
    done = call("data", "mix", recipe, "--batches", "200", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["short_batches"] == 0
    assert [found["sources"][name]["target"] for name in ("code", "search", "math")] == [0.4, 0.3, 0.3]
    assert [found["sources"][name]["achieved"] for name in ("code", "search", "math")] == [0.4, 0.3, 0.3]
    code = found["sources"]["code"]
    assert code["coverage"] == 1.0
    assert code["repeats"] == code["drawn"] - code["rows"] == 1600 - code["rows"]
    assert code["distinct"] == code["rows"]
    odd = json.loads(call("data", "mix", recipe, "rollout.tasks_per_step=7", "--batches", "30", "--json").output)
    assert odd["largest_batch_error"] < 1
    assert odd["largest_total_error"] < 1
    table = call("data", "mix", recipe, "--batches", "10").output
    assert "0 of them short" in table
    refused = call("data", "mix", recipe, "data.sources.code.ratio=0.5")
    assert (refused.exit_code, "the ratios add up to 1.1, not to 1, and strict is on" in refused.output) == (2, True)
    assert not (here / "runs").exists()


def test_the_mixed_recipe_trains_with_three_agents(here):
    make("mixed", here / "recipes/mixed/data", count=60)
    config = load(ROOT / "recipes/mixed/run.yaml", ["output_dir=run", "evaluation.tasks=6", "track.tensorboard=false"])
    parts = build(config)
    tasks = {task.source: task for task in parts.source.take(0, 20)}
    kinds = {name: type(parts.episode_factories.agent(task)).__name__ for name, task in tasks.items()}
    assert kinds == {"code": "CodeAgent", "search": "ToolAgent", "math": "ToolAgent"}
    assert [spec.name for spec in parts.episode_factories.agent(tasks["search"]).toolbox.specs] == ["search"]
    assert [spec.name for spec in parts.episode_factories.agent(tasks["math"]).toolbox.specs] == ["calculator"]
    run = train(config, stub=True)
    assert {"success/code", "success/search", "success/math"} <= run.summary["after"].keys()


def test_settings_for_real_files_in_recipes_are_valid():
    more = [
        "data.sources.code.path=taco.parquet",
        "data.sources.code.rewards=[{name: code_tests, args: {field: input_output}}]",
        "data.sources.search.agent.tool_args.search.corpus=wiki.jsonl",
    ]
    config = load(ROOT / "recipes/mixed/run.yaml", more)
    assert config.data.sources["code"].rewards[0].args == {"field": "input_output"}
    assert config.data.sources["search"].agent.tool_args == {"search": {"corpus": "wiki.jsonl", "top_k": 1}}


def test_the_gsm8k_recipe_trains_and_holds_out_its_test_file(here):
    make("gsm8k", here / "recipes/gsm8k/data", count=60)
    config = load(ROOT / "recipes/gsm8k/run.yaml", ["output_dir=run", "evaluation.tasks=50", "track.tensorboard=false"])
    source = build(config).source
    test_rows = {row["question"] for row in json.loads((here / "recipes/gsm8k/data/gsm8k_test.json").read_text())}
    assert {task.fields["question"] for task in source.evaluation(50)} == test_rows
    assert train(config, stub=True).summary["steps"] == 3


def test_the_rows_of_the_mixed_data_set_can_be_solved(here):
    make("mixed", here / "data", count=40)
    read = {name: json.loads((here / f"data/{name}.json").read_text()) for name in ("code", "search", "math")}
    for row in read["code"]:
        (case,) = read_cases(row["input_output"])
        assert case.expected == row["answer"]
    for row in read["math"]:
        expression = row["solution"].removeprefix("We compute ").partition(" = ")[0]
        assert equal(calculator(expression), final_part(row["solution"]))
    search = Search(here / "data/corpus.jsonl", top_k=1, index=here / "index")
    for row in read["search"]:
        assert row["golden_answers"][0] in search.search(row["query"]).replace("[[", "").replace("]]", "")


def test_a_question_names_one_document_that_contains_its_answer():
    questions, documents = make_facts(4000, seed=2)
    assert len({row["question"] for row in questions}) == 4000
    by_title = {document["title"]: document["text"] for document in documents}
    assert len(by_title) == len(documents)
    for row in questions:
        (title,) = [title for title in by_title if f" {title}" in row["question"].replace("?", " ?")][:1]
        assert row["answer"] in by_title[title]
    with pytest.raises(ValueError, match="count=999999"):
        make_facts(999_999)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [(["kind=calculator"], {"tools", "messages"}), (["kind=countdown", "skill=0.5", "args={count: 2}"], {"messages"})],
)
def test_generated_transcripts_can_be_imitated(settings, kinds, tmp_path):
    done = CliRunner().invoke(app, ["data", "make", "transcripts", *settings, "--count", "6", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {key for row in rows for key in row} == kinds
    shown = CliRunner().invoke(app, ["rollout", "algorithm=sft", f"data.path={tmp_path / 'transcripts.jsonl'}"])
    assert shown.exit_code == 0, shown.output
    assert "given" in shown.output
    assert "<|im_end|>" in shown.output


def test_files_of_webshop_are_prepared_for_the_shop(here):
    (here / "WebShop").mkdir()
    asins = [f"B{number}" for number in range(120)]
    rows = [{"asin": asin, "name": "soft cotton shirt", "query": "shirt", "pricing": "$5.00"} for asin in asins]
    note = {"attributes": ["soft"], "instruction": "Find me a shirt", "instruction_attributes": ["soft"]}
    (here / "WebShop" / "items_shuffle_1000.json").write_text(json.dumps(rows))
    (here / "WebShop" / "items_ins_v2_1000.json").write_text(json.dumps(dict.fromkeys(asins, note)))
    done = call("data", "prepare", "webshop", "--input", "WebShop", "--out", "shop", "--products", "100")
    assert done.exit_code == 0, done.output
    assert "shop/items_shuffle.json  100 products" in done.output
    played = call("env", "play", "shop", "data=shop", "human=false", "--oracle")
    assert (played.exit_code, "success 1" in played.output) == (0, True), played.output
