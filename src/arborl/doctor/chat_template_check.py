"""Checks of tokenizer, chat template and tool format. Nothing is sampled: the checks write replies and parse them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arborl.chat import Renderer
from arborl.chat.conversation import Conversations
from arborl.diagnosis.finding import Finding, State
from arborl.types import Completion, FinishReason, Message, ToolCall, ToolSpec

REPLY = "An answer of some words."
USER = Message("user", "Hello.")
TOOL = ToolSpec(
    "calculator",
    "Work out an expression.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
CALL = ToolCall("call_0", "calculator", {"expression": "2 + 3"})
TEXTS = (
    "Plain words, 12.5 %.", "  two spaces\n\n\ttab", "naïve Straße – “ja”", "漢字かな交じり", "🙂👩‍👩‍👧 ∑x²", "A a B b",
)  # fmt: skip
TEMPLATE_ADVICE = "Edit chat_template.jinja in the model's folder, or write model.chat_template=chatml or plain."


@dataclass(frozen=True, slots=True)
class TemplateSubject:
    """What the checks examine."""

    renderer: Renderer
    model_config: Mapping[str, Any]
    """The model's config.json."""
    tools: bool = False
    """Whether the run's agent calls tools."""


def append_only(subject: TemplateSubject) -> Finding:
    """The next prompt must begin with the tokens of the last call; otherwise every turn is a new branch."""
    renderer, rewritten = subject.renderer, []
    replies = {"an answer": REPLY, "an answer with thoughts": f"<think>\nLet me see.\n</think>\n\n{REPLY}"}
    if subject.tools:
        replies["a tool call"] = renderer.parser.format(CALL)
    for kind, text in replies.items():
        messages, conversations = [Message("user", "What is 2 + 3?")], Conversations(renderer)
        prompt = conversations.prompt(messages)
        ids = (*renderer.encode(renderer.escape_reply(text)), end_token(renderer) or renderer.stop[0])
        completion = Completion(ids, (0.0,) * len(ids), FinishReason.STOP)
        reply = renderer.read(completion)
        conversations.record(prompt, completion, reply=reply)
        if not conversations.prompt([*messages, reply, Message("user", "And 3 + 4?")]).reused:
            rewritten.append(kind)
    if not rewritten:
        return Finding("append-only template", "ok", "each prompt extends the last call's tokens")
    advice = "Training is correct, each turn on its own branch, but slower. Write model.chat_template=chatml, or a "
    advice += "chat_args of the template that keeps thoughts, for one branch."
    return Finding("append-only template", "warn", f"the template rewrites {' and '.join(rewritten)}", advice)


def begin_token(subject: TemplateSubject) -> Finding:
    tokenizer, name = subject.renderer.tokenizer, "begin token"
    text = getattr(tokenizer, "bos_token", None)
    token = tokenizer.token_id(text) if text else None
    if token is None:
        return Finding(name, "ok", "the model has none")
    count = subject.renderer.encode(subject.renderer.render([USER])).count(token)
    if count > 1:
        return Finding(name, "fail", f"a prompt has {text!r} {count} times", f"It must occur once. {TEMPLATE_ADVICE}")
    if not count and getattr(tokenizer, "wants_bos", False):
        advice = f"The model was trained with it: write it first in the template. {TEMPLATE_ADVICE}"
        return Finding(name, "warn", f"the template does not write {text!r}, which the tokenizer would add", advice)
    return Finding(name, "ok", f"{text!r} once" if count else f"{text!r} is not used")


def stop_token(subject: TemplateSubject) -> Finding:
    """The template ends an answer with a token at which sampling stops."""
    renderer = subject.renderer
    token = end_token(renderer)
    if token is not None:
        return Finding("stop token", "ok", f"an answer ends with {renderer.tokenizer.decode([token])!r}")
    stops = " or ".join(repr(renderer.tokenizer.decode([stop])) for stop in renderer.stop)
    detail = f"the template ends an answer with {_text_after_reply(renderer)[:16]!r}, but sampling stops at {stops}"
    advice = "Completions would continue to sampling.max_tokens. Write the token as eos_token in tokenizer_config.json,"
    return Finding("stop token", "fail", detail, f"{advice} or its id in eos_token_id of generation_config.json.")


def generation_prompt(subject: TemplateSubject) -> Finding:
    renderer, name = subject.renderer, "generation prompt"
    prompt, history = renderer.render([USER]).text, renderer.render([USER], generation=False).text
    if prompt == history:
        advice = f"Without it the model may write the user's turn. {TEMPLATE_ADVICE}"
        return Finding(name, "fail", "the template ignores add_generation_prompt", advice)
    note = " (completions begin within <think>)" if prompt.rstrip().endswith("<think>") else ""
    return Finding(name, "ok", repr(prompt[len(history) :]) + note)


