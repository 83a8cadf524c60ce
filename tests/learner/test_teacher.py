"""Whom a policy is distilled from: a local model or a server, requests about the same tokens in the same contexts."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from arborl.algorithms import Recipe
from arborl.config.algorithm_config import AlgorithmConfig
from arborl.config.run_config import LearnerConfig
from arborl.errors import ConfigError
from arborl.learner.core.learner import Learner
from arborl.learner.core.teacher import RemoteTeacher, branch_paths, check_tokenizer, open_teacher
from arborl.models.attention import ATTENTION_NAME
from arborl.models.model_loading import resolve
from arborl.rollout.token_trees import build_token_trees
from arborl.trainer.training_batch import prepare_batch
from arborl.types import Call, Completion, Episode, FinishReason, Group, Sampling, Task


class Server(ThreadingHTTPServer):
    """Answers as vLLM does, over a model; or as servers without `prompt_logprobs` do."""

    def __init__(self, model, tokenizer, form: str = "vllm", tokenizes: bool = True, longest: int = 4096):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer, self.form, self.tokenizes, self.longest = model, tokenizer, form, tokenizes, longest
        self.requests: list[list[int]] = []
        self.broken = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def reply(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "big", "max_model_len": self.server.longest}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            known = self.server.tokenizes
            return self.reply(
                {"tokens": self.server.tokenizer.encode(body["prompt"])} if known else {}, 200 if known else 404
            )
        if self.server.broken:
            self.server.broken -= 1
            return self.reply({"error": "busy"}, 503)
        ids = body["prompt"]
        self.server.requests.append(ids)
        with torch.no_grad():
            logprobs = self.server.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        likely = [None, *logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()]
        choice: dict = {"text": "", "logprobs": None}
        if self.server.form == "vllm":
            choice["prompt_logprobs"] = [
                None if one is None else {str(token): {"logprob": one, "rank": 1}}
                for one, token in zip(likely, ids, strict=True)
            ]
        elif self.server.form == "echo":
            choice["logprobs"] = {"token_logprobs": [*likely, -0.5]}
        self.reply({"choices": [choice]})


@pytest.fixture(scope="module")
def big(seedling):
    """Another model with the same tokenizer, and plain attention for the server."""
    model = copy.deepcopy(seedling[0])
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.abs().mean()
    model.set_attn_implementation("sdpa")
    return model


@pytest.fixture
def serve(big, seedling):
    servers = []

    def start(**settings) -> Server:
        servers.append(Server(big, seedling[1].tokenizer, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def group(*replies: tuple[int, ...], prompt=(5, 6, 7)) -> Group:
    """Episodes of one prompt, of which some go on from another's beginning."""
    calls = [Call(prompt, Completion(tokens, (-1.0,) * len(tokens), FinishReason.STOP), 0) for tokens in replies]
    return Group(Task("t"), [Episode(f"t#{i}", Task("t"), calls=[call]) for i, call in enumerate(calls)])


GROUPS = [group((10, 11, 12), (10, 11), (10, 13, 14, 15)), group((20,), prompt=(9,))]


def plain(model):
    """The same with the library's attention."""
    made = copy.deepcopy(model)
    made.set_attn_implementation("sdpa")
    return made


def direct(model, groups) -> np.ndarray:
    model = plain(model)
    found = []
    for one in groups:
        for episode in one.episodes:
            call = episode.calls[0]
            ids = torch.tensor([[*call.prompt, *call.completion.tokens]])
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)
            at = range(len(call.prompt) - 1, ids.shape[1] - 1)
            found += [float(logprobs[i, ids[0, i + 1]]) for i in at]
    return np.array(found)


@pytest.mark.parametrize("form", ["vllm", "echo"])
def test_a_server_gets_one_request_per_branch_and_scores_every_token(form, serve, big, seedling):
    server = serve(form=form)
    teacher = RemoteTeacher(server.url, wait=0.01)
    teacher.check(seedling[1].tokenizer, 1024)
    server.requests.clear()
    forest = build_token_trees(GROUPS)
    found = teacher.logprobs(forest.trees, forest.terms)
    assert found == pytest.approx(direct(big, GROUPS), abs=1e-5)
    assert sorted(server.requests) == [[5, 6, 7, 10, 11, 12], [5, 6, 7, 10, 13, 14, 15], [9, 20]]
    assert [path.tolist() for path in branch_paths(forest.trees[1])] == [[0, 1]]


def test_a_busy_server_is_retried_and_an_unreachable_one_fails_the_episodes(serve, seedling, caplog):
    server = serve()
    teacher = RemoteTeacher(server.url, wait=0.01, retries=1)
    teacher.check(seedling[1].tokenizer, 1024)
    server.broken = 1
    algorithm = Recipe(AlgorithmConfig(name="distill"))
    learner = Learner(copy.deepcopy(seedling[0]), LearnerConfig(), Sampling(), algorithm.needs, teacher=teacher)
    groups = [group((10, 11)), group((20,), prompt=(9,))]
    kept, _, terms = prepare_batch(algorithm, learner, groups)
    assert len(kept) == 2
    assert np.isfinite(terms.teacher).all()
    server.broken = 10**6
    kept, _, terms = prepare_batch(algorithm, learner, groups)
    assert kept == []
    assert "teacher: ArithmeticError" in str(groups[0].episodes[0].failure)
    assert "request of 5 tokens failed: status 503" in caplog.text


