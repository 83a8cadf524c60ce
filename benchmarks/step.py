"""One whole GRPO step of ours beside TRL's `GRPOTrainer`, on the same work, in one run.

    python benchmarks/step.py --device cpu --case single --json

A step is rollout, scoring and update. Cases on a CPU, with a Llama of 5 million parameters: `single` (4 prompts x 8, 64
tokens each) and `multi-turn` (4 frozen lakes x 8, four turns of 15 tokens). On a GPU, with a random Qwen2.5-0.5B in
bfloat16: `W1` (32 prompts of 512 tokens x 8, 128 sampled) and `W2` (8 of 2,048 x 8, 256 sampled).

Equal by construction: no token ends a reply, so both sides sample the same number of tokens; both play the same
environment for the same number of turns; rewards are a function of the ids; neither has a reference model. TRL runs
without vLLM and without gradient checkpointing, generates once an optimiser step, and is given several sizes of
micro-batch: its best counts. In `multi-turn` it uses its own loop over tool calls, with the environment as the tool;
every reply is a call. In bfloat16 TRL's optimiser works on the weights themselves, ours on float32 copies of them.

Each side runs in a process of its own, as it comes: what Arbor sets for its own sake is not set for TRL. Both have one
step to warm up; the best of `--repeats` counts. Needs `trl` and `datasets`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}

import arborl  # noqa: F401  # before torch, as everyone does who starts a run

# isort: split
import datasets
import numpy as np
import tokenizers
import torch
import transformers as hf
import trl
from engine import QWEN
from trl import GRPOConfig, GRPOTrainer

from arborl.agents.agent import FunctionAgent, Model
from arborl.algorithms import make_algorithm
from arborl.chat import Renderer
from arborl.config.run import AlgorithmConfig, LearnerConfig
from arborl.engines.local import LocalEngine
from arborl.envs.env import Env, Observation, Step
from arborl.envs.frozen_lake import FrozenLake
from arborl.learner.learner import Learner
from arborl.models.attention import NAME
from arborl.models.load import resolve, tune_cpu
from arborl.rollout.recorder import Limits
from arborl.rollout.runner import Cast, Rollout
from arborl.rollout.tree import plant
from arborl.types import Call, Episode, Group, Message, Sampling, Task, ToolSpec

FIVE_MILLION = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 40, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
AS_IT_COMES = {"MIMALLOC_PURGE_DELAY": "10"}
"""The allocator's own setting, for the side that is not Arbor's."""
RATE = 1e-6
"""So small that the policy, and with it the work, stays as it is."""
MOVE = ToolSpec(
    "move",
    "Say something to the lake.",
    {"type": "object", "properties": {"text": {"type": "string", "description": "What to say."}}, "required": ["text"]},
)
"""What the model is told of the lake, on both sides."""


@dataclass(frozen=True)
class Case:
    """`prompts` x `group` episodes of `turns`, each of which samples `sampled` tokens."""

    name: str
    device: str
    prompts: int
    group: int
    prompt: int
    """Tokens of the first prompt."""
    sampled: int
    tried: tuple[int, ...]
    """Sequences a micro-batch that TRL may choose from."""
    turns: int = 1
    context: int = 0
    """The longest conversation; 0 where the first prompt and reply are all."""

    @property
    def episodes(self) -> int:
        return self.prompts * self.group


CASES = [
    Case("single", "cpu", 4, 8, 64, 64, tried=(32, 8)),
    Case("multi-turn", "cpu", 4, 8, 221, 15, tried=(32, 8), turns=4, context=512),
    Case("W1", "cuda", 32, 8, 512, 128, tried=(256, 128, 64, 32)),
    Case("W2", "cuda", 8, 8, 2048, 256, tried=(64, 32, 16, 8)),
]


@dataclass
class Timing:
    """One step: seconds, of which sampling took some; tokens sampled; tokens run through the model to do so."""

    seconds: float
    rollout: float
    sampled: int
    read: int


# ------------------------------------------------------------------------------------------------ on both sides


def make_model(case: Case, tiny: bool) -> hf.PreTrainedModel:
    """The same weights at every call; no token ends a reply."""
    torch.manual_seed(0)
    if case.device == "cuda":
        model: hf.PreTrainedModel = hf.Qwen2ForCausalLM(hf.Qwen2Config(**(QWEN | TINY if tiny else QWEN)))
        model = model.to("cpu" if tiny else "cuda", torch.bfloat16)
    else:
        words = {"vocab_size": 2048} if case.turns > 1 else {}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**(FIVE_MILLION | words), rms_norm_eps=1e-6))
        if case.turns > 1:
            sow(model)
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = None
    gc.collect()
    gc.freeze()  # as a run does: the library's objects are not looked through again and again, on either side
    return model


@torch.no_grad()
def sow(model: hf.PreTrainedModel) -> None:
    """Put the embedded model's weights into a larger one, whose other parts add nothing: it plays alike."""
    seedling = hf.AutoModelForCausalLM.from_pretrained(resolve("seedling"), dtype=torch.float32)
    narrower = math.sqrt(seedling.config.hidden_size / model.config.hidden_size)  # norms divide by the mean, of more
    small = dict(seedling.named_parameters())
    for name, weight in model.named_parameters():
        if any(part in name for part in ("embed_tokens", "o_proj", "down_proj")):
            weight.zero_()
        if name in small:
            corner = tuple(slice(size) for size in small[name].shape)
            weight[corner] = small[name] * (narrower if "norm" in name else 1.0)


