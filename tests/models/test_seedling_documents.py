"""Document transcripts match the prompts of the context-managing agent."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from arborl.agents.context.managed_conversation import SUMMARY_REQUEST
from arborl.seedling import document_transcripts
from arborl.seedling.make import chat_template
from arborl.seedling.transcript_base import Transcript
from arborl.seeds import generator

RECIPE = Path(__file__).parents[2] / "recipes" / "statelm" / "run.yaml"
PERFECT = document_transcripts.PlayerStyle(1, 1, 1, 1, 1, 1, 1)


def test_transcripts_end_with_the_assistant_and_fit_a_training_row():
    rng = generator(0, "test")
    for transcript in [one for _ in range(10) for one in document_transcripts.documents(rng)]:
        assert isinstance(transcript, Transcript)
        assert transcript.messages[-1].role == "assistant"
        text = chat_template().render(transcript.messages, transcript.tools, generation=False)
        assert len(document_transcripts.PieceTokenizer().encode(text)) <= 1024
        assert text.startswith("<|im_start|>system\n")


def test_the_same_generator_writes_the_same_transcripts():
    assert document_transcripts.documents(generator(4, "x")) == document_transcripts.documents(generator(4, "x"))


def test_careful_players_mostly_succeed_and_players_that_never_delete_fail():
    rng = generator(1, "test")
    perfect = [document_transcripts.play_document(rng, 3000, PERFECT)[1] for _ in range(12)]
    assert sum(perfect) >= 9
    hoarding = document_transcripts.PlayerStyle(1, 1, 1, 1, 0, 1, 1)
    assert sum(document_transcripts.play_document(rng, 8000, hoarding)[1] for _ in range(8)) == 0


def test_careful_players_succeed_with_the_summary_policy():
    rng = generator(5, "test")
    tidy = document_transcripts.PlayerStyle(1, 1, 1, 0, 0, 1, 1)
    played = [document_transcripts.play_document(rng, 5000, tidy, summaries=True) for _ in range(10)]
    assert sum(success for _, success in played) >= 7
    summaries = [
        reply for player, _ in played for shown, reply in player.replies if shown[-1].content == SUMMARY_REQUEST
    ]
    assert any(": " in reply.content for reply in summaries)


def test_stubs_of_deleted_messages_are_never_trained_on():
    rng = generator(2, "test")
    for _ in range(20):
        for transcript in document_transcripts.documents(rng):
            replies = [
                message for message in transcript.messages[transcript.train_from :] if message.role == "assistant"
            ]
            assert replies
            assert all(message.sampled and "deleted" not in message.content for message in replies)


def test_every_reply_is_trained_on_once_in_the_context_it_was_written_in():
    player, _ = document_transcripts.play_document(generator(3, "test"), 4000, PERFECT)
    taught = [
        (tuple(one.messages[:place]), message)
        for one in document_transcripts.branches(player.replies)
        for place, message in enumerate(one.messages)
        if place >= one.train_from and message.role == "assistant"
    ]
    assert taught == player.replies
    assert len(document_transcripts.branches(player.replies)) > 1


def test_the_recipe_uses_the_same_agent_and_environment():
    run = yaml.safe_load(RECIPE.read_text())
    assert run["agent"]["name"] == "statelm"
    assert json.loads(json.dumps(run["agent"]["args"])) == document_transcripts.AGENT
    args = run["env"]["args"]
    assert {key: args[key] for key in document_transcripts.ENV} == document_transcripts.ENV
    assert run["sampling"]["max_context"] == document_transcripts.WINDOW
    assert run["sampling"]["max_tokens"] == document_transcripts.REPLY
