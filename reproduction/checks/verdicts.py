"""Every verdict of the six questions once more, from `numbers.json` and the plan alone: a check from outside.

Run: `python reproduction/checks/verdicts.py docs/results`. It prints each endpoint with its effect, interval and
verdict, and ends with 1 where the page of answers says another word. Nothing of fedgraft is imported; the rule is the
protocol's, with scipy's own paired t-tests: `ttest_1samp` on the seeds' differences, two one-sided tests for "same".
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats

ALPHA = 0.025  # one-sided
PLAN = Path(__file__).parents[1] / "presets"
ACCURACY = {"test", "best", "last", "personal", "finetuned", "balanced"}
Numbers = dict[str, Any]


def by_seed(part: Numbers, cell: str, measure: str) -> dict[str, float]:
    """A number by seed; a missing run is left out."""
    found = part.get("cells", {}).get(cell, {}).get(measure, {})
    return {seed: x for seed, x in found.items() if x is not None and not math.isnan(x)}


def seeds_of(part: Numbers, asked: Numbers) -> np.ndarray | None:
    """The endpoint's number for every seed that all of its cells have."""
    names = [asked["left"], *([asked["right"]] if asked.get("right") else []), *asked.get("minus", [])]
    cells = [by_seed(part, name, asked.get("measure", "test")) for name in names]
    common = sorted(set.intersection(*map(set, cells)), key=int)
    if not common:
        return None
    sides = np.array([[cell[seed] for seed in common] for cell in cells])
    if asked.get("ratio"):
        return np.log(sides[0]) - np.log(sides[1]) - math.log(asked.get("number") or 1.0)
    signs = np.array([1, -1, -1, 1])[: len(sides)]
    return signs @ sides - (asked.get("number") or 0.0)


def smallest_seen(x: np.ndarray) -> float:
    """The effect that this many seeds of this spread show four times in five (two-sided t-test at 5 %)."""
    n, sd = len(x), x.std(ddof=1)
    edge = stats.t.ppf(1 - ALPHA, n - 1)

    def missed(shift: float) -> float:
        return float(stats.nct.cdf(edge, n - 1, shift)) - 0.2

    return float(optimize.brentq(missed, 0.0, 2 * edge)) * sd / n**0.5


def unmet(part: Numbers, plan: Numbers, asked: Numbers, x: np.ndarray) -> str:
    """The conditions of the gate that do not hold."""
    gate, measure = plan.get("gate", {}), asked.get("measure", "test")
    if measure not in ACCURACY:
        return ""
    axes = [(axis["name"], list(axis["levels"])) for axis in plan["axes"]]
    arms = []
    for levels in itertools.product(*(levels for _, levels in axes)):
        at = dict(zip((name for name, _ in axes), levels, strict=True))
        kept = (at[name] in ([want] if isinstance(want, str) else want) for name, want in gate.get("arms", {}).items())
        if all(kept) and part["cells"].get("/".join(levels)):
            arms.append("/".join(levels))
    means = [np.mean(list(found.values())) for arm in arms if (found := by_seed(part, arm, measure))]
    span = max(means) - min(means) if len(means) > 1 else math.nan
    said = [] if span >= 5 * smallest_seen(x) else [f"range {span:.3g}, needs {5 * smallest_seen(x):.3g}"]
    if plan.get("study") != "attack" and min(part["cells"][arm]["evaluations"] for arm in arms) < 8:
        said.append("fewer than eight evaluations")
    if "dense" in gate:
        for other in ("start", "head_only"):
            if not gap(part, gate["dense"], gate[other], measure) >= 5:
                said.append(f"dense above {other}: {gap(part, gate['dense'], gate[other], measure):.3g}, needs 5")
    if "sharing" in gate and not (shared := gap(part, *gate["sharing"], measure)) > 0:
        said.append(f"FedAvg above local-only: {shared:.3g}")
    return "; ".join(said)


def gap(part: Numbers, left: str, right: str, measure: str) -> float:
    """Mean difference over common seeds."""
    a, b = by_seed(part, left, measure), by_seed(part, right, measure)
    common = set(a) & set(b)
    return float(np.mean([a[seed] - b[seed] for seed in common])) if common else math.nan


