"""Every number of docs/report once more, from `numbers.json` alone: `python reproduction/checks/report.py`.

Nothing of fedgraft or of the project is imported. Each line below is a piece of the report's text with its numbers left
out and the way to compute them; the filled-in text must stand in the report, else this ends with 1 and says which.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).parents[2]
RATES = ("0.001", "0.003", "0.01", "0.0333", "0.1", "0.3")
STEPS = (1, 4, 8, 16)
PRIMARY = 9
"""Endpoints that are corrected together, so Bonferroni's level is 0.05 over nine."""
Numbers = dict[str, Any]


class Kept:
    """The kept numbers of all questions."""

    def __init__(self, results: Path) -> None:
        self.questions: Numbers = {}
        for question in ("q1", "q2", "q3", "q4", "q5", "q6"):
            self.questions[question] = json.loads((results / question / "numbers.json").read_text("utf-8"))

    def series(self, place: str, measure: str) -> dict[int, float]:
        """The numbers by seed of `question:part:cell`."""
        question, part, cell = place.split(":")
        values = self.questions[question][part]["cells"][cell][measure]
        return {int(seed): value for seed, value in values.items() if value is not None}

    def mean(self, place: str, measure: str = "test") -> float:
        """The mean over seeds."""
        return float(np.mean(list(self.series(place, measure).values())))

    def gaps(self, left: str, right: str, measure: str = "test") -> np.ndarray:
        """Left minus right for the seeds that both have."""
        mine, theirs = self.series(left, measure), self.series(right, measure)
        return np.array([mine[seed] - theirs[seed] for seed in sorted(set(mine) & set(theirs))])

    def gap(self, left: str, right: str, measure: str = "test") -> float:
        """The mean difference."""
        return float(self.gaps(left, right, measure).mean())


def interval(gaps: np.ndarray, level: float) -> tuple[float, float]:
    """Student's interval of a mean."""
    low, high = stats.t.interval(level, len(gaps) - 1, gaps.mean(), stats.sem(gaps))
    return float(low), float(high)


def reach(steps: int) -> float:
    """Mean displacement per step by a constant unit gradient: momentum 0.9, from rest."""
    return float(np.mean([(1 - 0.9**t) / (1 - 0.9) for t in range(1, steps + 1)]))


def curve(kept: Kept, partition: str, steps: int, at: np.ndarray) -> np.ndarray:
    """Validation accuracy of one J at these reaches, interpolated over the logarithm."""
    known = np.array([float(rate) * reach(steps) for rate in RATES])
    heights = [kept.mean(f"q2:surface:{partition}/J={steps}/{rate}", "last") for rate in RATES]
    return np.interp(np.log(at), np.log(known), heights)


def spread_at_equal_reach(kept: Kept, partition: str) -> float:
    """The largest distance of the four curves from 0.006 to 0.3."""
    at = np.array([0.006, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3])
    curves = np.stack([curve(kept, partition, steps, at) for steps in STEPS])
    return float((curves.max(0) - curves.min(0)).max())


def spread_at_rate(kept: Kept, rate: str) -> float:
    """How far the four J lie apart IID at one rate."""
    heights = [kept.mean(f"q2:surface:IID/J={steps}/{rate}", "last") for steps in STEPS]
    return max(heights) - min(heights)


def rate_statements(kept: Kept) -> Iterator[str]:
    """The texts of section 1."""
    shared = "q2:surface:{}/J={}/0.003"
    iid = kept.gap(shared.format("IID", 16), shared.format("IID", 4), "last")
    classes = kept.gap(shared.format("N_c=10", 16), shared.format("N_c=10", 4), "last")
    yield f"J=16 is {iid:.1f} points above J=4 IID and {classes:.1f} above it with ten classes"
    yield f"A step of J=16 reaches {reach(16):.2f} rates on average, a step of J=4 {reach(4):.2f}"
    yield f"they spread over {spread_at_rate(kept, '0.003'):.1f} points at the rate 0.003"
    yield f"they lie within {spread_at_equal_reach(kept, 'IID'):.1f} points of each other at every reach"
    yield f"up to {spread_at_equal_reach(kept, 'N_c=10'):.1f} points at equal reach"
    fair = "q2:by_accuracy:{}/J={}"
    gaps = kept.gaps(fair.format("N_c=10", 4), fair.format("N_c=10", 16))
    low, high = interval(gaps, 1 - 0.05 / PRIMARY)
    yield f"J=4 ends {gaps.mean():.2f} points above J=16 (99.4 %: {low:.2f} to {high:.2f})"
    yield f"J=1 another {kept.gap(fair.format('N_c=10', 1), fair.format('N_c=10', 4)):.2f} above J=4"
    yield f"IID J=4 and J=16 differ by {kept.gap(fair.format('IID', 4), fair.format('IID', 16)):.2f}"
    loss = "q2:own_rate:N_c=10/J={}"
    yield f"We had published {kept.gap(loss.format(4), loss.format(16)):.2f} for the first number"


