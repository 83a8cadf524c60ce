"""What is written while training, and who else follows the run."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from arborl.config.base import Config
from arborl.config.parts import Part


class WandbConfig(Config):
    """Weights & Biases (needs the extra `wandb`). A bare string is the project."""

    shorthand: ClassVar[str] = "project"

    project: str | None = None
    """The project; without one, Weights & Biases is not used."""
    name: str | None = None
    """Of the run; without one, that of its folder."""
    entity: str | None = None
    """User or team; without one, your default."""
    dir: Path | None = None
    """Where its own files go; without it, the run's folder."""
    mode: Literal["online", "offline"] | None = None
    """`offline` sends nothing: `wandb sync FOLDER` does, later. Without one, what `WANDB_MODE` says, or `online`."""

    @model_validator(mode="after")
    def _is_of_a_project(self) -> WandbConfig:
        _says_where(self, "project")
        return self


class MlflowConfig(Config):
    """MLflow (needs the extra `mlflow`). A bare string is the address."""

    shorthand: ClassVar[str] = "uri"

    uri: str | None = None
    """The tracking server, a database or a folder: `http://…`, `sqlite:///mlflow.db`, `mlruns`; without one, MLflow is
    not used."""
    experiment: str = "arborl"
    """Is made where it is not there."""
    name: str | None = None
    """Of the run; without one, that of its folder."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> MlflowConfig:
        _says_where(self, "uri")
        return self


def _says_where(section: Config, key: str) -> None:
    """What is set beside a tracker that is not used would be silently ignored."""
    others = [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]
    if getattr(section, key) is None and others:
        raise ValueError(f"{others[0]} is given and {key} is not, so nothing would follow the run. Write {key} too.")


class TrackConfig(Config):
    """What is written while training, and who else follows the run."""

    tensorboard: bool = True
    episodes: bool = True
    """Write every episode to `episodes/`."""
    terms: int = Field(50_000, ge=0)
    """Sampled tokens of a step whose advantage, ratio, loss and pull on the weights are kept in `terms/`, for `arborl
    view`; of more, those that pulled most. 0 keeps none, and so does `episodes=false`."""
    top_logprobs: int = Field(0, ge=0, le=20)
    """Of each sampled token so many of the likeliest others, with their probabilities, are kept in the episode files
    for `arborl view`, about 17 bytes each. On a GPU sampling then leaves its graph, and is slower: for a short look.
    With `engine=local` only."""
    gifs: int = Field(3, ge=0)
    """Episodes rendered at the end."""
    render_save_dir: Path | None = None
    """Folder for GIFs of episodes, with the model's words beside the frames: `train/` and `validation/`."""
    render_every: int = Field(10, ge=1)
    """Steps between training episodes that are rendered (with `render_save_dir`), and that trackers are shown. Every
    evaluation is."""
    render_episodes: int = Field(2, ge=1)
    """With `render_save_dir`: episodes rendered each time."""
    timeline: int = Field(20, ge=0)
    """Steps of which `timeline.json` shows every episode, model call, tool call and engine step; of later ones it shows
    learning, publishing and waiting. Perfetto (https://ui.perfetto.dev) opens it. 0 writes none."""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackers: tuple[Part, ...] = ()
    """Trackers of your own, each `package.module:Class`, or with `name` and `args`. See docs/tracking.md."""
