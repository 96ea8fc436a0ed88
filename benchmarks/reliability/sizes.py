"""Hostile payload sizes: what screening allocates for a reply, measured as the peak of a child process's memory.

The child maps each payload from a file, so that the bytes a transport received are not counted; it resets the peak
(`/proc/self/clear_refs`), screens the payload, and reads how far the resident memory rose.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.reliability.outcome import ROOT, Outcome, share

MEGABYTE = 1 << 20
CHILD = """
import mmap, os, sys
import torch
torch.set_num_threads(1)
from fedgraft.server import validate as screening
from fedgraft.aggregate.codecs import VALUES
from dataclasses import replace
from fedgraft.server.validate import Expectation, validate_responses
from fedgraft.core.messages import Response, pack

def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

naive, length = sys.argv[1] == "naive", int(sys.argv[2])
expected = Expectation("run", 1, frozenset([0]), space="s", length=length, codec=VALUES, norm_bound=1e6)
if naive:  # the planted bug: nobody looks at the size before parsing
    real = screening.unpack
    screening.unpack = lambda kind, data, **limits: real(kind, bytes(data))
warm = Response("run", 1, 0, "s", 5, VALUES.encode(torch.zeros(100), torch.Generator(), {}))
print(expected.limit, flush=True)
for line in sys.stdin:
    with open(line.strip(), "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    child = os.fork()  # memory that one payload freed must not serve the next
    if child == 0:
        # Pages of the payload and of the code are there before the peak is reset.
        sum(mapped[i] for i in range(0, len(mapped), 4096))
        validate_responses([(0, pack(warm))], replace(expected, length=100))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        total = resident("VmRSS")
        accepted, rejections = validate_responses([(0, memoryview(mapped))], expected)
        print(resident("VmHWM") - total, len(accepted), len(rejections), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    mapped.close()
"""


def _header(entries: dict[str, object], plain: dict[str, object] | None = None) -> bytes:
    head = {"kind": "Response", "run": "run", "round": 1, "client": 0, "space": "s", "examples": 5} | (plain or {})
    text = json.dumps({"__metadata__": {"fedgraft": json.dumps(head)}, **entries}).encode()
    return len(text).to_bytes(8, "little") + text


def _vector(length: int, dtype: str = "F32", width: int = 4, shape: object = None) -> dict[str, object]:
    return {
        "update/values": {"dtype": dtype, "shape": shape or [length], "data_offsets": [0, width * length]},
    }


def payloads(length: int, limit: int) -> dict[str, Callable[[], Iterator[bytes]]]:
    """Name -> the pieces of one hostile reply; the honest one is first, for comparison."""
    update: dict[str, object] = {"update": {"codec": "values", "length": length}}
    zeros = bytes(MEGABYTE)

    def body(size: int) -> Iterator[bytes]:
        yield from (zeros[: min(MEGABYTE, size - begin)] for begin in range(0, size, MEGABYTE))

    def filled(text: bytes, size: int) -> Iterator[bytes]:
        """A header of this size made of one repeated text inside a list."""
        count = (size - 32) // len(text)
        inner = b'{"a":[' + text * (count - 1) + text.rstrip(b",") + b"]}"
        yield len(inner).to_bytes(8, "little")
        yield inner

    def benign() -> Iterator[bytes]:
        yield _header(_vector(length), update)
        yield from body(4 * length)

    def long_honest(times: int) -> Callable[[], Iterator[bytes]]:
        def made() -> Iterator[bytes]:
            yield _header(_vector(times * length), {"update": {"codec": "values", "length": times * length}})
            yield from body(times * 4 * length)

        return made

    def declared(entries: dict[str, object], plain: dict[str, object] | None = None) -> Callable[[], Iterator[bytes]]:
        def made() -> Iterator[bytes]:
            yield _header(entries, plain or update)
            yield from body(4 * length)

        return made

    nothing = {"dtype": "F32", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}
    shared = {f"sums/{i}": dict(_vector(length)["update/values"]) for i in range(50)}  # type: ignore[call-overload]
    metrics = {f"m{i}": 0.0 for i in range(3000)}
    return {
        "honest": benign,
        "ten times as long": long_honest(10),
        "twice as long": long_honest(2),
        "declared shape of 2^40": declared(_vector(length, shape=[1 << 40])),
        "declared length of 2^60": declared(_vector(length), {"update": {"codec": "values", "length": 1 << 60}}),
        "endless nothing": declared(_vector(length) | {"sums/b": nothing}),
        "fifty tensors at one place": declared(_vector(length) | shared),
        "float64 in its place": declared(_vector(length // 2, "F64", 8)),
        "bytes in its place": declared(_vector(4 * length, "U8", 1)),
        "not finite": lambda: iter([_header(_vector(length), update), b"\xff" * (4 * length)]),
        "over the norm bound": lambda: iter([_header(_vector(length), update), b"\x7e" * (4 * length)]),
        "header of empty lists": lambda: filled(b"[],", limit - 64),
        "header of objects": lambda: filled(b'{"":0},', limit - 64),
        "header of numbers": lambda: filled(b"1.5,", limit - 64),
        "header of brackets": lambda: iter([(limit - 64).to_bytes(8, "little"), b"[" * (limit - 64)]),
        "header length of 2^62": lambda: iter([(1 << 62).to_bytes(8, "little"), zeros]),
        "thousands of metrics": declared(_vector(length), {**update, "metrics": metrics}),
    }


def rises(way: str, length: int, folder: Path, only: list[str] | None = None) -> tuple[int, dict[str, tuple[int, int]]]:
    """The declared limit, and for each payload how far the child's memory rose and whether it was accepted."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, way, str(length)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        limit, found = int(child.stdout.readline()), {}
        for name, make in payloads(length, limit).items():
            if only is not None and name not in only:
                continue
            path = folder / "payload"
            with path.open("wb") as file:
                for piece in make():
                    file.write(piece)
            child.stdin.write(f"{path}\n")
            child.stdin.flush()
            rise, accepted, _ = map(int, child.stdout.readline().split())
            found[name] = (rise, accepted)
            path.unlink()
        child.stdin.close()
    return limit, found


def sizes(scale: float) -> Outcome:
    """Every hostile payload against a limit of 64 MB (less at a smaller scale)."""
    length = share(16 * MEGABYTE, scale, 4 * MEGABYTE)
    with tempfile.TemporaryDirectory() as name:
        limit, found = rises("ours", length, Path(name))
        _, naive = rises("naive", length, Path(name), ["ten times as long"])
    hostile = {key: rise / limit for key, (rise, _) in found.items() if key != "honest"}
    wrong = [key for key, (_, accepted) in found.items() if accepted != (key == "honest")]
    worst = max(hostile, key=lambda key: hostile[key])
    careless = naive["ten times as long"][0] / limit
    return Outcome(
        max(hostile.values()) <= 2 and not wrong,
        f"{len(hostile)} hostile payloads against a limit of {limit / 1e6:.0f} MB: largest rise {hostile[worst]:.2f}x "
        f"({worst}), all refused; the honest one takes {found['honest'][0] / limit:.2f}x"
        + (f"; wrongly judged: {', '.join(wrong)}" if wrong else ""),
        {"no look at the size before parsing": f"rise of {careless:.1f}x"},
        careless > 2,
        {"limit": limit, "rises": hostile},
    )
