"""`arborl.train` on the customer-service preset with the embedded model, and a second reward for evaluation only.

    python benchmarks/customer_service.py --seed 0 --out runs/customer-service

The training data of seedling contain no customer service. One call of `arborl.train` first imitates transcripts of a
scripted agent of medium skill and then trains with a reward. A quarter of the (scenario, user type) pairs is held out:
their scenarios occur in training, with other user types. Prints one JSON line: both rewards before training, after
imitation and at the end, and some replies of the agent.

`--reward met` trains with the environment's own reward (what a good reply must mention) and evaluates the heuristic
`customer_service` too; `--reward customer_service` trains with the heuristic and evaluates the environment's reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from arborl import (
    CONVERSATION_CONFIGS,
    AgentConfig,
    ConversationEnvironment,
    CustomerServiceReward,
    MultiTurnAgent,
    TrainingConfig,
    train,
)


class EvaluationRecorder:
    """Callback that stores the metrics of each evaluation."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_evaluation_end(self, data: dict[str, Any]) -> None:
        self.metrics.append(data["metrics"])


async def train_and_evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Train and return the result row."""
    args.out.mkdir(parents=True, exist_ok=True)
    environment = ConversationEnvironment(**CONVERSATION_CONFIGS["customer_service"])
    transcripts = await environment.transcripts(400, skill=0.4, seed=args.seed, eval_share=0.25)
    (args.out / "transcripts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in transcripts))
    config = TrainingConfig(
        num_episodes=8 * args.steps, num_generations=8, gradient_accumulation_steps=8, seed=args.seed,
        demonstrations=args.out / "transcripts.jsonl", demonstration_steps=args.imitation, eval_share=0.25,
        eval_num_generations=16, eval_steps=0, output_dir=args.out / "run", overrides={"demonstrations.batch": 32},
    )  # fmt: skip
    train_reward, eval_reward = (
        ("env", CustomerServiceReward()) if args.reward == "met" else (CustomerServiceReward(), "env")
    )
    names = {"met": "reward", "customer_service": "reward/customer_service"}
    if args.reward != "met":
        names = {"met": "reward/environment", "customer_service": "reward"}
    evaluations, began = EvaluationRecorder(), time.perf_counter()
    agent = MultiTurnAgent(AgentConfig(model_name="seedling", max_new_tokens=24))
    trained = await train(
        agent, environment, train_reward, config=config, eval_rewards=[eval_reward], callbacks=[evaluations]
    )
    seconds = time.perf_counter() - began
    stages = {
        "before": trained.summary["before"],
        "imitated": evaluations.metrics[0],
        "after": trained.summary["after"],
    }
    replies = {}
    for row in environment.rows()[::5]:
        state = await environment.reset(row["id"])
        history = [{"role": turn.role, "content": turn.content} for turn in state.conversation_history]
        replies[history[-1]["content"]] = await trained.generate_response(history)
    numbers = {
        name: {stage: round(metrics[key], 3) for stage, metrics in stages.items()} for name, key in names.items()
    }
    return {
        "reward": args.reward, "seed": args.seed, **numbers, "seconds": round(seconds, 1), "said": replies,
        "held_out": stages["after"]["tasks"], "machine": platform.machine(), "threads": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", choices=("met", "customer_service"), default="met")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation", type=int, default=120, help="imitation updates")
    parser.add_argument("--steps", type=int, default=50, help="reinforcement-learning updates")
    parser.add_argument("--out", type=Path, required=True)
    print(json.dumps(asyncio.run(train_and_evaluate(parser.parse_args())), ensure_ascii=False))


if __name__ == "__main__":
    main()
