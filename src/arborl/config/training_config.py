"""Settings of the learner, the trainer, evaluation and tracking."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from arborl.config.config_base import Config
from arborl.config.part_config import PartConfig


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
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Warm-up as a share of all optimizer steps, rounded up."""
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
    """Tree tokens of a micro-batch; changes memory and speed, not the result. 0: 4,096 on a CPU; on a GPU up to 16,384
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
    memory_share: float = Field(0.9, gt=0, le=1)
    """Share of the free GPU memory, after the model is loaded, that the run may use. `micro_batch_tokens=0`,
    `recompute=auto` and `engine.kv_tokens=0` are chosen within it."""
    master: Literal["float32", "none"] = "float32"
    """Master weights of a model in bfloat16 or float16: float32 copies, or none (bfloat16 only; small updates are
    lost)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State in host memory between steps. `optimizer`: float32 master weights and AdamW moments; `all`: gradients and
    the reference model too. The result is the same. With `strategy=fsdp2` the float32 shards are the master weights:
    `optimizer` offloads the moments, `all` the shards too."""
    strategy: Literal["single", "ddp", "fsdp2", "deepspeed", "tensor"] = "single"
    """Distribution over ranks. `ddp`: replicated model, different trees. `fsdp2`: sharded weights, gradients and
    optimizer state. `deepspeed`: DeepSpeed ZERO with `zero_stage` (needs the extra `deepspeed`). `tensor`: tensor
    parallelism, the same trees on all ranks. See docs/scale-out.md."""
    ranks: int = Field(1, ge=1)
    """Number of learner processes, one GPU each if there are GPUs. `arborl train` starts them; under `torchrun` or
    `accelerate launch`, 1 means all of their processes."""
    restarts: int = Field(2, ge=0)
    """Maximum automatic restarts from the last checkpoint after the loss of a rank. The run stops if a rank is lost at
    the same step again, or if `torchrun` or `accelerate launch` started the ranks."""
    zero_stage: Literal[1, 2, 3] = 2
    """With `strategy=deepspeed`, what is sharded: 1 optimizer state, 2 also gradients, 3 also weights."""
    critic: Literal["auto", "none", "shared", "separate"] = "auto"
    """The critic: a value head on the policy (`shared`) or a separate model. `auto` is `shared` for algorithms that
    need a critic."""
    critic_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic. Default: `lr` for a separate model, ten times `lr` for a head."""
    critic_detach: bool = False
    """Stop the gradient of the value loss at the shared trunk."""

    critic_from: str | None = None
    """Initial model of a separate critic, with the tokenizer of the policy. A sequence classifier with one label, such
    as a reward model, keeps its head."""

    @property
    def has_separate_critic(self) -> bool:
        """Whether a critic is a separate model."""
        return self.critic == "separate" or self.critic_from is not None

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded over ranks."""
        return self.strategy in ("fsdp2", "deepspeed", "tensor")

    @model_validator(mode="after")
    def _check_strategy(self) -> LearnerConfig:
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
    def _check_schedule(self) -> LearnerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio:g} both set the warm-up. "
                "Leave one out."
            )
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
        if self.critic_from is not None and self.critic in ("shared", "none"):
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
    """Number of checkpoints that are kept."""
    stop_seconds: float = Field(25.0, gt=0)
    """After SIGTERM or SIGHUP: seconds until the last checkpoint must begin; else the run ends without it. Schedulers
    usually kill after 30 seconds. A second signal ends the run at once."""

    @model_validator(mode="after")
    def _check_length(self) -> TrainerConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} both set the length of the run. Leave one out, or write "
                "null for it if a file has it."
            )
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 30)
        return self


class EvaluationConfig(Config):
    """Evaluation on held-out tasks before, during and after training."""

    tasks: int = Field(200, ge=0)
    """Number of held-out tasks; 0 for no evaluation."""
    before: bool = True
    """Evaluate before training."""
    every: int = Field(0, ge=0)
    """Steps between evaluations during training; 0 for none."""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    """Default: as in `sampling`, like the next three. The `sampling` of a source takes precedence."""
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    greedy: bool = True
    """Also evaluate with greedy decoding."""


class WandbConfig(Config):
    """Weights & Biases (needs the extra `wandb`). A bare string is the project."""

    shorthand: ClassVar[str] = "project"

    project: str | None = None
    """Project; None disables Weights & Biases."""
    name: str | None = None
    """Name of the run. Default: that of its folder."""
    entity: str | None = None
    """User or team. Default: your own."""
    dir: Path | None = None
    """Folder of its files. Default: the run folder."""
    mode: Literal["online", "offline"] | None = None
    """`offline` stores data for `wandb sync FOLDER`. Default: `WANDB_MODE`, else `online`."""

    @model_validator(mode="after")
    def _check_project(self) -> WandbConfig:
        _require_key(self, "project")
        return self


class MlflowConfig(Config):
    """MLflow (needs the extra `mlflow`). A bare string is the address."""

    shorthand: ClassVar[str] = "uri"

    uri: str | None = None
    """Tracking server, database or folder: `http://…`, `sqlite:///mlflow.db`, `mlruns`; None disables MLflow."""
    experiment: str = "arborl"
    """Experiment; created if it does not exist."""
    name: str | None = None
    """Name of the run. Default: that of its folder."""

    @model_validator(mode="after")
    def _check_uri(self) -> MlflowConfig:
        _require_key(self, "uri")
        return self


def _require_key(section: Config, key: str) -> None:
    """Refuse settings of a tracker that is not used."""
    others = [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]
    if getattr(section, key) is None and others:
        raise ValueError(f"{others[0]} is given without {key}, so the tracker is not used. Write {key} too.")


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
    """Episodes rendered at the end of the run."""
    render_save_dir: Path | None = None
    """Folder for GIFs of episodes with the messages of the model: `train/` and `validation/`."""
    render_every: int = Field(10, ge=1)
    """Steps between training episodes that are rendered (with `render_save_dir`) and sent to trackers. Evaluations
    always are."""
    render_episodes: int = Field(2, ge=1)
    """With `render_save_dir`: number of episodes."""
    timeline: int = Field(20, ge=0)
    """Steps of which `timeline.json` contains every episode, model call, tool call and engine step; later steps contain
    update, publish and wait only. Open it with Perfetto (https://ui.perfetto.dev). 0 for none."""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackers: tuple[PartConfig, ...] = ()
    """Custom trackers: `package.module:Class`, or `name` and `args`. See docs/tracking.md."""
