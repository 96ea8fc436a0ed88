"""Calibration against plain training on ViT-S/16 shapes: time as a ratio, and peak memory.

Both walk over the same samples in the same batches; runs alternate, and the ratio is taken between medians.
Times are seconds of processor time, which other work on the machine disturbs least.

    python benchmarks/bench_fisher.py --samples 64 --batch 8 --repeats 3
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgraft.edit.fisher import fisher_scores
from fedgraft.randomness import torch_stream


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
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    """Print both times, their ratio and the peak memory of the calibration alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("size", 224), ("samples", 64), ("batch", 8), ("repeats", 3), ("threads", 1)]:
        parser.add_argument(f"--{name}", type=int, default=default)
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
        fisher_scores(network, batches, "rademacher", generator=torch_stream(0, "labels"))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calibrate()  # alone first, so that the peak is its own
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runs = [(timed(train), timed(calibrate)) for _ in range(given.repeats)]
    plain, scored = (statistics.median(times) for times in zip(*runs, strict=True))
    print(f"{given.samples} samples in batches of {given.batch}, {given.size} px, {given.threads} thread(s)")
    print(f"forward+backward {plain:.2f} s, calibration {scored:.2f} s, ratio {scored / plain:.2f}")
    print(f"peak RSS {peak / 2**20:.2f} GB, of which before calibration {before / 2**20:.2f} GB")


if __name__ == "__main__":
    main()
