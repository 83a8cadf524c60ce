"""A program that knows nothing of Arbor calls the model over HTTP, and is recorded as every agent is."""

from __future__ import annotations

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
from arborl.envs.question import Question
from arborl.errors import ConfigError
from arborl.rewards.reward import Rewards
from arborl.rewards.rules import POSTED, posted
from arborl.rollout.recorder import Limits
from arborl.rollout.runner import Cast, Rollout
from arborl.rollout.tree import plant
from arborl.serve.endpoint import EndpointAgent
from arborl.training_run.build import check
from arborl.types import Message, Sampling, StopReason, Task

ROOT = Path(__file__).parents[2]
ASKED = Task("t", messages=(Message("user", "Add 97 and 62. Answer as <answer>number</answer>."),))


def rollout_of(opened, env=Question, limits=Limits(max_context=512), **args):  # noqa: B008
    cast = Cast(agent=lambda task: EndpointAgent(**args), env=lambda task: env())
    return Rollout(opened.engine, opened.served.renderer, cast, Sampling(48), limits, concurrency=8)


def played(opened, tasks=(ASKED,), size=1, **args):
    """The episodes, task by task."""
    groups = asyncio.run(rollout_of(opened, **args).collect(tasks, seed=5, group_size=size))
    return [episode for group in groups for episode in group.episodes], groups


def process(name):
    return [sys.executable, programs.__file__, name]


# ------------------------------------------------------------------------------------------------ what is recorded


def test_every_token_a_program_was_told_is_one_loss_term_in_the_context_it_was_sampled_in(opened):
    programs.HEARD.clear()
    episodes, groups = played(opened, [ASKED, Task("u", ASKED.messages)], 2, call="endpoint_programs:busy")
    assert [str(episode.failure) for episode in episodes] == ["None"] * 4
    heard = Counter((task, tuple(prompt), tuple(ids)) for task, prompt, ids in programs.HEARD)
    calls = [(one.task.id, call) for one in episodes for call in one.calls]
    assert heard == Counter((task, tuple(call.prompt), call.completion.tokens) for task, call in calls)

    forest = plant(groups)
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


def test_what_is_sent_back_goes_on_and_what_is_rewritten_branches(opened):
    (episode,), _ = played(opened, call="endpoint_programs:busy")
    first, second, forgotten, *_ = episode.calls
    assert first.whole.begins(second.prompt)
    assert not first.whole.begins(forgotten.prompt)
    if len(episode.calls) == 8:  # it called the tool: its call was sent back as it wrote it
        assert episode.calls[-2].whole.begins(episode.calls[-1].prompt)
    assert episode.answer == "said by the program"


def test_the_same_seed_plays_the_same_episodes_and_the_runs_temperature_holds(opened):
    one, _ = played(opened, size=4, call="endpoint_programs:once")
    other, _ = played(opened, size=4, call="endpoint_programs:once")
    said = [[call.completion.tokens for call in episode.calls] for episode in one]
    assert said == [[call.completion.tokens for call in episode.calls] for episode in other]
    assert len({str(each) for each in said}) > 1  # though the program asks for temperature 0 and a seed
    assert all(episode.metrics["endpoint/overruled"] == 1 for episode in one)


def test_a_program_is_shown_the_same_model_when_it_is_trained_and_when_it_is_served(opened, address):
    (episode,), _ = played(opened, call="endpoint_programs:busy")
    decode = opened.served.renderer.decode  # a sampled text may have other ids than the same text that is read
    for call in (episode.calls[0], episode.calls[1]):
        talk = [{"role": message.role, "content": message.content} for message in call.messages]
        (served,) = programs.chat(f"{address}/v1", talk, model="", max_tokens=1)
        assert decode(served["prompt_token_ids"]) == decode(tuple(call.prompt))


def test_the_models_last_message_is_the_answer_where_so_asked(opened):
    (episode,), _ = played(opened, call="endpoint_programs:busy", answer="reply")
    assert episode.turns[0].message is episode.calls[-1].reply


# ------------------------------------------------------------------------------------------------ processes


