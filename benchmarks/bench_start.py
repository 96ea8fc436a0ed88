"""Start-up: processor seconds of commands that train nothing, and how soon a run says its first words.

    python -m benchmarks.bench_start        # three minutes

Each command is a process of its own, several times; processor time is user and system time of the process. The first
line of `fedgraft run` is timed on the wall, with bytecode compiled and files in memory: the first repeat is not used.
Writes runs/benchmarks/start.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.page import spread

OUT = Path("runs") / "benchmarks" / "start.json"
BAR, FIRST_LINE = 0.4, 3.0
COMMANDS = {
    "list": ["list", "runs"],
    "show": ["show", "runs/demo"],
    "algorithms": ["algorithms"],
    "options": ["options"],
    "partition": ["partition", "demo"],
    "compare": ["compare", "runs/demo", "runs/again"],
}


def processor(words: list[str], folder: Path) -> float:
    """Processor seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "fedgraft", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"fedgraft {' '.join(words)}: {(done.stderr or done.stdout).strip()[-300:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_words(folder: Path) -> tuple[float, float]:
    """Seconds until `fedgraft run` prints its first line, and until it tells of its first round."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "fedgraft", "run", "demo", "--fresh", "-o", "runs/timed"]
    told: list[float] = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not told or (len(told) == 1 and "round" in line):
                told.append(time.perf_counter() - began)
        if process.wait():
            sys.exit("the demo failed")
    return told[0], told[-1]


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commands": {name: [] for name in COMMANDS}, "run": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("demo", "again"):
            processor(["run", "demo", "rounds.total=2", "-q", "-o", f"runs/{name}"], folder)
        for repeat in range(given.repeats + 1):  # the first one warms caches
            for name, words in COMMANDS.items():
                spent = processor(words, folder)
                found["commands"][name] += [spent] if repeat else []
            told = first_words(folder)
            found["run"] += [told] if repeat else []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=2))
    print(section(given.out))


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown of start-up."""
    found = json.loads(path.read_text())
    rows = []
    for name, spent in found["commands"].items():
        middle = spread(spent).middle
        rows.append(("start-up", f"{name}, processor seconds (at most)", BAR, middle, middle <= BAR))
    first = spread([one[0] for one in found["run"]]).middle
    return [*rows, ("start-up", "run, seconds to its first line (at most)", FIRST_LINE, first, first <= FIRST_LINE)]


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    lines = [
        "## Start-up",
        "",
        f"Command: `python -m benchmarks.bench_start`, {found['date']}, {len(found['run'])} repeats: medians (least to "
        "most). The demo's first round is told after its network, data and head.",
        "",
        "| command | processor seconds |",
        "|---|---|",
    ]
    lines += [f"| `fedgraft {name}` | {spread(spent)} |" for name, spent in found["commands"].items()]
    words = [spread([one[i] for one in found["run"]]) for i in (0, 1)]
    lines += ["", f"`fedgraft run demo`: first line after {words[0]} s, first word of a round after {words[1]} s."]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
