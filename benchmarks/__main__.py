"""`make bench`: every benchmark, the most telling first, each in a process of its own. Words choose some.

    python -m benchmarks                # all, about an hour
    python -m benchmarks --minutes 20   # the same until then; what is measured by then is the result
    python -m benchmarks head sparse

Everything is measured once before anything is repeated. docs/benchmarks.md is written anew after every step, also when
it is stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PEERS = ["-m", "benchmarks.peers", "--quick", "--timeout", "240"]
FIRST = ("features", "cnn", "frozen", "edit-sparse-nano", "edit-sparse-vits", "edit-qk-nano", "edit-lora-nano")
ALONE = ("job", "head", "scale", "micro", "sparse", "fisher")


def commands() -> dict[str, list[str]]:
    """Every benchmark by name, as the words that start it."""
    here = Path(__file__).parent
    stems = [path.stem for path in sorted(here.glob("bench_*.py"))]
    alone = {stem.removeprefix("bench_"): ["-m", f"benchmarks.{stem}"] for stem in stems}
    return {**alone, "peers": PEERS}


def steps() -> list[tuple[str, list[str]]]:
    """Everything in its order: once, then again."""
    found = commands()
    return [
        ("peers, once", [*PEERS, "--repeats", "1", *FIRST]),
        *((name, found[name]) for name in ALONE),
        ("peers, features and cnn again", [*PEERS, "features", "cnn"]),
        ("peers, all again", PEERS),
        *((name, overrides) for name, overrides in found.items() if name not in (*ALONE, "peers")),
    ]


def carry_out(overrides: list[str], seconds: float) -> bool:
    """Run one step, at most so long; nothing of it is left behind. Returns whether it ended well."""
    process = subprocess.Popen([sys.executable, *overrides], start_new_session=True)
    try:
        return process.wait(None if math.isinf(seconds) else max(1.0, seconds)) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # so that the benchmark ends what it has started
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    """Run the benchmarks that are named, or all, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    found = commands()
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(found)}; default: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in found]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(found)}")
    until, failed = time.time() + 60 * given.minutes, []
    for name, overrides in [(n, found[n]) for n in given.names] or steps():  # one that fails does not take others along
        left = until - time.time()
        if left < 10:
            print("no time left", flush=True)
            break
        print(f"\n== {name} == {time.strftime('%H:%M:%S')}", flush=True)
        limited = (
            ["--minutes", f"{left / 60:.3f}"] if "benchmarks.peers" in overrides and given.minutes < math.inf else []
        )
        if not carry_out([*overrides, *limited], left + 15 * bool(limited)):
            failed.append(name)
        write_page()
    if failed:
        sys.exit(f"not finished: {', '.join(failed)}")


def write_page() -> None:
    """docs/benchmarks.md of what is there, in this process, because it costs little."""
    from benchmarks.peers.__main__ import render

    render(draw=False)


if __name__ == "__main__":
    main()
