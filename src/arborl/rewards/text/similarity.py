"""Against saying the same again: within a conversation, and in all conversations of a group."""

from __future__ import annotations

from collections.abc import Sequence

from arborl.rewards.text.base import Context, RewardFunction, RewardResult, Turns, finite
from arborl.rewards.text.turns import as_turns, exchanges, turns_of
from arborl.rewards.text.words import alike, fresh, shingles, variety, words
from arborl.types import Episode


class SimilarityAwareReward(RewardFunction):
    """1 for replies that differ, from each other and from those of the other episodes of the task.

    Two texts are alike by the share of their runs of three words that are in both. Of each reply: 1 less how alike it
    is to the user's message or an earlier reply, times how varied its words are; an empty one has 0; the mean is the
    episode's own number. In a run it is then multiplied by 1 - `group` times how alike the episode is to the others of
    its group, on average. An episode alone keeps its own.

    It cannot see that the same was said in other words, and it costs a group that agrees on the one right answer: give
    it a small weight there, or `group=0`.

    Args:
        weight: of this reward among others.
        group: what being like all others costs, 0 to 1.
        size: words in a run.
        name: what it is called in metrics.
    """

    def __init__(self, weight: float = 1.0, group: float = 0.5, size: int = 3, name: str | None = None):
        super().__init__(weight, name)
        self.group = finite(group, f"{self.name}.group", 0)
        if self.group > 1:
            raise ValueError(f"{self.name}.group={group!r}: give 0 to 1")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{self.name}.size={size!r}: give a whole number, at least 1")
        self.size = size

    async def compute_reward(self, turns: Turns, context: Context | None = None) -> RewardResult:
        said = exchanges(as_turns(turns))
        pairs = zip(said, fresh(said, self.size), strict=True)
        scores = [unheard * variety(words(one.reply)) for one, unheard in pairs]
        return RewardResult(sum(scores) / len(scores) if scores else 0.0, metadata={"scores": scores})

    def across(self, episodes: Sequence[Episode], values: Sequence[float]) -> list[float]:
        """What each episode keeps beside the others of its task."""
        runs = [
            {run for one in exchanges(turns_of(episode)) for run in shingles(one.reply, self.size)}
            for episode in episodes
        ]
        kept = []
        for i, value in enumerate(values):
            others = [alike(runs[i], other) for j, other in enumerate(runs) if j != i]
            kept.append(value * (1 - self.group * (sum(others) / len(others) if others else 0.0)))
        return kept
