"""`train` on the customer-service preset with the embedded model, and a second reward that is not learned from.

    python benchmarks/customer_service.py --seed 0 --out runs/customer-service

seedling has never heard of customers. It imitates transcripts of a scripted agent of middling skill first, then learns
from a reward, all in one call of `arborl.train`. Held out is a quarter of the pairs of a scenario and a kind of user:
the scenario is known then, and who comes with it is not. Prints one JSON line: both rewards before training, after
imitation and at the end, and some of what the agent says.

`--reward met` learns from what a good reply must mention (the environment's own reward) and shows the heuristic
`customer_service` beside; `--reward customer_service` the other way round.
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


class Heard:
    """Keeps what is measured on the way."""

    def __init__(self) -> None:
        self.measured: list[dict[str, float]] = []

    def on_evaluation_end(self, data: dict[str, Any]) -> None:
        self.measured.append(data["metrics"])


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and say what came of it."""
    args.out.mkdir(parents=True, exist_ok=True)
    environment = ConversationEnvironment(**CONVERSATION_CONFIGS["customer_service"])
    transcripts = await environment.transcripts(400, skill=0.4, seed=args.seed, eval_share=0.25)
    (args.out / "transcripts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in transcripts))
    config = TrainingConfig(
        num_episodes=8 * args.steps, num_generations=8, gradient_accumulation_steps=8, seed=args.seed,
        demonstrations=args.out / "transcripts.jsonl", demonstration_steps=args.imitation, eval_share=0.25,
        eval_num_generations=16, eval_steps=0, output_dir=args.out / "run", overrides={"demonstrations.batch": 32},
    )  # fmt: skip
    learned, beside = ("env", CustomerServiceReward()) if args.reward == "met" else (CustomerServiceReward(), "env")
    names = {"met": "reward", "customer_service": "reward/customer_service"}
    if args.reward != "met":
        names = {"met": "reward/environment", "customer_service": "reward"}
    heard, began = Heard(), time.perf_counter()
    agent = MultiTurnAgent(AgentConfig(model_name="seedling", max_new_tokens=24))
    trained = await train(agent, environment, learned, config=config, eval_rewards=[beside], callbacks=[heard])
    seconds = time.perf_counter() - began
    stages = {"before": trained.summary["before"], "imitated": heard.measured[0], "after": trained.summary["after"]}
    said = {}
    for row in environment.rows()[::5]:
        state = await environment.reset(row["id"])
        history = [{"role": turn.role, "content": turn.content} for turn in state.conversation_history]
        said[history[-1]["content"]] = await trained.generate_response(history)
    numbers = {name: {stage: round(found[key], 3) for stage, found in stages.items()} for name, key in names.items()}
    return {
        "reward": args.reward, "seed": args.seed, **numbers, "seconds": round(seconds, 1), "said": said,
        "held_out": stages["after"]["tasks"], "machine": platform.machine(), "threads": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", choices=("met", "customer_service"), default="met")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation", type=int, default=120, help="updates of imitation")
    parser.add_argument("--steps", type=int, default=50, help="updates of reinforcement learning")
    parser.add_argument("--out", type=Path, required=True)
    print(json.dumps(asyncio.run(measured(parser.parse_args())), ensure_ascii=False))


if __name__ == "__main__":
    main()
