"""How gradients become weights, for how long, and how what they became is measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from arborl.config.base import Config


class LearnerConfig(Config):
    """How gradients become weights."""

    lr: float | None = Field(None, gt=0)
    """Without one, by the model's size: 6e-4 below 10M parameters (seedling), 1e-5 below 500M, else 1e-6; adapters ten
    times that."""
    lr_scale: float = Field(1.0, gt=0)
    """Times that, where `lr` is not given: 0.2 for a careful run, 2 for a bold one, whatever the model's size."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which `lr` is reached, from 0 at the first."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """The same as a share of all optimiser steps of the run, rounded up."""
    decay: Literal["none", "linear", "cosine", "constant_with_warmup"] = "linear"
    """What becomes of `lr` after the warm-up: `linear` and `cosine` bring it to `min_lr` at the run's last step,
    whether or not every step could be learned from; `none` keeps it; `constant_with_warmup` is another word for that.
    All are transformers' schedules of these names."""
    min_lr: float = Field(0.0, ge=0)
    """What `linear` and `cosine` come down to. Rates of a critic come down to the same share of their own."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's batch."""
    minibatches: int = Field(1, ge=1)
    """Optimiser steps a pass, each the mean over whole groups of its own; with fewer groups than this, fewer steps."""
    micro_batch_tokens: int = Field(0, ge=0)
    """Tree tokens that go through the model at once; changes memory and speed, never the result. 0 takes 4,096 on a CPU
    and on a GPU as many, up to 16,384, as the forecast of its memory has room for; where that does not suffice, it is
    halved until it does."""
    max_samples_per_trajectory: int | None = Field(None, ge=1)
    """Branches of an episode that are trained, where it has more; they count for those that are not. Without it, all.
    Advantages are always those of the whole episode."""
    downsample_mode: Literal["last", "random"] = "random"
    """With `max_samples_per_trajectory`, which. `random`: the last and a draw of the others (of all, where it is 1),
    with the expected gradient of all. `last`: the latest, with the weight of all."""
    attention: Literal["auto", "causal", "dense", "blocks", "kernel"] = "auto"
    """How trees are attended; `auto` takes the cheapest. All give the same result; one that does not is left, with a
    warning."""
    recompute: bool | Literal["auto"] = "auto"
    """Gradient checkpointing: run each layer again for its gradient instead of keeping what it computed. `auto` does on
    a GPU whose memory is forecast not to suffice otherwise."""
    memory_share: float = Field(0.9, gt=0, le=1)
    """Part of what a GPU has free, once the model is there, that the run may plan to take: with `micro_batch_tokens=0`,
    `recompute=auto` and `engine.kv_tokens=0` these are chosen so that learner and engine together fit."""
    master: Literal["float32", "none"] = "float32"
    """What the optimiser works on where the model is in bfloat16 or float16: float32 copies of its weights, or (for
    bfloat16 only) the weights themselves, which lose small updates."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What a GPU does not hold between steps. `optimizer` keeps float32 masters and AdamW's moments in the host's
    memory and brings them a part at a time; `all` gradients and the reference policy too. The result stays the same.
    With `strategy=fsdp2` the float32 parts are the masters: `optimizer` moves moments, `all` those parts too."""
    strategy: Literal["single", "ddp", "fsdp2", "deepspeed", "tensor"] = "single"
    """How the learner lies in its ranks, which all take the same steps. `ddp`: each holds everything and its own trees.
    `fsdp2`: each a part of every weight, gradient and moment. `deepspeed`: the same by DeepSpeed (needs the extra
    `deepspeed`), as far as `zero_stage` says. `tensor`: each some heads and columns of every layer, and all trees. See
    docs/scale-out.md."""
    ranks: int = Field(1, ge=1)
    """Processes that learn. `arborl train` starts them itself, each with a GPU of its own where there are some; under
    `torchrun` or `accelerate launch`, 1 takes all of theirs."""
    restarts: int = Field(2, ge=0)
    """How often a run that has lost a rank starts all of them anew and goes on from its last checkpoint by itself. It
    stops where one is lost at the same step again, and where `torchrun` or `accelerate launch` have started them."""
    zero_stage: Literal[1, 2, 3] = 2
    """With `strategy=deepspeed`, what each rank holds a part of: 1 moments, 2 gradients too, 3 weights too."""
    critic: Literal["auto", "none", "shared", "separate"] = "auto"
    """What estimates values: a head on the policy's own trunk, or a model of its own. `auto` is `shared` for an
    algorithm that needs one."""
    critic_lr: float | None = Field(None, gt=0)
    """Of the critic's own weights; without one, `lr` for a model of its own and ten times `lr` for a head."""
    critic_detach: bool = False
    """Keep the gradient of a shared critic's loss out of the trunk."""

    critic_from: str | None = None
    """Model that the critic, then one of its own, begins as; it must read the policy's tokens. Where it says one number
    itself (a sequence classifier of one label, such as a reward model) so does the critic from the start."""

    @property
    def own_critic(self) -> bool:
        """Whether a critic would be a model of its own."""
        return self.critic == "separate" or self.critic_from is not None

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the weights, and the whole of them is the engine's."""
        return self.strategy in ("fsdp2", "deepspeed", "tensor")

    @model_validator(mode="after")
    def _has_ranks(self) -> LearnerConfig:
        if self.ranks > 1 and self.strategy == "single":
            raise ValueError(f"ranks={self.ranks} with strategy=single, which is one process. Write strategy=fsdp2.")
        if self.strategy in ("deepspeed", "tensor") and self.offload != "none":
            raise ValueError(
                f"offload={self.offload} with strategy={self.strategy}, which keeps its parts on the device. Write "
                "strategy=fsdp2, or offload=none."
            )
        if "restarts" in self.model_fields_set and self.restarts != 2 and self.strategy == "single":
            raise ValueError(f"restarts={self.restarts} with strategy=single, which has no ranks. Leave it out.")
        if "zero_stage" in self.model_fields_set and self.zero_stage != 2 and self.strategy != "deepspeed":
            raise ValueError(f"zero_stage={self.zero_stage} with strategy={self.strategy}. Write strategy=deepspeed.")
        return self

    @model_validator(mode="after")
    def _is_one_schedule(self) -> LearnerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio:g} both say how long the "
                "warm-up is. Leave one out."
            )
        if self.lr is not None and self.lr_scale != 1.0:
            raise ValueError(f"lr_scale={self.lr_scale:g} is about the usual rate, and lr={self.lr:g}. Leave one out.")
        if self.min_lr and self.decay not in ("linear", "cosine"):
            raise ValueError(
                f"min_lr={self.min_lr:g} is what a decay comes down to, and decay={self.decay} has none. Write "
                "decay=linear or cosine, or leave min_lr out."
            )
        if self.min_lr and self.lr is not None and self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr:g} is above lr={self.lr:g}. Write a smaller min_lr.")
        return self

    @model_validator(mode="after")
    def _is_one_critic(self) -> LearnerConfig:
        if self.critic_from is not None and self.critic in ("shared", "none"):
            raise ValueError(
                f"critic_from={self.critic_from} is for a critic that is a model of its own, and critic={self.critic}. "
                "Write critic=separate, or leave one of both out."
            )
        return self

    @model_validator(mode="after")
    def _says_how_many(self) -> LearnerConfig:
        if self.downsample_mode != "random" and self.max_samples_per_trajectory is None:
            raise ValueError(
                f"downsample_mode={self.downsample_mode} says which branches are trained where not all are. Write "
                "max_samples_per_trajectory=2 too."
            )
        return self


