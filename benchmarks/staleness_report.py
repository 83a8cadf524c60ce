"""Tables and figure of `staleness.py`: held-out success at equal tokens and at equal time, with differences over seeds.

Curves are interpolated linearly between evaluations. The common budget is the smallest total of all runs: of tokens in
trained episodes, or of seconds. `mean` is the mean success over the common budget (the normalized area under the
curve), in which the noise of single evaluations is averaged. Differences are paired by seed; intervals are Student's
with 95 %, p-values those of a sign-flip test, which cannot be below 2 / 2^seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from arborl.trainer.evaluation import student
from arborl.trainer.policy_comparison import sign_flip_test

Row = dict[str, Any]
Key = tuple[int, str]
"""`max_lag` and correction."""
AXES = ("tokens", "seconds")
SHARES = {"quarter": 0.25, "half": 0.5, "all": 1.0}
"""Shares of the common budget at which curves are compared."""
COMPARED = ("tokens_mean", "seconds_mean", "final")
RECORDED = (
    "batch/lag_mean", "batch/lag_max", "rollout/dropped_stale", "rollout/cancelled", "sampled_per_trained",
    "policy/clipped", "importance_weight/clipped", "policy/logprob_diff", "policy/logprob_diff_max", "policy/entropy",
    "seconds", "cpu_share", "without_gradient",
)  # fmt: skip


def curve(row: Row, axis: str) -> tuple[list[float], list[float]]:
    return [point[axis] for point in row["curve"]], [point["success"] for point in row["curve"]]


def common_budget(rows: Sequence[Row], axis: str) -> float:
    return float(min(row["curve"][-1][axis] for row in rows))


def success_at(row: Row, axis: str, x: float) -> float:
    return float(np.interp(x, *curve(row, axis)))


def mean_success(row: Row, axis: str, budget: float) -> float:
    """Mean of the interpolated curve from 0 to `budget`."""
    points = [*(x for x in curve(row, axis)[0] if x < budget), budget]
    heights = [success_at(row, axis, x) for x in points]
    widths = np.diff(points)
    return float((widths * (np.add(heights[1:], heights[:-1]) / 2)).sum() / budget) if budget > 0 else heights[0]


def first_reached(row: Row, axis: str, target: float) -> float | None:
    """Where the interpolated curve first reaches the target; None if it does not."""
    xs, ys = curve(row, axis)
    if ys[0] >= target:
        return xs[0]
    for at in range(1, len(xs)):
        if ys[at] >= target:
            share = (target - ys[at - 1]) / (ys[at] - ys[at - 1])
            return float(xs[at - 1] + share * (xs[at] - xs[at - 1]))
    return None


def measures(row: Row, budgets: dict[str, float], target: float) -> dict[str, float | None]:
    found: dict[str, float | None] = {"final": row["final"]}
    for axis, budget in budgets.items():
        found |= {f"{axis}_{name}": success_at(row, axis, share * budget) for name, share in SHARES.items()}
        found[f"{axis}_mean"] = mean_success(row, axis, budget)
        found[f"{axis}_to_target"] = first_reached(row, axis, target)
    return found


def make_report(rows: Sequence[Row], target: float) -> dict[str, Any]:
    """Measures of every configuration by seed, and the differences between configurations."""
    budgets = {axis: common_budget(rows, axis) for axis in AXES}
    by_key: dict[Key, dict[int, dict[str, float | None]]] = {}
    recorded: dict[Key, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["correction"], row["max_lag"], row["seed"])):
        key = row["max_lag"], row["correction"]
        by_key.setdefault(key, {})[row["seed"]] = measures(row, budgets, target)
        recorded.setdefault(key, []).append(row)
    configurations = [
        {
            "max_lag": max_lag, "correction": correction, "seeds": list(seeds),
            "measures": {name: [values[name] for values in seeds.values()] for name in next(iter(seeds.values()))},
            "recorded": {
                name: fmean(row[name] for row in recorded[max_lag, correction])
                for name in RECORDED if all(name in row for row in recorded[max_lag, correction])
            },
            "steps": recorded[max_lag, correction][0]["curve"][-1]["step"],
        }
        for (max_lag, correction), seeds in by_key.items()
    ]  # fmt: skip
    return {"budgets": budgets, "configurations": configurations, "differences": differences(by_key)}


def differences(by_key: dict[Key, dict[int, dict[str, float | None]]]) -> list[dict[str, Any]]:
    """Every lag against none with the same correction, and every correction against none with the same lag."""
    pairs = [(key, (0, key[1])) for key in by_key if key[0] > 0]
    pairs += [(key, (key[0], "none")) for key in by_key if key[1] != "none"]
    found = []
    for key, other in pairs:
        seeds = [seed for seed in by_key[key] if seed in by_key.get(other, {})]
        for measure in COMPARED if seeds else ():
            each = [by_key[key][seed][measure] - by_key[other][seed][measure] for seed in seeds]  # type: ignore[operator]
            low, high = student(each) or (None, None)
            found.append({
                "of": list(key), "minus": list(other), "measure": measure, "seeds": seeds, "each": each,
                "mean": fmean(each), "low": low, "high": high, "p": sign_flip_test(each),
            })  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------ tables


def percent(values: Sequence[float | None]) -> str:
    """Mean over seeds in percent, and half the width of its interval."""
    known = [value for value in values if value is not None]
    interval = student(known)
    reach = "" if interval is None else f" ± {50 * (interval[1] - interval[0]):.1f}"
    return f"{100 * fmean(known):.1f}{reach}"


def amount(values: Sequence[float | None]) -> str:
    """Mean over seeds; without one that did not reach the target there is none."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} seeds"
    return f"{fmean(known):,.0f}" if fmean(known) >= 100 else f"{fmean(known):.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def print_tables(report: dict[str, Any], target: float) -> None:
    budgets, configurations = report["budgets"], report["configurations"]
    print(f"Success in % over {budgets['tokens']:,.0f} tokens and over {budgets['seconds']:.0f} s:\n")
    columns = [f"{axis}_{name}" for axis in AXES for name in (*SHARES, "mean")] + ["final"]
    print(table(
        ["correction", "max_lag", "seeds", *(name.replace("_", ", ") for name in columns)],
        [[one["correction"], str(one["max_lag"]), str(len(one["seeds"])),
          *(percent(one["measures"][name]) for name in columns)] for one in configurations],
    ))  # fmt: skip
    print("\nCost and staleness, means over seeds:\n")
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        f"tokens to {target:.0%}": lambda one: amount(one["measures"]["tokens_to_target"]),
        f"seconds to {target:.0%}": lambda one: amount(one["measures"]["seconds_to_target"]),
        "s per step": lambda one: f"{one['recorded']['seconds'] / one['steps']:.2f}",
        "CPU s per step": lambda one: f"{one['recorded']['cpu_share'] * one['recorded']['seconds'] / one['steps']:.2f}",
        "steps without gradient": lambda one: f"{one['recorded']['without_gradient']:.1f}",
        "lag mean, max": lambda one: "{batch/lag_mean:.2f}, {batch/lag_max:.1f}".format(**one["recorded"]),
        "dropped per step": lambda one: f"{one['recorded']['rollout/dropped_stale']:.1f}",
        "sampled per trained token": lambda one: f"{one['recorded']['sampled_per_trained']:.2f}",
        "clipped": lambda one: f"{clip_share(one['recorded']):.2%}",
        "logprob_diff mean, max": lambda one: "{policy/logprob_diff:.4f}, {policy/logprob_diff_max:.2f}".format(
            **one["recorded"]
        ),
    }
    print(table(
        ["correction", "max_lag", *cells],
        [[one["correction"], str(one["max_lag"]), *(cell(one) for cell in cells.values())] for one in configurations],
    ))  # fmt: skip
    print("\nDifferences in points, paired by seed, with 95 % intervals and p:\n")
    pairs: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in report["differences"]:
        of, minus = ("max_lag={} {}".format(*one[side]) for side in ("of", "minus"))
        pairs.setdefault((of, minus, str(len(one["seeds"]))), {})[one["measure"]] = difference(one)
    print(table(
        ["of", "minus", "seeds", *(name.replace("_", ", ") for name in COMPARED)],
        [[*pair, *(shown[name] for name in COMPARED)] for pair, shown in pairs.items()],
    ))  # fmt: skip


