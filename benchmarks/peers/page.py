"""docs/benchmarks.md from the stored results: each result replaces its section and its bars, the rest stays as it is.

So a part can be measured again by itself.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import SHORT, Spec

COMMAND = "python -m benchmarks.peers"
NAMES = {
    "fedgraft": "fedgraft",
    "bare": "bare hardware",
    "flower": "Flower simulation",
    "pfl": "pfl-research",
    "fedjax": "FedJAX",
    "fedlab": "FedLab",
    "torch_loop": "plain PyTorch loop",
}
BARS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "features": (
        ("round", "flower", 12),
        ("round", "pfl", 6),
        ("round", "fedjax", 4),
        ("whole", "flower", 10),
        ("whole", "pfl", 4),
        ("whole", "fedjax", 3),
    ),
    "cnn": (("round", "best torch peer", 1.4),),
    "frozen": (("whole", "best peer", 10),),
}
LIMITS = {"features": 2.0, "edit": 1.10}
"""At most so many times the bare hardware's seconds per round."""


@dataclass(frozen=True)
class Spread:
    """The median of repeats, with the least and the most."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        digits = 3 if self.middle < 1 else 2 if self.middle < 10 else 1
        return f"{self.middle:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most."""
    return Spread(statistics.median(values), min(values), max(values))


def steady(result: dict[str, Any]) -> float:
    """Median seconds of a round once it runs: the first two rounds (the first, of few) do not count."""
    rounds = result["round_seconds"]
    return statistics.median(rounds[2:] if len(rounds) > 5 else rounds[1:] or rounds)


def whole(result: dict[str, Any], spec: Spec) -> float:
    """Seconds of the whole process; rounds and evaluations that were not run are added at their measured cost."""
    missing = spec.rounds - result["rounds"]
    done = len(result["evaluations"])
    due = sum(r == spec.rounds or r % spec.evaluate_every == 0 for r in range(1, spec.rounds + 1))
    each = result["phases"]["evaluate"] / done if done else 0.0
    return result["seconds"] + missing * steady(result) + max(0, due - done) * each


def agree(accuracies: dict[str, list[float]], count: int) -> bool:
    """Whether all peers reach the same accuracy: within three standard errors of a difference, or two points."""
    middles = [statistics.median(found) for found in accuracies.values() if found]
    if len(middles) < 2:
        return True
    mean = statistics.mean(middles)
    error = (2 * mean * (1 - mean) / max(1, count)) ** 0.5
    return max(middles) - min(middles) <= max(0.02, 3 * error)


def load(root: Path, spec: Spec) -> dict[str, list[dict[str, Any]]]:
    """Results by peer, fedgraft first; a peer without any has an empty list. Only those like the newest count."""
    found = {}
    for peer in ("fedgraft", "bare", *spec.peers):
        files = sorted((root / "results" / spec.name / peer).glob("[0-9]*.json"))
        results = [json.loads(file.read_text()) for file in files]
        newest = max(results, key=lambda r: r["date"], default=None)
        found[peer] = [r for r in results if newest and r["key"] == newest["key"]]
    return found


def reason(root: Path, spec: Spec, peer: str) -> str:
    """Why a peer has no result."""
    file = root / "results" / spec.name / peer / "error.json"
    return json.loads(file.read_text())["reason"] if file.exists() else "not run yet"


