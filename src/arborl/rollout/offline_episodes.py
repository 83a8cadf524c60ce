"""Episodes of offline data (SFT, DPO, KTO): recorded conversations with the token ids that a rollout would record.

Before each assistant message stands the prompt that the model would receive. The message is what the chat template
writes for it, up to and including the end-of-turn token. The log-probabilities are unknown (NaN).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from arborl.chat.control_tokens import Rendered
from arborl.chat.conversation import Conversations, Prompt
from arborl.chat.renderer import Renderer
from arborl.config.run_config import RunConfig
from arborl.data.reading.row_reader import OfflineResponse, OfflineTask, RowKind
from arborl.data.source_factory import OfflineRows
from arborl.types import NOT_SAMPLED, Call, Completion, Episode, FinishReason, Group, Message, StopReason, Turn

ROW_KINDS: dict[str, RowKind] = {"sft": "transcripts", "dpo": "pairs", "ipo": "pairs", "kto": "labels"}
THINK = "<think>"


@dataclass(frozen=True, slots=True)
class OfflineEpisodes:
    renderer: Renderer
    max_context: int
    """Tokens of prompt and completion; the rest is cut off."""
    with_mismatched: bool = False
    """Add to each group the completion of the previous row, with weight 0: KTO estimates the KL from it."""

    def groups(self, tasks: Sequence[OfflineTask]) -> list[Group]:
        """One group for each task, with one episode for each response; the first response is the best."""
        groups = []
        for number, task in enumerate(tasks):
            episodes = [self.episode(task, one, f"{task.id}#{i}") for i, one in enumerate(task.responses)]
            if self.with_mismatched:
                other = tasks[number - 1].responses[0]
                mismatched = self.episode(task, replace(other, score=0.0), f"{task.id}#mismatched")
                mismatched.weight = 0.0
                episodes.append(mismatched)
            groups.append(Group(task, episodes))
        return groups

    @classmethod
    def of(cls, config: RunConfig, renderer: Renderer) -> OfflineEpisodes:
        with_mismatched = config.data.offline and config.algorithm.loss == "kto"
        return cls(renderer, config.sampling.max_context, with_mismatched)

    def rows(self, loss: str) -> OfflineRows:
        return OfflineRows(ROW_KINDS[loss], self.length, self.max_context)

    def length(self, task: OfflineTask) -> int:
        unbounded = replace(self, max_context=10**9)
        calls = [call for one in task.responses for call in unbounded.episode(task, one, task.id).calls]
        return max(len(call.prompt) + len(call.completion.tokens) for call in calls)

    def episode(self, task: OfflineTask, response: OfflineResponse, name: str) -> Episode:
        episode = Episode(name, task, task.seed, task.messages, rewards={"given": response.score}, weight=task.weight)
        conversations = Conversations(self.renderer)
        messages = list(task.messages)
        tool_calls: dict[str, tuple[str, str]] = {}
        for at, (message, trained) in enumerate(zip(response.messages, response.trained, strict=True), 1):
            if message.role != "assistant":
                messages.append(_with_call_id(message, tool_calls))
                continue
            prompt = conversations.prompt(messages, task.tools)
            ids = self.completion_ids(prompt, messages, message, task)
            room = self.max_context - len(prompt.tokens)
            if room < 1:
                episode.stop = StopReason.CONTEXT_FULL
                break
            cut = tuple(ids[:room])
            finish = FinishReason.STOP if len(cut) == len(ids) else FinishReason.LENGTH
            completion = Completion(cut, (math.nan,) * len(cut), finish, NOT_SAMPLED)
            reply = self.renderer.read(completion)
            pairs = zip(message.tool_calls, reply.tool_calls, strict=False)
            tool_calls |= {old.id: (new.id, new.name) for old, new in pairs}
            turn = len(episode.turns)
            episode.calls.append(Call(prompt.tokens, completion, turn, trained, tuple(messages), reply))
            observation = takewhile(lambda one: one.role != "assistant", response.messages[at:])
            episode.turns.append(Turn(reply, tuple(observation)))
            conversations.record(prompt, completion, reply=reply)
            messages.append(reply)
            if finish is FinishReason.LENGTH:
                episode.stop = StopReason.CONTEXT_FULL
                break
        return episode

    def completion_ids(
        self, prompt: Prompt, messages: Sequence[Message], message: Message, task: OfflineTask
    ) -> list[int]:
        """Token ids of a message as the model would sample it after the prompt, with the end-of-turn token."""
        renderer = self.renderer
        shown = renderer.render([*messages, message], task.tools, generation=False)
        if shown.starts_with(prompt.shown):
            rest = shown.after(len(prompt.text))
        elif message.tool_calls:
            raise ValueError(
                "the chat template renders a message with tool_calls differently from its generation prompt, so the "
                "sampled text is unknown. Write the call into the content, as the model does, and remove tool_calls"
            )
        else:
            rest = renderer.escape_reply(_without_think(prompt, message.content))
        ids = self._encode(rest)
        end = next((i for i, token in enumerate(ids) if token in renderer.stop), None)
        return [*ids, renderer.stop[0]] if end is None else ids[: end + 1]

    def _encode(self, rest: Rendered) -> list[int]:
        """Token ids in the middle of a text: some tokenizers mark the beginning of a text."""
        renderer = self.renderer
        stop = renderer.stop[0]
        ids = renderer.encode(rest.after(0, before=renderer.tokenizer.decode([stop])))
        return ids[1:] if ids[:1] == [stop] else renderer.encode(rest)


def _without_think(prompt: Prompt, content: str) -> str:
    if content.startswith(THINK) and prompt.text.rstrip().endswith(THINK):
        return content.removeprefix(THINK).lstrip("\n")
    return content


def _with_call_id(message: Message, tool_calls: dict[str, tuple[str, str]]) -> Message:
    if message.role != "tool" or message.tool_call_id not in tool_calls:
        return message
    call_id, name = tool_calls[message.tool_call_id]
    return replace(message, tool_call_id=call_id, name=message.name or name)
