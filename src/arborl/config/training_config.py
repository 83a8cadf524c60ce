"""Settings of the learner, the trainer, evaluation and tracking."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from arborl.config.config_base import Config, as_list, overrides_of
from arborl.config.part_config import PartConfig
from arborl.config.rollout_config import SamplingConfig

MAX_LEARNING_RATE = 1.0
"""Largest learning rate that may be meant; a run with a higher one starts with a warning."""


def default_learning_rate(parameters: int, adapted: bool = False) -> float:
    """The default for a model with so many parameters; `adapted`: trained by adapters."""
    default = 6e-4 if parameters < 10_000_000 else 1e-5 if parameters < 500_000_000 else 1e-6
    return default * (10 if adapted else 1)


class LearnerConfig(Config):
    """The learner: optimizer, batches, memory, ranks and critic."""

    lr: float | None = Field(None, gt=0)
    """Learning rate. Default by model size: 6e-4 below 10M parameters (seedling), 1e-5 below 500M, else 1e-6; ten times
    that for adapters."""
    lr_scale: float = Field(1.0, gt=0)
    """Factor of the default learning rate, if `lr` is not set."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Linear warm-up from 0: number of optimizer steps; below 1 a share of all optimizer steps, rounded up."""
    decay: Literal["none", "linear", "cosine", "constant_with_warmup"] = "linear"
    """Schedule after the warm-up, as in transformers: `linear` and `cosine` reach `min_lr` at the last step; `none` and
    `constant_with_warmup` keep `lr`."""
    min_lr: float = Field(0.0, ge=0)
    """Final learning rate of `linear` and `cosine`. That of a critic decays to the same share."""
    epochs: int = Field(1, ge=1)
    """Epochs over the batch of a step."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch; a mini-batch consists of whole groups."""
    micro_batch_tokens: int = Field(0, ge=0)
    """Tree tokens of a micro-batch; changes memory and speed, not the result. 0: 4,096 on a CPU; on a GPU up to 65,536
    by the memory forecast, halved after an out-of-memory error."""
    max_samples_per_trajectory: int | None = Field(None, ge=1)
    """Maximum trained branches of an episode; their weights are scaled to represent all. Default: all branches.
    Advantages are those of the whole episode."""
    downsample_mode: Literal["last", "random"] = "random"
    """Selection of these branches. `random`: the last and a random subset of the others, with the expected gradient of
    all. `last`: the latest, with the weight of all."""
    attention: Literal["auto", "causal", "dense", "blocks", "kernel"] = "auto"
    """Attention over token trees; `auto` selects the cheapest. All give the same result; a path that fails its check is
    not used, with a warning."""
    recompute: bool | Literal["auto"] = "auto"
    """Gradient checkpointing. `auto`: on a GPU if the memory forecast requires it."""
    memory_share: float = Field(0.85, gt=0, le=1)
    """Share of the GPU memory that is free before the model is loaded; the run may use this much.
    `micro_batch_tokens=0`, `recompute=auto` and `engine.kv_tokens=0` are chosen within it."""
    master: Literal["float32", "none"] = "float32"
    """Master weights of a model in bfloat16 or float16: float32 copies, or none (bfloat16 only; small updates are
    lost)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State in host memory between steps. `optimizer`: float32 master weights and AdamW moments; `all`: gradients and
    the reference model too. The result is the same. With `strategy=fsdp2` the float32 shards are the master weights:
    `optimizer` offloads the moments, `all` the shards too."""
    strategy: Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "tensor"] = "single"
    """Distribution over ranks. `ddp`: replicated model, different trees. `fsdp2`: sharded weights, gradients and
    optimizer state. `zero1`, `zero2`, `zero3`: DeepSpeed's ZeRO (needs the extra `deepspeed`), which shards the
    optimizer state, from 2 on gradients, with 3 also weights. `tensor`: tensor parallelism, the same trees on all
    ranks. See docs/scale-out.md."""
    ranks: int = Field(1, ge=1)
    """Number of learner processes, one GPU each if there are GPUs. `arborl train` starts them; under `torchrun` or
    `accelerate launch`, 1 means all of their processes."""
    restarts: int = Field(2, ge=0)
    """Maximum automatic restarts from the last checkpoint after the loss of a rank. The run stops if a rank is lost at
    the same step again, or if `torchrun` or `accelerate launch` started the ranks."""
    critic: Literal["auto", "none", "shared", "detached", "separate"] = "auto"
    """The critic: a value head on the policy (`shared`; `detached` if the value loss must not train the policy's
    layers) or a separate model. `auto` is `shared` for algorithms that need a critic."""
    critic_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic. Default: `lr` for a separate model, ten times `lr` for a head."""
    critic_from: str | None = None
    """Initial model of a separate critic, with the tokenizer of the policy. A sequence classifier with one label, such
    as a reward model, keeps its head."""

    def learning_rate(self, parameters: int, adapted: bool = False) -> float:
        """`lr`, or its default for a model of this size."""
        return self.lr or self.lr_scale * default_learning_rate(parameters, adapted)

    @property
    def has_separate_critic(self) -> bool:
        """Whether a critic is a separate model."""
        return self.critic == "separate" or self.critic_from is not None

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded over ranks."""
        return self.strategy not in ("single", "ddp")

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO; 0 for other strategies."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0

    @model_validator(mode="after")
    def _check_strategy(self) -> LearnerConfig:
        if self.ranks > 1 and self.strategy == "single":
            raise ValueError(f"ranks={self.ranks} with strategy=single, which is one process. Write strategy=fsdp2.")
        if (self.zero_stage or self.strategy == "tensor") and self.offload != "none":
            raise ValueError(
                f"offload={self.offload} with strategy={self.strategy}, which keeps its parts on the device. Write "
                "strategy=fsdp2, or offload=none."
            )
        if "restarts" in self.model_fields_set and self.restarts != 2 and self.strategy == "single":
            raise ValueError(f"restarts={self.restarts} with strategy=single, which has no ranks. Leave it out.")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> LearnerConfig:
        if self.warmup > 1 and self.warmup % 1:
            raise ValueError(f"warmup={self.warmup:g}: write a whole number of steps, or a share below 1.")
        if self.lr is not None and self.lr_scale != 1.0:
            raise ValueError(
                f"lr_scale={self.lr_scale:g} scales the default learning rate, and lr={self.lr:g}. Leave one out."
            )
        if self.min_lr and self.decay not in ("linear", "cosine"):
            raise ValueError(
                f"min_lr={self.min_lr:g} is the final learning rate of a decay, and decay={self.decay} has none. Write "
                "decay=linear or cosine, or leave min_lr out."
            )
        if self.min_lr and self.lr is not None and self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr:g} is above lr={self.lr:g}. Write a smaller min_lr.")
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> LearnerConfig:
        if self.critic_from is not None and self.critic in ("shared", "detached", "none"):
            raise ValueError(
                f"critic_from={self.critic_from} is for a separate critic, and critic={self.critic}. Write "
                "critic=separate, or leave one of them out."
            )
        return self

    @model_validator(mode="after")
    def _check_downsampling(self) -> LearnerConfig:
        if self.downsample_mode != "random" and self.max_samples_per_trajectory is None:
            raise ValueError(
                f"downsample_mode={self.downsample_mode} is read with max_samples_per_trajectory only. Write "
                "max_samples_per_trajectory=2 too."
            )
        return self