def reward_of(ids: Sequence[int]) -> float:
    return float(sum(ids) % 7)


def prompts_of(case: Case, vocabulary: int, step: int) -> list[list[int]]:
    return np.random.default_rng(step).integers(2, vocabulary, (case.prompts, case.prompt)).tolist()


def lake_seeds(case: Case, step: int) -> list[int]:
    return [1000 * step + number for number in range(case.prompts)]


class Lake(FrozenLake):
    """A lake as a tool, of always as many turns: who falls in or arrives before the last begins again."""

    def __init__(self, turns: int):
        super().__init__()
        self.turns = turns

    async def reset(self, task: Task, seed: int) -> Observation:
        self.task, self.seed, self.turn = task, seed, 0
        return await super().reset(task, seed)

    async def step(self, action: Message) -> Step:
        step = await super().step(action)
        self.turn += 1
        observation = step.observation
        if step.over:
            observation = await super().reset(self.task, self.seed)
        answer = Message("tool", observation.messages[-1].content, name=MOVE.name)
        return Step(Observation((answer,)), step.reward, truncated=self.turn >= self.turns)


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value
    raise RuntimeError("it waited for something")


# ------------------------------------------------------------------------------------------------ ours


async def walk(task: Task, env: Env, model: Model) -> None:
    """Every message goes to the lake, as the arguments of its tool."""
    messages = list((await env.reset(task, task.seed)).messages)
    while True:
        message = await model.chat(messages, [MOVE])
        step = await env.step(message)
        if step.over:
            return
        messages += [message, *step.observation.messages]