def table(root: Path, spec: Spec) -> list[str]:
    """The lines of one workload."""
    found = load(root, spec)
    ours = found["fedgraft"]
    base = (
        {"round": spread([steady(r) for r in ours]).middle, "whole": spread([whole(r, spec) for r in ours]).middle}
        if ours
        else {}
    )
    lines = [
        f"### {spec.name}: {spec.text}",
        "",
        f"{spec.clients} clients, {spec.per_round} per round, {spec.steps} steps, batch {spec.batch_size}, "
        f"{spec.rounds} rounds, {spec.examples:,} examples. Repeats: {repeated(found)}. {measured(found)}",
        "",
        "| | s per round | times fedgraft | whole process, s | times fedgraft | peak MB | cores "
        "| other load | test % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for peer, results in found.items():
        lines.append(_row(root, spec, peer, results, base))
    fewest = min((r["rounds"] for peer, rs in found.items() if peer != "bare" for r in rs), default=0)
    ran = {  # of equally many rounds: who stops after three of a hundred is not yet where the others are
        peer: [r["test_accuracy"] for r in results if r["rounds"] == fewest]
        for peer, results in found.items()
        if peer != "bare"
    }
    short = root / "results" / spec.name / "fedgraft" / f"{SHORT}.json"
    if not ran["fedgraft"] and short.exists() and (one := json.loads(short.read_text()))["rounds"] == fewest:
        ran["fedgraft"] = [one["test_accuracy"]]
        lines += ["", f"After the peers' {fewest} rounds fedgraft is at {100 * one['test_accuracy']:.1f} %."]
    if not agree(ran, spec.examples // 5):
        lines += ["", "**The accuracies differ by more than noise: this row compares unlike work.**"]
    bare = found["bare"][-1] if found["bare"] else {}
    if "extract_image" in bare:
        ratio = spread([r["extract_image"] / r["bare_image"] for r in found["bare"]])
        lines += ["", f"Extraction against a bare forward pass, one thread: {ratio} times (bar: 1.15)."]
    if ours and "bytes_up" in ours[-1] and spec.group == "edit":
        moved = ours[-1]["coordinates"]
        dense = 4 * moved["of"] / ours[-1]["bytes_up"]
        lines += ["", f"Bytes up per client: {ours[-1]['bytes_up']:,.0f}, {dense:.2f} times fewer than all weights."]
    return [*lines, ""]


def repeated(found: dict[str, list[dict[str, Any]]]) -> str:
    """How often the rows of a workload were measured."""
    counts = sorted({len(results) for results in found.values() if results})
    return " to ".join(map(str, counts[:1] + counts[1:][-1:])) or "none"


def _row(root: Path, spec: Spec, peer: str, results: list[dict[str, Any]], base: dict[str, float]) -> str:
    name = NAMES.get(peer, peer)
    if not results:
        return f"| {name} | no result: {reason(root, spec, peer)} |  |  |  |  |  |  |  |"
    if peer == "bare":
        if not results[0]["round_seconds"]:
            return f"| {name} | see below |  |  |  |  |  |  |  |"
        rounds = spread([steady(r) for r in results])
        ratio = f"{rounds.middle / base['round']:.2f}" if base else ""
        return f"| {name} | {rounds} | {ratio} |  |  |  |  | {spread([r['other_load'] for r in results])} |  |"
    rounds, total = spread([steady(r) for r in results]), spread([whole(r, spec) for r in results])
    partial = f"{total}\\*" if results[0]["rounds"] < spec.rounds else str(total)
    memory = statistics.median(r["peak_mb"] for r in results)
    cores = statistics.median(r["cpu_seconds"] / r["seconds"] for r in results)
    test = spread([100 * r["test_accuracy"] for r in results])
    ratios = [f"{a / base[b]:.1f}" if base else "" for a, b in ((rounds.middle, "round"), (total.middle, "whole"))]
    cells = [name, rounds, ratios[0], partial, ratios[1], f"{memory:.0f}", f"{cores:.1f}"]
    return f"| {' | '.join(map(str, cells))} | {spread([r['other_load'] for r in results])} | {test} |"


def bars(root: Path, specs: Sequence[Spec]) -> list[str]:
    """What was to be shown, and what was found."""
    lines = ["| workload | what | bar | found | |", "|---|---|---|---|---|"]
    for spec in specs:
        found = {peer: results for peer, results in load(root, spec).items() if results}
        if "fedgraft" not in found:
            continue
        timed = {p: rs for p, rs in found.items() if rs[0]["round_seconds"]}
        cost = {
            "round": {p: spread([steady(r) for r in rs]).middle for p, rs in timed.items()},
            "whole": {p: spread([whole(r, spec) for r in rs]).middle for p, rs in timed.items()},
        }
        for what, peer, bar in BARS.get(spec.group, ()):
            others = [p for p in spec.peers if p in cost[what] and (p != "fedjax" or "torch" not in peer)]
            which = [peer] if peer in cost[what] else others if peer.startswith("best") else []
            if which:
                ratio = min(cost[what][p] for p in which) / cost[what]["fedgraft"]
                lines.append(_bar(spec, f"{what}, times faster than {NAMES.get(peer, peer)}", bar, ratio, ratio >= bar))
        if spec.group in LIMITS and "bare" in cost["round"]:
            ratio = cost["round"]["fedgraft"] / cost["round"]["bare"]
            bar = LIMITS[spec.group]
            lines.append(_bar(spec, "round, times the bare hardware (at most)", bar, ratio, ratio <= bar))
        if "extract_image" in found.get("bare", [{}])[0]:
            ratio = statistics.median(r["extract_image"] / r["bare_image"] for r in found["bare"])
            lines.append(_bar(spec, "extraction, times a bare forward pass (at most)", 1.15, ratio, ratio <= 1.15))
        if spec.task == "sparse":
            ratio = 4 * found["fedgraft"][0]["coordinates"]["of"] / found["fedgraft"][0]["bytes_up"]
            lines.append(_bar(spec, "bytes up, times fewer than all weights", 9.9, ratio, ratio >= 9.9))
        if spec.group == "features":
            own = statistics.median(r["peak_mb"] for r in found["fedgraft"])
            least = [statistics.median(r["peak_mb"] for r in found[p]) for p in spec.peers if p in found]
            if least:
                ratio = own / min(least)
                lines.append(_bar(spec, "memory, times the leanest peer (at most)", 1.0, ratio, ratio <= 1))
    return lines


def others(root: Path) -> dict[str, Any]:
    """The benchmarks without peers that have a result, by name: their modules, which know how to show it."""
    names = ("job", "start", "head", "scale", "sparse", "fisher", "micro", "flower", "socket", "studio")
    return {name: import_module(f"benchmarks.bench_{name}") for name in names if (root / f"{name}.json").exists()}


def other_bars(root: Path) -> list[str]:
    """The bars of those."""
    rows = [
        row for name, one in others(root).items() if hasattr(one, "bars") for row in one.bars(root / f"{name}.json")
    ]
    return [
        f"| {name} | {what} | {bar:g} | {found:.2f} | {'reached' if good else 'not reached'} |"
        for name, what, bar, found, good in rows
    ]


def _bar(spec: Spec, what: str, bar: float, found: float, good: bool) -> str:
    return f"| {spec.name} | {what} | {bar:g} | {found:.2f} | {'reached' if good else 'not reached'} |"


def measured(found: dict[str, list[dict[str, Any]]]) -> str:
    """When, where and with which versions."""
    results = [result for some in found.values() for result in some]
    known = {f"{name} {number}" for result in results for name, number in result["versions"].items()}
    dates = sorted(result["date"][:10] for result in results)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores, {memory:.0f} GB, Python {platform.python_version()}"
    return f"Measured {dates[-1]} on {machine}: {', '.join(sorted(known))}." if dates else ""


EMPTY = f"""# Benchmarks

No results yet: `{COMMAND}`.

## What was to be shown

| workload | what | bar | found | |
|---|---|---|---|---|
"""


def page(root: Path, specs: Sequence[Spec], old: str = "") -> str:
    """The page with the sections and bars of what was measured put into the old one."""
    used = [spec for spec in specs if any(load(root, spec).values())]
    made = ["\n".join(table(root, spec)) for spec in used]
    made += [one.section(root / f"{name}.json") for name, one in others(root).items()]
    parts = re.split(r"(?m)^(?=##+ )", old or EMPTY)
    for text in made:
        same = [i for i, part in enumerate(parts) if _title(part) == _title(text)]
        at = same[0] if same else len(parts)
        parts[at : at + 1] = [text + "\n"]
    rows = [*bars(root, used)[2:], *other_bars(root)]
    parts = [_with_bars(part, rows) if _title(part) == "What was to be shown" else part for part in parts]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip() + "\n"


def _title(part: str) -> str:
    """What a section is known by: its heading up to a colon."""
    return part.partition("\n")[0].lstrip("# ").partition(":")[0]


def _with_bars(part: str, rows: Sequence[str]) -> str:
    """The table of bars with these rows in the place of older ones about the same."""
    lines = part.rstrip().split("\n")
    for row in rows:
        key = row.split("|")[1:3]
        same = [i for i, line in enumerate(lines) if line.split("|")[1:3] == key]
        if same:
            lines[same[0]] = row
        else:
            last = max(i for i, line in enumerate(lines) if line.startswith("|"))
            lines.insert(last + 1, row)
    return "\n".join([*lines, "", ""])
