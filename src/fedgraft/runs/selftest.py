"""`fedgraft selftest`: does this machine's device compute what its CPU computes, twice the same, and how fast.

Small federations on the digits that come with the package are trained on the CPU and twice on the device, from the same
seed. The CPU is the reference, because its results are what this project tests; a device may round differently.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import load
from fedgraft.core.device import Device, choose_devices, repeatable
from fedgraft.core.registry import TRAINABLES
from fedgraft.local.memory import one_thread
from fedgraft.runs.engines import Engines
from fedgraft.runs.head_init import install_head
from fedgraft.runs.open_run import open_run
from fedgraft.runs.setup import setup_of
from fedgraft.server import sample as server
from fedgraft.server.round import run_round

BASE = (
    "model.name=tiny",
    "model.ridge=1.0",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=240",
    "partition.clients=4",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "local.steps=4",
    "local.batch_size=16",
    "local.lr=0.02",
    "workers=1",
    "engine=reference",
)
ALGORITHMS: tuple[str, ...] = (
    "fedprox",
    "scaffold",
    "feddyn",
    "fednova",
    "fedadam",
    "moon",
    "fedlc",
    "ditto",
    "fedper",
    "fedrep",
    "fedala",
    "fedfisher",
)
NEAR = 0.02
"""A device is near the CPU if its model is at most so far from the CPU's, by the distance that training moved."""
NEAR_HALF = 0.2
"""The same for half precision."""
SPEED_BATCH = 64
SPEED_STEPS = 10


@dataclass(frozen=True)
class Check:
    """One small federation on the device: how far its model is from the CPU's, and whether it comes out twice."""

    name: str
    difference: float
    """Distance to the CPU's model, relative to how far training moved."""
    allowed: float
    repeats: bool
    """Two runs on the device have the same bits."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the model is near the CPU's and came out twice."""
        return self.difference <= self.allowed and self.repeats


@dataclass(frozen=True)
class Selftest:
    """What a self-test found; `facts` say on what machine, `speed` are images per second."""

    facts: dict[str, Any]
    checks: tuple[Check, ...]
    speed: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def as_table(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        return {"facts": self.facts, "checks": checks, "speed": self.speed, "passed": self.passed}


def rows() -> dict[str, tuple[str, ...]]:
    """Return the options of each check by its name: every trainable kind, a dozen algorithms, half precision."""
    options: dict[str, tuple[str, ...]] = {}
    for kind in TRAINABLES:
        options[f"trainable {kind}"] = (f"trainable.kind={kind}",)
    options["trainable sparse"] = ("trainable.kind=sparse", "trainable.sparse.samples=32", "trainable.sparse.rounds=2")
    options["batched heads"] = ("engine=batched",)
    for name in ALGORITHMS:
        options[name] = (f"algorithm.name={name}", "trainable.kind=last_blocks")
    for precision in ("bfloat16", "float16"):
        options[precision] = (f"local.amp={precision}", "trainable.kind=last_blocks")
    return options


def selftest(device: str = "auto", chosen: Sequence[str] = (), done: Callable[[Check], None] | None = None) -> Selftest:
    """Return what the checks find on this device; `done` is called after each.

    `chosen` are the names of the checks to make; none: all of them.
    """
    place = choose_devices(device).first
    checks = []
    with one_thread(), _own_cache():
        for name, options in rows().items():
            if chosen and name not in chosen:
                continue
            check = _check(name, options, place)
            checks.append(check)
            if done is not None:
                done(check)
        speed = _speed(place)
    return Selftest(_facts(place), tuple(checks), speed)


@contextmanager
def _own_cache() -> Iterator[None]:
    """Let nothing be taken from earlier runs: a cached mask or head would be compared with itself."""
    before = os.environ.get("FEDGRAFT_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDGRAFT_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("FEDGRAFT_CACHE")
            if before is not None:
                os.environ["FEDGRAFT_CACHE"] = before


def _check(name: str, options: Sequence[str], place: torch.device) -> Check:
    """Train one federation on the CPU and twice on the device, and compare."""
    half = any(option.startswith("local.amp=") for option in options)
    reference_options = [option for option in options if not option.startswith("local.amp=")]
    start, expected = _trained(reference_options, "cpu")
    began = time.perf_counter()
    _, found = _trained(options, str(place))
    seconds = time.perf_counter() - began
    _, again = _trained(options, str(place))
    moved = float((expected - start).norm())
    difference = float((found - expected).norm()) / max(moved, 1e-12)
    return Check(name, difference, NEAR_HALF if half else NEAR, torch.equal(found, again), seconds)


def _trained(options: Sequence[str], device: str) -> tuple[Tensor, Tensor]:
    """Return the common model before and after the rounds of one small federation, on the host."""
    setup = setup_of(load(None, [*BASE, *options, f"device={device}"]))
    engines = Engines(setup)
    install_head(setup, engines)
    opened = open_run(setup, engines)
    engine = engines.training(setup.algorithm, opened.context)
    state = server.start(setup.algorithm, opened.space.gather(setup.task.network), opened.space.trained)
    start = state.vector.clone()
    for _ in range(setup.config.rounds.total):
        state, _ = run_round(setup.algorithm, setup.federation, state, engine, opened.server_context)
    engines.close()
    return start, state.vector


def _speed(place: torch.device) -> dict[str, float]:
    """Return images per second of plain passes through the small network on this device, forward and in training."""
    setup = setup_of(load(None, [*BASE, f"device={place}"]))
    network = setup.task.network
    device = Device.of(network)
    images = device.put(setup.task.eval_images.batch(setup.task.data.train_rows[:SPEED_BATCH]))
    labels = device.put(setup.task.eval_images.labels[setup.task.data.train_rows[:SPEED_BATCH]])

    def forward() -> None:
        with torch.no_grad():
            network(images)

    def training() -> None:
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()

    network.eval()
    rates = {}
    for name, work in (("forward", forward), ("training", training)):
        work()
        device.wait()
        began = time.perf_counter()
        for _ in range(SPEED_STEPS):
            work()
        device.wait()
        rates[name] = SPEED_STEPS * len(images) / (time.perf_counter() - began)
    return rates


def _facts(place: torch.device) -> dict[str, Any]:
    """Return versions, the device and its settings."""
    facts: dict[str, Any] = {
        "device": str(place),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
    }
    if place.type == "cuda":
        with repeatable():
            facts["tf32"] = torch.backends.cuda.matmul.allow_tf32
        facts["name"] = torch.cuda.get_device_name(place)
        facts["cuda"] = torch.version.cuda
        facts["peak_megabytes"] = torch.cuda.max_memory_allocated(place) / 1e6
    return facts
