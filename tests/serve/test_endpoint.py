"""Agent `endpoint`: an external program calls the model over HTTP, and its calls are recorded."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import endpoint_programs as programs
import pytest

from arborl.config.load_config import load
from arborl.envs.env import Env, Observation, Step
from arborl.envs.games.question import Question
from arborl.errors import ConfigError
from arborl.rewards.answers import POSTED, posted
from arborl.rewards.reward import Rewards
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.serve.endpoint_agent import EndpointAgent
from arborl.training_run.build import check
from arborl.types import Message, Sampling, StopReason, Task

ROOT = Path(__file__).parents[2]
TASK = Task("t", messages=(Message("user", "Add 97 and 62. Answer as <answer>number</answer>."),))


def rollout_of(loaded, env=Question, limits=EpisodeLimits(max_context=512), **args):  # noqa: B008
    episode_factories = EpisodeFactories(agent=lambda task: EndpointAgent(**args), env=lambda task: env())
    return Rollout(loaded.engine, loaded.served.renderer, episode_factories, Sampling(48), limits, concurrency=8)


def play(loaded, tasks=(TASK,), size=1, **args):
    """The episodes, task by task."""
    groups = asyncio.run(rollout_of(loaded, **args).collect(tasks, seed=5, group_size=size))
    return [episode for group in groups for episode in group.episodes], groups


def process(name):
    return [sys.executable, programs.__file__, name]


def is_running(mark):
    return mark in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout


def test_every_token_a_program_received_is_one_loss_term_in_its_context(loaded):
    programs.RECEIVED.clear()
    episodes, groups = play(loaded, [TASK, Task("u", TASK.messages)], 2, call="endpoint_programs:calls_in_many_ways")
    assert [str(episode.failure) for episode in episodes] == ["None"] * 4
    received = Counter((task, tuple(prompt), tuple(ids)) for task, prompt, ids in programs.RECEIVED)
    calls = [(one.task.id, call) for one in episodes for call in one.calls]
    assert received == Counter((task, tuple(call.prompt), call.completion.tokens) for task, call in calls)

    forest = build_token_trees(groups)
    terms, number = forest.terms, 0
    for _, call in calls:
        context = list(call.prompt)
        for token, logprob in zip(call.completion.tokens, call.completion.logprobs, strict=True):
            tree, at = forest.trees[terms.tree[number]], terms.position[number]
            seen = [place for place in range(at + 1) if at < tree.end[place]]
            assert tree.tokens[seen].tolist() == context
            assert (terms.token[number], terms.logprob[number]) == (token, logprob)
            context.append(token)
            number += 1
    assert number == len(terms)


def test_a_history_extends_or_branches_and_renders_as_in_serving(loaded, address):
    (episode,), _ = play(loaded, call="endpoint_programs:calls_in_many_ways")
    first, second, forgotten, *_ = episode.calls
    assert first.whole.begins(second.prompt)
    assert not first.whole.begins(forgotten.prompt)
    if len(episode.calls) == 8:  # it called the tool: its call was sent back as it wrote it
        assert episode.calls[-2].whole.begins(episode.calls[-1].prompt)
    assert episode.answer == "answer of the program"
    (episode,), _ = play(loaded, call="endpoint_programs:calls_in_many_ways")
    decode = loaded.served.renderer.decode  # a sampled text may have other ids than the same text that is read
    for call in (episode.calls[0], episode.calls[1]):
        messages = [{"role": message.role, "content": message.content} for message in call.messages]
        (served,) = programs.chat(f"{address}/v1", messages, model="", max_tokens=1)
        assert decode(served["prompt_token_ids"]) == decode(tuple(call.prompt))


def test_equal_seeds_give_equal_episodes_with_the_temperature_of_the_run(loaded):
    one, _ = play(loaded, size=4, call="endpoint_programs:once")
    other, _ = play(loaded, size=4, call="endpoint_programs:once")
    texts = [[call.completion.tokens for call in episode.calls] for episode in one]
    assert texts == [[call.completion.tokens for call in episode.calls] for episode in other]
    assert len({str(each) for each in texts}) > 1  # though the program asks for temperature 0 and a seed
    assert all(episode.metrics["endpoint/sampling_overridden"] == 1 for episode in one)


def test_answer_reply_makes_the_last_message_of_the_model_the_answer(loaded):
    (episode,), _ = play(loaded, call="endpoint_programs:calls_in_many_ways", answer="reply")
    assert episode.turns[0].message is episode.calls[-1].reply


def test_a_process_gets_the_task_and_its_output_is_the_answer(loaded):
    tasks = [Task(name, TASK.messages) for name in "abc"]
    episodes, _ = play(loaded, tasks, command=process("answers"))
    for episode in episodes:
        assert episode.failure is None
        assert episode.answer == f"{episode.calls[0].reply.content} {episode.task.id}".strip()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exits", "the very last words (exit code 3)\nthe first words"),
        ("killed", "(exit code -9)"),
        ("never_calls", "it never called the model"),
    ],
)
def test_a_program_that_dies_fails_its_episode_and_is_named(loaded, name, words):
    (episode,), _ = play(loaded, command=process(name))
    assert episode.failure.where == f"program '{Path(sys.executable).name} endpoint_programs.py {name}'"
    assert words in episode.failure.message
    assert episode.stop is StopReason.ERROR


def test_a_program_that_prints_too_much_is_ended(loaded):
    episodes, _ = play(loaded, size=8, command=process("prints_too_much"))
    assert all("printed more than 1,048,576 bytes" in episode.failure.message for episode in episodes)


def test_a_program_that_dies_during_a_call_does_not_affect_others(loaded):
    async def both():
        two = [rollout_of(loaded, command=process(name)) for name in ("dies_in_a_call", "answers")]
        return await asyncio.gather(*(each.collect([TASK], 0, 2) for each in two))

    (bad,), (good,) = asyncio.run(both())
    assert all("(exit code -9)" in episode.failure.message for episode in bad.episodes)
    assert [episode.failure for episode in good.episodes] == [None, None]


def test_children_of_a_program_end_with_the_episode(loaded):
    mark = uuid.uuid4().hex

    async def cancelled():
        rollout = rollout_of(loaded, command=process("sleeps"))
        playing = asyncio.create_task(rollout.play(Task("t", (Message("user", mark),)), 0, "t#0"))
        while not await asyncio.to_thread(is_running, mark):
            await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait([playing])

    asyncio.run(cancelled())
    assert not is_running(mark)


def test_a_daemon_that_holds_the_output_pipe_ends_with_its_program(loaded):
    mark = uuid.uuid4().hex
    (episode,), _ = play(loaded, [Task("t", (Message("user", mark),))], command=process("starts_a_daemon"))
    assert (episode.failure, bool(episode.answer)) == (None, True)
    assert not is_running(mark)


def test_an_output_pipe_held_by_a_foreign_process_does_not_block(loaded, tmp_path):
    """Its descriptor was sent to a process that the program did not start, and that nothing ends."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        task = Task("t", (Message("user", str(tmp_path / "s")),))
        (episode,), _ = play(loaded, [task], command=process("passes_its_output_on"))
        line, _ = listening.accept()
        held = socket.recv_fds(line, 1, 1)[1]
        line.close()
        for handle in held:
            os.close(handle)
    assert (episode.failure, bool(episode.answer), bool(held)) == (None, True, True)


