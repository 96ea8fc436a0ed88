"""`make bench`: every benchmark in turn, each in its own process. Words choose some: `python -m benchmarks head`.

`peers` compares with other frameworks and writes docs/benchmarks.md; here it takes the short way of about half an hour
(`python -m benchmarks.peers --help` has the long one). The others print a table each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def commands() -> dict[str, list[str]]:
    """Every benchmark by name, as the words that start it."""
    here = Path(__file__).parent
    alone = {path.stem.removeprefix("bench_"): [str(path)] for path in sorted(here.glob("bench_*.py"))}
    return {**alone, "peers": ["-m", "benchmarks.peers", "--quick"]}


def main() -> None:
    """Run the benchmarks that are named, or all."""
    found = commands()
    wanted = sys.argv[1:] or list(found)
    unknown = [name for name in wanted if name not in found]
    if unknown:
        sys.exit(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(found)}")
    for name in wanted:
        print(f"\n== {name} ==", flush=True)
        subprocess.run([sys.executable, *found[name]], check=True)


if __name__ == "__main__":
    main()
