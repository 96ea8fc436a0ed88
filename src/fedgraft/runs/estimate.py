"""What a run will need: memory, disk and time, before it starts.

Two tiny training steps, of two and of four images, are taken on the real network with the real algorithm while every
tensor that is made is counted. What grows with the number of images and what does not follows from the two, and with it
the peak at the batch size of the run. Sizes of files are known exactly; times are those of the tiny steps on this
machine as it is now, so they are rough. `docs/devices.md` has the errors that were measured.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import vary
from fedgraft.client.train import LocalOutcome, train_locally
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import nearest_existing
from fedgraft.core.progress import phase
from fedgraft.core.state import to_tensors
from fedgraft.data.cache_limit import cache_dir
from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.data.feature_cache import BLOCK, CachedExamples
from fedgraft.data.pixels.on_demand import DecodedPixels
from fedgraft.local.features import evaluate_batch
from fedgraft.local.forward_memory import images_at_once
from fedgraft.local.memory import one_thread
from fedgraft.metrics.evaluate import EVALUATION_BATCH
from fedgraft.runs.checkpoint import KEEP_BEST, KEEP_LAST
from fedgraft.runs.engines import Engines
from fedgraft.runs.live_bytes import LiveBytes
from fedgraft.runs.open_run import OpenRun
from fedgraft.runs.setup import RunSetup
from fedgraft.server import sample as server

FEW = 2
MORE = 4
"""Images of the two steps that are measured."""
FRAGMENTED = 0.15
"""Share of all bytes that a step asks for which the C library holds besides those in use: free, but in pieces.

Measured on ViT-S/16 at 224 px with glibc: 0.10 to 0.19 for LoRA, the last blocks and all weights.
"""


@dataclass(frozen=True)
class Linear:
    """A quantity that grows with the number of images: `fixed` and `each` for one more image."""

    fixed: float
    each: float

    @classmethod
    def through(cls, few: float, more: float) -> Linear:
        """Return the line through the values at `FEW` and at `MORE` images; neither part is negative."""
        each = max(0.0, (more - few) / (MORE - FEW))
        return cls(max(0.0, few - FEW * each), each)

    def at(self, images: float) -> float:
        """Return the value at this number of images."""
        return self.fixed + self.each * images


@dataclass(frozen=True)
class StepCosts:
    """What one client's local training costs, by the number of images of a step."""

    training_bytes: Linear
    training_seconds: float
    """Of one image in a step; likewise below."""
    prefix_bytes: Linear
    """Of one forward pass through the frozen part."""
    prefix_seconds: float
    evaluation_bytes: Linear
    """Of one forward pass through the rest."""
    evaluation_seconds: float
    update_bytes: int
    """Of one client's response in memory."""
    memory_bytes: int
    """What one client remembers between rounds."""


