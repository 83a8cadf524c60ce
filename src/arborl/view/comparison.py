"""Comparison page of several runs: seeds of one setting are averaged, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

from arborl.errors import ConfigError
from arborl.track.folder_files import is_regular, replace_file
from arborl.track.jsonl import read_metrics
from arborl.trainer.evaluation import student
from arborl.view.curve import COLOURS, LEGEND, drawing, series_of
from arborl.view.report import data_uri, html_table, page
from arborl.view.web.folders import differences, read_config, read_summary
from arborl.view.web.series import seed_groups, setting_text

SHOWN = {
    "reward/mean": "Reward of training episodes", "episode/success": "Success of training episodes",
    "evaluation/success": "Success on held-out tasks", "evaluation/reward": "Reward on held-out tasks",
    "policy/entropy": "Entropy, nats per token", "policy/loss": "Loss", "evaluation/loss": "Held-out loss",
}  # fmt: skip
MEASURES = ("success", "reward", "loss", "greedy_success")


@dataclass(slots=True)
class SettingRuns:
    """Runs that differ only in their seed."""

    changes: str
    """The settings that differ from the others."""
    runs: list[Path] = field(default_factory=list)
    rows: list[list[dict[str, Any]]] = field(default_factory=list)
    """Metrics of each run."""

    @property
    def label(self) -> str:
        """The folder of a single run; of several seeds, the settings that differ from the others."""
        if len(self.runs) > 1 and self.changes:
            return self.changes
        return ", ".join(run.resolve().name for run in self.runs)

    def band(self, name: str) -> list[tuple[int, float, float, float]]:
        """Step, mean and 95 % interval over seeds, at steps that all runs have."""
        series = [dict(series_of(rows, name)) for rows in self.rows]
        steps = sorted(set.intersection(*(set(one) for one in series))) if series else []
        result = []
        for step in steps:
            values = [one[step] for one in series]
            low, high = student(values) or (values[0], values[0])
            result.append((step, fmean(values), low, high))
        return result


def write_comparison(settings: Sequence[SettingRuns], out: Path) -> Path:
    """Write the comparison page of runs grouped by setting (`settings_of`)."""
    folders = [run for setting in settings for run in setting.runs]
    curves = ""
    with TemporaryDirectory() as drawn:
        if picture := _picture(settings, Path(drawn) / "curves.png"):
            curves = f'<h2>Curves</h2><p class="hint">{_hint(settings)}</p>'
            curves += f'<img alt="curves of all settings" src="{data_uri(picture, "image/png")}">'
    title = f"{len(folders)} runs, {len(settings)} setting{'s' if len(settings) > 1 else ''}"
    sections = [f"<h1>{title}</h1>", _outcome(settings), curves, _runs(settings), _differences(folders)]
    return replace_file(out, page(title, "".join(sections)).encode("utf-8", "replace"))


def settings_of(folders: Sequence[Path]) -> list[SettingRuns]:
    """Runs grouped by setting."""
    for folder in folders:
        if not is_regular(folder / "metrics.jsonl"):
            raise ConfigError(f"{folder}: is no run folder: it has no metrics.jsonl. Write run folders.")
    if len({folder.resolve() for folder in folders}) != len(folders):
        raise ConfigError("a run is listed twice. Write each once.")
    by_name = {str(folder): folder for folder in folders}
    groups = seed_groups({name: read_config(folder) for name, folder in by_name.items()})
    result = [SettingRuns(changes, [by_name[name] for name in names]) for changes, names in groups.items()]
    for setting in result:
        setting.rows += [list(read_metrics(folder / "metrics.jsonl")) for folder in setting.runs]
    return result


def held_out_table(settings: Sequence[SettingRuns]) -> tuple[list[str], list[list[str]]]:
    """Held-out metrics before and after training: the names of the columns, and a row per setting."""
    summaries = [[read_summary(run) for run in setting.runs] for setting in settings]
    flat_summaries = [one for some in summaries for one in some]
    known = [name for name in MEASURES if any(_measured(one, "after", name) is not None for one in flat_summaries)]
    if not known:
        return [], []
    head = ["run", "seeds"]
    for name in known:
        head += [f"{name.replace('_', ' ')} before", "after"]
    rows = []
    for setting, some in zip(settings, summaries, strict=True):
        stub = " (stub)" if any(read_config(run).get("stub") is True for run in setting.runs) else ""
        cells = [_cell(some, when, name) for name in known for when in ("before", "after")]
        rows.append([setting.label + stub, str(len(setting.runs)), *cells])
    return head, rows


def _outcome(settings: Sequence[SettingRuns]) -> str:
    head, rows = held_out_table(settings)
    if not rows:
        return ""
    shown = []
    for number, (label, *cells) in enumerate(rows):
        key = f'<span class="key" style="background:{COLOURS[number % len(COLOURS)]}"></span>'
        shown.append([f"{key} {escape(label)}", *cells])
    return f"<h2>Held-out tasks</h2>{html_table(head, shown, 'after')}"


def _cell(summaries: Sequence[Mapping[str, Any]], when: str, name: str) -> str:
    """Mean and interval over seeds; of a single seed its interval over tasks."""
    result = [one for summary in summaries if (one := _measured(summary, when, name)) is not None]
    if not result:
        return "–"
    low_high = student(result)
    if low_high is None:
        ends = [_measured(summaries[0], when, f"{name}_{end}") for end in ("low", "high")]
        low_high = (ends[0], ends[1]) if ends[0] is not None and ends[1] is not None else None
    between = f" ({low_high[0]:.3f}–{low_high[1]:.3f})" if low_high is not None else ""
    return f"{fmean(result):.3f}{between}"


def _measured(summary: Mapping[str, Any], when: str, name: str) -> float | None:
    measured = summary.get(when)
    value = measured.get(name) if isinstance(measured, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _hint(settings: Sequence[SettingRuns]) -> str:
    if all(len(setting.runs) == 1 for setting in settings):
        return "One seed per setting: differences may be chance."
    return "Lines are means over seeds, bands their 95 % intervals (Student's t), at steps that all seeds have."


def _picture(settings: Sequence[SettingRuns], out: Path) -> Path | None:
    """One panel per metric; a line and a band per setting."""
    bands = {name: [setting.band(name) for setting in settings] for name in SHOWN}
    names = [name for name, result in bands.items() if any(result)]
    names = [name for name in names if name != "evaluation/reward" or "evaluation/success" not in names]
    if not names:
        return None
    high = -(-len(names) // 2)
    with drawing(out, (11, 3.6 * high), high, 2) as all_axes:
        for axes in all_axes[len(names) :]:
            axes.set_axis_off()
        for axes, name in zip(all_axes, names, strict=False):
            axes.set_title(SHOWN[name], fontsize=11)
            axes.set_xlabel("step")
            for number, (setting, band) in enumerate(zip(settings, bands[name], strict=True)):
                if band:
                    steps, means, low, high_ = (list(column) for column in zip(*band, strict=True))
                    colour, mark = COLOURS[number % len(COLOURS)], "o" if name.startswith("evaluation/") else None
                    axes.plot(
                        steps, means, color=colour, linewidth=2, marker=mark, label="\n".join(wrap(setting.label, 48))
                    )
                    axes.fill_between(steps, low, high_, color=colour, alpha=0.16, linewidth=0)
        if len(settings) > 1:
            all_axes[0].legend(loc="best", fontsize=9, **LEGEND)
    return out


def _runs(settings: Sequence[SettingRuns]) -> str:
    summaries = [read_summary(run) for setting in settings for run in setting.runs]
    measured = [name for name in MEASURES if any(_measured(one, "after", name) is not None for one in summaries)]
    metric, rows = measured[0] if measured else "success", []
    for setting in settings:
        for run, metrics in zip(setting.runs, setting.rows, strict=True):
            summary, config = read_summary(run), read_config(run)
            step = metrics[-1]["step"] if metrics else 0
            cells = (
                str(run), setting.changes or "the same", str(config.get("seed", "–")), str(step),
                _cell([summary], "before", metric), _cell([summary], "after", metric),
            )  # fmt: skip
            rows.append([escape(cell) for cell in cells])
    return f"<h2>Runs</h2>{html_table(('run', 'setting', 'seed', 'steps', f'{metric} before', 'after'), rows)}"


def _differences(folders: Sequence[Path]) -> str:
    differ = differences([read_config(folder) for folder in folders])[0]
    if not differ:
        return ""
    rows = [[escape(key), *(escape(setting_text(value)) for value in values)] for key, values in differ.items()]
    return f"<h2>Settings that differ</h2>{html_table(['setting', *(folder.name for folder in folders)], rows)}"
