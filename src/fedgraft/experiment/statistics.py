"""Numbers over seeds: mean, spread, intervals, paired comparisons, rounds and bytes to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedgraft.errors import FedgraftError
from fedgraft.randomness import numpy_stream


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n−1) and a 95 % interval of values over seeds."""

    mean: float
    std: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}"


def summarise(values: Sequence[float], method: str = "t", seed: int = 0) -> Summary:
    """Summary with Student's t interval, or a percentile bootstrap of 10,000 resamples."""
    data = np.asarray(values, dtype=float)
    if not len(data):
        raise FedgraftError("there are no values to summarise")
    mean, std = float(data.mean()), float(data.std(ddof=1)) if len(data) > 1 else 0.0
    if len(data) == 1:
        return Summary(mean, std, mean, mean, 1)
    if method == "bootstrap":
        stream = numpy_stream(seed, "bootstrap")
        means = data[stream.integers(0, len(data), (10_000, len(data)))].mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
    else:
        from scipy.stats import t

        half = float(t.ppf(0.975, len(data) - 1)) * std / len(data) ** 0.5
        low, high = mean - half, mean + half
    return Summary(mean, std, float(low), float(high), len(data))


@dataclass(frozen=True)
class Difference:
    """A paired difference on the same seeds; `p` is corrected for the number of comparisons made together."""

    name: str
    difference: Summary
    p: float


def paired(base: Sequence[float], others: Mapping[str, Sequence[float]]) -> list[Difference]:
    """Each series minus the base, seed by seed, with paired t-tests and Holm's correction for many."""
    from scipy.stats import ttest_rel

    found = []
    for name, values in others.items():
        if len(values) != len(base):
            raise FedgraftError(
                f"{name} has {len(values)} seeds and the base {len(base)}; a paired test needs the same"
            )
        gaps = np.asarray(values, dtype=float) - np.asarray(base, dtype=float)
        p = float(ttest_rel(values, base).pvalue) if len(gaps) > 1 and gaps.std() > 0 else 1.0
        found.append(Difference(name, summarise(gaps.tolist()), p))
    return _holm(found)


def _holm(found: list[Difference]) -> list[Difference]:
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    corrected, largest = dict[int, float](), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, found[i].p * (len(found) - rank)))
        corrected[i] = largest
    return [Difference(d.name, d.difference, corrected[i]) for i, d in enumerate(found)]


def rounds_to(rounds: Sequence[int], accuracy: Sequence[float], target: float) -> int | None:
    """The first round at which the accuracy reaches the target, or None."""
    return next((r for r, a in zip(rounds, accuracy, strict=True) if a >= target), None)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def latex(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table for a paper."""

    def line(cells: Sequence[object]) -> str:
        plain = (str(c).replace("%", r"\%").replace("_", r"\_").replace("±", r"$\pm$") for c in cells)
        return " & ".join(plain) + r" \\"

    columns = "l" + "r" * (len(header) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(header), r"\midrule", *map(line, rows)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