def chance(x: np.ndarray, asked: Numbers) -> float:
    """One-sided p: of a difference either way, or of equivalence."""
    if asked["expect"] != "same":
        return float(stats.ttest_1samp(x, 0.0).pvalue) / 2
    room = math.log(asked["margin"]) if asked.get("ratio") else asked.get("margin", 1.0)
    low = stats.ttest_1samp(x, -room, alternative="greater").pvalue
    return float(max(low, stats.ttest_1samp(x, room, alternative="less").pvalue))


def word(x: np.ndarray, asked: Numbers, decided: bool | None, alpha: float) -> str:
    """The verdict; `decided` is Holm's answer for a primary endpoint, None for the others."""
    mean, margin = float(x.mean()), asked.get("margin", 1.0)
    room = math.log(margin) if asked.get("ratio") else margin
    low, high = stats.t.interval(1 - 2 * alpha, len(x) - 1, mean, stats.sem(x))
    sure = decided if decided is not None else chance(x, asked) <= ALPHA
    if asked["expect"] == "same":
        return "supported" if sure else "contradicted" if low > room or high < -room else "undecided"
    if sure:
        return "supported" if (mean > 0) == (asked["expect"] == "more") else "contradicted"
    return f"equivalent within {margin:g}" if -room <= low and high <= room else "undecided"


def fact(part: Numbers, asked: Numbers) -> str | None:
    """The verdict on a number that does not vary over seeds; None where it does."""
    value = seeds_of(part, {**asked, "ratio": False, "number": 0.0})
    if value is None or value.std() > 1e-9 * max(1.0, abs(value).max()):
        return None
    measure, number = asked.get("measure", "test"), asked.get("number") or (1.0 if asked.get("ratio") else 0.0)
    left, right = (next(iter(by_seed(part, asked[side], measure).values())) for side in ("left", "right"))
    distance = (left / right if asked.get("ratio") else left - right) - number
    margin = number * (asked.get("margin", 1.0) - 1) if asked.get("ratio") else asked.get("margin", 1.0)
    if asked["expect"] == "same":
        return "supported" if abs(distance) <= margin else "contradicted"
    if distance == 0:
        return f"equivalent within {margin:g}"
    return "supported" if (distance > 0) == (asked["expect"] == "more") else "contradicted"


def verdicts(out: Path) -> dict[str, str]:
    """A word for every endpoint."""
    plans = {q: tomllib.loads((PLAN / f"{q}.toml").read_text()) for q in ("q1", "q2", "q3", "q4", "q5", "q6")}
    kept = {q: json.loads(f.read_text()) if (f := out / q / "numbers.json").exists() else {} for q in plans}
    found: dict[str, str] = {}
    left: dict[str, tuple[np.ndarray, Numbers]] = {}
    primary = [e["name"] for plan in plans.values() for e in plan["endpoints"] if e.get("primary", True)]
    for question, plan in plans.items():
        for asked in plan["endpoints"]:
            name, part = asked["name"], kept[question].get(asked["part"], {})
            x = seeds_of(part, asked)
            if x is None:
                found[name] = "undecided"
            elif asked.get("fact") and (said := fact(part, asked)):
                found[name] = said
            elif len(x) < 2 or x.std() == 0:
                found[name] = "undecided"
            elif unmet(part, plan["parts"][asked["part"]], asked, x):
                found[name] = "no range here"
            else:
                left[name] = (x, asked)
    holm, held = [], True
    for i, name in enumerate(sorted((n for n in primary if n in left), key=lambda n: chance(*left[n]))):
        held = held and (len(primary) - i) * chance(*left[name]) <= ALPHA
        holm += [name] if held else []
    for name, (x, asked) in left.items():
        alpha = ALPHA / max(1, len(primary) - len(holm)) if name in primary else ALPHA
        found[name] = word(x, asked, name in holm if name in primary else None, alpha)
        print(f"{name}: {x.mean():+.4g} over {len(x)} seeds, p {2 * chance(x, asked):.2g}: {found[name]}")
    return found


def main() -> None:
    """Compare with the table of answers."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    page, wrong = (out / "answers.md").read_text(), []
    for name, said in verdicts(out).items():
        texts = [e["text"] for q in PLAN.glob("q?.toml") for e in tomllib.loads(q.read_text())["endpoints"]
                 if e["name"] == name]  # fmt: skip
        row = next(line for line in page.splitlines() if line.startswith(f"| {texts[0]} ("))
        if f"| **{said}** |" not in row:
            wrong.append(f"{name}: {said} here, but the page has {row}")
    print("\n".join(wrong) or "every verdict is the page's")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