def test_a_slow_program_is_ended_by_the_deadline_of_the_episode(loaded):
    limits = EpisodeLimits(max_context=512, episode_seconds=1.0)
    (episode,), _ = play(loaded, limits=limits, command=process("sleeps"))
    assert episode.stop is StopReason.TIMEOUT
    assert episode.failure.where.startswith("program ")


@pytest.mark.parametrize(("name", "words"), [("quits", "SystemExit: 4"), ("breaks", "divided by nothing")])
def test_a_function_that_fails_fails_its_episode(loaded, name, words):
    (episode,), _ = play(loaded, call=f"endpoint_programs:{name}")
    assert episode.failure.where == f"program 'endpoint_programs:{name}'"
    assert words in episode.failure.message


@pytest.mark.parametrize(
    ("name", "stop", "calls"),
    [
        ("too_long", StopReason.CONTEXT_FULL, 1),
        ("shortens_its_prompt", StopReason.DONE, 1),
        ("calls_forever", StopReason.MAX_TURNS, 3),
    ],
)
def test_a_full_context_and_max_calls_end_a_program_that_does_not_adapt(loaded, name, stop, calls):
    (episode,), _ = play(loaded, call=f"endpoint_programs:{name}", max_calls=3)
    assert (episode.failure, episode.stop, len(episode.calls)) == (None, stop, calls)