@dataclass(frozen=True)
class Estimate:
    """What a run will need on this machine."""

    host_bytes: int
    """The most memory of all its processes together."""
    device_bytes: int
    """The most memory on the accelerator; 0 on a CPU."""
    disk_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of new files by what is in them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time by what is done."""

    @property
    def total_seconds(self) -> float:
        """Time of the whole run."""
        return sum(self.seconds.values())


def estimate_run(setup: RunSetup, opened: OpenRun, engines: Engines) -> Estimate:
    """Return the memory, disk and time that a run will need on this machine.

    A few images are decoded and trained on, and the network is changed by that.
    """
    resident = resident_bytes()
    with phase("measuring a training step", minor=True), one_thread():
        costs = _measure_steps(setup, opened)
    choice = engines.choice(setup.algorithm, opened.context)
    processes = max(1, choice.workers)
    batch = choice.pack * min(setup.algorithm.local.batch_size, setup.task.data.largest)
    # Before the first round all images pass the frozen part, on several processes; later every process trains clients.
    per_process = max(
        costs.training_bytes.at(batch),
        costs.prefix_bytes.at(BLOCK),
        costs.evaluation_bytes.at(_evaluation_batch(setup)),
    )
    updates = setup.federation.per_round * costs.update_bytes + _personal_bytes(setup, opened)
    # The server sums up when the last client has trained, so the two peaks do not meet.
    server_bytes = _server_state_bytes(setup, opened) + 2 * _vector_bytes(opened)
    if _is_on_cpu(setup):
        host = resident + updates + max(processes * per_process, server_bytes)
        device = 0.0
    else:
        host = resident + updates + server_bytes
        device = sum(tensor.nbytes for tensor in _tensors_of(setup)) + processes * per_process
    disk = _disk_bytes(setup, opened, costs)
    seconds = _seconds(setup, opened, costs, processes)
    return Estimate(int(host), int(device), disk, seconds)


def require_room_for_models(setup: RunSetup, opened: OpenRun, folder: Path) -> None:
    """Raise an error if the clients' own models cannot fit, which is known before anything is computed.

    A round mixes those of its cohort and writes them piece by piece, so memory holds the cohort's updates.
    """
    if not _has_personal_models(setup):
        return
    clients = setup.federation.clients
    each = _vector_bytes(opened)
    models = f"{clients} personal models of {each / 1e6:,.0f} MB"
    if clients * each > setup.config.rounds.personal_memory_mb * 1e6:
        require_disk(clients * each, folder, models)
    needed = setup.federation.per_round * each + _personal_bytes(setup, opened)
    available = available_bytes()
    if needed > available:
        raise FedgraftError(
            "E-RUN-MEMORY",
            f"a round of {setup.federation.per_round} clients among {models} needs at least {needed / 1e9:.1f} GB of "
            f"memory, and {available / 1e9:.1f} GB are free",
            "lower rounds.fraction or rounds.personal_memory_mb, or train less (trainable.kind=lora, last_blocks)",
            needed=needed,
            available=available,
        )


def require_room(estimate: Estimate, folder: Path) -> None:
    """Raise an error if the run cannot fit into this machine's memory or onto its disk.

    `folder` is where the run writes; the cache may lie on another disk.
    """
    available = available_bytes()
    if estimate.host_bytes > available:
        raise FedgraftError(
            "E-RUN-MEMORY",
            f"the run needs about {estimate.host_bytes / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free",
            "lower local.batch_size or workers, train less (trainable.kind=lora, last_blocks or head), or take an "
            "algorithm that keeps no model for each client",
            needed=estimate.host_bytes,
            available=available,
        )
    for place, purposes in ((cache_dir(), CACHED), (folder, KEPT)):
        needed = sum(estimate.disk_bytes.get(purpose, 0) for purpose in purposes)
        require_disk(needed, place, "the run")


def require_disk(needed: int, place: Path, purpose: str) -> None:
    """Raise an error if the disk of the folder `place` has fewer than `needed` bytes free; `purpose` is for what."""
    free = shutil.disk_usage(nearest_existing(place)).free
    if needed > free:
        raise FedgraftError(
            "E-RUN-DISK",
            f"{purpose} needs about {needed / 1e9:.1f} GB on the disk of {place}, and {free / 1e9:.1f} GB are free",
            "choose another disk (FEDGRAFT_CACHE, --out), set data.store=none or data.cache_features=false, or train "
            "less",
            needed=needed,
            available=free,
        )


CACHED = ("images at the network's size", "cached features")
"""What lies in the cache folder."""
KEPT = ("checkpoints", "clients' memories", "clients' models")
"""What lies in the run's folder."""


# ---- measuring ------------------------------------------------------------------------------------------------------


def _measure_steps(setup: RunSetup, opened: OpenRun) -> StepCosts:
    """Train on `FEW` and on `MORE` images and return what it costs."""
    network = setup.task.network
    entry = opened.context.examples.entry
    images = _few_images(setup)
    existing = _tensors_of(setup)
    prefix_bytes = Linear(0, 0)
    prefix_seconds = 0.0
    inputs = images.features
    if entry:
        prefix_bytes, prefix_seconds, inputs = _measure_forward(setup, inputs, existing, 0, entry)
    evaluation_bytes, evaluation_seconds, _ = _measure_forward(setup, inputs, existing, entry, network.depth)
    examples = FeatureExamples(inputs.cpu(), images.labels, entry)
    peaks = []
    for count in (FEW, MORE):
        with LiveBytes(existing) as live:
            outcome = _train_one_step(setup, opened, examples, count)
        peaks.append(_held_bytes(setup, live))
    began = time.perf_counter()
    _train_one_step(setup, opened, examples, MORE)
    training_seconds = (time.perf_counter() - began) / MORE
    update_bytes = outcome.update.nbytes + sum(tensor.nbytes for tensor in outcome.trained.closing.sums.values())
    memory_bytes = sum(tensor.nbytes for tensor in outcome.memory.values())
    return StepCosts(
        Linear.through(peaks[0], peaks[1]),
        training_seconds,
        prefix_bytes,
        prefix_seconds,
        evaluation_bytes,
        evaluation_seconds,
        update_bytes,
        memory_bytes,
    )


