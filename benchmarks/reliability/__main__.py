"""The command: `python -m benchmarks.reliability [checks] [--scale X]`."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.reliability.outcome import PAGE, ROOT, STORE, Check, Outcome, keep, kept, page

CHECKS: dict[str, Check] = {
    "kills": Check("kill -9 at 200 points, resume", "200 of 200 bit-identical", "faults", 6),
    "stages": Check(
        "node, restarted node or server gone at every stage of head, calibration, secure sums, evaluation",
        "the run completes, same bytes where nobody is lost; or a sum over fewer than an earlier one stays unopened",
        "stages",
        4,
    ),
    "damaged": Check("damaged checkpoints, 50 of each kind", "0 corrupt loads, all fall back", "faults", 3),
    "dropouts": Check(
        "secure sum, up to 30 % lost at each stage, 2,000 cases", "exact sum or clean abort, 0 wrong", "sums", 2
    ),
    "thousand": Check(
        "secure sum of 1,000 clients, 20 neighbours each, 3 % lost at each stage",
        "exact sum over those who stay; a client sends no more than in a small cohort",
        "sums",
        1,
    ),
    "view": Check(
        "the server's view of one client", "uniform; 0 and max indistinguishable; declared fields only", "views", 2
    ),
    "hostile": Check("hostile server", "100 % refused by clients", "servers", 5),
    "orders": Check(
        "a server that lies in its orders, all protections", "0 leaks, 0 crashes, each refused by name", "orders", 2
    ),
    "combinations": Check(
        "sequences of up to four allowed orders, all actions and settings, and linear algebra",
        "one client's contribution solved for in none of 10,000 sequences",
        "combined",
        8,
    ),
    "cost": Check(
        "secure sum, 10 clients x 1M coordinates, 20 % lost",
        "<= 4.1 bytes per coordinate up, <= half the time of flwr 1.41's SecAgg+ primitives",
        "cost",
        3,
    ),
    "malformed": Check(
        "malformed replies, 1,000 of each kind and aggregator",
        "0 crashes, 0 accepted, only the offender goes",
        "replies",
        6,
    ),
    "sizes": Check("hostile payload sizes", "memory rises by <= 2x the declared limit", "sizes", 1),
    "accounts": Check("epsilon of 500 configurations", "never below dp-accounting", "privacy", 6),
    "noise": Check("noise and sensitivity with drops, zero and NaN updates", "within 1 %, or refused", "privacy", 3),
    "membership": Check(
        "cohorts guessed from everything that a node and the run folder know", "no better than chance", "neighbours", 3
    ),
    "epsilon": Check(
        "runs with and without a client told apart, 1,000 pairs", "lower bound below the told epsilon", "neighbours", 2
    ),
    "uneven": Check(
        "honest clients at dirichlet 0.1, one with ten times the images", "0 benign updates refused", "uneven", 4
    ),
    "liar": Check("a liar on similarity, one of ten", "weight <= 2/m, accuracy within 6 points", "liar", 5),
    "soak": Check("10,000 rounds, head only", "< 1 MB per 1,000 rounds after warm-up, file handles flat", "soak", 12),
}


def run_here(name: str, scale: float, store: Path) -> bool:
    """Run one check in this process, keep what it found, and say whether it holds."""
    import torch

    from fedgraft.runs.environment import processor, revision

    torch.set_num_threads(1)  # as runs do; and a forked child must not meet another's threads
    sys.path.insert(0, str(ROOT / "tests"))
    check = getattr(importlib.import_module(f"benchmarks.reliability.{CHECKS[name].module}"), name)
    began, source = time.monotonic(), revision() or "no checkout"  # now: a checkout may move on during a long check
    try:
        outcome: Outcome = check(scale)
    except Exception as error:  # a check that breaks is a row that fails, and the others go on
        outcome = Outcome(False, f"broke off: {type(error).__name__}: {str(error)[:200]}", {}, False)
    about = {
        "check": name,
        "scale": scale,
        "seconds": time.monotonic() - began,
        "command": f"python -m benchmarks.reliability {name} --scale {scale:g}",
        "date": datetime.now(UTC).isoformat(timespec="seconds")[:16].replace("T", " "),
        "revision": source,
        "machine": processor(),
    }
    keep(store, name, outcome, about)
    print(f"{name}: {'holds' if outcome.passed and outcome.caught else 'FAILS'} - {outcome.result}", flush=True)
    for variant, said in outcome.broken.items():
        print(f"    broken variant, {variant}: {said}", flush=True)
    return outcome.passed and outcome.caught


def _written(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def main() -> None:
    """Run the checks that are named (all by default), each in its own process, and draw the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("checks", nargs="*", help=", ".join(CHECKS))
    parser.add_argument("--scale", type=float, default=1.0, help="a share of the full counts, for a quick look")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--store", type=Path, default=STORE, help="the folder of the results")
    parser.add_argument("--here", action="store_true", help="run one check in this process")
    parser.add_argument("--render", action="store_true", help="only draw the page again")
    options = parser.parse_args()
    names = options.checks or list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"there is no check {unknown[0]!r}; choose from {', '.join(CHECKS)}")
    if options.here and not options.render:
        held = [run_here(name, options.scale, options.store) for name in names]
        sys.exit(0 if all(held) else 1)
    failed = []
    for name in [] if options.render else names:
        print(f"{name}: about {CHECKS[name].minutes * options.scale:.1f} minutes", flush=True)
        words = [name, "--here", "--scale", str(options.scale), "--store", str(options.store)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.reliability", *words], cwd=ROOT)
        if done.returncode:
            failed.append(name)
        options.out.write_text(
            page(options.store, CHECKS, _written(options.out))
        )  # after each: a long run that is stopped loses nothing
    if options.render:
        options.out.write_text(page(options.store, CHECKS, _written(options.out)))
        failed = [n for n in names if not (one := kept(options.store, n)) or not (one["passed"] and one["caught"])]
    if failed:
        sys.exit(f"these do not hold: {', '.join(failed)}")


if __name__ == "__main__":
    main()
