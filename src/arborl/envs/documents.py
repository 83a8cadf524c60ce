"""Questions about a document that is not in the prompt: an agent with document tools must find the answer in it.

Without data, documents are made from the task's seed; a row of a file brings its own as `document_content`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from arborl.data.generated.document_problems import LETTERS, DocumentProblem, make_document_problem, with_choices
from arborl.envs.env import Env, Observation, Step
from arborl.envs.splits import check_split, split_of, wanted_split
from arborl.envs.wrapper import word_of
from arborl.seeds import derive
from arborl.types import Message, Metrics, Task

RULES = (
    "Answer the question from a long document. Search it, read parts of it, note what matters, delete what you have "
    "read, then finish with the answer."
)
FIELD = "document_content"
TRIES = 200
LETTER = re.compile(r"\s*\(?([A-D])(?:[).:]|\s*$)")


class Documents(Env):
    """Answer a question about a hidden document.

    The first message of the agent is its answer. Its reward is 1 where that is right, else 0; `choice`, `short_answer`
    and `judge` are rewards that tell more apart.

    Args:
        tokens: length of a made document in words and signs, or the range it is drawn from.
        hops: facts that a question needs, or the range.
        distractors: facts of the same kinds about others.
        lures: sentences a hop that mention its subject and say nothing about it.
        kind: `short` asks for a word, `choice` for a letter from A to D.
        system: the system message; empty for none.
    """

    blocking = False

    def __init__(
        self,
        tokens: int | Sequence[int] = (4000, 16000),
        hops: int | Sequence[int] = 2,
        distractors: int = 12,
        lures: int = 1,
        kind: Literal["short", "choice"] = "short",
        system: str = RULES,
    ):
        if kind not in ("short", "choice"):
            raise ValueError(f"kind={kind!r}: give short or choice")
        self.tokens, self.hops = _range(tokens, "tokens"), _range(hops, "hops")
        self.distractors, self.lures, self.kind, self.system = distractors, lures, kind, system
        make_document_problem(0, 50, self.hops[1], distractors, lures)  # numbers that cannot be are refused here
        self.document: Any = None
        """What the document tools read."""
        self.answered: str | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        self.answered, self.problem = None, None
        if FIELD in task.fields:
            self.document, self.right = task.fields[FIELD], str(task.fields.get("answer", ""))
            self.choices = tuple(str(one) for one in task.fields.get("choices") or ())
            messages = task.messages
            if not messages:
                raise ValueError(f"task {task.id!r} has a document and no question")
        else:
            split = wanted_split(task, "documents")
            problem = draw(
                task.seed, split, self.tokens, self.hops, self.distractors, self.lures, self.kind == "choice"
            )
            self.problem, self.document, self.choices = problem, problem.document, problem.choices
            self.right = problem.letter if problem.choices else problem.answer
            asked = with_choices(problem.question, problem.choices) if problem.choices else problem.question
            messages = (Message("user", asked),)
        if self.system and messages[0].role != "system":
            messages = (Message("system", self.system), *messages)
        self.question = messages[-1].content
        return Observation(messages, state_key=self.question)

    async def step(self, action: Message) -> Step:
        self.answered = action.content
        right = self._is_right()
        observation = Observation((), state_key=self.state_key())
        valid = read_letter(self.answered) is not None if self.choices else bool(self.answered.strip())
        return Step(observation, reward=float(right), terminated=True, info={"valid": float(valid)})

    def _is_right(self) -> bool:
        return self.answered is not None and is_right(self.answered, self.right, bool(self.choices))

    def metrics(self) -> Metrics:
        return {"success": float(self._is_right()), "answered": float(self.answered is not None)}

    def actions(self) -> list[str]:
        return list(LETTERS[: len(self.choices)]) if getattr(self, "choices", ()) else []

    def oracle(self) -> str | None:
        return self.right or None

    def state_key(self) -> str:
        return self.question if self.answered is None else f"{self.question}\n{self.answered}"

    def render(self) -> str:
        said = "" if self.answered is None else f"\n{self.answered}"
        size = len(self.document) if isinstance(self.document, str) else 0
        return f"[a document of {size:,} characters]\n{self.question}{said}"


def is_right(answer: str, right: str, choice: bool) -> bool:
    """Whether an answer is the right one: its letter, or the same words whatever their case and the signs around them.

    Example:
        is_right("B. Oslo", "B", choice=True)      # True
        is_right(" oslo. ", "Oslo", choice=False)  # True
    """
    if choice:
        return read_letter(answer) == right
    return _plain(answer) == _plain(right) != ""


def read_letter(text: str) -> str | None:
    """The choice an answer begins with: `B`, `(B)`, `B. Oslo`."""
    found = LETTER.match(text)
    return found.group(1) if found else None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


@lru_cache(maxsize=256)
def draw(
    seed: int,
    split: str,
    tokens: tuple[int, int],
    hops: tuple[int, int],
    distractors: int,
    lures: int,
    choices: bool,
) -> DocumentProblem:
    """A problem of this split; which split it is in is decided by its question and answer."""
    check_split(split, "documents")
    for number in range(TRIES):
        own = derive(seed, "document", number)
        size = tokens[0] + derive(own, "tokens") % (tokens[1] - tokens[0] + 1)
        steps = hops[0] + derive(own, "hops") % (hops[1] - hops[0] + 1)
        problem = make_document_problem(own, size, steps, distractors, lures, choices)
        if split_of((problem.question, problem.answer)) == split:
            return problem
    raise ValueError(f"no document of split {split!r} in {TRIES} draws; give other tokens or hops")


def document_of(task: Task, env: Env) -> Any:
    """The document of an episode: the task's, else the environment's; None where there is none."""
    if task.fields.get(FIELD) is not None:
        return task.fields[FIELD]
    return word_of(env, "document")


def _range(given: int | Sequence[int], name: str) -> tuple[int, int]:
    low, high = (given, given) if isinstance(given, int) else (int(given[0]), int(given[-1]))
    if not 1 <= low <= high:
        raise ValueError(f"{name}={given}: give a number, or two of which the first is not larger")
    return low, high
