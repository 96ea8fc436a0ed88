"""Numbers over seeds: mean, spread, intervals, paired comparisons, rounds and bytes to a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import numpy_stream

_LATEX = {sign: f"\\{sign}" for sign in "%_&#${}"} | {
    "±": r"$\pm$",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


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
    if method not in {"t", "bootstrap"}:
        raise FedgraftError(f"there is no interval {method!r}; there are t and bootstrap")
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

    def __str__(self) -> str:
        d = self.difference
        small = 1e-9 < max(abs(d.mean), abs(d.low), abs(d.high)) < 0.005  # hundredths would all read zero
        mean, low, high = (f"{x:+.2e}" if small else f"{x:+.2f}" for x in (d.mean, d.low, d.high))
        return f"{mean} [{low}, {high}]"


def gap_cells(name: str, gap: Difference | None) -> dict[str, str]:
    """Two cells of a table: the difference with its interval, under this name, and its corrected p."""
    return {name: str(gap), "p (Holm)": f"{gap.p:.3f}"} if gap else {name: "–", "p (Holm)": "–"}


def paired(base: Sequence[float], others: Mapping[str, Sequence[float]]) -> list[Difference]:
    """Each series minus the base, seed by seed, with paired t-tests and Holm's correction for many."""
    found = []
    for name, values in others.items():
        if len(values) != len(base):
            raise FedgraftError(
                f"{name} has {len(values)} seeds and the base {len(base)}; a paired test needs the same"
            )
        gaps = np.asarray(values, dtype=float) - np.asarray(base, dtype=float)
        found.append(Difference(name, summarise(gaps.tolist()), _p_value(gaps)))
    return _holm(found)


def _p_value(gaps: np.ndarray) -> float:
    """Of Student's t-test that the mean gap is zero; one seed proves nothing, a gap that never varies everything."""
    from scipy.stats import ttest_1samp

    if len(gaps) < 2 or not gaps.any():
        return 1.0
    if np.ptp(gaps) <= 1e-12 * np.abs(gaps).max():
        return 0.0
    return float(ttest_1samp(gaps, 0.0).pvalue)


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


def bytes_to(lines: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """Bytes sent up and down until a run's metrics first show the target validation accuracy, or None."""
    spent = 0
    for line in lines:
        spent += (line.get("bytes_up") or 0) + (line.get("bytes_down") or 0)
        if line.get("accuracy") is not None and line["accuracy"] >= target:
            return spent
    return None


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"

    return "\n".join([line(header), f"|{'---|' * len(header)}", *map(line, rows)])


def latex(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table for a paper."""

    def line(cells: Sequence[object]) -> str:
        return " & ".join("".join(_LATEX.get(sign, sign) for sign in str(cell)) for cell in cells) + r" \\"

    columns = "l" + "r" * (len(header) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(header), r"\midrule", *map(line, rows)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
