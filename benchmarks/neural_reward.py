"""Preferences with a known rule: how well a reward model learns it, and whether learning from that model obeys it.

    python benchmarks/neural_reward.py --out runs/neural-reward-benchmark

The three phases of learning from preferences, with seedling throughout: it imitates replies of all qualities; a reward
model learns from pairs of such replies; the imitator learns from the reward model's numbers alone. Prints one JSON
line: accuracy on held-out pairs, and what the rule gives the replies to held-out questions before and after.

A reply to a customer has three sentences. The rule counts what it does, each once: says sorry, names the customer's own
thing, a day of arrival, a next step, and offers more help. Other sentences use the same words to no purpose, name other
things, say a thing twice or make no sense, and of half the pairs the shorter is the better. Sentences and questions
that are held out are made of beginnings and ends that never stand together in training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ITEMS = ("cup", "lamp", "shirt", "chair", "clock", "book", "coat", "bag", "table", "box")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
Parts = tuple[Sequence[str], Sequence[str]]
ASKED: Parts = (
    ("Hello.", "Good morning.", "Hi.", "Listen."),
    ("Where is my {item}?", "My {item} is not here.", "I wait for my {item}.", "You have lost my {item}."),
)
USEFUL: dict[str, Parts] = {
    "sorry": (
        ("I am sorry", "We are sorry", "I am so sorry", "We are very sorry"),
        ("for the wait.", "for the trouble.", "about the delay.", "that it is late."),
    ),
    "item": (
        ("I have found your {item}", "I can see your {item}", "We do have your {item}", "I looked for your {item}"),
        ("in the list.", "on the screen.", "in the store.", "in the book of orders."),
    ),
    "day": (
        ("It will be with you", "You will have it", "It will come to you", "You will get it"),
        ("on {day}.", "by {day}.", "before {day}.", "not after {day}."),
    ),
    "step": (
        ("I will now call", "I will now write to", "I will now ask", "I will now go to"),
        ("the driver.", "the post office.", "the store.", "the man at the gate."),
    ),
    "help": (
        ("Can I do more", "Can I help with more", "Is there something else", "May I do something else"),
        ("for you?", "for you now?", "for you today?", "for you, please?"),
    ),
}
IDLE: dict[str, Parts] = {
    "sorry": (
        ("The cat was sorry", "My friend was sorry", "The old man was sorry", "The queen was sorry"),
        ("for the rain.", "for the snow.", "about the noise.", "that it was cold."),
    ),
    "item": (
        ("We also sell the {other}", "I do like the {other}", "I once had the {other}", "Some take the {other}"),
        ("in blue.", "on the wall.", "in the window.", "in three colours."),
    ),
    "day": (
        ("The shop is open", "The town is busy", "There is music", "The sun was here"),
        ("on {day}.", "till {day}.", "each {day}.", "all of {day}."),
    ),
    "step": (
        ("They like to see", "They like to hear", "They talk about", "They walk with"),
        ("the driver.", "the queen.", "the store.", "the man at the gate."),
    ),
    "help": (
        ("Can you do more", "Can they do more", "Is there rain", "May the sun do more"),
        ("for the tree?", "for the cat?", "for the river?", "for the old man?"),
    ),
}
SENTENCES, SENSELESS = 3, 0.25
"""Of a reply; and how often one that is of no use begins as one useful thing and ends as another."""


class Writer:
    """Questions and replies. `held_out` ones are made of beginnings and ends that stand together in no other."""

    def __init__(self, seed: int, held_out: bool):
        self.chance, self.held_out = random.Random(f"{seed} {held_out}"), held_out

    def question(self) -> tuple[str, str]:
        """A question, and the thing it is about."""
        item = self.chance.choice(ITEMS)
        return self._sentence(ASKED, item), item

    def reply(self, item: str) -> str:
        """Three sentences, each useful, idle or senseless, in any order; the useful may say the same twice."""
        useful = self.chance.randint(0, SENTENCES)
        said = []
        for n in range(SENTENCES):
            kind, other = self.chance.sample(list(USEFUL), 2)
            parts = USEFUL[kind] if n < useful else IDLE[kind]
            if n >= useful and self.chance.random() < SENSELESS:
                parts = (USEFUL[kind][0], USEFUL[other][1])
            said.append(self._sentence(parts, item))
        self.chance.shuffle(said)
        return " ".join(said)

    def pair(self) -> dict[str, str]:
        """Two replies to a question, of which the rule prefers one, be it the longer or the shorter."""
        question, item = self.question()
        longer = self.chance.random() < 0.5
        while True:
            better, worse = sorted((self.reply(item), self.reply(item)), key=lambda one: rule(item, one), reverse=True)
            if rule(item, better) > rule(item, worse) and (len(better) > len(worse)) == longer:
                return {"prompt": question, "chosen": better, "rejected": worse}

    def _sentence(self, parts: Parts, item: str) -> str:
        begins, ends = parts
        both = [(a, b) for a in range(4) for b in range(4) if ((a + b) % 4 == 0) == self.held_out]
        a, b = self.chance.choice(both)
        other = self.chance.choice([one for one in ITEMS if one != item])
        return f"{begins[a]} {ends[b]}".format(item=item, other=other, day=self.chance.choice(DAYS))


def rule(item: str, reply: str) -> float:
    """The share of the five useful things that a reply does; a sentence that is not quite one of them is none."""
    done = set()
    for kind, (begins, ends) in USEFUL.items():
        said = {f"{a} {b}".format(item=item, day=day) for a in begins for b in ends for day in DAYS}
        if any(sentence in said for sentence in sentences(reply)):
            done.add(kind)
    return len(done) / len(USEFUL)


def sentences(reply: str) -> list[str]:
    return [one.strip() for one in reply.replace(".", ".\n").replace("?", "?\n").splitlines() if one.strip()]


def prefers(score: Any, pairs: Sequence[dict[str, str]]) -> float:
    """Share of pairs whose better side scores higher; ties count half."""
    both = [(score(pair["prompt"], pair["chosen"]), score(pair["prompt"], pair["rejected"])) for pair in pairs]
    return fmean((better > worse) + (better == worse) / 2 for better, worse in both)


def rule_of_run(folder: Path, step: int) -> dict[str, float]:
    """What the rule and the reward model give the evaluation's episodes at a step."""
    from arborl.rollout.episode_store import EpisodeStore

    store = EpisodeStore(folder / "episodes" / "evaluation")
    episodes = list(store.read(folder / "episodes" / "evaluation" / f"step-{step:06}.jsonl"))
    given = [rule(one.task.fields["item"], one.turns[-1].message.content) for one in episodes]
    lengths = [len(sentences(one.turns[-1].message.content)) for one in episodes]
    numbers = {"rule": given, "neural": [one.reward for one in episodes], "sentences": lengths}
    return {"tasks": len(episodes), **{name: round(fmean(values), 3) for name, values in numbers.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/neural-reward-benchmark"))
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--imitation", type=int, default=250, help="steps")
    parser.add_argument("--steps", type=int, default=30, help="of reinforcement learning; 0 trains the reward alone")
    parser.add_argument("--kl", type=float, default=0.04, help="what it costs to leave the imitator")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(measured(args))), flush=True)


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    import arborl

    logging.basicConfig(level=logging.WARNING)
    writer, unseen = Writer(args.seed, held_out=False), Writer(args.seed, held_out=True)
    pairs, held = [writer.pair() for _ in range(args.pairs)], [unseen.pair() for _ in range(300)]
    began = time.perf_counter()
    trainer = arborl.NeuralRewardTrainer(
        "seedling", pairs, epochs=args.epochs, seed=args.seed, output_dir=args.out / "reward", device="cpu"
    )
    reward = await trainer.train()
    seconds = {"reward": round(time.perf_counter() - began, 1)}

    async def says(prompt: str, reply: str) -> float:
        turns = [arborl.ConversationTurn("user", prompt), arborl.ConversationTurn("assistant", reply)]
        return (await reward.compute_reward(turns)).score

    texts = [(pair["prompt"], pair[side]) for pair in held for side in ("chosen", "rejected")]
    scores = dict(zip(texts, await asyncio.gather(*(says(*text) for text in texts)), strict=True))
    row = {
        "seed": args.seed,
        "accuracy": round(prefers(lambda prompt, reply: scores[prompt, reply], held), 3),
        "accuracy_same_wording": reward.accuracy,
        "accuracy_of_length": round(prefers(lambda prompt, reply: len(reply), held), 3),
    }
    if args.steps:
        row |= learn(args, reward, writer, unseen, seconds)
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    return row | {"seconds": seconds, "cpus": os.cpu_count(), "machine": platform.machine(), **about}