def test_a_process_is_told_the_task_and_what_it_prints_is_the_answer(opened):
    tasks = [Task(name, ASKED.messages) for name in "abc"]
    episodes, _ = played(opened, tasks, command=process("answers"))
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
def test_a_program_that_dies_costs_its_episode_and_is_named(opened, name, words):
    (episode,), _ = played(opened, command=process(name))
    assert episode.failure.where == f"program '{Path(sys.executable).name} endpoint_programs.py {name}'"
    assert words in episode.failure.message
    assert episode.stop is StopReason.ERROR


def test_programs_that_print_faster_than_they_are_listened_to_are_ended_at_once(opened):
    episodes, _ = played(opened, size=8, command=process("shouts"))
    assert all("printed more than 1,048,576 bytes" in episode.failure.message for episode in episodes)


def test_a_program_that_dies_while_it_is_answered_leaves_the_others_alone(opened):
    async def both():
        two = [rollout_of(opened, command=process(name)) for name in ("dies_in_a_call", "answers")]
        return await asyncio.gather(*(each.collect([ASKED], 0, 2) for each in two))

    (bad,), (good,) = asyncio.run(both())
    assert all("(exit code -9)" in episode.failure.message for episode in bad.episodes)
    assert [episode.failure for episode in good.episodes] == [None, None]


def test_nothing_that_a_program_started_outlives_its_episode(opened):
    mark = uuid.uuid4().hex

    def there():
        return mark in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout

    async def cancelled():
        rollout = rollout_of(opened, command=process("lingers"))
        playing = asyncio.create_task(rollout.play(Task("t", (Message("user", mark),)), 0, "t#0"))
        while not await asyncio.to_thread(there):
            await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait([playing])

    asyncio.run(cancelled())
    assert not there()


def test_a_daemon_that_holds_the_output_of_a_program_ends_with_it_and_costs_no_deadline(opened):
    mark = uuid.uuid4().hex
    task = Task("t", (Message("user", mark),))
    limits = Limits(max_context=512, episode_seconds=60.0)
    (episode,), _ = played(opened, [task], limits=limits, command=process("leaves_a_daemon"))
    assert episode.failure is None
    assert episode.answer
    assert mark not in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout


