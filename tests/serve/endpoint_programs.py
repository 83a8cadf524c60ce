"""External programs for tests: they know a URL and HTTP only.

Functions are called in the process of the tests; `python endpoint_programs.py NAME` runs one as a process.
"""

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
RECEIVED: list[tuple[str, list[int], list[int]]] = []
"""Task id, prompt ids and sampled ids of every received choice."""
STATUS: list[int] = []


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(base_url, messages, **more):
    body = {"model": "whatever", "messages": messages, "return_token_ids": True, **more}
    status, body = post(f"{base_url}/chat/completions", body)
    if status != 200:
        raise RuntimeError(f"{status} {body}")
    if more.get("stream"):
        rows = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        return [row["choices"][0] for row in rows if row["choices"][0]["finish_reason"]]
    return json.loads(body)["choices"]


def user(text):
    return {"role": "user", "content": text}


def calls_in_many_ways(task, base_url):
    """A continued conversation, a new one, two choices, a stream, and a tool call."""
    history = [user(task["question"])]
    choices = chat(base_url, history, max_tokens=8)
    history += [choices[0]["message"], user("Go on.")]
    choices += chat(base_url, history, max_tokens=8)
    choices += chat(base_url, history[2:], max_tokens=8, temperature=0.1)  # the past is forgotten
    choices += chat(base_url, history, n=2, max_tokens=8)
    choices += chat(base_url, [user("Hello")], stream=True, max_tokens=8)
    options = {"tools": [ADD], "tool_choice": "required"}
    tool_reply = chat(base_url, [user("Add 1 and 2.")], **options)
    choices += tool_reply
    if calls := tool_reply[0]["message"].get("tool_calls"):
        back = [tool_reply[0]["message"], {"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"}]
        choices += chat(base_url, [user("Add 1 and 2."), *back], tools=[ADD])
    RECEIVED.extend((task["id"], one["prompt_token_ids"], one["token_ids"]) for one in choices)
    return "answer of the program"


def once(question, base_url):
    return chat(base_url, [user(question)], max_tokens=8, temperature=0, seed=3)[0]["message"]["content"]


async def quits(question, base_url):
    sys.exit(4)


def breaks(question, base_url):
    raise ZeroDivisionError("divided by nothing")


def too_long(question, base_url):
    chat(base_url, [user(question)], max_tokens=8)
    chat(base_url, [user("long " * 5000)])


def shortens_its_prompt(question, base_url):
    """A prompt that is too long, then a shorter one."""
    with suppress(RuntimeError):
        chat(base_url, [user("long " * 5000)])
    return chat(base_url, [user(question)], max_tokens=4)[0]["message"]["content"]


def calls_forever(question, base_url):
    while True:
        chat(base_url, [user(question)], max_tokens=2)


def sends_invalid_requests(question, base_url):
    """Invalid requests, then a valid one."""
    STATUS.clear()
    chats = f"{base_url}/chat/completions"
    for body in (b"\xff\xfe", b"[", {"messages": 3}, {"messages": [{"role": "king", "content": "?"}]}, {"what": 1}):
        STATUS.append(post(chats, body)[0])
    STATUS.append(post(f"{base_url}/completions", {"prompt": "Hello"})[0])
    STATUS.append(post(chats, {"messages": [user("?")], "n": 99})[0])
    STATUS.append(post(chats.replace("/e/", "/e/x"), {"messages": [user("?")]})[0])
    return once(question, base_url)


def posts_a_reward(question, base_url):
    """Posts its reward; further requests are refused."""
    STATUS.clear()
    once(question, base_url)
    at = base_url.removesuffix("/v1")
    STATUS.append(post(f"{at}/reward", b'{"reward": NaN}')[0])
    STATUS.append(post(f"{at}/reward", {"reward": 0.25, "answer": "mine"})[0])
    STATUS.append(post(f"{at}/reward", {"reward": 1.0})[0])
    STATUS.append(post(f"{base_url}/chat/completions", {"messages": [user("?")]})[0])
    raise RuntimeError("whatever happens now")


def steps(messages, base_url):
    """Plays an environment step by step."""
    at, over, history = base_url.removesuffix("/v1"), False, list(messages)
    while not over:
        body = chat(base_url, history, max_tokens=8)[0]["message"]
        result = json.loads(post(f"{at}/step", {"content": body["content"]})[1])
        history, over = [*history, body, *result["messages"]], result["done"]
    STATUS[:] = [post(f"{at}/step", {"content": "more"})[0]]


def answers(question, base_url):
    sys.stdout.write(f"{once(question, base_url)} {json.loads(os.environ['ARBORL_TASK'])['id']}")


def exits(question, base_url):
    sys.stderr.write("the first words\nthe very last words\n")
    sys.exit(3)


def killed(question, base_url):
    os.kill(os.getpid(), 9)


def never_calls(question, base_url):
    sys.stdout.write("42")


def prints_too_much(question, base_url):
    """Prints more than a reader takes at once, through a larger pipe."""
    with suppress(OSError, AttributeError):
        fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 2**20)
    sys.stdout.write("x" * 30_000_000)


def dies_in_a_call(question, base_url):
    threading.Timer(0.05, os.kill, (os.getpid(), 9)).start()
    while True:
        chat(base_url, [user(question)])


def sleeps(question, base_url):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {question}"])
    once(question, base_url)
    time.sleep(600)


def starts_a_daemon(question, base_url):
    """Starts a process in its own session that holds standard output."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {question}"], start_new_session=True)
    sys.stdout.write(once(question, base_url) or "done")


def passes_its_output_on(question, base_url):
    """Sends standard output to a process that it did not start."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(question)
        socket.send_fds(line, [b"x"], [1])
    sys.stdout.write(once("Hello", base_url) or "done")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.stdin.read(), os.environ["OPENAI_BASE_URL"])