def _held_bytes(setup: RunSetup, live: LiveBytes) -> float:
    """Return the most bytes that a process holds for these tensors, with what its allocator cannot use again."""
    if _is_on_cpu(setup):
        return live.peak + FRAGMENTED * live.allocated
    return live.peak


def _is_on_cpu(setup: RunSetup) -> bool:
    """Return whether the network computes on the CPU."""
    return setup.task.network.head.weight.device.type == "cpu"


def _few_images(setup: RunSetup) -> FeatureExamples:
    """Return `MORE` training images as the network takes them; of fewer images some stand there twice."""
    rows = setup.task.data.train_rows
    rows = rows.repeat(MORE)[:MORE]
    images = setup.task.eval_images
    return FeatureExamples(images.batch(rows), images.labels[rows], 0)


def _measure_forward(
    setup: RunSetup, inputs: Tensor, existing: list[Tensor], first: int, last: int
) -> tuple[Linear, float, Tensor]:
    """Return bytes and seconds per image of a forward pass from block `first` to `last`, and its outputs."""
    network = setup.task.network

    def forward(images: Tensor) -> Tensor:
        return evaluate_batch(network, images, lambda x: network.features(x, first, last).float())

    peaks = []
    for count in (FEW, MORE):
        with LiveBytes(existing) as live:
            forward(inputs[:count])
        peaks.append(live.peak)  # what a pass without gradients frees is used again at once
    began = time.perf_counter()
    outputs = forward(inputs)
    seconds = (time.perf_counter() - began) / len(inputs)
    return Linear.through(peaks[0], peaks[1]), seconds, outputs


def _train_one_step(setup: RunSetup, opened: OpenRun, examples: FeatureExamples, count: int) -> LocalOutcome:
    """Return the outcome of one client's local training of one step of `count` images; the network is trained."""
    space = opened.space
    algorithm = vary(setup.algorithm, steps=1, epochs=None, client_steps=(), batch_size=count)
    state = server.start(algorithm, space.gather(setup.task.network), space.trained)
    requests = server.instruct(algorithm, setup.federation, state, [0], space.digest)
    context = replace(opened.context, examples=examples, rows=lambda client: torch.arange(count))
    context.forget_binding()
    return train_locally(requests[0], algorithm, context, {})


def _tensors_of(setup: RunSetup) -> list[Tensor]:
    """Return the network's weights and buffers."""
    network = setup.task.network
    return [*network.parameters(), *network.buffers()]


# ---- adding up ------------------------------------------------------------------------------------------------------


def _evaluation_batch(setup: RunSetup) -> int:
    """Return the number of images that are evaluated at once, from pixels."""
    measured = max(len(setup.evaluation_rows), len(setup.task.data.dataset.test.labels))
    return min(images_at_once(setup.task.network, 0, EVALUATION_BATCH), measured)


def _vector_bytes(opened: OpenRun) -> int:
    """Return the bytes of one model as a vector."""
    return 4 * opened.space.size


def _has_personal_models(setup: RunSetup) -> bool:
    """Return whether the server holds a model for each client."""
    return Capability.PERSONAL_MODELS in setup.algorithm.provides


def _server_state_bytes(setup: RunSetup, opened: OpenRun) -> int:
    """Return the bytes of the server's state in a checkpoint, with the best model, without clients' memories."""
    space = opened.space
    state = server.start(setup.algorithm, space.gather(setup.task.network), space.trained)
    tensors, _ = to_tensors(state, {})
    return sum(tensor.nbytes for tensor in tensors.values()) + _vector_bytes(opened)


def _personal_bytes(setup: RunSetup, opened: OpenRun) -> int:
    """Return the memory of the clients' own models, where these are not on disk."""
    if not _has_personal_models(setup):
        return 0
    models = setup.federation.clients * _vector_bytes(opened)
    if models > setup.config.rounds.personal_memory_mb * 1e6:
        return 0
    return models


