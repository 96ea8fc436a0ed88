"""Every verdict of the six questions and on the documents' claims once more, from `numbers.json` and the plan alone.

Run: `python reproduction/checks/verdicts.py docs/results`. It prints each endpoint and claim with its effect and
verdict, and ends with 1 where the page of answers or of claims says another word. Nothing of fedgraft is imported; the
rule is the protocol's, with scipy's paired t-tests: `ttest_1samp` on the seeds' differences, two one-sided for "same".
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
ACCURACY = {"test", "best", "last", "at", "personal", "finetuned", "balanced"}
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
    """The word for a gate that is not met, empty where it is."""
    gate, measure = plan.get("gate", {}), asked.get("measure", "test")
    if measure.partition(":")[0] not in ACCURACY:
        return ""
    # Arms are those with the levels that all cells of the comparison share, and the start.
    compared = [asked[side].split("/") for side in ("left", "right") if asked.get(side)]
    compared += [cell.split("/") for cell in asked.get("minus", [])]
    shared = [len({cell[i] for cell in compared}) == 1 and len(compared) > 1 for i in range(len(compared[0]))]
    arms = [gate["start"]] if gate.get("start") in part["cells"] else []
    for levels in itertools.product(*(axis["levels"] for axis in plan["axes"])):
        name = "/".join(levels)
        alike = all(not same or levels[i] == compared[0][i] for i, same in enumerate(shared))
        if alike and name not in arms and part["cells"].get(name):
            arms.append(name)
    means = [np.mean(list(found.values())) for arm in arms if (found := by_seed(part, arm, measure))]
    span = max(means) - min(means) if len(means) > 1 else math.nan
    if not span >= 5 * smallest_seen(x):
        return "too noisy" if span >= 5 * asked.get("margin", 1.0) else "floor or ceiling"
    flat = False
    if "dense" in gate:
        flat = any(not gap(part, gate["dense"], gate[other], measure) >= 5 for other in ("start", "head_only"))
    if "sharing" in gate:
        flat = flat or not gap(part, *gate["sharing"], measure) > 0
    if flat:
        return "floor or ceiling"
    chosen = plan.get("study") != "attack" and gate.get("evaluations", True)
    few = chosen and min(part["cells"][arm]["evaluations"] for arm in arms) < 8
    return "too few evaluations" if few else ""


def gap(part: Numbers, left: str, right: str, measure: str) -> float:
    """Mean difference over common seeds."""
    a, b = by_seed(part, left, measure), by_seed(part, right, measure)
    common = set(a) & set(b)
    return float(np.mean([a[seed] - b[seed] for seed in common])) if common else math.nan


def chance(x: np.ndarray, asked: Numbers) -> float:
    """One-sided p: of a difference either way, or of equivalence."""
    if asked.get("expect", "more") != "same":
        return float(stats.ttest_1samp(x, 0.0).pvalue) / 2
    room = math.log(asked["margin"]) if asked.get("ratio") else asked.get("margin", 1.0)
    low = stats.ttest_1samp(x, -room, alternative="greater").pvalue
    return float(max(low, stats.ttest_1samp(x, room, alternative="less").pvalue))


def word(x: np.ndarray, asked: Numbers, decided: bool | None, alpha: float) -> str:
    """The verdict; `decided` is Holm's answer for a primary endpoint, None for the others."""
    mean, margin = float(x.mean()), asked.get("margin", 1.0)
    room = math.log(margin) if asked.get("ratio") else margin
    low, high = stats.t.interval(1 - 2 * alpha, len(x) - 1, mean, stats.sem(x))
    if decided:  # Holm has excluded zero, so the interval ends there
        low, high = (max(low, 0.0), high) if mean > 0 else (low, min(high, 0.0))
    sure = decided if decided is not None else chance(x, asked) <= ALPHA
    if asked.get("expect", "more") == "same":
        return "supported" if sure else "contradicted" if low > room or high < -room else "undecided"
    inside = -room <= low and high <= room
    if sure:
        said = "supported" if (mean > 0) == (asked.get("expect", "more") == "more") else "contradicted"
        return f"{said}, {size(low if mean > 0 else -high, inside, room, asked)}"
    return f"equivalent within {margin:g}" if inside else "undecided"


