"""`make reliability`: the fault checks at full count, written to docs/reliability.md.

The cases live beside the tests they belong to; the tests run a few of each, this runs many.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def kills(count: int) -> str:
    """kill -9 at random moments and in the middle of writes, then resume."""
    from test_run_resume import kill_check

    with tempfile.TemporaryDirectory() as folder:
        report = kill_check(count, Path(folder))
    naive = []
    for way in ("in_place", "no_round"):
        with tempfile.TemporaryDirectory() as folder:
            found = kill_check(max(4, count // 10), Path(folder), way=way)
        naive.append(f"naive writer `{way}`: {found.identical} of {max(4, count // 10)} identical")
    return (
        f"{report.identical} of {count} resumed runs bit-identical ({report.kills} killed, {report.while_writing} of "
        f"them in the middle of a write); {'; '.join(naive)}"
    )


def dropouts(count: int) -> str:
    """Secure sums with clients lost at every stage."""
    from test_exchange_secure_sum import dropout_cases

    found = dropout_cases(count)
    return f"{found['exact']} exact, {found['abort']} clean aborts, {found['wrong']} wrong of {count}"


def malformed(count: int) -> str:
    """Malformed replies of every kind."""
    from test_exchange_screening import MALFORMED, fuzz_cases

    return f"{fuzz_cases(count)} cases of {len(MALFORMED)} kinds: none accepted, none crashed"


def accounts(count: int) -> str:
    """Random privacy settings against dp-accounting."""
    from test_exchange_privacy import account_cases

    return f"{account_cases(count)} configurations, epsilon never below the reference"


CHECKS: dict[str, tuple[Callable[[int], str], int]] = {
    "kills": (kills, 200),
    "dropouts": (dropouts, 2000),
    "malformed": (malformed, 1000),
    "accounts": (accounts, 500),
}


def main() -> None:
    """Run the checks that are named (all by default) and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="*", default=list(CHECKS), help=", ".join(CHECKS))
    parser.add_argument("--scale", type=float, default=1.0, help="a share of the full counts, for a quick look")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reliability.md")
    options = parser.parse_args()
    rows = []
    for name in options.checks:
        check, full = CHECKS[name]
        began, count = time.monotonic(), max(1, round(full * options.scale))
        result = check(count)
        rows.append(f"| {name} | {(check.__doc__ or '').strip()} | {result} | {time.monotonic() - began:.0f} s |")
        print(rows[-1], flush=True)
    words = " ".join([*(options.checks if len(options.checks) < len(CHECKS) else []), f"--scale {options.scale:g}"])
    text = ["# Reliability", "", f"Command: `python -m benchmarks.reliability {words}`.", ""]
    text += ["| check | what | result | wall time |", "|---|---|---|---|", *rows, ""]
    options.out.write_text("\n".join(text))


if __name__ == "__main__":
    main()
