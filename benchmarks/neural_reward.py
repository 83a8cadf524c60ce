"""Preferences by a known rule: accuracy of a reward model, and the rule's score of a policy trained with that model.

    python benchmarks/neural_reward.py --out runs/neural-reward-benchmark

The three phases of RLHF with seedling: supervised fine-tuning on replies of all qualities, training of a reward model
on pairs of such replies, and reinforcement learning of the fine-tuned model with the reward model alone. Prints one
JSON line: accuracy on held-out pairs, and the rule's score of replies to held-out questions before and after training.

A reply to a customer has three sentences. The rule counts distinct useful acts: an apology, the customer's item, a day
of arrival, a next step, an offer of further help. Other sentences use the same words without one of these acts, name
other items, repeat an act or make no sense; in half of the pairs the shorter reply is the better one. Held-out
sentences and questions combine beginnings and ends that never occur together in training.
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
QUESTIONS: Parts = (
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
USELESS: dict[str, Parts] = {
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
SENTENCES, SENSELESS_PROBABILITY = 3, 0.25
"""Sentences per reply; probability that a useless sentence joins the halves of two different useful ones."""


class Writer:
    """Generates questions and replies. `held_out` ones combine beginnings and ends that occur together in no other."""

    def __init__(self, seed: int, held_out: bool):
        self.rng, self.held_out = random.Random(f"{seed} {held_out}"), held_out

    def question(self) -> tuple[str, str]:
        """A question and its item."""
        item = self.rng.choice(ITEMS)
        return self._sentence(QUESTIONS, item), item

    def reply(self, item: str) -> str:
        """Three useful, useless or senseless sentences in random order; a useful act may be repeated."""
        useful = self.rng.randint(0, SENTENCES)
        reply_sentences = []
        for n in range(SENTENCES):
            kind, other = self.rng.sample(list(USEFUL), 2)
            parts = USEFUL[kind] if n < useful else USELESS[kind]
            if n >= useful and self.rng.random() < SENSELESS_PROBABILITY:
                parts = (USEFUL[kind][0], USEFUL[other][1])
            reply_sentences.append(self._sentence(parts, item))
        self.rng.shuffle(reply_sentences)
        return " ".join(reply_sentences)

    def pair(self) -> dict[str, str]:
        """Two replies with different scores; the better one is the longer one with probability 0.5."""
        question, item = self.question()
        longer = self.rng.random() < 0.5
        while True:
            better, worse = sorted(
                (self.reply(item), self.reply(item)), key=lambda one: rule_score(item, one), reverse=True
            )
            if rule_score(item, better) > rule_score(item, worse) and (len(better) > len(worse)) == longer:
                return {"prompt": question, "chosen": better, "rejected": worse}

    def _sentence(self, parts: Parts, item: str) -> str:
        beginnings, ends = parts
        combinations = [(a, b) for a in range(4) for b in range(4) if ((a + b) % 4 == 0) == self.held_out]
        a, b = self.rng.choice(combinations)
        other = self.rng.choice([one for one in ITEMS if one != item])
        return f"{beginnings[a]} {ends[b]}".format(item=item, other=other, day=self.rng.choice(DAYS))


def rule_score(item: str, reply: str) -> float:
    """Share of the five useful acts in a reply; only exact sentences count."""
    done = set()
    for kind, (beginnings, ends) in USEFUL.items():
        accepted = {f"{a} {b}".format(item=item, day=day) for a in beginnings for b in ends for day in DAYS}
        if any(sentence in accepted for sentence in sentences(reply)):
            done.add(kind)
    return len(done) / len(USEFUL)


def sentences(reply: str) -> list[str]:
    return [one.strip() for one in reply.replace(".", ".\n").replace("?", "?\n").splitlines() if one.strip()]


def pairwise_accuracy(score: Any, pairs: Sequence[dict[str, str]]) -> float:
    """Share of pairs whose chosen reply scores higher; ties count half."""
    both = [(score(pair["prompt"], pair["chosen"]), score(pair["prompt"], pair["rejected"])) for pair in pairs]
    return fmean((better > worse) + (better == worse) / 2 for better, worse in both)


def mean_scores(folder: Path, step: int) -> dict[str, float]:
    """Mean scores by the rule and by the reward model over the evaluation episodes of a step."""
    from arborl.rollout.episode_store import EpisodeStore

    store = EpisodeStore(folder / "episodes" / "evaluation")
    episodes = list(store.read(folder / "episodes" / "evaluation" / f"step-{step:06}.jsonl"))
    rule_scores = [rule_score(one.task.fields["item"], one.turns[-1].message.content) for one in episodes]
    lengths = [len(sentences(one.turns[-1].message.content)) for one in episodes]
    numbers = {"rule": rule_scores, "neural": [one.reward for one in episodes], "sentences": lengths}
    return {"tasks": len(episodes), **{name: round(fmean(values), 3) for name, values in numbers.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/neural-reward-benchmark"))
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--imitation", type=int, default=250, help="steps of supervised fine-tuning")
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of reinforcement learning; 0 trains only the reward model"
    )
    parser.add_argument("--kl", type=float, default=0.04, help="coefficient of the KL term to the fine-tuned model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(train_and_evaluate(args))), flush=True)


async def train_and_evaluate(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    import arborl

    logging.basicConfig(level=logging.WARNING)
    writer, held_out_writer = Writer(args.seed, held_out=False), Writer(args.seed, held_out=True)
    pairs, held_out_pairs = [writer.pair() for _ in range(args.pairs)], [held_out_writer.pair() for _ in range(300)]
    began = time.perf_counter()
    trainer = arborl.NeuralRewardTrainer(
        "seedling", pairs, epochs=args.epochs, seed=args.seed, output_dir=args.out / "reward", device="cpu"
    )
    reward = await trainer.train()
    seconds = {"reward": round(time.perf_counter() - began, 1)}

    async def reward_model_score(prompt: str, reply: str) -> float:
        turns = [arborl.ConversationTurn("user", prompt), arborl.ConversationTurn("assistant", reply)]
        return (await reward.compute_reward(turns)).score

    texts = [(pair["prompt"], pair[side]) for pair in held_out_pairs for side in ("chosen", "rejected")]
    scores = dict(zip(texts, await asyncio.gather(*(reward_model_score(*text) for text in texts)), strict=True))
    row = {
        "seed": args.seed,
        "accuracy": round(pairwise_accuracy(lambda prompt, reply: scores[prompt, reply], held_out_pairs), 3),
        "accuracy_same_wording": reward.accuracy,
        "accuracy_of_length": round(pairwise_accuracy(lambda prompt, reply: len(reply), held_out_pairs), 3),
    }
    if args.steps:
        row |= train_policy(args, reward, writer, held_out_writer, seconds)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return row | {"seconds": seconds, "cpus": os.cpu_count(), "machine": platform.machine(), **versions}


def train_policy(
    args: argparse.Namespace, reward: Any, writer: Writer, held_out_writer: Writer, seconds: dict[str, float]
) -> Any:
    """Fine-tune on replies of all qualities, then train with the reward model; the rule's score before and after."""
    import arborl

    common_settings = {"track.gifs": 0, "track.tensorboard": False, "model.device": "cpu", "seed": args.seed}
    demonstrations = []
    for _ in range(4000):
        question, item = writer.question()
        demonstrations.append({"prompt": question, "completion": writer.reply(item)})
    began = time.perf_counter()
    arborl.run(
        model="seedling", data=demonstrations, algorithm="sft", steps=args.imitation, output_dir=args.out / "imitation",
        **common_settings, **{"rollout.tasks_per_step": 32, "learner.lr": 2e-3, "evaluation.tasks": 100},
    )  # fmt: skip
    seconds["imitation"] = round(time.perf_counter() - began, 1)
    files = {"train": args.out / "train.jsonl", "unseen": args.out / "unseen.jsonl"}
    for path, source in zip(files.values(), (writer, held_out_writer), strict=True):
        rows = [dict(zip(("question", "item"), source.question(), strict=True)) for _ in range(200)]
        path.write_text("\n".join(json.dumps(one) for one in rows))
    began = time.perf_counter()
    fine_tuned_model = args.out / "imitation" / "checkpoints" / f"step-{args.imitation:06}" / "model"
    done = arborl.run(
        model=str(fine_tuned_model), rewards=[reward], algorithm="grpo", steps=args.steps,
        output_dir=args.out / "learned", **common_settings,
        **{"data.path": str(files["train"]), "data.evaluation_path": str(files["unseen"]), "learner.lr": 3e-4,
           "algorithm.kl.coef": args.kl, "sampling.max_tokens": 64, "rollout.tasks_per_step": 8,
           "rollout.group_size": 8, "evaluation.tasks": 200, "evaluation.greedy": False},
    )  # fmt: skip
    seconds["learning"] = round(time.perf_counter() - began, 1)
    return {"before": mean_scores(done.folder, 0), "after": mean_scores(done.folder, args.steps)}


if __name__ == "__main__":
    main()