class Ours:
    """Engine and learner on one model, put together as a run does."""

    def __init__(self, case: Case, model: hf.PreTrainedModel, micro_batch_tokens: int):
        model.set_attn_implementation(NAME)
        self.case, self.model = case, model.eval()
        context = case.context or case.prompt + case.sampled
        self.engine = LocalEngine(model, context, max(case.episodes, 256))
        self.algorithm = make_algorithm(AlgorithmConfig(name="grpo", std="group"))
        self.sampling = Sampling(case.sampled, stop=(model.config.vocab_size,))
        config = LearnerConfig(lr=RATE, decay="none", micro_batch_tokens=micro_batch_tokens)
        self.learner = Learner(model, config, self.sampling, self.algorithm.needs)
        self.share = 1.0
        """Tokens that were learned from, over those that rows of their own would have had."""
        self.renderer = Renderer.from_folder(resolve("seedling"))

    async def step(self, number: int) -> Timing:
        """Sample, score, credit, learn, publish."""
        began = time.perf_counter()
        groups = await (self._converse(number) if self.case.turns > 1 else self._answer(number))
        rollout = time.perf_counter() - began
        for group in groups:
            for episode in group.episodes:
                episode.rewards["ids"] = reward_of([t for call in episode.calls for t in call.completion.tokens])
        kept = self.algorithm.keep(groups)
        forest = plant(kept)
        terms = self.learner.look(forest.trees, forest.terms, self.algorithm.needs)
        self.learner.update(forest.trees, self.algorithm.credit(kept, terms), self.algorithm)
        await self.engine.load(self.learner.weights(), number + 1)
        synchronize(self.model)
        seconds = time.perf_counter() - began
        if len(kept) != len(groups) or any(group.survivors != group.episodes for group in groups):
            raise RuntimeError("some episodes were not learned from; the work is not the same")
        self.share = sum(map(len, forest.trees)) / forest.raw_tokens
        counted = self.engine.metrics()
        return Timing(seconds, rollout, int(counted["engine/sampled"]), int(counted["engine/read"]))

    async def _answer(self, step: int) -> list[Group]:
        async def episode(task: Task, prompt: list[int], number: int) -> Episode:
            sampling = dataclasses.replace(self.sampling, seed=1000 * step + number)
            completion = await self.engine.generate(prompt, sampling, session=str(number))
            return Episode(str(number), task, calls=[Call(tuple(prompt), completion, 0)])

        async def group(number: int, prompt: list[int]) -> Group:
            task, size = Task(str(number)), self.case.group
            numbers = range(size * number, size * number + size)
            return Group(task, list(await asyncio.gather(*(episode(task, prompt, n) for n in numbers))))

        prompts = prompts_of(self.case, self.model.config.vocab_size, step)
        return list(await asyncio.gather(*(group(number, prompt) for number, prompt in enumerate(prompts))))

    async def _converse(self, step: int) -> list[Group]:
        case = self.case
        cast = Cast(lambda task: FunctionAgent(walk), lambda task: Lake(case.turns))
        limits = Limits(max_turns=case.turns + 1, max_context=case.context)
        rollout = Rollout(self.engine, self.renderer, cast, self.sampling, limits, case.episodes)
        return await rollout.collect([Task("lake", seed=seed) for seed in lake_seeds(case, step)], step, case.group)


def measure_ours(case: Case, tiny: bool, repeats: int, micro_batch_tokens: int) -> tuple[Timing, dict[str, Any]]:
    tune_cpu()
    ours = Ours(case, make_model(case, tiny), micro_batch_tokens)
    with asyncio.Runner() as runner:
        timings = [runner.run(ours.step(number)) for number in range(repeats + 1)]
    return fastest(timings), {"learned_share": round(ours.share, 3)}


# ------------------------------------------------------------------------------------------------ TRL's

EVERY_REPLY_IS_A_CALL = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?=[\s\S])",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "move", "arguments": {"text": "{content}"}}},
        },
        "content": {"content": "text"},
    },
}


class Counted(GRPOTrainer):
    """Counts what it reads and samples, and for how long."""

    read = sampled = 0
    generating = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generating += time.perf_counter() - began
        sampled = sum(map(len, completion_ids))
        self.sampled += sampled
        self.read += sum(map(len, prompt_ids)) + sampled - len(completion_ids)  # the last one is not read
        return completion_ids, logprobs


