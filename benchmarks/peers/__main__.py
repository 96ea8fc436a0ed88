"""`python -m benchmarks.peers features cnn --repeats 3 --quick`: run what is missing, then write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from pathlib import Path

from benchmarks.peers.figure import plot
from benchmarks.peers.harness import Failed, Plan, bench, environment
from benchmarks.peers.page import page
from benchmarks.peers.workloads import SPECS, Spec, chosen, smallest

ROOT = Path(__file__).resolve().parents[2]


def estimate(spec: Spec, repeats: int, quick: bool) -> float:
    """Rough seconds of a workload on an idle machine with two cores."""
    start, each = spec.own
    found = start + each * spec.rounds_of("fedgraft", quick) + 12  # the last is the bare hardware's turn
    for peer in spec.peers:
        found += (17 if peer == "flower" else 6) + spec.each * spec.rounds_of(peer, quick)
    return repeats * found


def main() -> None:
    """Environments, runs, page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("workloads", nargs="*", help="features cnn frozen edit, or single rows; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of cnn and frozen, the rest extrapolated")
    parser.add_argument("--tiny", action="store_true", help="only see whether everything runs; writes no page")
    parser.add_argument("--fresh", action="store_true", help="run again what is there already")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which one run is ended")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, whatever is there by then")
    parser.add_argument("--prepare", action="store_true", help="only write the data of the workloads")
    parser.add_argument("--threads", type=int, help="threads of each peer, on a busy machine; default: all cores")
    parser.add_argument("--page-only", action="store_true", help="only write the page from what is there")
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    parser.add_argument("--environments", action="store_true", help="only create the environments")
    given = parser.parse_args()
    specs, root = chosen(given.workloads), ROOT / "runs" / "benchmarks"
    if given.tiny:
        specs, root = [smallest(spec) for spec in specs], root / "tiny"
    times = {spec.name: estimate(spec, given.repeats, given.quick) / 60 for spec in specs}
    each = ", ".join(f"{name} {minutes:.1f}" for name, minutes in times.items())
    print(f"about {sum(times.values()):.0f} minutes on two idle cores: {each}", flush=True)
    if given.estimate:
        return
    if not given.page_only:
        for peer in dict.fromkeys(peer for spec in specs for peer in spec.peers):
            try:
                environment(peer)
            except Failed as why:
                print(f"{peer}: cannot be installed: {why}", flush=True)
    if given.environments:
        return
    cores, repeats = given.threads or os.cpu_count() or 1, 0 if given.prepare else given.repeats
    plan = Plan(repeats, given.quick, given.fresh, given.timeout, cores, time.time() + 60 * given.minutes)
    if given.tiny:
        bench(specs, plan, root)
        print(page(root, specs))
        return
    try:
        if not given.page_only:
            bench(specs, plan, root, lambda: render(draw=False))
    finally:  # also when somebody stops it
        if not given.prepare:
            render()


def render(draw: bool = True) -> None:
    """Put what is there by now into docs/benchmarks.md, and draw its figures where they are wanted."""
    root, docs, file = ROOT / "runs" / "benchmarks", ROOT / "docs", ROOT / "docs" / "benchmarks.md"
    text = page(root, list(SPECS.values()), file.read_text() if file.exists() else "")
    file.write_text(text)
    if draw:
        plot(text, docs / "benchmarks.png")
        if (root / "scale.png").exists():
            shutil.copy(root / "scale.png", docs / "scale.png")
        print(f"wrote {file}", flush=True)


if __name__ == "__main__":
    main()
