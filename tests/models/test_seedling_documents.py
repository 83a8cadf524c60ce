"""What seedling is taught about documents is what the agent will show it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from arborl.agents.context.managed_conversation import SUMMARY_REQUEST
from arborl.seedling import document_transcripts
from arborl.seedling.make import template
from arborl.seedling.transcript import Transcript
from arborl.seeds import generator

RECIPE = Path(__file__).parents[2] / "recipes" / "statelm" / "run.yaml"
PERFECT = document_transcripts.Manner(1, 1, 1, 1, 1, 1, 1)


def test_transcripts_end_with_the_players_words_and_fit_a_row():
    chance = generator(0, "test")
    for transcript in [one for _ in range(10) for one in document_transcripts.documents(chance)]:
        assert isinstance(transcript, Transcript)
        assert transcript.messages[-1].role == "assistant"
        text = template().render(transcript.messages, transcript.tools, generation=False)
        assert len(document_transcripts.Pieces().encode(text)) <= 1024
        assert text.startswith("<|im_start|>system\n")


def test_the_same_generator_writes_the_same_transcripts():
    assert document_transcripts.documents(generator(4, "x")) == document_transcripts.documents(generator(4, "x"))


def test_careful_players_mostly_succeed_and_those_who_never_delete_do_not():
    chance = generator(1, "test")
    perfect = [document_transcripts.play(chance, 3000, PERFECT)[1] for _ in range(12)]
    assert sum(perfect) >= 9
    hoarding = document_transcripts.Manner(1, 1, 1, 1, 0, 1, 1)
    assert sum(document_transcripts.play(chance, 8000, hoarding)[1] for _ in range(8)) == 0


def test_careful_players_answer_from_their_own_summaries_too():
    chance = generator(5, "test")
    tidy = document_transcripts.Manner(1, 1, 1, 0, 0, 1, 1)
    played = [document_transcripts.play(chance, 5000, tidy, summaries=True) for _ in range(10)]
    assert sum(success for _, success in played) >= 7
    asked = [reply for player, _ in played for shown, reply in player.said if shown[-1].content == SUMMARY_REQUEST]
    assert any(": " in reply.content for reply in asked)


def test_no_stub_is_taught_as_something_to_say():
    chance = generator(2, "test")
    for _ in range(20):
        for transcript in document_transcripts.documents(chance):
            said = [message for message in transcript.messages[transcript.since :] if message.role == "assistant"]
            assert said
            assert all(message.sampled and "deleted" not in message.content for message in said)


def test_every_message_of_an_episode_is_imitated_once_in_the_context_it_was_written_in():
    player, _ = document_transcripts.play(generator(3, "test"), 4000, PERFECT)
    taught = [
        (tuple(one.messages[:place]), message)
        for one in document_transcripts.branches(player.said)
        for place, message in enumerate(one.messages)
        if place >= one.since and message.role == "assistant"
    ]
    assert taught == player.said
    assert len(document_transcripts.branches(player.said)) > 1


def test_the_recipe_plays_as_the_players_did():
    run = yaml.safe_load(RECIPE.read_text())
    assert run["agent"]["name"] == "statelm"
    assert json.loads(json.dumps(run["agent"]["args"])) == document_transcripts.AGENT
    given = run["env"]["args"]
    assert {key: given[key] for key in document_transcripts.ENV} == document_transcripts.ENV
    assert run["sampling"]["max_context"] == document_transcripts.WINDOW
    assert run["sampling"]["max_tokens"] == document_transcripts.REPLY