class Watch(hf.TrainerCallback):
    """Times each step, from its first micro-batch to after the optimiser's step."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []
        self.trainer: Counted | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        synchronize(self.trainer.model)
        self.trainer.read, self.trainer.sampled, self.trainer.generating = 0, 0, 0.0
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        assert trainer is not None
        synchronize(trainer.model)
        seconds = time.perf_counter() - self.began
        self.timings.append(Timing(seconds, trainer.generating, trainer.sampled, trainer.read))


class LakeTool:
    """A lake as TRL plays it."""

    def __init__(self, turns: int):
        self._env = Lake(turns)

    def reset(self, **row: Any) -> None:
        now(self._env.reset(Task("lake", seed=row["seed"]), row["seed"]))

    def move(self, text: str):  # type: ignore[no-untyped-def]  # TRL would tell the model of the type
        """Say something to the lake.

        Args:
            text: What to say.
        """
        return now(self._env.step(Message("assistant", text))).observation.messages[-1].content


def scores(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def words(vocabulary: int) -> hf.PreTrainedTokenizerFast:
    """Token 7 is the word `w7`; the end token is one the model cannot say."""
    special = {"<pad>": 0, "<unknown>": 1, "<end>": vocabulary}
    known = special | {f"w{number}": number for number in range(2, vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )


def lake_tokenizer() -> hf.PreTrainedTokenizerFast:
    tokenizer = hf.AutoTokenizer.from_pretrained(resolve("seedling"))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.response_template = EVERY_REPLY_IS_A_CALL
    return tokenizer


def rows_of(case: Case, steps: int, vocabulary: int) -> list[dict[str, Any]]:
    if case.turns == 1:
        prompts = [prompt for step in range(steps) for prompt in prompts_of(case, vocabulary, step)]
        return [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
    rows = []
    for seed in (seed for step in range(steps) for seed in lake_seeds(case, step)):
        opening = now(Lake(case.turns).reset(Task("lake", seed=seed), seed))
        rows.append({"prompt": [{"role": m.role, "content": m.content} for m in opening.messages], "seed": seed})
    return rows


def trl_steps(case: Case, tiny: bool, repeats: int, size: int, folder: str) -> list[Timing]:
    """Timings of TRL's steps with micro-batches of `size` sequences, the warm-up first."""
    model = make_model(case, tiny)
    cpu = model.device.type == "cpu"
    parts = case.episodes // size
    settings = GRPOConfig(
        output_dir=folder, use_cpu=cpu, bf16=model.dtype == torch.bfloat16, max_steps=repeats + 1,
        per_device_train_batch_size=size, gradient_accumulation_steps=parts, steps_per_generation=parts,
        num_generations=case.group, max_completion_length=case.context or case.sampled,
        generation_kwargs={"max_new_tokens": case.sampled}, max_tool_calling_iterations=case.turns - 1,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=RATE,
        lr_scheduler_type="constant", gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True,
        logging_strategy="no", save_strategy="no", report_to="none",
    )  # fmt: skip
    watch = Watch()
    tokenizer = words(model.config.vocab_size) if case.turns == 1 else lake_tokenizer()
    trainer = watch.trainer = Counted(
        model, scores, settings, datasets.Dataset.from_list(rows_of(case, repeats + 1, model.config.vocab_size)),
        processing_class=tokenizer, callbacks=[watch],
        environment_factory=(lambda: LakeTool(case.turns)) if case.turns > 1 else None,
    )  # fmt: skip
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    watch.trainer = None
    return watch.timings


def measure_trl(case: Case, tiny: bool, repeats: int) -> tuple[Timing, dict[str, Any]]:
    """The best micro-batch's best step."""
    tried: dict[int, float | str] = {}
    found: list[Timing] = []
    for size in case.tried:
        with tempfile.TemporaryDirectory() as folder:
            try:
                timing = fastest(trl_steps(case, tiny, repeats, size, folder))
                tried[size] = round(timing.seconds, 4)
                found.append(timing)
            except torch.OutOfMemoryError:
                tried[size] = "out of memory"
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if not found:
        raise RuntimeError(f"{case.name}: no micro-batch of {case.tried} fits into the GPU's memory")
    return min(found, key=lambda timing: timing.seconds), {"baseline_tried": tried}


# ------------------------------------------------------------------------------------------------ the comparison


def fastest(timings: list[Timing]) -> Timing:
    """Of one side's steps; the first warms up and does not count."""
    return min(timings[1:], key=lambda timing: timing.seconds)


def synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def measure(side: str, case: Case, tiny: bool, repeats: int, micro_batch_tokens: int) -> tuple[Timing, dict[str, Any]]:
    if side == "trl":
        return measure_trl(case, tiny, repeats)
    return measure_ours(case, tiny, repeats, micro_batch_tokens)


