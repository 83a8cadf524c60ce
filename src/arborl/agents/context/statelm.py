"""The agent that manages its own context: it reads documents longer than its window, takes notes and deletes messages.

Each round samples a message and runs its tool calls. After an edit the next call starts a new branch; all of
them share the reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arborl.agents.agent_interface import Agent, Model
from arborl.agents.context.history import STUB, ContextError, Delete, Edit, Fold, ViewForm, ViewStyle
from arborl.agents.context.managed_conversation import ContextBudget, ContextPolicy, ManagedConversation, PolicyKind
from arborl.agents.tool_agents import count_results
from arborl.chat.formats.json_formats import HermesParser
from arborl.envs.env import Env
from arborl.envs.games.documents_env import episode_document
from arborl.errors import ConfigError, ContextFull, MaxTurns, did_you_mean
from arborl.registry import call_checked
from arborl.seeds import derive
from arborl.tokens import Tokens
from arborl.tools.core.background_threads import run_in_thread
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.core.toolbox import Toolbox
from arborl.tools.library import document_tools
from arborl.types import Call, Episode, Message, Task, ToolCall, ToolResult, ToolSpec

ALL = (
    document_tools.analyze_text, document_tools.load_document, document_tools.build_index, document_tools.read_chunk,
    document_tools.search_engine, document_tools.note, document_tools.read_note, document_tools.update_note,
    document_tools.merge_notes, document_tools.check_budget,
    document_tools.get_context_stats, document_tools.delete_context, document_tools.summarize, document_tools.finish,
)  # fmt: skip
TOOLSET: dict[str, document_tools.JsonTool] = {tool.name: tool for tool in ALL}
DEFAULT_TOOLS = tuple(name for name in TOOLSET if name not in ("mergeNotes", "getContextStats", "summarize"))
CONTEXT_TOOLS = ("note", "readNote", "updateNote", "mergeNotes", "deleteContext", "summarize")
"""Tools that are useful only if the model manages its context."""


EXAMPLE_CALL = ToolCall("", "readChunk", {"chunk_id": 1})


class ContextSession(ManagedConversation):
    """One episode: history, edits, notes and budget, shared by the agent and its context tools. The numbers of the
    budget that the model sees are those that end the episode."""

    def __init__(
        self,
        model: Model,
        opening: Sequence[Message],
        specs: Sequence[ToolSpec],
        space: document_tools.Workspace,
        budget: ContextBudget,
        style: ViewStyle,
    ):
        self.space, is_brief = space, style.form == "brief" and bool(specs)
        style = replace(style, budget=f"{budget.tokens} tokens, {budget.turns} rounds" if style.rooms else "")
        messages = _with_tool_list(opening, specs, model) if is_brief else opening
        super().__init__(model, messages, None, () if is_brief else specs, budget, style)
        self.turns = 0

    def notes(self) -> Mapping[str, str]:
        return {key: note.summary for key, note in self.space.notes.items()}

    def check(self) -> None:
        if self.turns >= self.limits.turns:
            self.model.count({"context/exceeded": 1.0})
            raise MaxTurns(f"{self.limits.turns} rounds are used up")
        room = self.room()
        if room < 0:
            self.model.count({"context/exceeded": 1.0})
            raise ContextFull(f"{-room} tokens too many for a context of {self.limits.tokens}")

    async def next(self) -> Message:
        message = await self.sample()
        self.add(message)
        self.turns += 1
        return message

    def add_result(self, call: ToolCall, result: ToolResult, caller: int) -> None:
        """Add a tool result with the number of tokens that are left."""
        content, room = result.content, max(self.room(), 0)
        if not result.ok and not content.startswith('{"error"'):
            content = document_tools.error_object(call.name, content)
        tag = ""
        if self.space.scanning and call.name == "readChunk" and self.space.index and result.ok:
            tag = f"{self.space.last_chunk + 1}/{len(self.space.index)}"
        if self.style.form == "brief":
            content = document_tools.shorten_result(call.name, content)
        message = Message("tool", content, tool_call_id=call.id, name=call.name or None)
        self.history = self.history.add(message, caller, room, tag, result.ok)

    def report(self) -> None:
        counts = self.edit_counts({"deleted": Delete, "folded": Fold})
        counts |= {"context/notes": float(len(self.space.notes)), "context/turns": float(self.turns)}
        self.model.count(counts)

    def budget(self) -> dict[str, int]:
        return {
            "conv_rounds": self.turns,
            "available_tokens": max(self.room(), 0),
            "available_rounds": max(self.limits.turns - self.turns, 0),
        }

    def delete(self, msg_id: int) -> dict[str, Any]:
        self._edit(Delete(msg_id))
        entry = self.history.find(msg_id)
        assert entry is not None, "the edit of an unknown message was refused"
        return {"status": "success", "deleted_msg_id": msg_id, "deleted_role": entry.message.role}

    def fold(self, summary: str) -> dict[str, Any]:
        """Replace all messages before the calling message by a summary; also that message if it makes no other call."""
        caller_id = max(entry.id for entry in self.history.entries if entry.message.role == "assistant")
        caller = self.history.find(caller_id)
        assert caller is not None, "the latest assistant message is in the history"
        is_only_call = all(call.name == "summarize" for call in caller.message.tool_calls)
        last = caller_id if is_only_call else caller_id - 1
        if last < 1:
            raise document_tools.DocumentToolError("there is nothing to summarize yet")
        self._edit(Fold(1, last, summary))
        return {"status": "success", "folded": last}

    def _edit(self, new: Edit) -> None:
        try:
            self.edit(new)
        except ContextError as error:
            raise document_tools.DocumentToolError(str(error)) from error


def _with_tool_list(opening: Sequence[Message], specs: Sequence[ToolSpec], model: Model) -> list[Message]:
    """The opening with the tools and an example call, in the model's format, in the system message."""
    parser = getattr(getattr(model, "renderer", None), "parser", None) or HermesParser()
    text = f"Tools: {document_tools.format_tool_list(specs)}\nCall: {parser.format(EXAMPLE_CALL)}"
    if opening and opening[0].role == "system":
        return [replace(opening[0], content=f"{opening[0].content}\n{text}"), *opening[1:]]
    return [Message("system", text), *opening]