def mask_statements(kept: Kept) -> Iterator[str]:
    """The texts of section 3; what edits keep when they are added is in merging.md, which its own script writes."""
    arm = "q3:body:{}/{}"
    iid = {name: kept.mean(arm.format("IID", name)) for name in _ARMS}
    yield f"ends last: {iid['least sensitive']:.1f} % IID, where the start has {iid['start']:.1f}"
    yield f"a random tenth {iid['random']:.1f}, the highest magnitudes {iid['highest magnitude']:.1f}"
    yield f"and the whole block {iid['dense']:.1f}"
    below = -kept.gap(arm.format("N_c=10", "least sensitive"), arm.format("N_c=10", "random"))
    yield f"with ten classes per client it is {below:.1f} points below a random tenth"
    many = kept.gaps(arm.format("N_c=50", "least sensitive"), arm.format("N_c=50", "random"))
    turned = many - kept.gaps(arm.format("IID", "least sensitive"), arm.format("IID", "random"))
    low, high = interval(turned, 0.95)
    yield f"({turned.mean():.1f} points, 95 %: {low:.1f} to {high:.1f})"


def similarity_statements(kept: Kept) -> Iterator[str]:
    """The texts of section 2."""
    arm = "q4:known:{}"
    published, shuffled = arm.format("s=10/CKA as published"), arm.format("s=10/CKA, rows shuffled")
    yield f"CKA as published ends at {kept.mean(published, 'finetuned'):.2f} %"
    yield f"with its rows shuffled at {kept.mean(shuffled, 'finetuned'):.2f}"
    gaps = kept.gaps(published, shuffled, "finetuned")
    low, high = interval(gaps, 1 - 0.05 / PRIMARY)
    yield f"they differ by {gaps.mean():.2f} points (99.4 %: {low:.2f} to {high:.2f})"
    yield f"they correlate with shared classes by {kept.mean(published, 'correlation'):.2f}"
    yield f"keep {kept.mean(published, 'self_weight'):.2f} of the own model"
    yield f"looks at nothing, ends at {kept.mean(arm.format('s=10/self-weight 0.1'), 'finetuned'):.2f} %"
    quarter = kept.gaps(arm.format("s=10/self-weight 0.25"), published, "finetuned")
    yield f"{quarter.mean():.2f} points more {_bracket(quarter, 2)}"
    groups = arm.format("two groups/{}")
    known = kept.gaps(groups.format("groups known"), groups.format("CKA as published"), "finetuned")
    yield f"ends {known.mean():.1f} points above CKA as published {_bracket(known, 1)}"
    probe = groups.format("CKA on a shared probe")
    yield f"finds these groups (correlation {kept.mean(probe, 'correlation'):.2f})"
    gain = kept.gaps(probe, groups.format("FedBABU"), "finetuned")
    low, high = interval(gain, 0.95)
    yield f"({gain.mean():.1f} points over FedBABU, 95 %: {low:.1f} to {high:.1f})"
    alone = kept.gaps(arm.format("s=10/local only"), arm.format("s=10/FedBABU"), "finetuned")
    yield f"ends {alone.mean():.1f} points above it {_bracket(alone, 1)}"


def privacy_statements(kept: Kept) -> Iterator[str]:
    """The texts of section 4."""
    before = "q5:dp:clients=1000/{}"
    published = kept.gap(before.format("no noise"), before.format("epsilon 8"))
    yield f"epsilon 8 costs a head {published:.1f} points with 1,000 clients"
    cell = "q5:clip:clients={}/{}"
    gaps = kept.gaps(cell.format(1000, "no noise"), cell.format(1000, "epsilon 8"))
    low, high = interval(gaps, 1 - 0.05 / PRIMARY)
    yield f"it costs {gaps.mean():.1f} points (99.4 %: {low:.1f} to {high:.1f})"
    many = kept.gap(cell.format(3000, "no noise"), cell.format(3000, "epsilon 8"))
    few = kept.gap(cell.format(100, "no noise"), cell.format(100, "epsilon 8"))
    yield f"with 3,000 clients {many:.1f} and with 100 clients {few:.1f}"
    strict = kept.gap(cell.format(1000, "no noise"), cell.format(1000, "epsilon 1"))
    yield f"Epsilon 1 costs {strict:.1f} with 1,000 clients"
    clipped = "q5:clip_surface:clients=3000/clip alone/{}/{}"
    narrow = max(kept.mean(clipped.format(rate, "0.5"), "last") for rate in ("0.1", "0.3"))
    yield f"ends 3,000 clients at {narrow:.1f} %"
    wide = max(kept.mean(clipped.format(rate, "4"), "last") for rate in ("0.1", "0.3", "1"))
    yield f"where a clip of 4 ends at {wide:.1f}"


def _bracket(gaps: np.ndarray, digits: int) -> str:
    """The 95 % interval of a mean difference in brackets."""
    low, high = interval(gaps, 0.95)
    return f"(95 %: {low:.{digits}f} to {high:.{digits}f})"


_ARMS = ("least sensitive", "start", "random", "highest magnitude", "dense")
SECTIONS: tuple[Callable[[Kept], Iterator[str]], ...] = (
    rate_statements,
    similarity_statements,
    mask_statements,
    privacy_statements,
)


def missing(report: str, kept: Kept) -> list[str]:
    """The statements that the report does not make, line breaks aside."""
    text = re.sub(r"\s+", " ", report)
    lacking = []
    for statements in SECTIONS:
        for statement in statements(kept):
            if statement not in text:
                lacking.append(statement)
    return lacking


def main() -> None:
    """Compare the report with the kept numbers."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "results"
    report = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "report" / "README.md"
    lacking = missing(report.read_text("utf-8"), Kept(results))
    print("\n".join(f"the report does not say: {line}" for line in lacking) or "every number is the report's")
    raise SystemExit(bool(lacking))


if __name__ == "__main__":
    main()