def test_the_policys_gradient_is_that_of_the_reverse_kl_at_its_own_samples(big, seedling):
    """Ours by a local teacher: the sum over tokens of (student - teacher), held fixed, times the log-probability."""
    algorithm = Recipe(AlgorithmConfig(name="distill", aggregation="token"))
    student = copy.deepcopy(seedling[0])
    teacher = copy.deepcopy(big).requires_grad_(False)
    teacher.set_attn_implementation(ATTENTION_NAME)
    learner = Learner(student, LearnerConfig(), Sampling(), algorithm.needs, teacher=teacher)
    old = direct(student, GROUPS)
    groups = [
        Group(one.task, [Episode(e.id, e.task, calls=[_likely(e.calls[0], old_tokens)]) for e, old_tokens in pairs])
        for one, pairs in _cut(GROUPS, old)
    ]
    kept, forest, terms = prepare_batch(algorithm, learner, groups)
    assert terms.teacher == pytest.approx(direct(big, GROUPS), abs=1e-4)
    metrics = learner.backward(forest.trees, algorithm.credit(kept, terms), algorithm)
    gap = old - direct(big, GROUPS)
    assert metrics["policy/loss"] == pytest.approx(gap.mean(), abs=1e-4)
    assert metrics["policy/teacher_kl"] == pytest.approx(gap.mean(), abs=1e-4)
    other = plain(seedling[0])
    total, at = torch.zeros(()), 0
    for one in GROUPS:
        for episode in one.episodes:
            call = episode.calls[0]
            ids = torch.tensor([[*call.prompt, *call.completion.tokens]])
            logprobs = other(ids).logits[0].log_softmax(-1)
            for i in range(len(call.prompt) - 1, ids.shape[1] - 1):
                total = total + logprobs[i, ids[0, i + 1]] * float(gap[at]) / len(gap)
                at += 1
    total.backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in other.parameters())
    for ours, theirs in zip(student.parameters(), other.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).abs().max()) < 1e-4 * largest


def _cut(groups, old):
    at = 0
    for one in groups:
        pairs = []
        for episode in one.episodes:
            count = len(episode.calls[0].completion.tokens)
            pairs.append((episode, old[at : at + count]))
            at += count
        yield one, pairs


def _likely(call: Call, logprobs) -> Call:
    return Call(call.prompt, Completion(call.completion.tokens, tuple(map(float, logprobs)), FinishReason.STOP), 0)


def test_a_teacher_that_equals_the_student_gives_no_gradient_and_a_warning(seedling, caplog):
    algorithm = Recipe(AlgorithmConfig(name="distill"))
    student = copy.deepcopy(seedling[0])
    learner = Learner(student, LearnerConfig(), Sampling(), algorithm.needs, teacher=seedling[0])
    old = direct(student, GROUPS)
    groups = [
        Group(one.task, [Episode(e.id, e.task, calls=[_likely(e.calls[0], own)]) for e, own in pairs])
        for one, pairs in _cut(GROUPS, old)
    ]
    with caplog.at_level(logging.WARNING):
        kept, forest, terms = prepare_batch(algorithm, learner, groups)
    assert "equal the policy's" in caplog.text
    metrics = learner.backward(forest.trees, algorithm.credit(kept, terms), algorithm)
    assert metrics["policy/loss"] == pytest.approx(0, abs=1e-6)


def test_teachers_that_cannot_teach_are_refused(serve, seedling, tmp_path):
    tokenizer = seedling[1].tokenizer
    with pytest.raises(ConfigError, match=r"context of 64 tokens.*Write a smaller sampling.max_context"):
        RemoteTeacher(serve(longest=64).url).check(tokenizer, 1024)
    with pytest.raises(ConfigError, match=r"the server has no model 'other'. It has: big"):
        RemoteTeacher(f"{serve().url}?model=other").check(tokenizer, 1024)
    with pytest.raises(ConfigError, match=r"no log-probabilities of a prompt.*Serve it with vLLM"):
        RemoteTeacher(serve(form="neither").url, wait=0.01).check(tokenizer, 1024)
    with pytest.raises(ConfigError, match="does not list its models"):
        RemoteTeacher("http://127.0.0.1:9/v1", wait=0.01).check(tokenizer, 1024)
    with pytest.raises(
        ConfigError, match=r"algorithm.args.teacher=no-such: model.name: no model here is called 'no-such'"
    ):
        open_teacher("no-such", resolve("seedling"), "cpu", 1024)
    other = shifted(tmp_path)
    with pytest.raises(ConfigError, match=r"its tokenizer differs: token 300 is .* there and .* here"):
        check_tokenizer(resolve("seedling"), other, "other")


def shifted(folder: Path) -> Path:
    """Seedling's tokenizer with two tokens exchanged."""
    for name in ("tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(resolve("seedling") / name, folder / name)
    about = json.loads((resolve("seedling") / "tokenizer.json").read_text())
    vocabulary = about["model"]["vocab"]
    one, two = (next(text for text, number in vocabulary.items() if number == wanted) for wanted in (300, 301))
    vocabulary[one], vocabulary[two] = 301, 300
    (folder / "tokenizer.json").write_text(json.dumps(about))
    return folder


def test_a_local_teacher_is_in_its_own_precision_and_learns_nothing():
    teacher = open_teacher("seedling", resolve("seedling"), "cpu", 1024)
    assert teacher.dtype == torch.bfloat16  # as its files are
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