def in_a_process(side: str, case: Case) -> tuple[Timing, dict[str, Any]]:
    """The same in a process of its own, told what this one was told."""
    command = [sys.executable, *sys.argv, "--side", side, "--case", case.name]
    environment = os.environ | (AS_IT_COMES if side == "trl" else {})
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    timing, more = json.loads(done.stdout.splitlines()[-1])
    return Timing(**timing), more


def compare(case: Case, tiny: bool, micro_batch_tokens: int) -> dict[str, Any]:
    baseline, tried = in_a_process("trl", case)
    print(f"{case.name}: TRL {baseline.seconds:.3f} s a step, {tried}; now ours", file=sys.stderr, flush=True)
    mine, share = in_a_process("ours", case)
    bf16 = case.device == "cuda"
    model = "random Qwen2.5-0.5B" if bf16 else "seedling grown to 5M" if case.turns > 1 else "random 5M Llama"
    return {
        "case": case.name, "model": "tiny" if tiny else model, "prompts": case.prompts, "group": case.group,
        "turns": case.turns, "prompt": case.prompt, "sampled_a_turn": case.sampled,
        "ours_s": round(mine.seconds, 4), "baseline_s": round(baseline.seconds, 4),
        "ratio": round(baseline.seconds / mine.seconds, 2),
        "ours_rollout_s": round(mine.rollout, 4), "baseline_rollout_s": round(baseline.rollout, 4),
        "ours_sampled": mine.sampled, "baseline_sampled": baseline.sampled,
        "ours_read": mine.read, "baseline_read": baseline.read, **share, **tried,
        "ours_weights": "bfloat16, float32 masters" if bf16 else "float32",
        "baseline_weights": "bfloat16" if bf16 else "float32", "micro_batch_tokens": micro_batch_tokens,
        "device": torch.cuda.get_device_name() if bf16 and not tiny else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": hf.__version__,
        "trl": trl.__version__, "python": platform.python_version(),
    }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    work = "{case}: {prompts} x {group} x {turns} of {prompt} + {sampled_a_turn} tokens, {model}".format_map(row)
    speed = "ours {ours_s:.3f} s a step, TRL {baseline_s:.3f} s, {ratio:.2f}x".format_map(row)
    tokens = "sampled {ours_sampled} and {baseline_sampled}, read {ours_read} and {baseline_read}".format_map(row)
    return f"{work}\n  {speed}; {tokens}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="without one, all of the device")
    parser.add_argument("--repeats", type=int, help="3 on a CPU, 2 on a GPU")
    parser.add_argument("--micro-batch-tokens", type=int, help="ours: 4,096 on a CPU, 16,384 on a GPU")
    parser.add_argument("--tried", type=int, nargs="*", help="TRL: sequences a micro-batch; without any, several")
    parser.add_argument("--json", action="store_true", help="one JSON line a case, nothing else")
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)  # one alone
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # a GPU's case, small, on a CPU
    args = parser.parse_args()
    cases = [case for case in CASES if case.device == args.device and args.case in (None, case.name)]
    if not cases:
        parser.error(f"--case {args.case} is not for --device {args.device}")
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    cuda = args.device == "cuda"
    for case in cases:
        if args.tried:
            case = dataclasses.replace(case, tried=tuple(args.tried))
        if args.tiny:
            prompt = case.prompt if case.turns > 1 else 16  # a lake's is what it is
            case = dataclasses.replace(case, prompts=2, prompt=prompt, sampled=8, tried=(16, 8))
        repeats, tokens = args.repeats or (2 if cuda else 3), args.micro_batch_tokens or (16384 if cuda else 4096)
        if args.side:
            timing, more = measure(args.side, case, args.tiny, repeats, tokens)
            print(json.dumps([dataclasses.asdict(timing), more]))
            continue
        row = compare(case, args.tiny, tokens)
        print(json.dumps(row) if args.json else describe(row))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
