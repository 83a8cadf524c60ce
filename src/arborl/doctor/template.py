"""Is the model shown what it should be, and read as it writes? Questions about its tokenizer, chat template and format.

Nothing is sampled: replies are written here, and go the way that sampled ones go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.chat import Renderer
from arborl.chat.conversation import Conversations
from arborl.doctor.finding import Finding, State
from arborl.types import Completion, FinishReason, Message, ToolCall, ToolSpec

SAID = "An answer of some words."
TOOL = ToolSpec(
    "calculator",
    "Work out an expression.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
CALL = ToolCall("call_0", "calculator", {"expression": "2 + 3"})
TEXTS = (
    "Plain words, 12.5 %.",
    "  two spaces\n\n\ttab",
    "naïve Straße – “ja”",
    "漢字かな交じり",
    "🙂👩‍👩‍👧 ∑x²",
    "A a B b",
)
OWN_TEMPLATE = "Mend chat_template.jinja in the model's folder, or write model.chat_template=chatml or plain."


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at."""

    renderer: Renderer
    described: Mapping[str, Any]
    """The model's config.json."""
    tools: bool = False
    """Whether the run's agent calls tools."""


def append_only(subject: Subject) -> Finding:
    """The next prompt must begin with the tokens of the last call; else it is a branch of its own and is run anew."""
    renderer, rewritten = subject.renderer, []
    replies = {"an answer": SAID, "an answer with thoughts": f"<think>\nLet me see.\n</think>\n\n{SAID}"}
    if subject.tools:
        replies["a tool call"] = renderer.parser.format(CALL)
    for what, text in replies.items():
        talk, conversations = [Message("user", "What is 2 + 3?")], Conversations(renderer)
        prompt = conversations.prompt(talk)
        ids = (*renderer.encode(renderer.said(text)), ending(renderer) or renderer.stop[0])
        completion = Completion(ids, (0.0,) * len(ids), FinishReason.STOP)
        said = renderer.read(completion)
        conversations.sampled(prompt, completion, said=said)
        if not conversations.prompt([*talk, said, Message("user", "And 3 + 4?")]).reused:
            rewritten.append(what)
    if not rewritten:
        return Finding("append-only template", "ok", "each prompt goes on from the last call's tokens")
    advice = "Training is right all the same, each turn on a branch of its own, and slower. Write "
    advice += "model.chat_template=chatml, or a chat_args of the template that keeps thoughts, to have one branch."
    return Finding("append-only template", "warn", f"the template rewrites {' and '.join(rewritten)}", advice)


def begin_token(subject: Subject) -> Finding:
    tokenizer, name = subject.renderer.tokenizer, "begin token"
    text = getattr(tokenizer, "bos_token", None)
    begin = tokenizer.token_id(text) if text else None
    if begin is None:
        return Finding(name, "ok", "the model has none")
    ids = subject.renderer.encode(subject.renderer.render([Message("user", "Hello.")]))
    if ids.count(begin) > 1:
        return Finding(
            name, "fail", f"a prompt has {text!r} {ids.count(begin)} times", f"It must stand once. {OWN_TEMPLATE}"
        )
    if begin not in ids and getattr(tokenizer, "wants_bos", False):
        advice = f"The model was trained with it: write it first in the template. {OWN_TEMPLATE}"
        return Finding(name, "warn", f"the template does not write {text!r}, which the tokenizer would add", advice)
    return Finding(name, "ok", f"{text!r} once" if begin in ids else f"{text!r} is not used")


def stop_token(subject: Subject) -> Finding:
    """What the template writes behind an answer is what the model was taught to end with."""
    renderer = subject.renderer
    ends = " or ".join(repr(renderer.tokenizer.decode([stop])) for stop in renderer.stop)
    found = ending(renderer)
    if found is None:
        detail = f"behind an answer the template writes {_behind(renderer)[:16]!r}, and sampling ends at {ends}"
        advice = (
            "Replies would go on to sampling.max_tokens. Write the token as eos_token in tokenizer_config.json, or "
        )
        return Finding("stop token", "fail", detail, f"{advice}its id among eos_token_id in generation_config.json.")
    return Finding("stop token", "ok", f"an answer ends with {renderer.tokenizer.decode([found])!r}")


def turn_begins(subject: Subject) -> Finding:
    """The model is told that it is its turn."""
    renderer, talk, name = subject.renderer, [Message("user", "Hello.")], "generation prompt"
    told, untold = renderer.render(talk).text, renderer.render(talk, generation=False).text
    if told == untold:
        advice = f"Without it the model may speak as the user. {OWN_TEMPLATE}"
        return Finding(name, "fail", "the template ignores add_generation_prompt", advice)
    opened = told.rstrip().endswith("<think>")
    return Finding(name, "ok", repr(told[len(untold) :]) + (" (replies begin within <think>)" if opened else ""))


