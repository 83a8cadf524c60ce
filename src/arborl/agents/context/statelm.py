"""The agent that manages its own context: it reads documents far longer than its window, takes notes, and deletes.

PENDING -> GENERATING -> PROCESSING_TOOLS -> GENERATING -> … -> TERMINATED. Every call is recorded as it was made; where
an edit changed what the model is shown, the next call begins a new branch, and all branches share the episode's reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from arborl.agents.agent import Agent, Model
from arborl.agents.context.dump import Dump
from arborl.agents.context.history import STUB, Form, Style
from arborl.agents.context.policy import Kind, Policy
from arborl.agents.context.session import ContextSession
from arborl.agents.context.talk import Bounds
from arborl.agents.rounds import count
from arborl.envs.env import Env
from arborl.envs.games.documents_env import episode_document
from arborl.errors import ConfigError, did_you_mean
from arborl.registry import call_checked
from arborl.tools.core.background_threads import run_in_thread
from arborl.tools.core.tool import AnyTool
from arborl.tools.core.tool_context import ToolContext
from arborl.tools.core.toolbox import Toolbox
from arborl.tools.library import document_tools
from arborl.tools.library.document_tools import WORKSPACE, DocumentSettings, JsonTool, Workspace
from arborl.types import Message, Task, ToolResult

ALL = (
    document_tools.analyze_text, document_tools.load_document, document_tools.build_index, document_tools.read_chunk,
    document_tools.search_engine, document_tools.note, document_tools.read_note, document_tools.update_note,
    document_tools.merge_notes, document_tools.check_budget,
    document_tools.get_context_stats, document_tools.delete_context, document_tools.summarize, document_tools.finish,
)  # fmt: skip
TOOLSET: dict[str, JsonTool] = {tool.name: tool for tool in ALL}
"""All tools of this agent, by name."""
USUAL = tuple(name for name in TOOLSET if name not in ("mergeNotes", "getContextStats", "summarize"))
EDITS = ("note", "readNote", "updateNote", "mergeNotes", "deleteContext", "summarize")
"""Tools that only make sense where the model manages its context."""


class Phase(StrEnum):
    """Where an episode stands."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"


