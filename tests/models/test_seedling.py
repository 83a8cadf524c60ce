"""The embedded model: size, tokenizer, chat template, transcripts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from arborl.chat import Conversations
from arborl.models.model_files import SEEDLING_DIR
from arborl.seedling.make import assistant_mask, chat_template
from arborl.seedling.transcript_rows import WRITERS, write
from arborl.seeds import generator
from arborl.tools.library.calculator import calculator
from arborl.types import Completion, FinishReason, Message


def test_the_weights_are_at_most_8_mb_and_record_how_they_were_made():
    assert sum(file.stat().st_size for file in SEEDLING_DIR.iterdir()) < 8_000_000
    record = json.loads((SEEDLING_DIR / "record.json").read_text())
    assert {"command", "transcripts", "tokens", "train_seconds", "final_loss"} <= record.keys()
    assert record["shares"] == {name: share for name, (share, _) in WRITERS.items()}


def test_plain_transformers_loads_it_and_renders_the_same_prompt(seedling):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, renderer = seedling
    model = AutoModelForCausalLM.from_pretrained(SEEDLING_DIR)
    tokenizer = AutoTokenizer.from_pretrained(SEEDLING_DIR)
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


def test_decode_inverts_encode_for_any_text(seedling):
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
        tokens = (*renderer.tokenizer.encode(message.content), renderer.stop[0])
        conversations.record(prompt, Completion(tokens, (0.0,) * len(tokens), FinishReason.STOP))


def test_the_loss_covers_the_assistants_tokens_only():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SEEDLING_DIR / "tokenizer.json"))
    text = chat_template().render([Message("user", "Hi."), Message("assistant", "Yes.")], (), generation=False)
    ids = tokenizer.encode(text).ids
    trained = [i for i, mask in zip(ids, assistant_mask(tokenizer, ids), strict=True) if mask]
    assert tokenizer.decode(trained, skip_special_tokens=False) == "Yes.<|im_end|>"


def test_the_template_shows_tools_and_tool_results(seedling):
    _, renderer = seedling
    messages = [Message("user", "2 + 2?"), Message("tool", "4", tool_call_id="call_0", name="calculator")]
    text = renderer.text(messages, [calculator.spec])
    assert '"name": "calculator"' in text
    assert "<tool_response>4</tool_response>" in text


def test_transcripts_depend_only_on_the_seed():
    assert write(generator(3, "x")) == write(generator(3, "x"))
    assert np.isclose(sum(share for share, _ in WRITERS.values()), 1.0)