def test_invalid_requests_are_refused_and_the_episode_continues(loaded):
    (episode,), _ = play(loaded, call="endpoint_programs:sends_invalid_requests")
    assert programs.STATUS == [400, 400, 400, 400, 400, 404, 400, 404]
    assert (episode.failure, len(episode.calls)) == (None, 1)


def test_a_call_after_the_end_is_404(loaded):
    async def late():
        from arborl.serve.episode_server import EpisodeServer

        rollout = rollout_of(loaded, call="endpoint_programs:once")
        await rollout.collect([TASK], 0, 1)
        server = await EpisodeServer.get("127.0.0.1", 0)
        assert not server.episodes
        body = {"messages": [{"role": "user", "content": "?"}]}
        return await asyncio.to_thread(programs.post, f"{server.url}/e/gone/v1/chat/completions", body)

    status, texts = asyncio.run(late())
    assert (status, json.loads(texts)["error"]["code"]) == (404, "episode_not_found")


def with_episode(loaded, work, context=512):
    """The result of `work` with the URL of an open episode and its server."""
    from arborl.rollout.recorder import Recorder
    from arborl.serve.episode_server import EpisodeServer, ExternalEpisode
    from arborl.types import Episode

    async def inside():
        limits = EpisodeLimits(max_context=context)
        recorder = Recorder(loaded.engine, loaded.served.renderer, Sampling(8), limits, Episode("e", TASK, 0))
        server = await EpisodeServer.get("127.0.0.1", 0)
        with server.open(ExternalEpisode(TASK, TASK.messages, Question(), recorder, 64)) as at:
            return await work(at, server)

    return asyncio.run(inside())


@pytest.mark.parametrize(
    "path", ["/e/wrong/v1/chat/completions", "/v1/episodes/wrong/reward", "/e/wrong/step", "/", "/e/"]
)
def test_a_request_with_a_wrong_id_is_refused_before_its_body_is_read(loaded, path):
    """The client announces a megabyte and sends none of it."""

    async def work(at, server):
        host, port = server.socket.getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        writer.write(head.encode())
        status = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        return status

    assert b" 404 " in with_episode(loaded, work)


