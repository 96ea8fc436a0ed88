"""What an attack that tells neighbouring runs apart proves about epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import beta


def epsilon_lower_bound(with_client: Sequence[float], without: Sequence[float], delta: float) -> float:
    """Return the Clopper-Pearson lower bound (95 %) on epsilon, from the scores of runs with a client and without it.

    A threshold of the score is chosen on one half of the runs and judged on the other.
    """
    half = len(with_client) // 2
    best, level = -math.inf, 0.0
    for cut in sorted(with_client[:half])[:: max(1, half // 50)]:
        right = sum(s > cut for s in with_client[:half]) / half
        wrong = max(1, sum(s > cut for s in without[:half])) / half
        if right > delta and math.log((right - delta) / wrong) > best:
            best, level = math.log((right - delta) / wrong), cut
    n = len(with_client) - half
    hits, slips = sum(s > level for s in with_client[half:]), sum(s > level for s in without[half:])
    low = beta.ppf(0.025, hits, n - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, slips + 1, n - slips) if slips < n else 1.0
    return math.log(max(low - delta, 1e-9) / high)
