"""Technical support: scenarios of your own, an agent that looks things up, a trainer with callbacks.

`Support` overrides `generate_response`: it adds what a small knowledge base says about the problem before the model is
asked. The same method answers in training and afterwards, so the agent is trained with the context it will have.

`seedling`, the default, cannot read the notes it is given: it shows that the parts fit. Take an instruction-tuned
model: `--model Qwen/Qwen2.5-1.5B-Instruct --episodes 1000`, on a GPU.

    python examples/technical_support_agent.py [--episodes 24] [--model seedling] [--out FOLDER]
"""

import argparse
import asyncio
from pathlib import Path

import arborl

NOTES = {
    "wifi": "Wi-Fi drops: restart the router, then move to the 5 GHz band.",
    "printer": "Printer offline: turn it off and on, then remove the paused job from the queue.",
    "password": "Password lost: use the link 'Forgot password'; it works for one hour.",
}
SCENARIOS = [
    {"id": f"{topic}-{number}", "topic": topic, "user_responses": [opening, {"text": follow_up, "expect": expect}]}
    for topic, follow_up, expect, openings in (
        ("wifi", "What should I do first?", ["router"], ["My wifi drops every hour.", "The wifi is gone again!"]),
        ("printer", "And after that?", ["queue"], ["My printer says offline.", "The printer does not print."]),
        ("password", "How long does the link work?", ["hour"], ["I lost my password.", "My password is refused."]),
    )
    for number, opening in enumerate(openings, 1)
]


class Support(arborl.MultiTurnAgent):
    """Reads the notes about what the user has named."""

    async def generate_response(self, conversation_history):
        said = " ".join(turn["content"].lower() for turn in conversation_history if turn["role"] == "user")
        known = [note for word, note in NOTES.items() if word in said]
        told = [{"role": "system", "content": "You are technical support. What is known:\n" + "\n".join(known)}]
        return await super().generate_response(
            told + [turn for turn in conversation_history if turn["role"] != "system"]
        )


async def main(episodes, model, out):
    agent = Support(arborl.AgentConfig(model_name=model, max_new_tokens=24 if model == "seedling" else 160))
    trainer = arborl.MultiTurnGRPOTrainer(
        agent,
        arborl.ConversationEnvironment(scenarios=SCENARIOS, max_turns=2),
        reward_function=arborl.TechnicalSupportReward(),
        config=arborl.TrainingConfig(
            num_episodes=episodes, num_generations=4, eval_share=0.34, eval_steps=0, output_dir=out
        ),
        eval_rewards=[arborl.TaskCompletionReward()],
    )
    stop = arborl.EarlyStoppingCallback(patience=20, metric="reward/mean", min_delta=0.005)
    keep = arborl.CheckpointCallback(save_dir=Path(out or "runs") / "support-checkpoints", save_steps=10, keep=2)
    trained = await trainer.train(callbacks=[stop, keep])
    for when in ("before", "after"):
        found = trained.summary[when]
        print(f"{when}: reward {found['reward']:.3f}, tasks completed {found['reward/task_completion']:.3f} (held out)")
    print(f"stopped early: {stop.abort_reason or 'no'}; checkpoints: {', '.join(path.name for path in keep.saved)}")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--episodes", type=int, default=24, help="scenarios to play, each by a group of four")
    words.add_argument("--model", default="seedling")
    words.add_argument("--out", help="folder of the run; by default the next free runs/conversation-NNN")
    asyncio.run(main(**vars(words.parse_args())))