HOSTILE = {
    "values": b'{"prompt":[' + b"{}," * 300_000 + b"{}]}",
    "depth": b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
    "arguments": b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":['
    + b"{}," * 300_000
    + b']}"}}]}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/step", "/reward"])
def test_the_json_bounds_apply_to_programs(loaded, name, path):
    async def work(at, server):
        return await asyncio.to_thread(programs.post, f"{at}{path}", HOSTILE[name])

    status, texts = with_episode(loaded, work)
    assert status == 400
    if name != "arguments" or path == "/v1/chat/completions":
        assert json.loads(texts)["error"]["code"] == "body_too_complex"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_text_and_tools_that_exceed_the_context_do_not_reach_the_recorder(loaded, role, monkeypatch):
    """The recorder would tokenize them in the event loop of the run."""
    from arborl.chat.tokenizer import FileTokenizer

    loop, seen, encode = threading.get_ident(), [], FileTokenizer.encode

    def watched(self, text, quoted=()):
        if threading.get_ident() == loop:
            seen.append(len(text))
        return encode(self, text, quoted)

    monkeypatch.setattr(FileTokenizer, "encode", watched)
    long, texts = "some words " * 100_000, {"role": "user", "content": "?"}
    tool = {"function": {"name": "f", "description": long, "parameters": {}}}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
    bodies = [
        {"messages": [texts, {"role": role, "content": long}]},
        {"messages": [texts], "tools": [tool]},
        {"messages": [texts, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [texts], "max_tokens": 2},
    ]

    async def work(at, server):
        return [await asyncio.to_thread(programs.post, f"{at}/v1/chat/completions", body) for body in bodies]

    answers = with_episode(loaded, work)
    assert [status for status, _ in answers] == [400, 400, 400, 200]
    assert all(json.loads(result)["error"]["code"] == "context_length_exceeded" for _, result in answers[:3])
    assert max(seen, default=0) < 100_000


def test_rewards_are_posted_or_their_lack_is_a_failure(loaded):
    (episode,), groups = play(loaded, call="endpoint_programs:posts_a_reward")
    assert programs.STATUS == [400, 200, 410, 410]
    assert (episode.failure, episode.answer) == (None, "mine")
    asyncio.run(Rewards([("posted", posted, 2.0)], 5).score(groups))
    assert (episode.reward, episode.metrics[POSTED]) == (0.5, 0.25)
    (episode,), groups = play(loaded, call="endpoint_programs:once")
    asyncio.run(Rewards([("posted", posted, 1.0)], 5).score(groups))
    assert "ARBORL_EPISODE_URL/reward" in episode.failure.message


class Counting(Env):
    """Over after three steps."""

    blocking = False

    async def reset(self, task, seed):
        self.steps = 0
        return Observation((Message("user", "Begin."),))

    async def step(self, action):
        self.steps += 1
        return Step(Observation((Message("user", f"Step {self.steps}."),)), 1.0, terminated=self.steps == 3)


@pytest.mark.parametrize(("most", "stop", "turns"), [(9, StopReason.DONE, 3), (2, StopReason.MAX_TURNS, 2)])
def test_a_program_plays_an_environment_step_by_step(loaded, most, stop, turns):
    limits = EpisodeLimits(max_turns=most, max_context=512)
    (episode,), _ = play(loaded, env=Counting, limits=limits, call="endpoint_programs:steps")
    assert (episode.failure, episode.stop, len(episode.turns)) == (None, stop, turns)
    assert [call.turn for call in episode.calls] == list(range(turns))
    assert programs.STATUS == [400]


@pytest.fixture
def waiting_program():
    """A service that receives tasks by POST; it answers the task `later` with 202 and posts its reward at the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            result = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            later, bad = result["task"]["id"] == "later", result["task"]["id"] == "bad"
            if not later and not bad:
                programs.once(result["task"]["question"], result["base_url"])
            body = json.dumps({} if later else {"answer": "of the server"}).encode()
            self.send_response(202 if later else 503 if bad else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if later:
                programs.once("Hello", result["base_url"])
                programs.post(f"{result['episode_url']}/reward", {"reward": 1, "answer": "later"})

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/play"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_http_program_receives_each_task(loaded, waiting_program):
    tasks = [Task(name, TASK.messages) for name in ("now", "later", "bad")]
    (now, later, bad), _ = play(loaded, tasks, url=waiting_program)
    assert (now.failure, now.answer, len(now.calls)) == (None, "of the server", 1)
    assert (later.failure, later.answer, later.metrics[POSTED]) == (None, "later", 1.0)
    assert "status 503" in bad.failure.message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "agent.args: agent=endpoint needs one of command, call and url"),
        (["agent.args.command=[python]", "agent.args.url=http://h"], "needs one of command, call and url"),
        (["agent.args.command=python"], "command: write a list of words"),
        (["agent.args.command=[no-such-program]"], "program 'no-such-program' not found"),
        (["agent.args.call=endpoint_programs:post"], "has the parameter 'url'; available: question"),
        (["agent.args.url=h:1"], "is not a valid address"),
        (["agent.args.command=[python]", "agent.args.max_calls=0"], "max_calls=0: must be at least 1"),
        (["agent.args.command=[python]", "agent.args.warm=perhaps"], "warm='perhaps': write true or false"),
        (["agent.args.url=http://h", "agent.args.warm=true"], "warm=True: write true or false, with command only"),
        (["agent.args.command=[python]", "agent.args.cmd=1"], "agent.args.cmd: unknown argument"),
        (["agent.args.command=[python]", "tools=[calculator]"], "the program has its own tools and prompts"),
        (["agent.args.command=[python]", "agent.system=Hello"], "agent.system: with agent=endpoint"),
        (["agent.args.command=[python]", "context=summary"], "manages its context itself"),
    ],
)
def test_contradictory_settings_are_config_errors(settings, words, tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text('[{"question": "?", "answer": 1}]')
    with pytest.raises(ConfigError, match=words):
        check(load(None, [f"data.path={rows}", "rewards=[equal]", "agent=endpoint", *settings]))


def test_a_script_with_the_openai_sdk_needs_no_change(loaded):
    pytest.importorskip("openai")
    script = str(ROOT / "examples" / "endpoint" / "openai_loop.py")
    episodes, _ = play(loaded, size=2, command=["python", script])
    for episode in episodes:
        assert episode.failure is None
        assert set(episode.branches) == {0}  # what it sends back is what the model wrote
        assert episode.answer == episode.calls[-1].reply.content.strip()


def test_an_agent_of_a_framework_needs_no_change(loaded, monkeypatch):
    pytest.importorskip("pydantic_ai", reason="the extra 'endpoint'")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "endpoint"))
    episodes, _ = play(loaded, size=2, call="with_pydantic_ai:solve")
    for episode in episodes:
        assert episode.failure is None
        assert set(episode.branches) == {0}
