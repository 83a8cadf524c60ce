"""Environments of `verifiers` for the tests of its adapter: one message, several, tools, tools with a state."""

import verifiers as vf
from datasets import Dataset


def rows(count, first=0):
    numbers = range(first, first + count)
    return Dataset.from_dict({"question": [f"{n} + 1?" for n in numbers], "answer": [str(n + 1) for n in numbers]})


def right(completion, answer):
    return float(completion[-1].content.strip() == answer)


async def short(completion):
    return float(len(completion[-1].content) < 5)


def sums(count=40, eval_count=0):
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.1])
    held_out = rows(eval_count, first=1000) if eval_count else None
    return vf.SingleTurnEnv(dataset=rows(count), eval_dataset=held_out, rubric=rubric, system_prompt="Add.")


class Guess(vf.MultiTurnEnv):
    """The answer is to be guessed; the environment says whether it is higher."""

    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["guesses"] += 1
        said, answer = messages[-1].content.strip(), state["answer"]
        if said == answer:
            state["final_env_response"] = [vf.UserMessage(content="Right.")]
            return state["final_env_response"]
        higher = said.isdigit() and int(said) < int(answer)
        return [vf.UserMessage(content="Higher." if higher else "Not higher.")]


def guesses(state):
    return float(state["guesses"])


def guess(count=5, **more):
    env = Guess(dataset=rows(count), rubric=vf.Rubric(funcs=[right_guess]), max_turns=4, **more)
    env.rubric.add_metric(guesses)
    return env


def right_guess(completion, answer):
    return float(any(message.role == "assistant" and message.content.strip() == answer for message in completion))


class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        found = await super().get_prompt_messages(state)
        return found[-1:]


def rewriting():
    return Rewriting(dataset=rows(5), rubric=vf.Rubric(funcs=[right_guess]), max_turns=4)


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def called(completion):
    return float(any(message.role == "tool" and message.content == "42" for message in completion))


def tools():
    return vf.ToolEnv(tools=[double], dataset=rows(5), rubric=vf.Rubric(funcs=[called]), max_turns=4)


class Ledger(vf.StatefulToolEnv):
    """Its tool adds to an amount in the state, which the model cannot name."""

    def __init__(self, **more):
        super().__init__(tools=[], **more)
        self.add_tool(self.add, args_to_skip=["state"])

    async def setup_state(self, state):
        state["amount"] = 0
        return state

    def add(self, number: int, state: dict) -> str:
        """Add a number."""
        state["amount"] += number
        return f"now {state['amount']}"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "state": state}


def amount(state):
    return state["amount"] / 10


def ledger():
    return Ledger(dataset=rows(5), rubric=vf.Rubric(funcs=[amount]), max_turns=6)


def group():
    def best(completions, **kwargs) -> list:
        return [1.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=rows(5), rubric=vf.Rubric(funcs=[best]))