def test_output_that_a_stranger_process_holds_costs_no_deadline(opened, tmp_path):
    """Its descriptor was sent to a process that the program did not start, and that nothing ends."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        task = Task("t", (Message("user", str(tmp_path / "s")),))
        limits = Limits(max_context=512, episode_seconds=60.0)
        (episode,), _ = played(opened, [task], limits=limits, command=process("hands_over_its_output"))
        line, _ = listening.accept()
        held = socket.recv_fds(line, 1, 1)[1]
        line.close()
        for handle in held:
            os.close(handle)
    assert held
    assert episode.failure is None
    assert episode.answer


def test_one_that_takes_too_long_is_ended_by_the_episodes_deadline(opened):
    limits = Limits(max_context=512, episode_seconds=1.0)
    (episode,), _ = played(opened, limits=limits, command=process("lingers"))
    assert episode.stop is StopReason.TIMEOUT
    assert episode.failure.where.startswith("program ")


# ------------------------------------------------------------------------------------------------ limits and manners


@pytest.mark.parametrize(("name", "words"), [("quits", "SystemExit: 4"), ("breaks", "divided by nothing")])
def test_a_function_that_fails_costs_its_episode(opened, name, words):
    (episode,), _ = played(opened, call=f"endpoint_programs:{name}")
    assert episode.failure.where == f"program 'endpoint_programs:{name}'"
    assert words in episode.failure.message


def test_a_program_that_dies_of_a_full_context_has_used_it_up_and_not_failed(opened):
    (episode,), _ = played(opened, call="endpoint_programs:too_long")
    assert (episode.failure, episode.stop, len(episode.calls)) == (None, StopReason.CONTEXT_FULL, 1)


def test_a_program_may_make_room_in_a_full_context(opened):
    (episode,), _ = played(opened, call="endpoint_programs:forgets")
    assert (episode.failure, episode.stop, len(episode.calls)) == (None, StopReason.DONE, 1)


def test_a_program_that_never_ends_has_so_many_calls(opened):
    (episode,), _ = played(opened, call="endpoint_programs:greedy", max_calls=3)
    assert (episode.failure, episode.stop, len(episode.calls)) == (None, StopReason.MAX_TURNS, 3)


def test_garbage_is_answered_and_the_episode_goes_on(opened):
    (episode,), _ = played(opened, call="endpoint_programs:garbage")
    assert programs.STATUS == [400, 400, 400, 400, 400, 404, 400, 404]
    assert (episode.failure, len(episode.calls)) == (None, 1)


def test_a_call_after_the_end_is_told_so(opened):
    async def late():
        from arborl.serve.episodes import Endpoint

        rollout = rollout_of(opened, call="endpoint_programs:once")
        await rollout.collect([ASKED], 0, 1)
        endpoint = await Endpoint.here("127.0.0.1", 0)
        assert not endpoint.visits
        body = {"messages": [{"role": "user", "content": "?"}]}
        return await asyncio.to_thread(programs.post, f"{endpoint.at}/e/gone/v1/chat/completions", body)

    status, said = asyncio.run(late())
    assert (status, json.loads(said)["error"]["code"]) == (404, "episode_not_found")


def visited(opened, work, context=512):
    """What `work` comes to, given the address of an open episode and the endpoint."""
    from arborl.rollout.recorder import Recorder
    from arborl.serve.episodes import Endpoint, Visit
    from arborl.types import Episode

    async def inside():
        limits = Limits(max_context=context)
        recorder = Recorder(opened.engine, opened.served.renderer, Sampling(8), limits, Episode("e", ASKED, 0))
        endpoint = await Endpoint.here("127.0.0.1", 0)
        with endpoint.open(Visit(ASKED, ASKED.messages, Question(), recorder, 64)) as at:
            return await work(at, endpoint)

    return asyncio.run(inside())


@pytest.mark.parametrize(
    "path", ["/e/wrong/v1/chat/completions", "/v1/episodes/wrong/reward", "/e/wrong/step", "/", "/e/"]
)
def test_a_request_under_a_wrong_id_is_refused_before_its_body_is_read(opened, path):
    """The client says that a megabyte will come and sends none of it: the answer does not wait for it."""

    async def work(at, endpoint):
        host, port = endpoint.socket.getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        writer.write(head.encode())
        status = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        return status

    assert b" 404 " in visited(opened, work)


HOSTILE = {
    "values": b'{"prompt":[' + b"{}," * 300_000 + b"{}]}",
    "depth": b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
    "arguments": b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":['
    + b"{}," * 300_000
    + b']}"}}]}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/step", "/reward"])
def test_a_program_has_the_bounds_of_any_client(opened, name, path):
    async def work(at, endpoint):
        return await asyncio.to_thread(programs.post, f"{at}{path}", HOSTILE[name])

    status, said = visited(opened, work)
    assert status == 400
    if name != "arguments" or path == "/v1/chat/completions":
        assert json.loads(said)["error"]["code"] == "body_too_complex"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_text_and_tools_that_cannot_fit_do_not_reach_the_recorder(opened, role, monkeypatch):
    """It would tokenise them in the event loop of the run."""
    from arborl.chat.tokenizer import FileTokenizer

    loop, seen, encode = threading.get_ident(), [], FileTokenizer.encode

    def watched(self, text, quoted=()):
        if threading.get_ident() == loop:
            seen.append(len(text))
        return encode(self, text, quoted)

    monkeypatch.setattr(FileTokenizer, "encode", watched)
    long, said = "some words " * 100_000, {"role": "user", "content": "?"}
    tool = {"function": {"name": "f", "description": long, "parameters": {}}}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
    bodies = [
        {"messages": [said, {"role": role, "content": long}]},
        {"messages": [said], "tools": [tool]},
        {"messages": [said, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [said], "max_tokens": 2},
    ]

    async def work(at, endpoint):
        return [await asyncio.to_thread(programs.post, f"{at}/v1/chat/completions", body) for body in bodies]

    answers = visited(opened, work)
    assert [status for status, _ in answers] == [400, 400, 400, 200]
    assert all(json.loads(told)["error"]["code"] == "context_length_exceeded" for _, told in answers[:3])
    assert max(seen, default=0) < 100_000


# ------------------------------------------------------------------------------------------------ rewards, steps, URLs


def test_a_reward_that_a_program_posts_closes_its_episode(opened):
    (episode,), groups = played(opened, call="endpoint_programs:rewards")
    assert programs.STATUS == [400, 200, 410, 410]
    assert (episode.failure, episode.answer) == (None, "mine")
    asyncio.run(Rewards([("posted", posted, 2.0)], 5).score(groups))
    assert (episode.reward, episode.metrics[POSTED]) == (0.5, 0.25)


def test_a_reward_that_was_not_posted_is_a_failure_that_says_what_to_do(opened):
    (episode,), groups = played(opened, call="endpoint_programs:once")
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
def test_a_program_plays_an_environment_step_by_step(opened, most, stop, turns):
    limits = Limits(max_turns=most, max_context=512)
    (episode,), _ = played(opened, env=Counting, limits=limits, call="endpoint_programs:plays")
    assert (episode.failure, episode.stop, len(episode.turns)) == (None, stop, turns)
    assert [call.turn for call in episode.calls] == list(range(turns))
    assert programs.STATUS == [400]


@pytest.fixture
def waiting_program():
    """Is told of tasks by a POST; a task of the id `later` it answers at once, and posts its reward when it is done."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            later, bad = told["task"]["id"] == "later", told["task"]["id"] == "bad"
            if not later and not bad:
                programs.once(told["task"]["question"], told["base_url"])
            body = json.dumps({} if later else {"answer": "of the server"}).encode()
            self.send_response(202 if later else 503 if bad else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if later:
                programs.once("Hello", told["base_url"])
                programs.post(f"{told['episode_url']}/reward", {"reward": 1, "answer": "later"})

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/play"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_program_behind_an_address_is_told_of_each_task(opened, waiting_program):
    tasks = [Task(name, ASKED.messages) for name in ("now", "later", "bad")]
    (now, later, bad), _ = played(opened, tasks, url=waiting_program)
    assert (now.failure, now.answer, len(now.calls)) == (None, "of the server", 1)
    assert (later.failure, later.answer, later.metrics[POSTED]) == (None, "later", 1.0)
    assert "status 503" in bad.failure.message


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "agent.args: agent=endpoint needs one of command, call and url"),
        (["agent.args.command=[python]", "agent.args.url=http://h"], "needs one of command, call and url"),
        (["agent.args.command=python"], "command: give a list of words"),
        (["agent.args.command=[no-such-program]"], "there is no program 'no-such-program'"),
        (["agent.args.call=endpoint_programs:post"], "asks for 'url'; by name there are: question"),
        (["agent.args.url=h:1"], "is no address of a program"),
        (["agent.args.command=[python]", "agent.args.max_calls=0"], "max_calls=0: give 1 or more"),
        (["agent.args.command=[python]", "agent.args.cmd=1"], "agent.args.cmd: unknown argument"),
        (["agent.args.command=[python]", "tools=[calculator]"], "the program has its own tools and prompts"),
        (["agent.args.command=[python]", "agent.system=Hello"], "agent.system: with agent=endpoint"),
        (["agent.args.command=[python]", "context=summary"], "keeps its own account"),
    ],
)
def test_settings_that_an_endpoint_cannot_follow_are_refused_in_a_sentence(settings, words, tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text('[{"question": "?", "answer": 1}]')
    with pytest.raises(ConfigError, match=words):
        check(load(None, [f"data.path={rows}", "rewards=[equal]", "agent=endpoint", *settings]))


# ------------------------------------------------------------------------------------------------ programs as they are


def test_a_script_on_the_openai_sdk_is_played_as_it_is(opened):
    pytest.importorskip("openai")
    script = str(ROOT / "examples" / "endpoint" / "openai_loop.py")
    episodes, _ = played(opened, size=2, command=["python", script])
    for episode in episodes:
        assert episode.failure is None
        assert set(episode.branches) == {0}  # what it sends back is what the model wrote
        assert episode.answer == episode.calls[-1].reply.content.strip()


def test_an_agent_of_a_framework_is_played_as_it_is(opened, monkeypatch):
    pytest.importorskip("pydantic_ai", reason="the extra 'endpoint'")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "endpoint"))
    episodes, _ = played(opened, size=2, call="with_pydantic_ai:solve")
    for episode in episodes:
        assert episode.failure is None
        assert set(episode.branches) == {0}