class StateLM(Agent):
    """Works through a hidden document with tools, and decides itself what stays in its context.

    The calls of one message run in the order written. A call of `finish` that works ends the episode and its answer
    goes to the environment; a message without a call goes to the environment as it is. Passing a limit ends the episode
    with stop `context_full` or `max_turns`, which rewards can penalise for the episode as a whole.

    Args:
        tools: of your own, beside those of the toolset.
        toolset: names of document, note and context tools; by default the eleven of StateLM, without notes and edits
            where `policy` is another.
        policy: `statelm` (the model edits), `none`, `window`, `truncate` or `summary`.
        form: `json`, or `brief` for small windows: the same calls and ids, shown in fewer tokens.
        max_model_len: tokens of prompt and reply; the run's `sampling.max_context` by default.
        single_turn_max_tokens: tokens kept free for a reply; the run's `sampling.max_tokens` by default.
        max_assistant_turns: messages of the model in an episode.
        min_assistant_turns: an answer before so many is counted as `context/too_few_turns`.
        max_calls: calls of one message that are run; those beyond are answered with that.
        reading: how the document is cut and searched: `chunk_size`, `overlap`, `built`, `results`, `fragment_size`,
            `fragments`.
        stub: what is shown in place of deleted content.
        tidy: do not show rounds that only took notes or deleted, once that worked: what they did is in view.
        show_budget: show what is left with every answer of a tool, and the whole beside the question.
        window, compress_at, compression_ratio, train_summaries: of the other policies; see `policy.py`.
        context: the policy, where the section `context` of a configuration says it.
        dump_trajectories_enabled: write episodes as JSON files for people.
        dump_trajectories_dir: where to.
        dump_trajectories_freq: one in so many.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool | Callable[..., Any]] = (),
        toolset: Sequence[str] | None = None,
        policy: Kind = "statelm",
        form: Form = "json",
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
        context: Policy | None = None,
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
        self.policy = context or Policy(policy, window, compress_at, compression_ratio, train_summaries)
        self.toolbox = Toolbox([*chosen(toolset, self.policy.kind), *tools], max_calls)
        self.reading: DocumentSettings = call_checked(DocumentSettings, reading or {}, "agent.args.reading")
        self.limits = (max_model_len, single_turn_max_tokens, max_assistant_turns)
        self.min_assistant_turns = min_assistant_turns
        has = self.toolbox.tools
        self.style = Style(form, stub, "note" in has, "", show_budget, ids="deleteContext" in has, tidy=tidy)
        self.dump = Dump(dump_trajectories_enabled, dump_trajectories_dir, dump_trajectories_freq)

    async def run(self, task: Task, env: Env, model: Model) -> None:
        async with ToolContext(task, getattr(model, "tokenizer", None)) as context:
            await Play(self, env, model, context).run()


class Play:
    """One episode of the agent."""

    def __init__(self, agent: StateLM, env: Env, model: Model, context: ToolContext):
        self.agent, self.env, self.model, self.context = agent, env, model, context
        self.session: ContextSession
        self.message: Message

    async def run(self) -> None:
        state = Phase.PENDING
        try:
            while state is not Phase.TERMINATED:
                match state:
                    case Phase.PENDING:
                        state = await self._open()
                    case Phase.GENERATING:
                        state = await self._generate()
                    case Phase.PROCESSING_TOOLS:
                        state = await self._process_tools()
        finally:
            if hasattr(self, "session"):
                self.session.report()
                self.agent.dump.write(self.session)

    async def _open(self) -> Phase:
        """The question is asked, and the document lies ready."""
        agent, task = self.agent, self.context.task
        observation = await self.env.reset(task, task.seed)
        space: Workspace = self.context.state(WORKSPACE, WORKSPACE.make)
        space.document, space.settings = episode_document(task, self.env), agent.reading
        bounds = Bounds.of(self.model, *agent.limits)
        specs = agent.toolbox.specs
        self.session = ContextSession(self.model, observation.messages, specs, space, bounds, agent.style)
        space.editor = self.session
        agent.policy.begin(self.session)
        if agent.reading.built:
            await self._build(space)
        return Phase.GENERATING

    async def _build(self, space: Workspace) -> None:
        """The index from the start. Without a text to index there is none, and the tools will say so."""
        reading, tokenizer = self.agent.reading, self.context.tokenizer
        try:
            text = space.text(self.context)
        except ValueError:
            return
        await run_in_thread(lambda: space.build(text, reading.chunk_size, reading.overlap, tokenizer))

    async def _generate(self) -> Phase:
        """The model speaks, if limits allow; what is no call goes to the environment."""
        await self.agent.policy.make_room(self.session)
        self.session.check()
        self.message = await self.session.next()
        if self.message.tool_calls:
            return Phase.PROCESSING_TOOLS
        return await self._tell(self.message, finished=False)

    async def _process_tools(self) -> Phase:
        """Each call in turn: a later one sees what an earlier one did, and knows what room is left."""
        session, toolbox = self.session, self.agent.toolbox
        caller = session.history.last
        for number, call in enumerate(self.message.tool_calls):
            if number < toolbox.max_calls:
                (result,) = await toolbox.run([call], self.context)
            else:
                result = ToolResult(f"not run: one message may hold {toolbox.max_calls} calls", False, "too_many")
            count([result], self.context, self.model)
            if toolbox.ends(call, result):
                said = Message("assistant", result.content, tool_calls=(call,))
                return await self._tell(said, finished=True)
            session.answer(call, result, caller)
        return Phase.GENERATING

    async def _tell(self, message: Message, finished: bool) -> Phase:
        """The environment hears an answer. Where it goes on, so does the episode."""
        few = self.session.turns < self.agent.min_assistant_turns
        step = await self.env.step(message)
        if finished or step.over:
            self.model.count({"context/finished": float(finished), "context/too_few_turns": float(few)})
            return Phase.TERMINATED
        self.session.hear(step.observation.messages)
        return Phase.GENERATING


def chosen(names: Sequence[str] | None, policy: str) -> list[JsonTool]:
    """The tools of these names."""
    if names is None:
        names = USUAL if policy == "statelm" else [name for name in USUAL if name not in EDITS]
    for name in names:
        if name not in TOOLSET:
            raise ConfigError(
                f"agent.args.toolset: no tool {name!r}.{did_you_mean(name, TOOLSET)} Known: {', '.join(TOOLSET)}."
            )
        if policy != "statelm" and name in ("deleteContext", "summarize"):
            raise ConfigError(f"agent.args.toolset: {name} edits the context, which policy={policy} does by itself.")
    return [TOOLSET[name] for name in dict.fromkeys(names)]
