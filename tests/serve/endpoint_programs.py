"""Programs of others, as small as they can be: they know an address and HTTP, and nothing of what trains them.

Functions are called in the tests' process; `python endpoint_programs.py NAME` runs one as a process of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

ADD = {
    "type": "function",
    "function": {"name": "calculator", "description": "", "parameters": {"type": "object", "properties": {}}},
}
HEARD: list[tuple[str, list[int], list[int]]] = []
"""Of every choice that a function was told: the task's id, the prompt's ids and the sampled ones."""
STATUS: list[int] = []


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(base_url, messages, **more):
    body = {"model": "whatever", "messages": messages, "return_token_ids": True, **more}
    status, said = post(f"{base_url}/chat/completions", body)
    if status != 200:
        raise RuntimeError(f"{status} {said}")
    if more.get("stream"):
        rows = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
        return [row["choices"][0] for row in rows if row["choices"][0]["finish_reason"]]
    return json.loads(said)["choices"]


def user(text):
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------------------------------ in this process


def busy(task, base_url):
    """Asks, goes on, forgets, asks for two answers, listens to a stream, and lets a tool be called."""
    talk = [user(task["question"])]
    heard = chat(base_url, talk, max_tokens=8)
    talk += [heard[0]["message"], user("Go on.")]
    heard += chat(base_url, talk, max_tokens=8)
    heard += chat(base_url, talk[2:], max_tokens=8, temperature=0.1)  # the past is forgotten
    heard += chat(base_url, talk, n=2, max_tokens=8)
    heard += chat(base_url, [user("Hello")], stream=True, max_tokens=8)
    wanted = {"tools": [ADD], "tool_choice": "required"}
    called = chat(base_url, [user("Add 1 and 2.")], **wanted)
    heard += called
    if calls := called[0]["message"].get("tool_calls"):
        back = [called[0]["message"], {"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"}]
        heard += chat(base_url, [user("Add 1 and 2."), *back], tools=[ADD])
    HEARD.extend((task["id"], one["prompt_token_ids"], one["token_ids"]) for one in heard)
    return "said by the program"


def once(question, base_url):
    return chat(base_url, [user(question)], max_tokens=8, temperature=0, seed=3)[0]["message"]["content"]


async def quits(question, base_url):
    sys.exit(4)


def breaks(question, base_url):
    raise ZeroDivisionError("divided by nothing")


def too_long(question, base_url):
    chat(base_url, [user(question)], max_tokens=8)
    chat(base_url, [user("long " * 5000)])


def forgets(question, base_url):
    """Asks with too much, and then with less."""
    with suppress(RuntimeError):
        chat(base_url, [user("long " * 5000)])
    return chat(base_url, [user(question)], max_tokens=4)[0]["message"]["content"]


def greedy(question, base_url):
    while True:
        chat(base_url, [user(question)], max_tokens=2)


def garbage(question, base_url):
    """Sends what is no request, and goes on."""
    STATUS.clear()
    chats = f"{base_url}/chat/completions"
    for body in (b"\xff\xfe", b"[", {"messages": 3}, {"messages": [{"role": "king", "content": "?"}]}, {"what": 1}):
        STATUS.append(post(chats, body)[0])
    STATUS.append(post(f"{base_url}/completions", {"prompt": "Hello"})[0])
    STATUS.append(post(chats, {"messages": [user("?")], "n": 99})[0])
    STATUS.append(post(chats.replace("/e/", "/e/x"), {"messages": [user("?")]})[0])
    return once(question, base_url)


def rewards(question, base_url):
    """Says itself what it was worth, and is told that no more is taken."""
    STATUS.clear()
    once(question, base_url)
    at = base_url.removesuffix("/v1")
    STATUS.append(post(f"{at}/reward", b'{"reward": NaN}')[0])
    STATUS.append(post(f"{at}/reward", {"reward": 0.25, "answer": "mine"})[0])
    STATUS.append(post(f"{at}/reward", {"reward": 1.0})[0])
    STATUS.append(post(f"{base_url}/chat/completions", {"messages": [user("?")]})[0])
    raise RuntimeError("whatever happens now")


def plays(messages, base_url):
    """Plays an environment step by step."""
    at, over, talk = base_url.removesuffix("/v1"), False, list(messages)
    while not over:
        said = chat(base_url, talk, max_tokens=8)[0]["message"]
        told = json.loads(post(f"{at}/step", {"content": said["content"]})[1])
        talk, over = [*talk, said, *told["messages"]], told["done"]
    STATUS[:] = [post(f"{at}/step", {"content": "more"})[0]]


# ------------------------------------------------------------------------------------------------ as a process


def answers(question, base_url):
    sys.stdout.write(f"{once(question, base_url)} {json.loads(os.environ['ARBORL_TASK'])['id']}")


def exits(question, base_url):
    sys.stderr.write("the first words\nthe very last words\n")
    sys.exit(3)


def killed(question, base_url):
    os.kill(os.getpid(), 9)


def never_calls(question, base_url):
    sys.stdout.write("42")


def shouts(question, base_url):
    """Faster than it is listened to: with a wider pipe, more comes at once than a reader takes."""
    with suppress(OSError, AttributeError):
        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 2**20)
    sys.stdout.write("x" * 30_000_000)


def dies_in_a_call(question, base_url):
    threading.Timer(0.05, os.kill, (os.getpid(), 9)).start()
    while True:
        chat(base_url, [user(question)])


def lingers(question, base_url):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {question}"])
    once(question, base_url)
    time.sleep(600)


def leaves_a_daemon(question, base_url):
    """It holds standard output, in a session of its own."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {question}"], start_new_session=True)
    sys.stdout.write(once(question, base_url) or "done")


def hands_over_its_output(question, base_url):
    """To a process that it did not start, and that holds it from then on."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(question)
        socket.send_fds(line, [b"x"], [1])
    sys.stdout.write(once("Hello", base_url) or "done")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.stdin.read(), os.environ["OPENAI_BASE_URL"])
