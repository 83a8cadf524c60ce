"""The embedded model is what it says: small, plain Llama, with its own tokenizer and template."""

from __future__ import annotations

import json

import numpy as np
import pytest

from arborl.chat import Conversations
from arborl.models.seedling import WEIGHTS
from arborl.seedling.corpus import WRITERS, write
from arborl.seedling.make import spoken_by_assistant, template
from arborl.seeds import generator
from arborl.tools.library.calculator import calculator
from arborl.types import Completion, FinishReason, Message


def test_the_weights_are_at_most_8_mb_and_record_how_they_were_made():
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) < 8_000_000
    record = json.loads((WEIGHTS / "record.json").read_text())
    assert {"command", "transcripts", "tokens", "train_seconds", "final_loss"} <= record.keys()
    assert record["shares"] == {name: share for name, (share, _) in WRITERS.items()}


def test_plain_transformers_loads_it_and_renders_the_same_prompt(seedling):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, renderer = seedling
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    assert type(model).__name__ == "LlamaForCausalLM"
    theirs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, tokenize=False
    )
    assert renderer.text([Message("user", "Hello!")]) == theirs
    assert renderer.tokenizer.encode(theirs) == tokenizer(theirs, add_special_tokens=False)["input_ids"]


def test_a_cell_of_a_grid_is_always_one_token(seedling):
    _, renderer = seedling
    for grid in ("OOGP\n__XO\nPOOG", "GGGG\nPPPP"):
        assert len(renderer.tokenizer.encode(grid)) == len(grid)


def test_any_text_survives_the_tokenizer(seedling):
    _, renderer = seedling
    for text in ("Žluťoučký kůň 🐴", "a\tb\r\nc", "<answer>√</answer>", "  two  spaces "):
        assert renderer.tokenizer.decode(renderer.tokenizer.encode(text)) == text


@pytest.mark.parametrize("seed", range(30))
def test_incremental_rendering_of_its_own_transcripts_equals_the_full_render(seedling, seed):
    _, renderer = seedling
    transcript = write(generator(seed, "test"))[0]
    conversations = Conversations(renderer)
    for end, message in enumerate(transcript.messages):
        if message.role != "assistant" or message.tool_calls:
            continue
        prompt = conversations.prompt(transcript.messages[:end], transcript.tools)
        assert list(prompt.tokens) == renderer.tokenizer.encode(
            renderer.text(transcript.messages[:end], transcript.tools)
        )
        said = (*renderer.tokenizer.encode(message.content), renderer.stop[0])
        conversations.sampled(prompt, Completion(said, (0.0,) * len(said), FinishReason.STOP))


def test_the_maker_imitates_the_assistants_words_and_nothing_else():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    text = template().render([Message("user", "Hi."), Message("assistant", "Yes.")], (), generation=False)
    ids = tokenizer.encode(text).ids
    spoken = [i for i, own in zip(ids, spoken_by_assistant(tokenizer, ids), strict=True) if own]
    assert tokenizer.decode(spoken, skip_special_tokens=False) == "Yes.<|im_end|>"


def test_its_template_shows_tools_and_their_answers(seedling):
    _, renderer = seedling
    messages = [Message("user", "2 + 2?"), Message("tool", "4", tool_call_id="call_0", name="calculator")]
    text = renderer.text(messages, [calculator.spec])
    assert '"name": "calculator"' in text
    assert "<tool_response>4</tool_response>" in text


def test_transcripts_depend_on_their_seed_alone():
    assert write(generator(3, "x")) == write(generator(3, "x"))
    assert np.isclose(sum(share for share, _ in WRITERS.values()), 1.0)
