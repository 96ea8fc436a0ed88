"""Calibration against plain training on ViT-S/16 shapes: time as a ratio, and peak memory.

Both walk over the same samples in the same batches; runs alternate, and the ratio is taken between medians. Writes
runs/benchmarks/fisher.json.

    python benchmarks/bench_fisher.py --samples 64 --batch 8 --repeats 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgraft.core.rng import torch_stream
from fedgraft.edit.fisher import estimate_fisher

OUT = Path("runs") / "benchmarks" / "fisher.json"
MOST_GB, MOST_RATIO = 2.0, 1.5


class Classifier(nn.Module):
    """A ViT trunk with random weights and a linear head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, image_size=size)
        self.backbone = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(384, 100)

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        return self.head(self.backbone(inputs).last_hidden_state[:, 0])


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Print both times, their ratio and the peak memory of the calibration alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"size": 224, "samples": 64, "batch": 8, "repeats": 2, "threads": os.cpu_count() or 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    network = Classifier(given.size)
    draw = torch_stream(0, "bench")
    inputs = torch.randn(given.samples, 3, given.size, given.size, generator=draw)
    targets = torch.randint(0, 100, (given.samples,), generator=draw)
    batches = list(zip(inputs.split(given.batch), targets.split(given.batch), strict=True))

    def train() -> None:
        for x, y in batches:
            network.zero_grad()
            F.cross_entropy(network(x), y).backward()

    def calibrate() -> None:
        network.zero_grad()
        estimate_fisher(network, batches, "rademacher", generator=torch_stream(0, "labels"))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calibrate()  # alone first, so that the peak is its own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runs = [(timed(train), timed(calibrate)) for _ in range(given.repeats)]
    result = {"runs": runs, "peak": peak / 2**20, "before": before / 2**20, **vars(given), "out": str(given.out)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result))
    print(section(given.out))


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    ratios = [scored / plain for plain, scored in found["runs"]]
    plain, scored = (statistics.median(times) for times in zip(*found["runs"], strict=True))
    lines = [
        "## Calibration of ViT-S/16 shapes",
        "",
        f"Command: `python benchmarks/bench_fisher.py`. {found['samples']} samples of {found['size']} px in batches of "
        f"{found['batch']}, {found['threads']} threads, {len(ratios)} repeats in turn.",
        "",
        "| | s | times forward-backward | peak memory, GB |",
        "|---|---|---|---|",
        f"| forward and backward | {plain:.2f} | 1 | |",
        f"| Fisher scores | {scored:.2f} | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {found['peak']:.2f}, of which {found['before']:.2f} before |",
    ]
    return "\n".join([*lines, ""])


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown: workload, what, bar, found, reached."""
    found = json.loads(path.read_text())
    ratio = statistics.median(scored / plain for plain, scored in found["runs"])
    return [
        ("calibration", "Fisher scores, times forward-backward (at most)", MOST_RATIO, ratio, ratio <= MOST_RATIO),
        ("calibration", "peak memory, GB (at most)", MOST_GB, found["peak"], found["peak"] <= MOST_GB),
    ]


if __name__ == "__main__":
    main()