def learn(args: argparse.Namespace, reward: Any, writer: Writer, unseen: Writer, seconds: dict[str, float]) -> Any:
    """Imitation of replies of all qualities, then learning from the reward model; the rule before and after."""
    import arborl

    quiet = {"track.gifs": 0, "track.tensorboard": False, "model.device": "cpu", "seed": args.seed}
    shown = []
    for _ in range(4000):
        question, item = writer.question()
        shown.append({"prompt": question, "completion": writer.reply(item)})
    began = time.perf_counter()
    arborl.run(
        model="seedling", data=shown, algorithm="sft", steps=args.imitation, output_dir=args.out / "imitation",
        **quiet, **{"rollout.tasks_per_step": 32, "learner.lr": 2e-3, "evaluation.tasks": 100},
    )  # fmt: skip
    seconds["imitation"] = round(time.perf_counter() - began, 1)
    files = {"train": args.out / "train.jsonl", "unseen": args.out / "unseen.jsonl"}
    for path, source in zip(files.values(), (writer, unseen), strict=True):
        rows = [dict(zip(("question", "item"), source.question(), strict=True)) for _ in range(200)]
        path.write_text("\n".join(json.dumps(one) for one in rows))
    began = time.perf_counter()
    imitator = args.out / "imitation" / "checkpoints" / f"step-{args.imitation:06}" / "model"
    done = arborl.run(
        model=str(imitator), rewards=[reward], algorithm="grpo", steps=args.steps, output_dir=args.out / "learned",
        **quiet,
        **{"data.path": str(files["train"]), "data.evaluation_path": str(files["unseen"]), "learner.lr": 3e-4,
           "algorithm.kl.coef": args.kl, "sampling.max_tokens": 64, "rollout.tasks_per_step": 8,
           "rollout.group_size": 8, "evaluation.tasks": 200, "evaluation.greedy": False},
    )  # fmt: skip
    seconds["learning"] = round(time.perf_counter() - began, 1)
    return {"before": rule_of_run(done.folder, 0), "after": rule_of_run(done.folder, args.steps)}


if __name__ == "__main__":
    main()
