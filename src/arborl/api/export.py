"""A run's policy as a folder that plain transformers loads, proved to say the same, with a card of its numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborl import checkpoint
from arborl.api.measure import Asked, settings_of
from arborl.build import copy_tokenizer, renderer_of
from arborl.config.capabilities import READ
from arborl.config.run import AgentConfig, RunConfig
from arborl.errors import ConfigError, writing
from arborl.models.find import check_supported, described, resolve, stored_dtype
from arborl.registry import short

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from arborl.chat import Renderer

LIMITS = {"float32": 1e-3, "float64": 1e-3}
"""Mean difference of log-probabilities above which the copy is not the policy; 0.25 of coarser numbers."""
TEXT = "Hello, world! What is 12 + 30? <answer>42</answer> def f(x): return x ** 2"
OWN = "arborl"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how it compares."""

    folder: Path
    merged: bool
    """Whether adapters were added to the weights they correct."""
    tokens: int
    """Compared."""
    mean_gap: float
    """Of log-probabilities, before and after."""
    max_gap: float


def export(
    name: str, out: Path, overrides: tuple[str, ...] = (), dtype: str | None = None, trust: bool = False
) -> Exported:
    """Write the policy as an ordinary model. Nothing is left at `out` unless it was read back and says the same.

    Args:
        name: a run, a checkpoint, a model folder (of adapters too) or a model's name.
        out: a folder that is not there yet.
        overrides: settings on top of the run's.
        dtype: of the weights; without one, the run's.
        trust: fill in the environment variables that a run's folder names though this user did not write it.
    """
    if out.exists():
        raise ConfigError(f"{out}: there already. Write a folder that is not.")
    config = settings_of(name, Asked(overrides, trust=trust), only=(READ,))
    config = config.model_copy(update={"agent": AgentConfig()})  # nothing that the run's folder names is imported
    folder, dtype = checkpoint.check_model(resolve(config.model.name)), dtype or config.model.dtype
    about = described(folder)
    dtype = stored_dtype(about) if dtype == "auto" else dtype
    check_supported(about, config.model.name, 1)

    from arborl.models.load import load_model
    from arborl.models.lora import export_merged, has_lora

    renderer, model = renderer_of(config, folder), load_model(folder, dtype, "cpu")
    merged = has_lora(model)
    partial = out.with_name(f".{out.name}.partial")
    with writing(out):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            if merged:
                export_merged(model, partial)
            else:
                model.save_pretrained(partial)
            copy_tokenizer(folder, renderer, partial)
            done = _compared(model, partial, renderer, dtype, out, merged)
            (partial / "README.md").write_text(card(name, config, done), encoding="utf-8")
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return done


def _compared(
    model: PreTrainedModel, folder: Path, renderer: Renderer, dtype: str, out: Path, merged: bool
) -> Exported:
    """Read it back as anybody would, and ask both what they say of the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from arborl.models.load import quiet

    most = getattr(model.config, "max_position_embeddings", None) or 64
    ids = torch.tensor([list(renderer.tokenizer.encode(TEXT))[: min(64, most)]])
    with quiet():
        copy = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ours, theirs = (one(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1) for one in (model, copy))
    gaps = (ours - theirs).gather(1, ids[0, 1:, None]).abs()
    done = Exported(out, merged, int(gaps.numel()), float(gaps.mean()), float(gaps.max()))
    if not done.mean_gap <= LIMITS.get(dtype, 0.25):  # NaN is no agreement either
        raise ConfigError(
            f"{out}: what was written says something else than the policy: log-probabilities differ by "
            f"{done.mean_gap:.2g} on average. Nothing is kept. Write --dtype float32."
        )
    return done


def card(name: str, config: RunConfig, done: Exported) -> str:
    """The model card: where it is from, and what was measured."""
    run = _run_of(name)
    base = _base(run) or config.model.name
    front = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [{OWN}, reinforcement-learning]",
    ]
    if not Path(base).exists():  # a name, and no place on this machine
        front.append(f"base_model: {json.dumps(base)}")
    task = "given rows" if config.data.offline else short(config.env.name)
    lines = [*front, "---", "", f"# {config.name if run else Path(base).name}", ""]
    if run is not None:
        lines += [
            f"`{Path(base).name}`, trained on {task} with {config.algorithm.name} by Arbor (seed {config.seed}).",
            "",
        ]
        lines += _numbers(run, name)
    lines += ["## Export", ""]
    lines += [
        "Adapters were added to the weights they correct." if done.merged else "The weights as they were trained."
    ]
    lines += [
        f"Read back by plain transformers, log-probabilities of {done.tokens} tokens differ by {done.mean_gap:.1e} on"
    ]
    lines += [f"average and {done.max_gap:.1e} at most.", "", "## Use", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
    ]
    return "\n".join([*lines, "```", ""])


def _run_of(name: str) -> Path | None:
    place = Path(name)
    return next((one for one in (place, place.parent.parent) if (one / "config.yaml").exists()), None)


def _base(run: Path | None) -> str | None:
    """What the run began from."""
    from arborl.config.load import load

    return load(run / "config.yaml", []).model.name if run is not None else None


def _numbers(run: Path, name: str) -> list[str]:
    """Before and after, where the run has ended and this is what it ended with."""
    try:
        summary: Mapping[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ["The run has not ended: it has no numbers yet.", ""]
    last = f"step-{int(summary.get('steps', 0)):06}"
    if Path(name) != run and Path(name).name != last:
        return [f"From {Path(name).name}; the run was measured at {last}.", ""]
    before, after = summary.get("before") or {}, summary.get("after") or {}
    rows = [(key, before.get(key), value) for key, value in after.items() if not key.endswith(("_low", "_high"))]
    told = [f"| {key} | {'–' if b is None else f'{b:.4g}'} | {a:.4g}{_ends(after, key)} |" for key, b, a in rows]
    head = f"Held-out tasks, after {summary.get('steps')} steps ({summary.get('train_seconds')} s of training):"
    return [head, "", "| metric | before | after |", "|---|---|---|", *told, ""] if rows else []


def _ends(numbers: Mapping[str, float], key: str) -> str:
    low, high = numbers.get(f"{key}_low"), numbers.get(f"{key}_high")
    return "" if low is None or high is None else f" (95 %: {low:.3g} to {high:.3g})"
