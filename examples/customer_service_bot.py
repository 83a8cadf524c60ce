"""A customer-service bot: the preset customers, a reward made of rewards, held-out numbers before and after, a talk.

The customers are those of the preset `customer_service`: six scenarios, each with customers of four tempers.
What is trained on is a weighted sum; `ConcisenessReward` is only measured beside it, to see what the gain costs.

`seedling`, the default, speaks no English beyond small talk: with it this shows that the parts fit, and replies stay
nonsense. Take a model that can hold a conversation: `--model Qwen/Qwen2.5-1.5B-Instruct --episodes 800`, on a GPU.

    python examples/customer_service_bot.py [--episodes 24] [--model seedling] [--out FOLDER]
"""

import argparse
import asyncio

from arborl import (
    CONVERSATION_CONFIGS,
    AgentConfig,
    CompositeReward,
    ConcisenessReward,
    ConversationEnvironment,
    CustomerServiceReward,
    MultiTurnAgent,
    SafetyReward,
    get_config_for_task,
    train,
)


async def main(episodes, model, out):
    agent = MultiTurnAgent(
        AgentConfig(
            model_name=model,
            system_prompt="You are a friendly customer-service agent. Solve the customer's problem.",
            max_new_tokens=24 if model == "seedling" else 160,
            temperature=0.9,
        )
    )
    customers = ConversationEnvironment(**CONVERSATION_CONFIGS["customer_service"], max_turns=3)
    good_service = CompositeReward([CustomerServiceReward(weight=0.8), SafetyReward(weight=0.2)])
    config = get_config_for_task(  # what suits the domain and the model's size; what is said here wins
        "customer_service",
        model_name=model,
        num_episodes=episodes,
        num_generations=4,
        eval_num_generations=1,
        eval_steps=0,
        output_dir=out,
    )
    trained = await train(agent, customers, good_service, config=config, eval_rewards=[ConcisenessReward()])

    for when in ("before", "after"):
        found = trained.summary[when]
        beside = found["reward/conciseness"]
        print(f"{when}: reward {found['reward']:.3f} on {found['tasks']:.0f} held-out tasks, conciseness {beside:.3f}")

    history = [{"role": "user", "content": "Hello! My order has not arrived."}]
    history.append({"role": "assistant", "content": await trained.generate_response(history)})
    history.append({"role": "user", "content": "It was due on Monday. Where is it?"})
    history.append({"role": "assistant", "content": await trained.generate_response(history)})
    for message in history:
        print(f"{message['role']:>9}: {message['content']}")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--episodes", type=int, default=24, help="scenarios to play, each by a group of four")
    words.add_argument("--model", default="seedling")
    words.add_argument("--out", help="folder of the run; by default the next free runs/conversation-NNN")
    asyncio.run(main(**vars(words.parse_args())))
