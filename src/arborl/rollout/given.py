"""Given tasks as episodes: what was said, in the very ids that a rollout would have recorded had the model said it.

The conversation is gone through as an agent would: before each message of the assistant stands the prompt that the
model would have been given, and the message is what the chat template writes for it, up to and with the token that ends
the turn. No policy sampled it, so there are no log-probabilities of a policy that did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from arborl.chat.control import Rendered
from arborl.chat.conversation import Conversations, Prompt
from arborl.chat.renderer import Renderer
from arborl.config.run_config import RunConfig
from arborl.data.from_config import GivenRows
from arborl.data.reading.given import GivenTask, Kind, Side
from arborl.types import NOT_SAMPLED, Call, Completion, Episode, FinishReason, Group, Message, StopReason, Turn

KINDS: dict[str, Kind] = {"sft": "transcripts", "dpo": "pairs", "ipo": "pairs", "kto": "labels"}
"""Loss to the rows it learns from."""
THOUGHT = "<think>"


@dataclass(frozen=True, slots=True)
class GivenEpisodes:
    """Makes groups of given tasks.

    Example:
        GivenEpisodes(renderer, max_context=1024).groups(source.take(step=0, count=16))
    """

    renderer: Renderer
    max_context: int
    """Tokens of prompt and completion; what goes beyond is left out."""
    strangers: bool = False
    """Whether each group also has the completion of the row before it under its own prompt, at weight 0: what KTO
    estimates the policy's KL from."""

    def groups(self, tasks: Sequence[GivenTask]) -> list[Group]:
        """One group a task, with an episode a side; the first is the best."""
        made = []
        for number, task in enumerate(tasks):
            episodes = [self.episode(task, side, f"{task.id}#{i}") for i, side in enumerate(task.sides)]
            if self.strangers:
                side = tasks[number - 1].sides[0]
                stranger = self.episode(task, replace(side, score=0.0), f"{task.id}#stranger")
                stranger.weight = 0.0
                episodes.append(stranger)
            made.append(Group(task, episodes))
        return made

    @classmethod
    def of(cls, config: RunConfig, renderer: Renderer) -> GivenEpisodes:
        """Those of a run."""
        strangers = config.data.offline and config.algorithm.loss == "kto"
        return cls(renderer, config.sampling.max_context, strangers)

    def rows(self, loss: str) -> GivenRows:
        """How rows that this loss learns from are read, and counted."""
        return GivenRows(KINDS[loss], self.length, self.max_context)

    def length(self, task: GivenTask) -> int:
        """Tokens of the longest call of the task, however many that is."""
        unbounded = replace(self, max_context=10**9)
        calls = [call for side in task.sides for call in unbounded.episode(task, side, task.id).calls]
        return max(len(call.prompt) + len(call.completion.tokens) for call in calls)

    def episode(self, task: GivenTask, side: Side, name: str) -> Episode:
        """What was said on one side."""
        episode = Episode(name, task, task.seed, task.messages, rewards={"given": side.score}, weight=task.weight)
        conversations = Conversations(self.renderer)
        messages = list(task.messages)
        names: dict[str, tuple[str, str]] = {}
        for at, (message, trained) in enumerate(zip(side.messages, side.trained, strict=True), 1):
            if message.role != "assistant":
                messages.append(_answering(message, names))
                continue
            prompt = conversations.prompt(messages, task.tools)
            ids, room = self.said(prompt, messages, message, task), self.max_context - len(prompt.tokens)
            if room < 1:
                episode.stop = StopReason.CONTEXT_FULL
                break
            cut = tuple(ids[:room])
            finish = FinishReason.STOP if len(cut) == len(ids) else FinishReason.LENGTH
            completion = Completion(cut, (math.nan,) * len(cut), finish, NOT_SAMPLED)
            reply = self.renderer.read(completion)
            names |= {
                old.id: (new.id, new.name) for old, new in zip(message.tool_calls, reply.tool_calls, strict=False)
            }
            turn = len(episode.turns)
            episode.calls.append(Call(prompt.tokens, completion, turn, trained, tuple(messages), reply))
            answered = takewhile(lambda one: one.role != "assistant", side.messages[at:])
            episode.turns.append(Turn(reply, tuple(answered)))
            conversations.sampled(prompt, completion, said=reply)
            messages.append(reply)
            if finish is FinishReason.LENGTH:
                episode.stop = StopReason.CONTEXT_FULL
                break
        return episode

    def said(self, prompt: Prompt, messages: Sequence[Message], message: Message, task: GivenTask) -> list[int]:
        """The ids of a message as the model would have sampled it behind the prompt, the end of the turn included."""
        renderer = self.renderer
        shown = renderer.render([*messages, message], task.tools, generation=False)
        if shown.starts_with(prompt.shown):
            rest = shown.after(len(prompt.text))
        elif message.tool_calls:
            raise ValueError(
                "the chat template writes a message with tool_calls otherwise than it asks for one, so what the model "
                "would have written is not known. Write the call into the content, as the model does, and leave "
                "tool_calls out"
            )
        else:
            rest = renderer.said(_behind(prompt, message.content))
        ids = self._encode(rest)
        end = next((i for i, token in enumerate(ids) if token in renderer.stop), None)
        return [*ids, renderer.stop[0]] if end is None else ids[: end + 1]

    def _encode(self, rest: Rendered) -> list[int]:
        """Ids that do not depend on the text's being a beginning: some tokenizers mark that."""
        renderer = self.renderer
        stop = renderer.stop[0]
        ids = renderer.encode(rest.after(0, before=renderer.tokenizer.decode([stop])))
        return ids[1:] if ids[:1] == [stop] else renderer.encode(rest)


def _behind(prompt: Prompt, content: str) -> str:
    """The content, without the mark that begins a thought where the prompt ends with it."""
    if content.startswith(THOUGHT) and prompt.text.rstrip().endswith(THOUGHT):
        return content.removeprefix(THOUGHT).lstrip("\n")
    return content


def _answering(message: Message, names: dict[str, tuple[str, str]]) -> Message:
    """A tool's answer, with the id and the name that the call has in a rollout."""
    if message.role != "tool" or message.tool_call_id not in names:
        return message
    own, called = names[message.tool_call_id]
    return replace(message, tool_call_id=own, name=message.name or called)
