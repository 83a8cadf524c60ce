"""Arbor's part of `step.py`: engine, rollout and learner as in a training run."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import transformers as hf
from gpu_profile import GpuProfile
from step_work import (
    LEARNING_RATE,
    MOVE,
    Case,
    FixedLengthLake,
    ModelSpec,
    Timing,
    fastest,
    id_reward,
    lake_seeds,
    make_prompts,
    peak_gib,
    synchronize,
)

from arborl.agents.agent_interface import FunctionAgent, Model
from arborl.algorithms import make_algorithm
from arborl.chat import Renderer
from arborl.config.run_config import AlgorithmConfig, LearnerConfig
from arborl.engines.local import LocalEngine
from arborl.engines.remote.vllm_engine import VllmEngine
from arborl.envs.env import Env
from arborl.learner.core.learner import Learner
from arborl.models.attention import ATTENTION_NAME
from arborl.models.model_loading import tune_cpu
from arborl.rollout.recorder import EpisodeLimits
from arborl.rollout.runner import EpisodeFactories, Rollout
from arborl.rollout.token_trees import build_token_trees
from arborl.tokens import Tokens
from arborl.types import Call, Episode, Group, Sampling, Task


async def play_lake(task: Task, env: Env, model: Model) -> None:
    """Agent that passes every reply to the environment as the argument of its tool."""
    messages = list((await env.reset(task, task.seed)).messages)
    while True:
        message = await model.chat(messages, [MOVE])
        step = await env.step(message)
        if step.over:
            return
        messages += [message, *step.observation.messages]


class ArborSteps:
    """Engine and learner of one model, connected as in a training run."""

    def __init__(
        self, case: Case, model_spec: ModelSpec, model: hf.PreTrainedModel, micro_batch_tokens: int, vllm_python: str
    ):
        model.set_attn_implementation(ATTENTION_NAME)
        self.case, self.model = case, model.eval()
        context = case.context or case.prompt + case.sampled
        self.engine: LocalEngine | VllmEngine
        self.algorithm = make_algorithm(AlgorithmConfig(name="grpo", std="group"))
        self.sampling = Sampling(case.sampled, top_p=case.top_p)
        config = LearnerConfig(lr=LEARNING_RATE, decay="none", micro_batch_tokens=micro_batch_tokens)
        if vllm_python:
            self.engine = VllmEngine(model, context, case.episodes, case.episodes * (context + 64), python=vllm_python)
        else:
            self.engine = LocalEngine(model, context, max(case.episodes, 256))
            self.engine.warm_up(self.sampling)
        self.learner = Learner(model, config, self.sampling, self.algorithm.needs)
        self.share = 1.0
        """Tokens of the token trees divided by the tokens of separate rows."""
        self.texts = model_spec.texts(model.config.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            self.renderer = Renderer.from_folder(model_spec.tokenizer_folder(Path(folder)))

    async def step(
        self, number: int, around: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()
    ) -> Timing:
        """One step: rollout, rewards, advantages, update, weights to the engine. The parts `rollout` and `update` run
        inside the context managers of `around`."""
        began = time.perf_counter()
        with around("rollout"):
            collect = self._collect_multi_turn if self.case.turns > 1 else self._collect_single_turn
            groups = await collect(number)
        rollout = time.perf_counter() - began
        for group in groups:
            for episode in group.episodes:
                episode.rewards["ids"] = id_reward([t for call in episode.calls for t in call.completion.tokens])
        kept = self.algorithm.keep(groups)
        forest = build_token_trees(kept)
        terms = self.learner.score_terms(forest.trees, forest.terms, self.algorithm.needs)
        with around("update"):
            self.learner.update(forest.trees, self.algorithm.credit(kept, terms), self.algorithm)
        await self.engine.load(self.learner.weights(), number + 1)
        synchronize(self.model)
        seconds = time.perf_counter() - began
        replies = [len(call.completion.tokens) for group in groups for e in group.episodes for call in e.calls]
        if set(replies) != {self.case.sampled}:
            raise RuntimeError(f"replies of {sorted(set(replies))} tokens; {self.case.sampled} were requested")
        if len(kept) != len(groups) or any(group.valid_episodes != group.episodes for group in groups):
            raise RuntimeError("some episodes were not used in the update; the work is not the same")
        self.share = sum(map(len, forest.trees)) / forest.raw_tokens
        engine_metrics = self.engine.metrics()
        return Timing(
            seconds, rollout, int(engine_metrics["engine/sampled"]), int(engine_metrics.get("engine/read", 0))
        )

    async def _collect_single_turn(self, step: int) -> list[Group]:
        async def episode(task: Task, prompt: Tokens, number: int) -> Episode:
            sampling = dataclasses.replace(self.sampling, seed=1000 * step + number)
            completion = await self.engine.generate(prompt, sampling, session=str(number))
            return Episode(str(number), task, calls=[Call(prompt, completion, 0)])

        async def group(number: int, prompt: Tokens) -> Group:
            task, size = Task(str(number)), self.case.group
            numbers = range(size * number, size * number + size)
            return Group(task, list(await asyncio.gather(*(episode(task, prompt, n) for n in numbers))))

        prompts = map(Tokens, make_prompts(self.case, self.texts, step))  # as the recorder of an episode gives them
        return list(await asyncio.gather(*(group(number, prompt) for number, prompt in enumerate(prompts))))

    async def _collect_multi_turn(self, step: int) -> list[Group]:
        case = self.case
        factories = EpisodeFactories(lambda task: FunctionAgent(play_lake), lambda task: FixedLengthLake(case.turns))
        limits = EpisodeLimits(max_turns=case.turns + 1, max_context=case.context)
        rollout = Rollout(self.engine, self.renderer, factories, self.sampling, limits, case.episodes)
        return await rollout.collect([Task("lake", seed=seed) for seed in lake_seeds(case, step)], step, case.group)


def measure_ours(
    case: Case,
    model_spec: ModelSpec,
    repeats: int,
    micro_batch_tokens: int,
    vllm_python: str = "",
    profiled: bool = False,
) -> tuple[Timing, dict[str, Any]]:
    """Arbor with its own engine, or with vLLM in a process of the interpreter `vllm_python`. `profiled` adds a step
    whose rollout and update are profiled."""
    tune_cpu()
    model = model_spec.load_with_adapters(case)
    began = time.perf_counter()
    steps = ArborSteps(case, model_spec, model, micro_batch_tokens, vllm_python)
    setup_seconds = time.perf_counter() - began
    with asyncio.Runner() as runner:
        timings = [runner.run(steps.step(number)) for number in range(repeats + 1)]
        profiles = {part: GpuProfile() for part in ("rollout", "update")} if profiled else {}
        if profiled:
            runner.run(steps.step(repeats + 1, profiles.__getitem__))
        runner.run(steps.engine.close())
    return fastest(timings), {
        "learned_share": round(steps.share, 3),
        "first_step_s": round(setup_seconds + timings[0].seconds, 2),
        "peak_gib": peak_gib(model.device.type),
        **{f"{part}_profile": profile.row for part, profile in profiles.items()},
    }
