"""`fedgraft selftest`: does this machine's device compute what this project's CPU computed, twice the same, how fast.

Small federations on the digits that come with the package are trained twice on the device, from a fixed seed. Their
models are compared with those of the machine that this project is tested on. Of each, `selftest.json` holds 64 sums of
how far the coordinates moved, with random signs: the distance of two such sketches is about that of the models.

    python -m fedgraft.runs.selftest      # compute the stored results anew, after a change that moves them
"""

from __future__ import annotations

import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.config.load import load
from fedgraft.core.device import Device, choose_devices, repeatable
from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.rng import torch_stream
from fedgraft.engines.in_process import InProcess
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
STORED = Path(__file__).with_name("selftest.json")
"""The results of the machine that this project is tested on, by check."""
SKETCH = 64
"""Numbers that are stored of each model."""
NEAR = 0.02
"""A result is near the stored one if its model is at most so far from it, by the distance that training moved."""
NEAR_HALF = 0.2
"""The same for half precision, which is compared with the stored result of float32."""
SPEED_BATCH = 64
SPEED_STEPS = 10
SPEED_ROUNDS = 5
"""Times that fedgraft and the bare loop alternate."""


@dataclass(frozen=True)
class Check:
    """One small federation on the device: how far its model is from the stored one, and whether it comes out twice."""

    name: str
    difference: float
    """Distance to the stored model, relative to how far training moved."""
    allowed: float
    repeats: bool
    """Two runs on the device have the same bits."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the model is near the stored one and came out twice."""
        return self.difference <= self.allowed and self.repeats


@dataclass(frozen=True)
class Selftest:
    """What a self-test found; `facts` say on what machine, `speed` are images per second."""

    facts: dict[str, Any]
    checks: tuple[Check, ...]
    speed: dict[str, float]
    refused: dict[str, str]
    """Checks that this machine cannot make, with the reason."""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def as_table(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        table = {"facts": self.facts, "checks": checks, "speed": self.speed}
        return table | {"refused": self.refused, "passed": self.passed}


def rows() -> dict[str, tuple[str, ...]]:
    """Return the options of each check by its name: every trainable kind, a dozen algorithms, half precision."""
    options: dict[str, tuple[str, ...]] = {}
    for kind in TRAINABLES:
        options[f"trainable {kind}"] = (f"trainable.kind={kind}",)
    options["trainable sparse"] = ("trainable.kind=sparse", "trainable.sparse.samples=32", "trainable.sparse.rounds=2")
    options["batched heads"] = ("engine=batched",)
    options["packed clients"] = ("engine=auto", "pack=4", "trainable.kind=lora")
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
    stored = json.loads(STORED.read_text())["checks"]
    checks = []
    refused = {}
    with one_thread(), _own_cache():
        for name, options in rows().items():
            if chosen and name not in chosen:
                continue
            try:
                check = _check(name, options, place, stored[name])
            except FedgraftError as error:
                if error.code != "E-DEVICE-BFLOAT16":
                    raise
                refused[name] = str(error)
                continue
            checks.append(check)
            if done is not None:
                done(check)
        speed = measured_speed(place)
    return Selftest(_facts(place), tuple(checks), speed, refused)


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


def _check(name: str, options: Sequence[str], place: torch.device, stored: Sequence[float]) -> Check:
    """Train one federation twice on the device and compare; `stored` is the sketch of the expected movement."""
    half = any(option.startswith("local.amp=") for option in options)
    began = time.perf_counter()
    start, found = _trained(options, str(place))
    seconds = time.perf_counter() - began
    _, again = _trained(options, str(place))
    expected = torch.tensor(stored)
    difference = float((sketch(found - start) - expected).norm() / expected.norm())
    return Check(name, difference, NEAR_HALF if half else NEAR, torch.equal(found, again), seconds)


def sketch(vector: Tensor) -> Tensor:
    """Return `SKETCH` sums of the coordinates with random signs, whose norm is about the vector's."""
    signs = torch.randint(0, 2, vector.shape, generator=torch_stream(0, "selftest")) * 2.0 - 1.0
    missing = -len(vector) % SKETCH
    padded = torch.nn.functional.pad(vector * signs, (0, missing))
    return padded.view(-1, SKETCH).double().sum(0).float()


def store_results(path: Path = STORED) -> None:
    """Train every federation on this machine's CPU in float32 and write the sketches to the file."""
    sketches = {}
    with one_thread(), _own_cache():
        for name, options in rows().items():
            exact = [option for option in options if not option.startswith("local.amp=")]
            start, found = _trained(exact, "cpu")
            sketches[name] = [round(value, 7) for value in sketch(found - start).tolist()]
    content = {"torch": torch.__version__, "platform": platform.platform(), "checks": sketches}
    lines = json.dumps(content).replace('], "', '],\n"')
    path.write_text(lines + "\n")


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


def measured_speed(place: torch.device) -> dict[str, float]:
    """Return images per second on this device: plain passes forward, a bare training loop, and fedgraft's own.

    The bare loop and fedgraft's alternate, and their medians count, so that both see the same machine.
    """
    options = ["trainable.kind=everything", f"local.steps={SPEED_STEPS}", f"local.batch_size={SPEED_BATCH}"]
    setup = setup_of(load(None, [*BASE, *options, "partition.clients=1", f"device={place}"]))
    network = setup.task.network
    device = Device.of(network)
    rows = setup.task.data.train_rows[:SPEED_BATCH]
    images = device.put(setup.task.eval_images.batch(rows))
    labels = device.put(setup.task.eval_images.labels[rows])
    engines = Engines(setup)
    opened = open_run(setup, engines)
    state = server.start(setup.algorithm, opened.space.gather(network), opened.space.trained)
    requests = server.instruct(setup.algorithm, setup.federation, state, [0], opened.space.digest)
    engine = InProcess(setup.algorithm, opened.context)
    optimizer_step = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9).step

    def forward() -> None:
        with torch.no_grad():
            for _ in range(SPEED_STEPS):
                network(images)

    def bare() -> None:
        for _ in range(SPEED_STEPS):
            network.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimizer_step()

    def fedgraft() -> None:
        list(engine.exchange(requests))

    works = {"forward": forward, "bare training": bare, "fedgraft's training": fedgraft}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(SPEED_ROUNDS + 1):
        for name, work in works.items():
            device.wait()
            began = time.perf_counter()
            work()
            device.wait()
            if number:  # the first is slower
                seconds[name].append(time.perf_counter() - began)
    engines.close()
    rates = {}
    for name, measured in seconds.items():
        rates[name] = SPEED_STEPS * SPEED_BATCH / sorted(measured)[len(measured) // 2]
    return rates


def _facts(place: torch.device) -> dict[str, Any]:
    """Return versions, the device and its settings, and the memory that the checks took."""
    facts: dict[str, Any] = {
        "device": str(place),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "peak_host_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "tf32": False,
    }
    if place.type == "cuda":
        with repeatable():
            facts["tf32"] = torch.backends.cuda.matmul.allow_tf32
        facts["name"] = torch.cuda.get_device_name(place)
        facts["cuda"] = torch.version.cuda
        facts["peak_megabytes"] = torch.cuda.max_memory_allocated(place) / 1e6
    return facts


if __name__ == "__main__":
    store_results()