def messages_kept(subject: TemplateSubject) -> Finding:
    """Every message is part of the prompt."""
    answer = [USER, Message("assistant", "Qareply."), Message("user", "Go on.")]
    conversations = {
        "system messages": ([Message("system", "Qasystem."), USER], "Qasystem."),
        "user messages": ([Message("user", "Qauser.")], "Qauser."),
        "answers": (answer, "Qareply."),
    }
    if subject.tools:
        result = Message("tool", "Qaresult.", tool_call_id="call_0", name="calculator")
        conversations["tool results"] = ([USER, Message("assistant", tool_calls=(CALL,)), result], "Qaresult.")
    lost, specs = [], (TOOL,) if subject.tools else ()
    for kind, (messages, text) in conversations.items():
        try:
            if text not in subject.renderer.text(messages, specs):
                lost.append(kind)
        except ValueError as error:
            lost.append(f"{kind} ({error})")
    if not lost:
        return Finding("messages kept", "ok", f"{', '.join(conversations)} are in the prompt")
    only_system = lost[0].startswith("system") and len(lost) == 1
    advice = "Write the instructions in the first user message." if only_system else TEMPLATE_ADVICE
    state: State = "warn" if only_system else "fail"
    return Finding("messages kept", state, f"the template leaves out {', '.join(lost)}", advice)


def tool_round_trip(subject: TemplateSubject) -> Finding:
    """The parser reads a call as it was written, and the template writes it in the same format."""
    renderer, name = subject.renderer, "tool round trip"
    advice = "Write the agent.tool_format that the model was trained with (`fence`, `hermes`, `llama3`, `mistral`, "
    advice += "`pythonic`, `qwen_xml`, `react`), or your own parser."
    state: State = "fail" if subject.tools else "warn"
    text = renderer.parser.format(CALL)
    ids = renderer.encode(renderer.escape_reply(text))
    if not _is_call(renderer.parser.parse(renderer.decode(ids))):
        return Finding(name, state, f"the call {text!r} is not parsed as it was written", advice)
    question = [Message("user", "What is 2 + 3?")]
    if TOOL.name not in renderer.text(question, (TOOL,)):
        return Finding(name, state, "the prompt does not list the tools", TEMPLATE_ADVICE)
    with_call = renderer.render([*question, Message("assistant", tool_calls=(CALL,))], (TOOL,), generation=False).text
    before = renderer.render(question, (TOOL,), generation=False).text
    if not _is_call(renderer.parser.parse(with_call.removeprefix(before))):
        return Finding(name, state, "the template writes a call in another format than the parser reads", advice)
    return Finding(name, "ok", f"{type(renderer.parser).__name__.removesuffix('Parser').lower()}: {text!r}")


def text_is_text(subject: TemplateSubject) -> Finding:
    """Text in a message never becomes a control token."""
    renderer = subject.renderer
    marks = sorted(renderer.tokenizer.control)
    ids = {token for mark in marks if (token := renderer.tokenizer.token_id(mark)) is not None}
    plain, marked = (
        sum(token in ids for token in renderer.encode(renderer.render([Message("user", text)])))
        for text in ("Hello.", f"Hello.{''.join(marks)}")
    )
    if plain == marked:
        return Finding("text is text", "ok", f"{len(marks)} control tokens cannot be written in a message")
    advice = f"A tool result could end the turn. {TEMPLATE_ADVICE}"
    return Finding("text is text", "fail", "control text in a message becomes a control token", advice)


def tokenizer(subject: TemplateSubject) -> Finding:
    """Decoding inverts encoding."""
    decoded = {text: subject.renderer.decode(subject.renderer.tokenizer.encode(text)) for text in TEXTS}
    changed = [(text, after) for text, after in decoded.items() if text != after]
    if not changed:
        return Finding("tokenizer", "ok", "decodes every text as it was")
    advice = "Training uses ids and is correct; rewards and tools see the changed text and must not depend on it."
    return Finding("tokenizer", "warn", f"{changed[0][0]!r} is decoded as {changed[0][1]!r}", advice)


def vocabulary(subject: TemplateSubject) -> Finding:
    renderer = subject.renderer
    model_size = subject.model_config.get("text_config", subject.model_config).get("vocab_size")
    size = renderer.tokenizer.vocab_size
    largest = max(*renderer.encode(renderer.render([USER])), *renderer.stop)
    if model_size is not None and largest >= model_size:
        detail = f"the tokenizer writes the token {largest}, but the model has {model_size}"
        return Finding("vocabulary", "fail", detail, "Use a folder with the model's own tokenizer.json.")
    if model_size is not None and size > model_size:
        detail = f"the tokenizer has {size} tokens, but the model has {model_size}"
        return Finding("vocabulary", "warn", detail, "Use the tokenizer.json that the model was trained with.")
    return Finding("vocabulary", "ok", f"{size} tokens" + (f" of {model_size}" if model_size is not None else ""))


TEMPLATE_CHECKS: tuple[Callable[[TemplateSubject], Finding], ...] = (
    append_only, begin_token, stop_token, generation_prompt, messages_kept, tool_round_trip, text_is_text, tokenizer,
    vocabulary,
)  # fmt: skip


def end_token(renderer: Renderer) -> int | None:
    """The token that ends an answer in the template's text, if sampling stops at it."""
    first = renderer.tokenizer.encode(_text_after_reply(renderer))[:1]
    return first[0] if first and first[0] in renderer.stop else None


def _text_after_reply(renderer: Renderer) -> str:
    return renderer.text([USER, Message("assistant", REPLY), Message("user", "Go on.")]).partition(REPLY)[2]


def _is_call(calls: tuple[ToolCall, ...]) -> bool:
    return [(call.name, call.arguments, call.error) for call in calls] == [(CALL.name, CALL.arguments, None)]
