"""The building blocks one by one, each beside its roofline: what the machine's peak rates would allow for that work.

Peaks (matrix product, copy, AES keystream, disk) are measured in the same run, on one thread; every figure is the best
of some repeats, because other work on the machine only adds. Writes runs/benchmarks/micro.json.

    python benchmarks/bench_micro.py              # full sizes: 21.7 million scores, 1,000 clients
    python benchmarks/bench_micro.py --small      # a quick look
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedgraft.aggregate.codecs import codec
from fedgraft.aggregate.mixing import mix, mixing_matrix
from fedgraft.aggregate.similarity import crsm, svcca_basis, svcca_of_bases
from fedgraft.consortium.roofline import Roofline, best_seconds, measure_roofline
from fedgraft.core.rng import torch_stream
from fedgraft.edit.choose import choose, random_scores
from fedgraft.edit.fisher import estimate_fisher
from fedgraft.models.backbones import load_network
from fedgraft.privacy.secagg.keys import add_keystream
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.runs.checkpoint import save

OUT = Path("runs") / "benchmarks" / "micro.json"
Row = tuple[str, float, float, str]
"""What, seconds, least seconds, which limit."""


def normal(*shape: int) -> torch.Tensor:
    """Random numbers, the same every time."""
    return torch.randn(*shape, generator=torch_stream(0, "micro", *shape))


def calibration(peak: Roofline, small: bool) -> list[Row]:
    """Fisher scores against a forward and backward pass over the same images."""
    network = load_network("tiny" if small else "nano", 10)
    inputs = normal(32, 3, network.image_size, network.image_size)
    targets = torch.arange(32) % 10

    def plain() -> None:
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), targets).backward()

    def scores() -> object:
        return estimate_fisher(network, [(inputs, targets)], "rademacher", generator=torch_stream(0, "labels"))

    return [("Fisher calibration, 32 images", best_seconds(scores), best_seconds(plain), "forward and backward")]


def selection(peak: Roofline, small: bool) -> list[Row]:
    """A mask of 10 % over all scores at once."""
    rows = 200 if small else 21_665
    scores = random_scores({"w": torch.empty(rows, 1000)}, 0)
    least = peak.seconds(0, 2 * 4 * rows * 1000)
    seconds = best_seconds(lambda: choose(scores, 0.1), 2)
    return [(f"mask selection, {rows / 1e3:.1f}M scores", seconds, least, "one copy")]


def hiding(peak: Roofline, small: bool) -> list[Row]:
    """One client's part in a secure sum: fixed-point words, then a mask for each of ten neighbours."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    length = 100_000 if small else 2_000_000
    ring, vector = Ring((Segment("update", length, 1.0),), 10), 1e-3 * normal(length)
    overrides = ring.encode({"update": vector}, torch_stream(0, "ring"))
    zeros = bytes(4 * len(overrides))

    def keystream() -> object:
        return Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor().update(zeros)

    def masks() -> None:
        for _ in range(10):
            add_keystream(overrides, bytes(32))

    least = 10 * (best_seconds(keystream) + peak.seconds(0, 3 * 4 * len(overrides)))
    text = f"secure sum, {length / 1e6:g}M weights, ten masks"
    return [(text, best_seconds(masks, 3), least, "keystream and one addition")]


def comparing(peak: Roofline, small: bool) -> list[Row]:
    """SVCCA of two layers; similarity and mixing of a thousand clients."""
    n, p, clients, length = (256, 64, 50, 10_000) if small else (512, 384, 1000, 100_000)
    x, y = normal(n, p), normal(n, p) + 1
    flops = 2 * (4 * n * p * p + 8 * p**3) + 2 * n * 50 * 50  # two thin decompositions and one product

    def compare() -> None:
        svcca_of_bases(svcca_basis(x), svcca_basis(y))

    rows = [("SVCCA, two layers", best_seconds(compare), peak.seconds(flops), "matrix product")]
    shown = [normal(64, 64) + k / clients for k in range(clients)]
    size = 2.0 * clients * (64 * 64 * 64 + clients * 64 * 64)
    least = peak.seconds(size, 4 * clients * 64 * 64)
    rows.append((f"CRSM of {clients} clients", best_seconds(lambda: crsm(shown), 2), least, "matrix product"))
    matrix = mixing_matrix(crsm(shown).double())
    anchor, offsets = normal(length), 1e-3 * normal(clients, length)
    least = peak.seconds(2.0 * clients * clients * length, 2 * 4 * clients * length)
    seconds = best_seconds(lambda: mix(anchor, offsets, matrix), 1)
    rows.append((f"mixing {clients} models of {length / 1e3:.0f}k", seconds, least, "float32 matrix product"))
    return rows


def storing(peak: Roofline, small: bool) -> list[Row]:
    """A checkpoint of one vector, against writing the same bytes and waiting for the disk."""
    vector = normal(100_000 if small else 5_750_000)
    data = vector.numpy().tobytes()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder)

        def bare() -> None:
            with (path / "bare").open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        def whole() -> None:
            save(path / "checkpoints", 1, {"vector": vector}, {})

        return [
            (
                f"checkpoint of {len(data) / 1e6:.0f} MB",
                best_seconds(whole, 3),
                best_seconds(bare, 3),
                "write and fsync",
            )
        ]


def packing(peak: Roofline, small: bool) -> list[Row]:
    """Every codec, both ways."""
    length, rows = 100_000 if small else 5_000_000, []
    vector = 1e-3 * normal(length)
    for name in ("values", "half", "int8", "top_k:0.01"):
        one = codec(name)
        payload = one.encode(vector, torch_stream(0, "codec"), {})
        moved = 4 * length + sum(t.numel() * t.element_size() for t in payload.arrays.values())
        ways: dict[str, Callable[[], object]] = {
            "encode": lambda one=one: one.encode(vector, torch_stream(0, "codec"), {}),  # type: ignore[misc]
            "decode": lambda one=one, payload=payload: one.expand(payload.arrays, length),  # type: ignore[misc]
        }
        for way, work in ways.items():
            least = peak.seconds(0, moved)
            rows.append((f"{name} {way}, {length / 1e6:g}M", best_seconds(work, 3), least, "bytes read and written"))
    return rows


GROUPS = (calibration, selection, hiding, comparing, storing, packing)


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    lines = [
        "## Building blocks beside their rooflines",
        "",
        f"Command: `python benchmarks/bench_micro.py`. One thread; peaks then: {found['gflops']:.0f} GFLOP/s, "
        f"{found['gbytes']:.1f} GB/s copied; load before {found['load']:.1f}. Best of the repeats.",
        "",
        "| what | ms | least, ms | ratio | the limit is |",
        "|---|---|---|---|---|",
    ]
    for name, seconds, least, limit in found["rows"]:
        lines.append(f"| {name} | {1e3 * seconds:.2f} | {1e3 * least:.2f} | {seconds / least:.2f} | {limit} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure everything, print the table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    load, peak, rows = os.getloadavg()[0], measure_roofline(), []
    for group in GROUPS:
        rows += group(peak, given.small)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"rows": rows, "gflops": peak.flops / 1e9, "gbytes": peak.bandwidth / 1e9, "load": load}
    given.out.write_text(json.dumps({**result, "small": given.small, "numpy": np.__version__}, indent=2))
    print(section(given.out))


if __name__ == "__main__":
    main()
