"""Statistics over seeds: mean, deviation, intervals, paired comparisons, rounds and bytes to a target, tables.

Several comparisons made together are corrected after Holm, A simple sequentially rejective multiple test procedure
(1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import numpy_stream
from fedgraft.core.text import markdown_cell

_RESAMPLES = 10_000
_LATEX = {sign: f"\\{sign}" for sign in "%_&#${}"} | {
    "±": r"$\pm$",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n-1) and a 95 % interval of values over seeds."""

    mean: float
    std: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        """Return mean and deviation with two decimals."""
        return f"{self.mean:.2f} ± {self.std:.2f}"


def summarise(values: Sequence[float], method: str = "t", seed: int = 0) -> Summary:
    """Return mean, deviation and 95 % interval: Student's ("t"), or by 10,000 resamples ("bootstrap") from `seed`."""
    if method not in {"t", "bootstrap"}:
        raise FedgraftError(
            "E-METRICS-INTERVAL", f"there is no interval {method!r}", "choose t or bootstrap", method=method
        )
    data = np.asarray(values, dtype=float)
    if not len(data):
        raise FedgraftError("E-METRICS-NO-VALUES", "there are no values to summarise", "give at least one")
    mean = float(data.mean())
    if len(data) == 1:
        return Summary(mean, 0.0, mean, mean, 1)
    std = float(data.std(ddof=1))
    if method == "bootstrap":
        stream = numpy_stream(seed, "bootstrap")
        means = data[stream.integers(0, len(data), (_RESAMPLES, len(data)))].mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
    else:
        from scipy.stats import t

        half = float(t.ppf(0.975, len(data) - 1)) * std / len(data) ** 0.5
        low = mean - half
        high = mean + half
    return Summary(mean, std, float(low), float(high), len(data))


@dataclass(frozen=True)
class Difference:
    """A paired difference on the same seeds; `p` is corrected for the number of comparisons made together."""

    name: str
    difference: Summary
    p: float

    def __str__(self) -> str:
        """Return the difference with its interval; in scientific notation where two decimals would all read zero."""
        numbers = (self.difference.mean, self.difference.low, self.difference.high)
        largest = max(abs(number) for number in numbers)
        pattern = "+.2f"
        if 1e-9 < largest < 0.005:
            pattern = "+.2e"
        mean, low, high = (format(number, pattern) for number in numbers)
        return f"{mean} [{low}, {high}]"


def gap_cells(name: str, gap: Difference | None) -> dict[str, str]:
    """Return two cells of a table: the difference with its interval, under this name, and its corrected p."""
    if gap is None:
        return {name: "–", "p (Holm)": "–"}
    return {name: str(gap), "p (Holm)": f"{gap.p:.3f}"}


def paired(base: Sequence[float], others: Mapping[str, Sequence[float]]) -> list[Difference]:
    """Return each series minus the base, seed by seed, with p-values of paired t-tests and Holm's correction.

    `base` and the series of `others` (by name) have one value for each seed, in the same order.
    """
    differences = []
    for name, values in others.items():
        if len(values) != len(base):
            raise FedgraftError(
                "E-METRICS-UNPAIRED",
                f"{name} has {len(values)} seeds and the base {len(base)}",
                "compare series of the same seeds",
                name=name,
                seeds=len(values),
                base_seeds=len(base),
            )
        gaps = np.asarray(values, dtype=float) - np.asarray(base, dtype=float)
        differences.append(Difference(name, summarise(gaps.tolist()), _p_value(gaps)))
    return _holm(differences)


def _p_value(gaps: np.ndarray) -> float:
    """Return the p-value of Student's t-test that the mean gap is zero.

    It is 1 for a single seed or gaps that are all zero, and 0 for a constant gap other than zero.
    """
    from scipy.stats import ttest_1samp

    if len(gaps) < 2 or not gaps.any():
        return 1.0
    if np.ptp(gaps) <= 1e-12 * np.abs(gaps).max():
        return 0.0
    return float(ttest_1samp(gaps, 0.0).pvalue)


def _holm(differences: list[Difference]) -> list[Difference]:
    """Return the differences with p-values corrected after Holm, in the same order."""
    corrected = holm([difference.p for difference in differences])
    return [Difference(d.name, d.difference, p) for d, p in zip(differences, corrected, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values of comparisons made together corrected after Holm, in the same order."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        corrected[i] = largest
    return corrected


def rounds_to(rounds: Sequence[int], accuracy: Sequence[float], target: float) -> int | None:
    """Return the first of these rounds whose accuracy reaches the target; None if none does."""
    for number, value in zip(rounds, accuracy, strict=True):
        if value >= target:
            return number
    return None


def bytes_to(lines: Sequence[Mapping[str, Any]], target: float) -> int | None:
    """Return the bytes sent up and down until a run first reaches the validation accuracy `target`.

    None if it never does. `lines` are the lines of its metrics.jsonl.
    """
    sent = 0
    for line in lines:
        sent += line.get("bytes_up") or 0
        sent += line.get("bytes_down") or 0
        accuracy = line.get("accuracy")
        if accuracy is not None and accuracy >= target:
            return sent
    return None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], with_markup: bool = False) -> str:
    """Return a Markdown table; cells are shown word for word, or, `with_markup`, are Markdown of the caller's own."""
    lines = [_markdown_row(header, with_markup), f"|{'---|' * len(header)}"]
    for row in rows:
        lines.append(_markdown_row(row, with_markup))
    return "\n".join(lines)


def _markdown_row(cells: Sequence[object], with_markup: bool) -> str:
    """Return one row of a Markdown table; of cells that are Markdown themselves only `|` is escaped."""
    shown = []
    for cell in cells:
        if with_markup:
            shown.append(str(cell).replace("|", r"\|"))
        else:
            shown.append(markdown_cell(str(cell)))
    return "| " + " | ".join(shown) + " |"


def latex_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a LaTeX table with booktabs rules; the first column is left-aligned, the others right-aligned."""
    columns = "l" + "r" * (len(header) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_row(header), r"\midrule"]
    for row in rows:
        lines.append(_latex_row(row))
    lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _latex_row(cells: Sequence[object]) -> str:
    """Return one row of a LaTeX table, with special characters escaped."""
    return " & ".join(_latex_text(str(cell)) for cell in cells) + r" \\"


def _latex_text(text: str) -> str:
    """Return the text with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(sign, sign) for sign in text)