def _disk_bytes(setup: RunSetup, opened: OpenRun, costs: StepCosts) -> dict[str, int]:
    """Return the bytes of new files by what is in them; an empty entry is left out."""
    clients = setup.federation.clients
    checkpoints = (KEEP_LAST + KEEP_BEST) * _server_state_bytes(setup, opened)
    memories = clients * costs.memory_bytes
    if memories <= setup.config.rounds.personal_memory_mb * 1e6:
        checkpoints += (KEEP_LAST + KEEP_BEST) * memories  # they are part of each checkpoint
        memories = 0
    disk = {
        CACHED[0]: sum(_undecoded(images) * _pixel_bytes(images) for images in _image_sets(setup)),
        CACHED[1]: _feature_bytes(setup, opened),
        KEPT[0]: checkpoints,
        KEPT[1]: memories,
    }
    if _has_personal_models(setup):
        disk[KEPT[2]] = clients * _vector_bytes(opened)
    return {purpose: size for purpose, size in disk.items() if size}


def _image_sets(setup: RunSetup) -> list[ImageExamples]:
    """Return the training and the test images, where the data are images."""
    sets = []
    for images in (setup.task.train_images, setup.task.test_images):
        if isinstance(images, ImageExamples):
            sets.append(images)
    return sets


def _undecoded(images: ImageExamples) -> int:
    """Return how many images the run will decode and store before it starts."""
    if isinstance(images.opened, DecodedPixels):
        return len(images)
    return 0


def _pixel_bytes(images: ImageExamples) -> int:
    """Return the bytes of one image at the network's size."""
    return 3 * images.transform.rule.size**2


def _feature_tables(setup: RunSetup, opened: OpenRun) -> list[tuple[CachedExamples, int]]:
    """Return the tables of cached features that the run uses, with the number of rows that it will compute of each."""
    tables = []
    context = opened.context
    if isinstance(context.examples, CachedExamples):
        tables.append((context.examples, len(setup.task.data.train_rows) + len(setup.evaluation_rows)))
    if isinstance(context.tests, CachedExamples):
        tables.append((context.tests, len(context.tests)))
    return tables


def _feature_bytes(setup: RunSetup, opened: OpenRun) -> int:
    """Return the bytes of cached features, also those that the head's sums are made of."""
    total = 0
    for table, rows in _feature_tables(setup, opened):
        total += 4 * rows * table.cache.views * int(np.prod(table.cache.shape))
    if setup.config.makes_head:
        total += 4 * len(setup.task.data.train_rows) * setup.task.network.width
    return total


def _seconds(setup: RunSetup, opened: OpenRun, costs: StepCosts, processes: int) -> dict[str, float]:
    """Return the time by what is done; work that is in the cache already is counted too, so it is at most this."""
    config = setup.config
    local = setup.algorithm.local
    data = setup.task.data
    cores = min(processes, len(os.sched_getaffinity(0)))
    seconds: dict[str, float] = {}
    undecoded = sum(_undecoded(images) for images in _image_sets(setup))
    if undecoded:
        seconds["decoding images"] = undecoded * _decoding_seconds(setup) / len(os.sched_getaffinity(0))
    rows = sum(rows * table.cache.views for table, rows in _feature_tables(setup, opened))
    if rows:
        seconds["features of the frozen part"] = costs.prefix_seconds * rows / max(1, setup.threads)
    sizes = data.partition.sizes()
    steps = sum(local.steps_for(int(images)) for images in sizes) / len(sizes)
    batch = min(local.batch_size, data.largest)
    exchanges = setup.federation.per_round * config.rounds.total
    seconds["training"] = exchanges * steps * costs.training_seconds * batch / cores
    evaluations = 1
    if config.rounds.evaluate_every:
        evaluations += config.rounds.total // config.rounds.evaluate_every
    evaluated = evaluations * len(setup.evaluation_rows) + len(data.dataset.test.labels)
    seconds["evaluation"] = costs.evaluation_seconds * evaluated / max(1, setup.threads)
    return seconds


def _decoding_seconds(setup: RunSetup) -> float:
    """Return the time in which one core decodes an image, measured on a few."""
    images = setup.task.train_images
    assert isinstance(images, ImageExamples)
    rows = torch.arange(min(16, len(images)))
    began = time.perf_counter()
    images.pixels(rows)
    return (time.perf_counter() - began) / len(rows) * len(os.sched_getaffinity(0))


# ---- this machine ---------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    status = Path("/proc/self/statm")
    if not status.exists():  # macOS: the most it ever held, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Return the memory that this machine could still give to a run, besides what this process holds already."""
    information = Path("/proc/meminfo")
    if not information.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in information.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 + resident_bytes()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
