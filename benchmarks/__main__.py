"""`make bench`: every benchmark in turn, each in its own process. Words choose some: `python -m benchmarks head`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run the benchmarks that are named, or all."""
    here = Path(__file__).parent
    found = {path.stem.removeprefix("bench_"): path for path in sorted(here.glob("bench_*.py"))}
    wanted = sys.argv[1:] or list(found)
    unknown = [name for name in wanted if name not in found]
    if unknown:
        sys.exit(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(found)}")
    for name in wanted:
        print(f"\n== {name} ==", flush=True)
        subprocess.run([sys.executable, str(found[name])], check=True)


if __name__ == "__main__":
    main()