class TrainerConfig(Config):
    """Length of the run and checkpoints."""

    steps: int | None = Field(None, ge=1)
    """Number of steps; 30 if neither `steps` nor `epochs` is set."""
    epochs: int | None = Field(None, ge=1)
    """Instead of `steps`: epochs over the training rows. A step takes `rollout.tasks_per_step` rows and its spares; the
    last step is filled from the next epoch. An epoch of a mixture is the number of rows of all sources. Not for tasks
    of an environment or `data.endless`."""
    save_every: int = Field(10, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept. With `on_alarm=stop` or `rollback`, up to two older ones are kept
    too."""
    keep_best: str | None = None
    """Metric whose best checkpoint is kept besides the newest, such as `evaluation/success`; `-evaluation/loss` for the
    lowest value. A step with a better value than all before is saved. `RUN/best` names this checkpoint."""
    on_alarm: Literal["warn", "stop", "rollback"] = "warn"
    """Reaction to an alarm (docs/alarms.md): loss or gradient not finite, KL or entropy out of range, longer replies
    without more success, engine and learner that differ, reward lost. `stop`: end with exit code 3. `rollback`: return
    to the last checkpoint before the evidence with a lower learning rate."""
    rollback_lr_factor: float = Field(0.1, gt=0, le=1)
    """Factor of the learning rate at each rollback, on top of the schedule. The result is at most the default rate for
    a model of this size."""
    max_rollbacks: int = Field(3, ge=1)
    """Rollbacks of a run; the next alarm stops it."""
    checkpoint_dir: Path | None = None
    """Folder for checkpoints, in a subfolder with the name of the run folder, which then has a link to it. Default:
    `checkpoints/` in the run folder."""
    stop_seconds: float = Field(25.0, gt=0)
    """After SIGTERM or SIGHUP: seconds until the last checkpoint must begin; else the run ends without it. Schedulers
    usually kill after 30 seconds. A signal more than a second later ends the run at once."""

    @model_validator(mode="after")
    def _check_length(self) -> TrainerConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} both set the length of the run. Leave one out, or write "
                "null for it if a file has it."
            )
        for name in ("rollback_lr_factor", "max_rollbacks"):
            value = getattr(self, name)
            if self.on_alarm != "rollback" and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value} is read with on_alarm=rollback only. Write on_alarm=rollback too.")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 30)
        return self


EVALUATION_SAMPLING = overrides_of(
    SamplingConfig, "top_k", "top_p", "min_p", "max_tokens",
    temperature=Annotated[float, Field(ge=0, allow_inf_nan=False)],
)  # fmt: skip


class EvaluationConfig(Config):
    """Evaluation on held-out tasks before, during and after training."""

    tasks: int = Field(200, ge=0)
    """Number of held-out tasks; 0 for no evaluation."""
    before: bool = True
    """Evaluate before training."""
    every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 for none."""
    group_size: int = Field(1, ge=1)
    """Episodes per held-out task."""
    sampling: Annotated[dict[str, Any], EVALUATION_SAMPLING] = Field(default_factory=dict)
    """Settings that differ from `sampling`, but `temperature` is 1 by default. The `sampling` of a source takes
    precedence."""
    greedy: bool = True
    """Also evaluate with greedy decoding."""

    @property
    def temperature(self) -> float:
        return float(self.sampling.get("temperature", 1.0))


class TrackConfig(Config):
    """Files of the run and trackers."""

    tensorboard: bool = True
    """Write TensorBoard files."""
    episodes: bool = True
    """Write every episode to `episodes/`."""
    terms: int = Field(50_000, ge=0)
    """Maximum sampled tokens per step whose advantage, ratio, loss and gradient magnitude are stored in `terms/` for
    `arborl view`; the largest magnitudes are kept. 0, or `episodes=false`, for none."""
    top_logprobs: int = Field(0, ge=0, le=20)
    """Number of most likely tokens that are stored with each sampled token in the episode files, for `arborl view`;
    about 17 bytes each. Sampling on a GPU is slower (no CUDA graph). With `engine=local` only."""
    gifs: int = Field(3, ge=0)
    """Episodes rendered as GIFs at the end of the run; with `render_every` also each time."""
    render_every: int = Field(0, ge=0)
    """Steps between training episodes that are rendered with the messages of the model, in `frames/train/`; then
    episodes of every evaluation are too, in `frames/validation/`. 0 for none."""
    timeline: int = Field(20, ge=0)
    """Steps of which `timeline.json` contains every episode, model call, tool call and engine step; later steps contain
    update, publish and wait only. Open it with Perfetto (https://ui.perfetto.dev). 0 for none."""
    trackers: Annotated[tuple[PartConfig, ...], BeforeValidator(as_list)] = ()
    """`wandb`, `mlflow`, or your own as `package.module:Class`: names, or `{name: wandb, args: {project: lakes}}`. See
    docs/tracking.md."""
