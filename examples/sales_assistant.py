"""A sales assistant: GSPO, several objectives at once, replies that differ, and a memory of earlier buyers.

The objectives are multiplied, so that none can be bought with another: an assistant that presses, or says the same to
everybody, earns little however well it sells. After training the agent remembers: what one conversation said is there
in the next.

`seedling`, the default, knows nothing to sell and repeats its few phrases: it shows that the parts fit. Take a model
that writes: `--model Qwen/Qwen2.5-1.5B-Instruct --episodes 800`, on a GPU.

    python examples/sales_assistant.py [--episodes 24] [--model seedling] [--out FOLDER]
"""

import argparse
import asyncio

from arborl import (
    CONVERSATION_CONFIGS,
    AgentConfig,
    ConversationEnvironment,
    ConversationMemory,
    GSPOConfig,
    MultiObjectiveReward,
    MultiTurnAgent,
    SafetyReward,
    SalesAssistantReward,
    SimilarityAwareReward,
    train_with_gspo,
)


async def main(episodes, model, out):
    agent = MultiTurnAgent(
        AgentConfig(model_name=model, max_new_tokens=24 if model == "seedling" else 160),
        memory=ConversationMemory(max_turns=40, summarization_threshold=20),
    )
    buyers = ConversationEnvironment(**CONVERSATION_CONFIGS["sales"], max_turns=3)
    honest_sale = MultiObjectiveReward(
        objectives=[
            {"name": "sales", "reward": SalesAssistantReward(), "weight": 0.6},
            {"name": "varied", "reward": SimilarityAwareReward(group=0.3), "weight": 0.2},
            {"name": "safe", "reward": SafetyReward(), "weight": 0.2},
        ],
        aggregation="product",
        normalize=True,
    )
    config = GSPOConfig(  # ratios of whole conversations, held within 3e-4 below and 4e-4 above 1
        num_episodes=episodes,
        num_generations=4,
        beta=0.01,
        eval_num_generations=1,
        eval_steps=0,
        output_dir=out,
    )
    trained = await train_with_gspo(config, agent, buyers, reward_model=honest_sale)
    for when in ("before", "after"):
        found = trained.summary[when]
        print(f"{when}: reward {found['reward']:.3f} on {found['tasks']:.0f} held-out tasks")

    await trained.generate_response([{"role": "user", "content": "Hello! I am Ann, and I look for a tent for two."}])
    reply = await trained.generate_response([{"role": "user", "content": "Hello again! What did I look for?"}])
    print(f"remembered: {len(trained.memory)} messages of {len(trained.memory.conversations)} conversations")
    print(f"assistant: {reply}")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--episodes", type=int, default=24, help="scenarios to play, each by a group of four")
    words.add_argument("--model", default="seedling")
    words.add_argument("--out", help="folder of the run; by default the next free runs/conversation-NNN")
    asyncio.run(main(**vars(words.parse_args())))
