"""Export of a policy as a folder that transformers loads, with a model card; log-probabilities are compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl import checkpoint
from arborl.config.load_config import load
from arborl.config.run_config import AgentPartConfig, RunConfig
from arborl.config.trust import READ
from arborl.errors import ConfigError, disk_errors
from arborl.models.model_files import check_supported, read_model_config, resolve, stored_dtype
from arborl.registry import short_name
from arborl.training_run.build import make_renderer, save_tokenizer
from arborl.training_run.measure import MeasureOptions, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from arborl.chat import Renderer

MAX_DIFFERENCE = {"float32": 1e-3, "float64": 1e-3}
"""Largest mean difference of log-probabilities, by precision; 0.25 for lower precision."""
TEXT = "Hello, world! What is 12 + 30? <answer>42</answer> def f(x): return x ** 2"


@dataclass(frozen=True, slots=True)
class ExportResult:
    folder: Path
    merged: bool
    tokens: int
    mean_gap: float
    max_gap: float


def export(
    name: str, out: Path, overrides: tuple[str, ...] = (), dtype: str | None = None, trust: bool = False
) -> ExportResult:
    """Write the policy as a model folder. `out` exists afterwards only if the written model agrees with the policy.

    Args:
        name: a run, a checkpoint, a model folder (of adapters too) or a model's name.
        overrides: settings as on the command line.
        dtype: precision of the weights. Default: that of the run.
        trust: read environment variables that an unsigned run folder names.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists already. Write a new folder.")
    config = settings_of(name, MeasureOptions(overrides, trust=trust), only=(READ,))
    config = config.model_copy(update={"agent": AgentPartConfig()})  # so that no part of the run folder is imported
    folder, dtype = checkpoint.check_model(resolve(config.model.name)), dtype or config.model.dtype
    about = read_model_config(folder)
    dtype = stored_dtype(about) if dtype == "auto" else dtype
    check_supported(about, config.model.name, 1)

    from arborl.models.lora import export_merged, has_lora
    from arborl.models.model_loading import load_model

    renderer, model = make_renderer(config, folder), load_model(folder, dtype, "cpu")
    merged = has_lora(model)
    partial = out.with_name(f".{out.name}.partial")
    with disk_errors(out):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            if merged:
                export_merged(model, partial)
            else:
                model.save_pretrained(partial)
            save_tokenizer(folder, renderer, partial)
            done = _compare(model, partial, renderer, dtype, out, merged)
            (partial / "README.md").write_text(card(name, config, done), encoding="utf-8")
            mode = (partial / "README.md").stat().st_mode
            for file in partial.iterdir():
                file.chmod(mode)  # safetensors writes files that only their owner can read
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return done


def _compare(
    model: PreTrainedModel, folder: Path, renderer: Renderer, dtype: str, out: Path, merged: bool
) -> ExportResult:
    """Load the written model with transformers, and compare log-probabilities of the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from arborl.models.model_loading import weight_loading

    most = getattr(model.config, "max_position_embeddings", None) or 64
    ids = torch.tensor([list(renderer.tokenizer.encode(TEXT))[: min(64, most)]])
    with weight_loading():
        copy = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ours, theirs = (one(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1) for one in (model, copy))
    gaps = (ours - theirs).gather(1, ids[0, 1:, None]).abs()
    done = ExportResult(out, merged, int(gaps.numel()), float(gaps.mean()), float(gaps.max()))
    if not done.mean_gap <= MAX_DIFFERENCE.get(dtype, 0.25):  # also refuses NaN
        raise ConfigError(
            f"{out}: the written model differs from the policy: log-probabilities differ by {done.mean_gap:.2g} on "
            "average. It is deleted. Write --dtype float32."
        )
    return done


def card(name: str, config: RunConfig, done: ExportResult) -> str:
    place = Path(name)
    run = next((one for one in (place, place.parent.parent) if (one / "config.yaml").exists()), None)
    base = config.model.name if run is None else load(run / "config.yaml", []).model.name  # its initial model
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    front.append("tags: [arborl, reinforcement-learning]")
    if not Path(base).exists():  # a name, not a local folder
        front.append(f"base_model: {json.dumps(base)}")
    task = "offline rows" if config.data.offline else short_name(config.env.name)
    lines = [*front, "---", "", f"# {config.name if run else Path(base).name}", ""]
    if run is not None:
        origin = f"trained on {task} with {config.algorithm.name} by Arbor (seed {config.seed})."
        lines += [f"`{Path(base).name}`, {origin}", "", *_numbers(run, name)]
    lines += ["## Export", ""]
    lines += ["LoRA adapters were merged into the weights." if done.merged else "The weights as they were trained."]
    lines += [f"Loaded by transformers, log-probabilities of {done.tokens} tokens differ by {done.mean_gap:.1e} on"]
    lines += [f"average and {done.max_gap:.1e} at most.", "", "## Use", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += ['model = AutoModelForCausalLM.from_pretrained("FOLDER")']
    lines += ['tokenizer = AutoTokenizer.from_pretrained("FOLDER")']
    return "\n".join([*lines, "```", ""])


def _numbers(run: Path, name: str) -> list[str]:
    """Metrics before and after training, if the run is finished and this is its last checkpoint."""
    try:
        summary: Mapping[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ["The run is not finished and has no evaluation yet.", ""]
    last = f"step-{int(summary.get('steps', 0)):06}"
    if Path(name) != run and Path(name).name != last:
        return [f"From {Path(name).name}; the run was evaluated at {last}.", ""]
    before, after = summary.get("before") or {}, summary.get("after") or {}
    rows = [(key, before.get(key), value) for key, value in after.items() if not key.endswith(("_low", "_high"))]
    table = [f"| {key} | {'–' if b is None else f'{b:.4g}'} | {a:.4g}{_interval(after, key)} |" for key, b, a in rows]
    head = f"Held-out tasks, after {summary.get('steps')} steps ({summary.get('train_seconds')} s of training):"
    return [head, "", "| metric | before | after |", "|---|---|---|", *table, ""] if rows else []


def _interval(numbers: Mapping[str, float], key: str) -> str:
    low, high = numbers.get(f"{key}_low"), numbers.get(f"{key}_high")
    return "" if low is None or high is None else f" (95 %: {low:.3g} to {high:.3g})"