def difference(one: dict[str, Any]) -> str:
    interval = "" if one["low"] is None else f" ({100 * one['low']:+.1f} to {100 * one['high']:+.1f}), p {one['p']:.3f}"
    return f"{100 * one['mean']:+.1f}{interval}"


def clip_share(recorded: dict[str, float]) -> float:
    """Share of tokens whose ratio or importance weight is cut."""
    return recorded.get("importance_weight/clipped", recorded["policy/clipped"])


# ------------------------------------------------------------------------------------------------ figure


def draw_curves(rows: Sequence[Row], correction: str) -> Figure:
    """Success over tokens and over seconds: the mean over seeds of each `max_lag`, with a standard error band."""
    chosen = [row for row in rows if row["correction"] == correction]
    if not chosen:
        raise SystemExit(f"no run has the correction {correction!r}")
    lags = sorted({row["max_lag"] for row in chosen})
    colors = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(lags)))
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, axis in zip(figure.subplots(1, 2, sharey=True), AXES, strict=True):
        for lag, color in zip(lags, colors, strict=True):
            seeds = [row for row in chosen if row["max_lag"] == lag]
            xs = np.linspace(0.0, common_budget(seeds, axis), 200)
            ys = 100 * np.array([np.interp(xs, *curve(row, axis)) for row in seeds])
            mean, error = ys.mean(0), ys.std(0, ddof=1) / len(ys) ** 0.5 if len(ys) > 1 else np.zeros(len(xs))
            axes.plot(xs, mean, color=color, linewidth=1.8, label=f"max_lag={lag}")
            axes.fill_between(xs, mean - error, mean + error, color=color, alpha=0.18, linewidth=0)
        axes.set_xlabel("sampled tokens in trained episodes" if axis == "tokens" else "training seconds")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
    figure.axes[0].xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
    figure.axes[0].set_ylabel("held-out success, %")
    figure.axes[1].legend(loc="lower right", frameon=False)
    figure.suptitle(f"Correction: {correction}; mean and standard error over seeds", x=0.01, ha="left", fontsize=10)
    return figure