@dataclass(frozen=True, slots=True)
class TrajectoryDump:
    """Writes episodes as JSON files: the whole history, the deletions, and every call."""

    enabled: bool = False
    folder: str = "trajectories"
    freq: int = 1  # one episode in `freq`, chosen by a hash of its id

    def __post_init__(self) -> None:
        if self.freq < 1:
            raise ValueError(f"dump_trajectories_freq={self.freq}: give 1 or more")

    def write(self, session: ContextSession) -> Path | None:
        """Write the episode if it is selected. The file is only for people."""
        episode = getattr(session.model, "episode", None)
        if not self.enabled or not isinstance(episode, Episode) or derive(0, episode.id, episode.seed) % self.freq:
            return None
        name = re.sub(r"[^\w.-]+", "_", episode.id)[-80:]
        path = Path(self.folder) / f"{name}-{episode.seed:016x}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = _trajectory(session, episode)
        path.write_text(json.dumps(row, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return path


def _trajectory(session: ContextSession, episode: Episode) -> dict[str, Any]:
    entries = session.history.entries
    deleted = [edit.id for edit in session.edits if isinstance(edit, Delete)]
    return {
        "request_id": episode.id,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "user_turns": sum(entry.message.role == "user" for entry in entries),
        "assistant_turns": session.turns,
        "had_delete_operation": bool(deleted),
        "deleted_msg_ids": deleted,
        "notes": {key: note.summary for key, note in session.space.notes.items()},
        "messages": [{"msg_id": entry.id} | _message_row(entry.message) for entry in entries],
        "rows": [_call_row(index, episode.calls, session) for index in range(len(episode.calls))],
    }


def _message_row(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {})


def _call_row(index: int, calls: list[Call], session: ContextSession) -> dict[str, Any]:
    """One call. It is a snapshot if no later call extends it."""
    call = calls[index]
    whole = call.whole
    decode = getattr(getattr(session.model, "tokenizer", None), "decode", str)
    return {
        "index": index,
        "is_snapshot": index < len(calls) - 1 and all(not whole.begins(Tokens(c.prompt)) for c in calls[index + 1 :]),
        "num_turns": index + 1,
        "prompt_length": len(call.prompt),
        "response_length": len(call.completion.tokens),
        "prompt_text": decode(call.prompt),
        "response_text": decode(call.completion.tokens),
    }


class StateLM(Agent):
    """Reads a hidden document with tools and decides itself what stays in its context.

    The calls of one message run in order. A successful call of `finish` ends the episode and its answer goes to the
    environment. A message without a call goes to the environment. An exceeded limit ends the episode with stop reason
    `context_full` or `max_turns`.

    Args:
        tools: custom tools, besides the toolset.
        toolset: names of document, note and context tools; by default the eleven of StateLM, without notes and edits
            for other policies.
        policy: `statelm` (the model edits), `none`, `window`, `truncate` or `summary`.
        form: `json`, or `brief` for small windows: the same calls and ids in fewer tokens.
        max_model_len: tokens of prompt and reply; `sampling.max_context` by default.
        single_turn_max_tokens: tokens reserved for a reply; `sampling.max_tokens` by default.
        max_assistant_turns: messages of the model in an episode.
        min_assistant_turns: an earlier answer is counted as `context/too_few_turns`.
        max_calls: calls of one message that are run; further calls get an error.
        reading: how the document is split and searched: `chunk_size`, `overlap`, `built`, `results`, `fragment_size`,
            `fragments`.
        stub: replaces deleted content.
        tidy: hide rounds that only took notes or deleted, after they succeeded.
        show_budget: show the remaining budget with every tool result, and the whole budget with the question.
        window, compress_at, compression_ratio, train_summaries: of the other policies; see `ContextPolicy`.
        context: the policy from the section `context` of a configuration.
        dump_trajectories_enabled: write episodes as JSON files.
        dump_trajectories_dir: folder of these files.
        dump_trajectories_freq: one episode in so many.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        toolset: Sequence[str] | None = None,
        policy: PolicyKind = "statelm",
        form: ViewForm = "json",
        max_model_len: int | None = None,
        single_turn_max_tokens: int | None = None,
        max_assistant_turns: int = 32,
        min_assistant_turns: int = 0,
        max_calls: int = 16,
        reading: Mapping[str, Any] | None = None,
        stub: str = STUB,
        tidy: bool = False,
        show_budget: bool = True,
        window: int = 8,
        compress_at: float = 0.75,
        compression_ratio: float = 0.5,
        train_summaries: bool = True,
        context: ContextPolicy | None = None,
        dump_trajectories_enabled: bool = False,
        dump_trajectories_dir: str = "trajectories",
        dump_trajectories_freq: int = 1,
    ):
        for name, value in (("max_assistant_turns", max_assistant_turns), ("max_model_len", max_model_len)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")
        if form not in ("json", "brief"):
            raise ValueError(f"form={form!r}: give json or brief")
        if context is not None and policy != "statelm":
            raise ValueError(f"policy={policy} and context.policy={context.kind}: write one of them")
        self.policy = context or ContextPolicy(policy, window, compress_at, compression_ratio, train_summaries)
        self.toolbox = Toolbox([*select_tools(toolset, self.policy.kind), *tools], max_calls)
        self.reading: document_tools.DocumentSettings = call_checked(
            document_tools.DocumentSettings, reading or {}, "agent.args.reading"
        )
        self.limits = (max_model_len, single_turn_max_tokens, max_assistant_turns)
        self.min_assistant_turns = min_assistant_turns
        names = self.toolbox.tools
        self.style = ViewStyle(form, stub, "note" in names, "", show_budget, ids="deleteContext" in names, tidy=tidy)
        self.dump = TrajectoryDump(dump_trajectories_enabled, dump_trajectories_dir, dump_trajectories_freq)

    async def run(self, task: Task, env: Env, model: Model) -> None:
        async with ToolContext(task, getattr(model, "tokenizer", None)) as context:
            session = await self._open(context, env, model)
            try:
                if self.reading.built:
                    await self._build_index(session.space, context)
                while not await self._round(session, context, env):
                    pass
            finally:
                session.report()
                self.dump.write(session)

    async def _open(self, context: ToolContext, env: Env, model: Model) -> ContextSession:
        task = context.task
        observation = await env.reset(task, task.seed)
        space: document_tools.Workspace = context.state(document_tools.WORKSPACE, document_tools.WORKSPACE.make)
        space.document, space.settings = episode_document(task, env), self.reading
        budget = ContextBudget.of(model, *self.limits)
        session = ContextSession(model, observation.messages, self.toolbox.specs, space, budget, self.style)
        space.editor = session
        self.policy.begin(session)
        return session

    async def _build_index(self, space: document_tools.Workspace, context: ToolContext) -> None:
        """Build the index. Without a text there is none, and the tools report that."""
        try:
            text = space.text(context)
        except ValueError:
            return
        sizes = self.reading.chunk_size, self.reading.overlap
        await run_in_thread(lambda: space.build(text, *sizes, context.tokenizer))

    async def _round(self, session: ContextSession, context: ToolContext, env: Env) -> bool:
        """Sample a message and run its calls in order, or send it to the environment; whether the episode is over."""
        await self.policy.make_room(session)
        session.check()
        message = await session.next()
        if not message.tool_calls:
            return await self._step(session, env, message, finished=False)
        toolbox, caller = self.toolbox, session.history.last
        for number, call in enumerate(message.tool_calls):
            if number < toolbox.max_calls:
                (result,) = await toolbox.run([call], context)
            else:
                result = ToolResult(f"not run: a message may contain {toolbox.max_calls} calls", False, "too_many")
            count_results([result], context, session.model)
            if toolbox.ends(call, result):
                answer = Message("assistant", result.content, tool_calls=(call,))
                return await self._step(session, env, answer, finished=True)
            session.add_result(call, result, caller)
        return False

    async def _step(self, session: ContextSession, env: Env, message: Message, finished: bool) -> bool:
        """Send a message to the environment; whether the episode is over."""
        is_early = session.turns < self.min_assistant_turns
        step = await env.step(message)
        if finished or step.over:
            session.model.count({"context/finished": float(finished), "context/too_few_turns": float(is_early)})
            return True
        session.observe(step.observation.messages)
        return False


def select_tools(names: Sequence[str] | None, policy: str) -> list[document_tools.JsonTool]:
    if names is None:
        names = DEFAULT_TOOLS if policy == "statelm" else [name for name in DEFAULT_TOOLS if name not in CONTEXT_TOOLS]
    for name in names:
        if name not in TOOLSET:
            near = did_you_mean(name, TOOLSET)
            raise ConfigError(f"agent.args.toolset: no tool {name!r}.{near} Known: {', '.join(TOOLSET)}.")
        if policy != "statelm" and name in ("deleteContext", "summarize"):
            raise ConfigError(f"agent.args.toolset: {name} edits the context, which policy={policy} does by itself.")
    return [TOOLSET[name] for name in dict.fromkeys(names)]
