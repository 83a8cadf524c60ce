"""What a mixture would give, without training: `arborl data mix`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from arborl.data.mixing.mixture import Mixture, coverage
from arborl.data.mixing.schedule import normalize_ratios


def composition(mixture: Mixture, batches: int, size: int) -> dict[str, Any]:
    """The achieved composition of so many batches, counted from the tasks that were really drawn.

    Example:
        composition(mixture, 1000, 16)["sources"]["math"]
        # {"target": 0.3, "achieved": 0.3, "repeats": 120, "coverage": 1.0, …}
    """
    drawn: Counter[str] = Counter()
    seen: dict[str, set[str]] = {name: set() for name in mixture.pools}
    wanted = dict.fromkeys(mixture.pools, 0.0)
    short, worst = 0, 0.0
    for step in range(batches):
        tasks = mixture.take(step, size)
        counts = Counter(task.source for task in tasks)
        drawn += counts
        short += len(tasks) < size
        shares = normalize_ratios({name: ratio for name, ratio in mixture.shares(step).items() if ratio > 0})
        for name in mixture.pools:
            quota = float(shares.get(name, 0)) * size
            wanted[name] += quota
            worst = max(worst, abs(counts[name] - quota))
        for task in tasks:
            seen[task.source].add(task.id.partition("#")[0])
    total = batches * size
    sources = {}
    for name, pool in mixture.pools.items():
        told = coverage(pool.size, drawn[name])
        sources[name] = {
            "target": round(wanted[name] / total, 6),
            "achieved": round(drawn[name] / total, 6),
            "rows": pool.size,
            "drawn": drawn[name],
            "distinct": len(seen[name]),
            "repeats": int(told["repeats"]),
            "coverage": round(told["coverage"], 6) if "coverage" in told else None,
            "never_seen": int(told.get("unseen", 0)),
            **{f"rows_{why}": count for why, count in pool.counts.items()},
        }
    error = max(abs(drawn[name] - wanted[name]) for name in mixture.pools)
    return {
        "sources": sources,
        "batches": batches,
        "batch_size": size,
        "short_batches": short,
        "largest_batch_error": round(worst, 6),
        "largest_total_error": round(error, 6),
    }
