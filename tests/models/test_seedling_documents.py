"""What seedling is taught about documents is what the agent will show it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from arborl.models.seedling import documents
from arborl.models.seedling.make import template
from arborl.models.seedling.transcripts import Transcript
from arborl.seeds import generator

RECIPE = Path(__file__).parents[2] / "recipes" / "statelm" / "run.yaml"
PERFECT = documents.Manner(1, 1, 1, 1, 1, 1, 1)


def test_transcripts_end_with_the_players_words_and_fit_a_row():
    chance = generator(0, "test")
    for _ in range(20):
        transcript = documents.documents(chance)
        assert isinstance(transcript, Transcript)
        assert transcript.messages[-1].role == "assistant"
        assert "<tool_call>" in transcript.messages[-1].content
        text = template().render(transcript.messages, transcript.tools, generation=False)
        assert len(documents.Pieces().encode(text)) <= 1000
        assert "Notes: " in text
        assert text.startswith("<|im_start|>system\n")


def test_the_same_generator_writes_the_same_transcripts():
    assert documents.documents(generator(4, "x")) == documents.documents(generator(4, "x"))


def test_careful_players_mostly_succeed_and_those_who_never_delete_do_not():
    chance = generator(1, "test")
    perfect = [documents.play(chance, 3000, PERFECT)[1] for _ in range(12)]
    assert sum(perfect) >= 9
    hoarding = documents.Manner(1, 1, 1, 1, 0, 1, 1)
    assert sum(documents.play(chance, 8000, hoarding)[1] for _ in range(8)) == 0


def test_no_stub_is_taught_as_something_to_say():
    chance = generator(2, "test")
    for _ in range(20):
        said = [message for message in documents.documents(chance).messages if message.role == "assistant"]
        assert all(message.sampled and "deleted" not in message.content for message in said)


def test_the_recipe_plays_as_the_players_did():
    run = yaml.safe_load(RECIPE.read_text())
    assert run["agent"]["name"] == "statelm"
    assert json.loads(json.dumps(run["agent"]["args"])) == documents.AGENT
    given = run["env"]["args"]
    assert {key: given[key] for key in documents.ENV} == documents.ENV
    assert run["sampling"]["max_context"] == documents.WINDOW
    assert run["sampling"]["max_tokens"] == documents.REPLY
