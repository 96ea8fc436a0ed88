"""Large folders: peak memory and time of a run on 1,000 and on 100,000 images of mixed sizes, in 100 and 1,000 classes.

Makes two folders of small JPEG files (a folder per class, sides of 24 to 96 pixels, smooth noise), and starts on each
the same run as a user would, in a process of its own with an empty cache and one worker: `--dry-run` first, for the
time that it tells, then one round. Writes runs/benchmarks/folder.json. Peak memory is that of the whole process.

    python -m benchmarks.bench_folder --model FOLDER                     # 1,000 and 100,000 images: most of an hour
    python -m benchmarks.bench_folder --model nano --images 1000,4000    # a quick look
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

OUT = Path("runs") / "benchmarks" / "folder.json"
CLASSES = 1000
"""Most classes; where there are fewer than ten images for each there are fewer classes."""
SIDES = (24, 97)
"""Sides of the images, from and below, in pixels."""


def make_images(folder: Path, images: int) -> None:
    """Write so many JPEG files of mixed sizes, spread evenly over the folders of classes."""
    classes = min(CLASSES, images // 10)
    draw = np.random.default_rng(0)
    for number in range(images):
        place = folder / f"class{number % classes:04d}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        width, height = draw.integers(*SIDES, 2)
        coarse.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(place / f"{number:06d}.jpg", quality=80)


def run_fedgraft(arguments: Sequence[str], cache: Path) -> tuple[str, float, float]:
    """Run the command in a process of its own; return its output, its seconds and its peak memory in megabytes."""
    environment = {**os.environ, "FEDGRAFT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedgraft", *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        sys.exit(text)
    return text, time.perf_counter() - began, usage.ru_maxrss / 1000


def measure(images: int, model: str, size: int, place: Path) -> dict[str, float | str]:
    """Return seconds and megabytes of a plan and of one round on so many images, and the time that the plan told."""
    folder = place / f"images-{images}"
    make_images(folder, images)
    run = [
        "run",
        str(folder),
        f"model.name={model}",
        f"data.image_size={size}",
        "partition.kind=iid",
        "partition.clients=10",
        "rounds.total=1",
        "workers=1",
        "device=cpu",
        f"--folder={place / f'run-{images}'}",
    ]
    plan, plan_seconds, _ = run_fedgraft([*run, "--dry-run"], place / f"cache-{images}")
    told = [line.strip() for line in plan.splitlines() if "time" in line.lower()]
    _, seconds, megabytes = run_fedgraft(run, place / f"cache-{images}")
    return {
        "plan seconds": round(plan_seconds, 1),
        "told": " / ".join(told),
        "seconds": round(seconds, 1),
        "peak MB": round(megabytes),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a line for each number of images, and the ratio of the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--images", default="1000,100000")
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args(arguments)
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        for images in map(int, options.images.split(",")):
            rows[images] = measure(images, options.model, options.size, Path(place))
            print(images, rows[images], flush=True)
    peaks = [float(row["peak MB"]) for row in rows.values()]
    print(f"peak memory of the last over the first: {peaks[-1] / peaks[0]:.2f}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"model": options.model, "load": os.getloadavg()[0], "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
