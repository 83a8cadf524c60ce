"""A domain of your own: an `Environment` subclass, a reward from `@reward_function`, PPO with a critic.

A robot (P) is to reach its charger (G) along a corridor. The agent sees the corridor as text and answers one move a
turn; who arrives is rewarded, the sooner the more. `seedling` knows the words for moves and hardly looks: on a CPU it
learns within a minute or two to walk towards G. Where there is more to read, take a model that reads:
`--model Qwen/Qwen2.5-0.5B-Instruct`, or larger.

    python examples/custom_domain_agent.py [--episodes 160] [--model seedling] [--out FOLDER]
"""

import argparse
import asyncio
import re

import arborl

MOVES = {"Left": -1, "Right": 1}


class Corridor(arborl.Environment):
    """Everything that belongs to an episode is in its state: the object itself plays many at once."""

    system = "Walk from P to G. Each turn, answer with one move: <answer>Left</answer> or <answer>Right</answer>."
    max_turns = 8
    scenarios = [
        {"id": f"{size}-{place}-{goal}", "size": size, "place": place, "goal": goal}
        for size in (4, 5, 6)
        for place in range(size)
        for goal in range(size)
        if place != goal
    ]

    async def reset(self, scenario=None):
        return arborl.EnvironmentState([{"role": "user", "content": self.picture(scenario)}], scenario)

    async def step(self, state, action):
        told = re.search(r"<answer>(Left|Right)</answer>", action.content)
        size, place, goal = (state.metadata[name] for name in ("size", "place", "goal"))
        place = min(max(place + (MOVES[told[1]] if told else 0), 0), size - 1)
        now = {"size": size, "place": place, "goal": goal, "completed": place == goal}
        return arborl.EnvironmentState((), now), self.picture(now), 0.0, now["completed"]

    def picture(self, state):
        return "".join({state["place"]: "P", state["goal"]: "G"}.get(at, "_") for at in range(state["size"]))


@arborl.reward_function
def arrives(turns, context=None):
    """1 for arriving, a little less for each turn it took; 0 for not arriving."""
    took = sum(turn.role == "assistant" for turn in turns)
    return (1.0 - 0.05 * took) * context["metrics"].get("success", 0.0)


async def main(episodes, model, out):
    agent = arborl.MultiTurnAgent(arborl.AgentConfig(model_name=model, max_new_tokens=8, max_context=512))
    config = arborl.TrainingConfig(
        algorithm="ppo",
        num_episodes=episodes,
        num_generations=8,
        gradient_accumulation_steps=8,
        eval_share=0.25,
        output_dir=out,
    )
    critic = arborl.ValueFunction(gamma=1.0, gae_lambda=0.95)
    trained = await arborl.train(agent, Corridor(), arrives, config=config, value_function=critic)
    for when in ("before", "after"):
        found = trained.summary[when]
        print(f"{when}: {found['success']:.0%} of held-out corridors walked, reward {found['reward']:.2f}")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--episodes", type=int, default=160, help="scenarios to play, each by a group of eight")
    words.add_argument("--model", default="seedling")
    words.add_argument("--out", help="folder of the run; by default the next free runs/conversation-NNN")
    asyncio.run(main(**vars(words.parse_args())))
