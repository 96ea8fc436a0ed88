"""docs/benchmarks.md from the stored results: tables, the bars, the plot. Nothing here is timed or typed by hand."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import SHORT, Spec

COMMAND = "python -m benchmarks.peers"
NAMES = {
    "fedgraft": "fedgraft", "bare": "bare hardware", "flower": "Flower simulation", "pfl": "pfl-research",
    "fedjax": "FedJAX", "fedlab": "FedLab", "torch_loop": "plain PyTorch loop",
}  # fmt: skip
BARS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "W1": (
        ("round", "flower", 20), ("round", "pfl", 7), ("round", "fedjax", 5),
        ("whole", "flower", 10), ("whole", "pfl", 4), ("whole", "fedjax", 3),
    ),
    "W2": (("round", "best torch peer", 1.4),),
    "W3": (("whole", "best peer", 10),),
}  # fmt: skip
LIMITS = {"W1": 1.6, "W4": 1.10}
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
    base = {"round": spread([steady(r) for r in ours]).middle, "whole": spread([whole(r, spec) for r in ours]).middle} \
        if ours else {}  # fmt: skip
    lines = [
        f"### {spec.name}: {spec.text}", "",
        f"{spec.clients} clients, {spec.per_round} per round, {spec.steps} steps, batch {spec.batch_size}, "
        f"{spec.rounds} rounds, {spec.examples:,} examples. Repeats: {repeated(found)}.", "",
        "| | s per round | times fedgraft | whole process, s | times fedgraft | peak MB | cores "
        "| other load | test % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
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
    if ours and "bytes_up" in ours[-1] and spec.group == "W4":
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
        if spec.group == "W1":
            own = statistics.median(r["peak_mb"] for r in found["fedgraft"])
            least = [statistics.median(r["peak_mb"] for r in found[p]) for p in spec.peers if p in found]
            if least:
                ratio = own / min(least)
                lines.append(_bar(spec, "memory, times the leanest peer (at most)", 1.0, ratio, ratio <= 1))
    return lines


def others(root: Path) -> dict[str, Any]:
    """The benchmarks without peers that have a result, by name: their modules, which know how to show it."""
    names = ("head", "scale", "sparse", "fisher", "micro")
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


def versions(root: Path, specs: Sequence[Spec]) -> list[str]:
    """Installed versions by peer, as the runs reported them."""
    known: dict[str, dict[str, str]] = {}
    for spec in specs:
        for peer, results in load(root, spec).items():
            for result in results:
                known.setdefault(peer, {}).update(result["versions"])
    return [
        f"- {NAMES.get(p, p)}: " + ", ".join(f"{k} {v}" for k, v in sorted(found.items())) for p, found in known.items()
    ]


def machine() -> str:
    """The machine in one line."""
    info = Path("/proc/cpuinfo")
    models = [x.partition(":")[2].strip() for x in info.read_text().splitlines() if x.startswith("model name")] \
        if info.exists() else []  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = models[0] if models else platform.machine()
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GB, Python {platform.python_version()}"


def page(root: Path, specs: Sequence[Spec], picture: str | None) -> str:
    """The whole page."""
    used = [spec for spec in specs if any(load(root, spec).values())]
    dates = sorted(r["date"] for spec in used for rs in load(root, spec).values() for r in rs)
    repeats = sorted({len(rs) for spec in used for rs in load(root, spec).values() if rs})
    lines = [
        "# Benchmarks against peers", "",
        f"Written by `{COMMAND}` (also `make bench`) from the results under `runs/benchmarks`. Each peer runs in an "
        "environment of its own, with the versions pinned in `benchmarks/peers/*/requirements.txt`, on the same data, "
        "the same number of steps and the same evaluation. Peers take turns; figures are medians with the least and "
        "the most of the repeats. fedgraft is the whole `fedgraft run`, with config, metrics, checkpoints and report.",
        "",
        "A round's seconds exclude its evaluation. Whole process: from start to exit. A star marks a peer that ran "
        "fewer rounds, the missing ones added at their measured cost; its accuracy is that of the "
        "rounds it ran. Memory is the peak PSS of the process tree. "
        "Other load is how many cores other processes and the hypervisor had during the run: ratios taken under load "
        "are rough. In W3 peers are given images and run the frozen trunk in every step, as their users would; W1 is "
        "the comparison when peers are given features. FedJAX has no part in W3 and W4, whose networks are torch's; "
        "FedLab stands in W1 alone; W4 compares with the plain loop, and with pfl in one row. ViT-S/16 shapes and W4 "
        "have fewer clients and images than W1 to W3, so that all takes an hour; each table names its sizes.", "",
        f"- Machine: {machine()}",
        f"- Dates: {dates[0]} to {dates[-1]}, repeats: {', '.join(map(str, repeats))}" if dates else "- No results yet",
        *versions(root, used), "",
    ]  # fmt: skip
    if picture:
        lines += [f"![Seconds per round, by workload]({picture})", ""]
    lines += ["## What was to be shown", "", *bars(root, used), *other_bars(root), ""]
    note = Path(__file__).parent / "note.md"
    lines += [note.read_text(), ""] if note.exists() else []
    lines += ["## Workloads", ""]
    for spec in used:
        lines += table(root, spec)
    for name, one in others(root).items():
        lines += one.section(root / f"{name}.json").splitlines()
        lines += ["", "![Growth of the cost](scale.png)", ""] if name == "scale" else [""]
    return "\n".join(lines).rstrip() + "\n"


def plot(root: Path, specs: Sequence[Spec], file: Path) -> bool:
    """Seconds per round on a logarithmic scale, one panel per workload; False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(s, {p: rs for p, rs in load(root, s).items() if rs and rs[0]["round_seconds"]}) for s in specs]
    shown = [(spec, found) for spec, found in shown if found]
    if not shown:
        return False
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.4 * columns, 2.6 * rows), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, (spec, found) in zip(axes.flat, shown, strict=False):
        names = list(found)[::-1]
        spreads = [spread([steady(r) for r in found[p]]) for p in names]
        colours = ["#c2410c" if p == "fedgraft" else "#94a3b8" if p == "bare" else "#475569" for p in names]
        middles = [s.middle for s in spreads]
        axis.barh([NAMES.get(p, p) for p in names], middles, color=colours)
        axis.errorbar(middles, range(len(names)), fmt="none", ecolor="black", capsize=2,
                      xerr=[[s.middle - s.least for s in spreads], [s.most - s.middle for s in spreads]])  # fmt: skip
        axis.set_xscale("log")
        low, high = min(s.least for s in spreads), max(s.most for s in spreads)
        ticks = [m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5) if low / 2.5 <= m * 10.0**e <= high * 1.5]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_title(spec.name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("seconds per round", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return True
