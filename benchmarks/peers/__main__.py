"""`python -m benchmarks.peers W1 W2 --repeats 3 --quick`: run what is missing, then write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.peers.harness import Failed, Plan, bench, environment
from benchmarks.peers.page import page, plot
from benchmarks.peers.workloads import SPECS, Spec, chosen

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
    parser.add_argument("workloads", nargs="*", help="W1 W2 W3 W4, or single rows; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of W2 to W4, ViT-S rows only by name")
    parser.add_argument("--fresh", action="store_true", help="run again what is there already")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which one run is ended")
    parser.add_argument("--threads", type=int, help="threads of each peer, on a busy machine; default: all cores")
    parser.add_argument("--page-only", action="store_true", help="only write the page from what is there")
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    parser.add_argument("--environments", action="store_true", help="only create the environments")
    given = parser.parse_args()
    specs, root = chosen(given.workloads, given.quick), ROOT / "runs" / "benchmarks"
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
    if not given.page_only:
        cores = given.threads or os.cpu_count() or 1
        bench(specs, Plan(given.repeats, given.quick, given.fresh, given.timeout, cores), root)
    docs = ROOT / "docs"
    drawn = plot(root, list(SPECS.values()), docs / "benchmarks.png")
    (docs / "benchmarks.md").write_text(page(root, list(SPECS.values()), "benchmarks.png" if drawn else None))
    print(f"wrote {docs / 'benchmarks.md'}")


if __name__ == "__main__":
    main()
