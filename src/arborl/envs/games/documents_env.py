"""A question about a document that is not in the prompt; an agent with document tools finds the answer.

The document is generated from the task's seed, or is the task's field `document_content`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from arborl.data.generated.document_problems import LETTERS, DocumentProblem, make_document_problem, with_choices
from arborl.envs.env import Env, Observation, Step, check_split, split_of, task_split
from arborl.envs.wrapper import inner_attribute
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

RULES = (
    "Answer the question from a long document. Search it, read parts of it, note what matters, delete what you have "
    "read, then finish with the answer."
)
FIELD = "document_content"
MAX_DRAWS = 200
LETTER = re.compile(r"\s*\(?([A-D])(?:[).:]|\s*$)")


@dataclass(eq=False)
class Documents(Env):
    """Answer a question about a document.

    The agent's first message is its answer, with reward 1 if correct, else 0. The rewards `choice`, `short_answer` and
    `judge` grade more finely.
    """

    blocking = False

    tokens: int | Sequence[int] = (4000, 16000)
    """Length of a generated document in words and punctuation, or a range."""
    hops: int | Sequence[int] = 2
    """Number of facts that the question needs, or a range."""
    distractors: int = 12
    """Number of facts of the same kinds about other subjects."""
    lures: int = 1
    """Sentences per hop that mention its subject without the fact."""
    kind: Literal["short", "choice"] = "short"
    """`short` for a word, `choice` for a letter from A to D."""
    system: str = RULES
    """The system message; empty for none."""

    def __post_init__(self) -> None:
        if self.kind not in ("short", "choice"):
            raise ValueError(f"kind={self.kind!r}: give short or choice")
        self.token_range, self.hop_range = _range(self.tokens, "tokens"), _range(self.hops, "hops")
        make_document_problem(0, 50, self.hop_range[1], self.distractors, self.lures)  # raises for impossible numbers
        self.document: Any = None
        self.reply: str | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        self.reply, self.problem = None, None
        if FIELD in task.fields:
            self.document, self.solution = task.fields[FIELD], str(task.fields.get("answer", ""))
            self.choices = tuple(str(one) for one in task.fields.get("choices") or ())
            messages = task.messages
            if not messages:
                raise ValueError(f"task {task.id!r} has a document and no messages: add the question")
        else:
            split = task_split(task, "documents")
            problem = draw_document_problem(
                task.seed, split, self.token_range, self.hop_range, self.distractors, self.lures, self.kind == "choice"
            )
            self.problem, self.document, self.choices = problem, problem.document, problem.choices
            self.solution = problem.letter if problem.choices else problem.answer
            question = with_choices(problem.question, problem.choices) if problem.choices else problem.question
            messages = (Message("user", question),)
        if self.system and messages[0].role != "system":
            messages = (Message("system", self.system), *messages)
        self.question = messages[-1].content
        return Observation(messages, state_key=self.question)

    async def step(self, action: Message) -> Step:
        self.reply = action.content
        right = self._is_correct()
        observation = Observation((), state_key=self.state_key())
        valid = read_letter(self.reply) is not None if self.choices else bool(self.reply.strip())
        return Step(observation, reward=float(right), terminated=True, info={"valid": float(valid)})

    def _is_correct(self) -> bool:
        return self.reply is not None and is_right(self.reply, self.solution, bool(self.choices))

    def metrics(self) -> Metrics:
        return {"success": float(self._is_correct()), "answered": float(self.reply is not None)}

    def actions(self) -> list[str]:
        return list(LETTERS[: len(self.choices)]) if getattr(self, "choices", ()) else []

    def oracle(self) -> str | None:
        return self.solution or None

    def state_key(self) -> str:
        return self.question if self.reply is None else f"{self.question}\n{self.reply}"

    def render(self) -> str:
        reply = "" if self.reply is None else f"\n{self.reply}"
        size = len(self.document) if isinstance(self.document, str) else 0
        return f"[a document of {size:,} characters]\n{self.question}{reply}"


def is_right(answer: str, right: str, choice: bool) -> bool:
    """Whether an answer is correct: the same letter, or the same words without case and punctuation."""
    if choice:
        return read_letter(answer) == right
    return _plain(answer) == _plain(right) != ""


def read_letter(text: str) -> str | None:
    """The letter at the start of an answer: `B`, `(B)`, `B. Oslo`."""
    found = LETTER.match(text)
    return found.group(1) if found else None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


@lru_cache(maxsize=256)
def draw_document_problem(
    seed: int, split: str, tokens: tuple[int, int], hops: tuple[int, int], distractors: int, lures: int, choices: bool
) -> DocumentProblem:
    """A problem of this split, by a hash of question and answer."""
    check_split(split, "documents")
    for number in range(MAX_DRAWS):
        problem_seed = derive(seed, "document", number)
        size = tokens[0] + derive(problem_seed, "tokens") % (tokens[1] - tokens[0] + 1)
        steps = hops[0] + derive(problem_seed, "hops") % (hops[1] - hops[0] + 1)
        problem = make_document_problem(problem_seed, size, steps, distractors, lures, choices)
        if split_of((problem.question, problem.answer)) == split:
            return problem
    raise ValueError(f"no document of split {split!r} in {MAX_DRAWS} draws; give other tokens or hops")


def episode_document(task: Task, env: Env) -> Any:
    """The task's document, else the environment's; None without one."""
    if task.fields.get(FIELD) is not None:
        return task.fields[FIELD]
    return inner_attribute(env, "document")


def _range(value: int | Sequence[int], name: str) -> tuple[int, int]:
    low, high = (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
    if not 1 <= low <= high:
        raise ValueError(f"{name}={value}: give a number, or two numbers in ascending order")
    return low, high