def messages_kept(subject: Subject) -> Finding:
    """Everything that is said reaches the model."""
    shown = {
        "system messages": ([Message("system", "Qasystem."), Message("user", "Hello.")], "Qasystem."),
        "user messages": ([Message("user", "Qauser.")], "Qauser."),
        "answers": ([Message("user", "Hello."), Message("assistant", "Qasaid."), Message("user", "Go on.")], "Qasaid."),
    }
    if subject.tools:
        called = Message("assistant", tool_calls=(CALL,))
        result = Message("tool", "Qaresult.", tool_call_id="call_0", name="calculator")
        shown["tool results"] = ([Message("user", "Hello."), called, result], "Qaresult.")
    lost, specs = [], (TOOL,) if subject.tools else ()
    for what, (talk, text) in shown.items():
        try:
            if text not in subject.renderer.text(talk, specs):
                lost.append(what)
        except ValueError as error:
            lost.append(f"{what} ({error})")
    if not lost:
        return Finding("messages kept", "ok", f"{', '.join(shown)} are in the prompt")
    only = lost[0].startswith("system") and len(lost) == 1
    advice = "Say in the first user message what is to be known." if only else OWN_TEMPLATE
    return Finding("messages kept", "warn" if only else "fail", f"the template leaves out {', '.join(lost)}", advice)


def tool_round_trip(subject: Subject) -> Finding:
    """A call as the model would write it is read as that call; and it is shown as it would be written."""
    renderer, name = subject.renderer, "tool round trip"
    advice = "Write agent.tool_format as the model was taught (`fence`, `hermes`, `llama3`, `mistral`, `pythonic`, "
    advice += "`qwen_xml`, `react`), or a parser of your own."
    state: State = "fail" if subject.tools else "warn"
    written = renderer.parser.format(CALL)
    ids = renderer.encode(renderer.said(written))
    if not _same(renderer.parser.parse(renderer.decode(ids))):
        return Finding(name, state, f"the call {written!r} is not read back as it was written", advice)
    talk = [Message("user", "What is 2 + 3?"), Message("assistant", tool_calls=(CALL,))]
    shown = renderer.render(talk, (TOOL,), generation=False).text
    if TOOL.name not in renderer.text(talk[:1], (TOOL,)):
        return Finding(name, state, "the prompt does not say which tools there are", OWN_TEMPLATE)
    before = renderer.render(talk[:1], (TOOL,), generation=False).text
    if not _same(renderer.parser.parse(shown[len(before) :] if shown.startswith(before) else shown)):
        detail = "the template shows a call in another form than the one that replies are read in"
        return Finding(name, state, detail, advice)
    return Finding(name, "ok", f"{type(renderer.parser).__name__.removesuffix('Parser').lower()}: {written!r}")


def text_is_text(subject: Subject) -> Finding:
    """What somebody writes into a message never becomes a control token."""
    renderer = subject.renderer
    marks = sorted(renderer.tokenizer.control)
    ids = {found for mark in marks if (found := renderer.tokenizer.token_id(mark)) is not None}
    counted = [
        sum(token in ids for token in renderer.encode(renderer.render([Message("user", text)])))
        for text in ("Hello.", f"Hello.{''.join(marks)}")
    ]
    if counted[0] == counted[1]:
        return Finding("text is text", "ok", f"{len(marks)} control tokens cannot be written in a message")
    advice = f"A tool result could end the turn. {OWN_TEMPLATE}"
    return Finding("text is text", "fail", "control text in a message becomes a control token", advice)


def tokens_and_text(subject: Subject) -> Finding:
    """Text that is encoded and decoded is the same text."""
    tokenizer = subject.renderer.tokenizer
    lost = [text for text in TEXTS if subject.renderer.decode(tokenizer.encode(text)) != text]
    if not lost:
        return Finding("tokenizer", "ok", "gives every text back as it was")
    detail = f"{lost[0]!r} comes back as {subject.renderer.decode(tokenizer.encode(lost[0]))!r}"
    advice = "Training reads ids alone and is right; rewards and tools see the changed text, so let them not depend on "
    return Finding("tokenizer", "warn", detail, f"{advice}what it loses.")


def vocabulary(subject: Subject) -> Finding:
    described = subject.described.get("text_config", subject.described)
    known, written = described.get("vocab_size"), subject.renderer.tokenizer.vocab_size
    largest = max(
        *subject.renderer.encode(subject.renderer.render([Message("user", "Hello.")])), *subject.renderer.stop
    )
    if known is not None and largest >= known:
        detail = f"the tokenizer writes the token {largest}, and the model knows {known}"
        return Finding("vocabulary", "fail", detail, "Give a folder whose tokenizer.json is the model's own.")
    if known is not None and written > known:
        detail = f"the tokenizer has {written} tokens, and the model knows {known}"
        return Finding("vocabulary", "warn", detail, "Give the tokenizer.json that the model was trained with.")
    return Finding("vocabulary", "ok", f"{written} tokens" + (f", room for {known}" if known is not None else ""))


QUESTIONS: tuple[Callable[[Subject], Finding], ...] = (
    append_only,
    begin_token,
    stop_token,
    turn_begins,
    messages_kept,
    tool_round_trip,
    text_is_text,
    tokens_and_text,
    vocabulary,
)


def ending(renderer: Renderer) -> int | None:
    """The token that ends an answer in the template's own text, where sampling stops at it."""
    first = renderer.tokenizer.encode(_behind(renderer))[:1]
    return first[0] if first and first[0] in renderer.stop else None


def _behind(renderer: Renderer) -> str:
    """What the template writes behind an answer."""
    talk = [Message("user", "Hello."), Message("assistant", SAID), Message("user", "Go on.")]
    text = renderer.text(talk)
    return text[text.find(SAID) + len(SAID) :] if SAID in text else ""


def _same(calls: tuple[ToolCall, ...]) -> bool:
    return [(call.name, call.arguments, call.error) for call in calls] == [(CALL.name, CALL.arguments, None)]