def size(nearest: float, inside: bool, room: float, asked: Numbers) -> str:
    """How large a decided effect is, from the limit that is nearer to the line."""
    factor = "a factor of " if asked.get("ratio") else ""
    matters = f"{factor}{asked.get('margin', 1.0):g}"
    if inside:
        return f"below {matters}"
    return f"at least {matters}" if nearest >= room else "size undecided"


def fact(part: Numbers, asked: Numbers) -> str | None:
    """The verdict on a number that does not vary over seeds; None where it does."""
    value = seeds_of(part, {**asked, "number": 0.0})
    if value is None or value.std(ddof=1) > (1e-3 if asked.get("ratio") else 1e-9 * max(1.0, abs(value).max())):
        return None
    measure, number = asked.get("measure", "test"), asked.get("number") or (1.0 if asked.get("ratio") else 0.0)
    left, right = (next(iter(by_seed(part, asked[side], measure).values())) for side in ("left", "right"))
    distance = (left / right if asked.get("ratio") else left - right) - number
    margin = number * (asked.get("margin", 1.0) - 1) if asked.get("ratio") else asked.get("margin", 1.0)
    if asked.get("expect", "more") == "same":
        return "supported" if abs(distance) <= margin else "contradicted"
    if distance == 0:
        return f"equivalent within {margin:g}"
    said = "supported" if (distance > 0) == (asked.get("expect", "more") == "more") else "contradicted"
    held = {"margin": margin}
    return f"{said}, {size(abs(distance), abs(distance) <= margin, margin, held)}"


def asked_of(plans: Numbers) -> dict[str, tuple[str, str, Numbers]]:
    """Every endpoint, and every claim that a cell speaks of: question, part, and what is asked."""
    found = {e["name"]: (question, e["part"], e) for question, plan in plans.items() for e in plan["endpoints"]}
    for claim in tomllib.loads((PLAN.parent / "claims.toml").read_text())["claims"]:
        if "cell" in claim:
            question, _, part = claim["cell"].partition(":")
            found[claim["id"]] = (question, part, {**claim, "primary": False})
    return found


def verdicts(out: Path) -> dict[str, tuple[Numbers, str]]:
    """A word for every endpoint and claim."""
    plans = {q: tomllib.loads((PLAN / f"{q}.toml").read_text()) for q in ("q1", "q2", "q3", "q4", "q5", "q6")}
    kept = {q: json.loads(f.read_text()) if (f := out / q / "numbers.json").exists() else {} for q in plans}
    found: dict[str, tuple[Numbers, str]] = {}
    left: dict[str, tuple[np.ndarray, Numbers]] = {}
    every = asked_of(plans)
    for name, (question, where, asked) in every.items():
        part = kept[question].get(where, {})
        x = seeds_of(part, asked)
        if x is not None and asked.get("fact") and (said := fact(part, asked)):
            found[name] = asked, said
        elif x is None:
            found[name] = asked, "not measured"
        elif len(x) < 2 or x.std() == 0:
            found[name] = asked, "undecided"
        elif lacking := unmet(part, plans[question]["parts"][where], asked, x):
            found[name] = asked, lacking
            print(f"{name}: {x.mean():+.4g} over {len(x)} seeds: {lacking}")
        else:
            left[name] = (x, asked)
    primary = [name for name, (_, _, asked) in every.items() if asked.get("primary", True)]
    holm, held = [], True
    for i, name in enumerate(sorted((n for n in primary if n in left), key=lambda n: chance(*left[n]))):
        held = held and (len(primary) - i) * chance(*left[name]) <= ALPHA
        holm += [name] if held else []
    for name, (x, asked) in left.items():
        alpha = ALPHA / len(primary) if name in primary else ALPHA
        found[name] = asked, word(x, asked, name in holm if name in primary else None, alpha)
        print(f"{name}: {x.mean():+.4g} over {len(x)} seeds, p {min(1.0, 2 * chance(x, asked)):.2g}: {found[name][1]}")
    return found


def main() -> None:
    """Compare with the tables of answers and of claims."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    pages = [line for page in ("answers.md", "claims.md") for line in (out / page).read_text().splitlines()]
    wrong = []
    for name, (asked, said) in verdicts(out).items():
        begin = f"| {asked['id']} |" if "id" in asked else f"| {asked['text']} ("
        row = next((line for line in pages if line.startswith(begin)), "no such row")
        if f"| **{said}** |" not in row:
            wrong.append(f"{name}: {said} here, but the page has {row}")
    print("\n".join(wrong) or "every verdict is the page's")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
