"""How sure a mean over held-out tasks is: 95 % intervals.

Tasks are what was drawn, so n counts tasks; several episodes of one task are averaged first and count as one. The
interval is about other tasks of the same kind, not about another training run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

Z = NormalDist().inv_cdf(0.975)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Of a share (Wilson's score interval): stays within 0 and 1, and says something at 0 of n too.

    >>> [round(end, 3) for end in wilson(0.0, 20)]
    [0.0, 0.161]
    >>> [round(end, 3) for end in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    if n < 1:
        raise ValueError("an interval of no tasks")
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    reach = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean of any numbers (Student's t); one number alone has none.

    >>> [round(end, 3) for end in student([1.0, 2.0, 3.0, 4.0, 5.0])]
    [1.037, 4.963]
    """
    if len(values) < 2:
        return None
    middle, reach = fmean(values), quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return middle - reach, middle + reach


def quantile(freedom: int) -> float:
    """The t distribution's 97.5 % point: exact for 1 and 2 degrees of freedom, a series in 1/freedom above (1e-2 at 3).

    >>> [round(quantile(n), 2) for n in (1, 2, 4, 9, 199)]
    [12.71, 4.3, 2.78, 2.26, 1.97]
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = Z, freedom
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return sum(terms)
