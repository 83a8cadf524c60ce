"""How many rows of each source a batch holds: whole numbers whose sums keep to the ratios for ever.

A source's quota in a batch, ratio times size, is seldom whole. Each source gets its quota rounded down, and the rows
that are left go to some of the sources, one each. Who gets one decides what happens in the long run. Always giving to
the largest remainders starves the others; carrying the error along keeps the sums right only on average. The choice
here keeps every source less than one row from its exact share after every batch, and every batch within one row of the
quotas. It is the algorithm PD2 of proportionate scheduling (Baruah, Cohen, Plaxton and Varvel 1996; Anderson and
Srinivasan 2001), where sources are tasks, batches time slots and spare rows processors: first those who must get a row
soonest, and among these, first those who will be in need again soonest. It is written here in terms of how far each
source is behind, so it also goes on sensibly from wherever ratios or sizes change.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor

ZERO = Fraction(0)


def normalize_ratios(ratios: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    """Ratios as fractions that add up to 1; a number is taken as it is written.

    Example:
        exact({"code": 0.4, "math": 0.2})      # {"code": Fraction(2, 3), "math": Fraction(1, 3)}
    """
    written = {name: Fraction(str(ratio)) for name, ratio in ratios.items()}
    total = sum(written.values(), ZERO)
    return {name: ratio / total for name, ratio in written.items()}


def allocate(ratios: Mapping[str, Fraction], size: int, behind: Mapping[str, Fraction]) -> dict[str, int]:
    """Rows of each source in the next batch.

    Args:
        ratios: add up to 1.
        size: of the batch.
        behind: rows each source has had too few so far; below 0 where it has had too many.

    Example:
        deal({"a": Fraction(1, 3), "b": Fraction(2, 3)}, 4, {})      # {"a": 1, "b": 3}
    """
    quotas = {name: ratio * size for name, ratio in ratios.items()}
    counts = {name: floor(quota) for name, quota in quotas.items()}
    spare = size - sum(counts.values())
    claims = {name: quotas[name] - counts[name] for name in ratios if quotas[name] > counts[name]}
    order = sorted(claims, key=lambda name: _urgency(claims[name], behind.get(name, ZERO)))
    for name in order[:spare]:
        counts[name] += 1
    return counts


def _urgency(claim: Fraction, behind: Fraction) -> tuple[bool, int, bool, int]:
    """Smaller is sooner. `claim` is what a source is owed a batch beyond whole rows, between 0 and 1."""
    early = behind + claim <= 0  # a row now would be one too many
    deadline = (1 - behind) / claim
    due = ceil(deadline)
    presses = due != deadline  # the row after this one may be given in the same batch as this one at the latest
    return early, due, not presses, -_cascade(claim, behind, due) if presses else 0


def _cascade(claim: Fraction, behind: Fraction, due: int) -> int:
    """Batches until a source that is owed more than half a row a batch could miss one again."""
    if 2 * claim < 1:
        return 0
    rest = 1 - claim
    missed = ceil(rest * due - behind)
    return ceil((missed + behind) / rest)