class TrainerConfig(Config):
    """The run itself."""

    steps: int | None = Field(None, ge=1)
    """Updates; 30 where neither these nor `epochs` are given."""
    epochs: int | None = Field(None, ge=1)
    """Instead of `steps`: passes over the rows that are trained on. A step takes `rollout.tasks_per_step` of them and
    its spares; the last is filled up from the next pass. Of several sources, a pass is as many tasks as all have rows
    together. Tasks without end (an environment's, `data.endless`) have no passes."""
    save_every: int = Field(10, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep."""
    stop_seconds: float = Field(25.0, gt=0)
    """After SIGTERM or SIGHUP: seconds in which the run must have come to its last checkpoint; one that has not, for a
    long update, ends without. Schedulers kill after 30 seconds unless told otherwise. A second signal ends at once."""

    @model_validator(mode="after")
    def _is_one_length(self) -> TrainerConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} both say how long to train. Leave one out, or write null "
                "for it where a file has it."
            )
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 30)
        return self


class EvaluationConfig(Config):
    """Measured before, during and after training, on tasks that are never trained on."""

    tasks: int = Field(200, ge=0)
    """0 turns evaluation off."""
    before: bool = True
    """Measure before training too."""
    every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 evaluates before and after only."""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    """Without one as in training (`sampling`); so are the next three. A source's own `sampling` comes before them."""
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    greedy: bool = True
    """Also report the likeliest token's play."""
