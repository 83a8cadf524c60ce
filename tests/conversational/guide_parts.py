"""Data, agents and environments of the tests of the StateSet guide's blocks."""

from __future__ import annotations

import yaml

from arborl import AgentConfig, ConversationEnvironment, ConversationTurn, MultiTurnAgent

HELLO = [{"role": "user", "content": "Hello, is this the bakery?"}]
SCENARIOS = [
    {
        "id": "rye", "topic": "goods", "user_responses": ["Do you have rye bread?"],
        "metadata": {"difficulty": "easy", "category": "stock"},
    },
    {"id": "hours", "topic": "shop", "user_responses": ["When do you open?", "And on Sunday?"]},
]  # fmt: skip
SMALL = {"num_episodes": 2, "num_generations": 2, "gradient_accumulation_steps": 2, "eval_num_generations": 1}
TALK = [
    ConversationTurn(role="user", content="Do you have rye bread?"),
    ConversationTurn(
        role="assistant",
        content="Yes, please take a rye bread from the shelf; it was baked at five. Do you want it sliced?",
    ),
]


def stub() -> MultiTurnAgent:
    return MultiTurnAgent(AgentConfig(use_stub_model=True, stub_responses=["Yes, we have rye bread today."]))


def small_agent(model_name="gpt2", **more) -> MultiTurnAgent:
    return MultiTurnAgent(AgentConfig(model_name=model_name, max_new_tokens=6, max_context=256, **more))


def bakery() -> ConversationEnvironment:
    return ConversationEnvironment(scenarios=SCENARIOS, max_turns=2)


def config_of(trained) -> dict:
    return yaml.safe_load((trained.run_folder / "config.yaml").read_text())
