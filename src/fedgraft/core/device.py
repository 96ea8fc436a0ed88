"""Where a process computes: the one place that chooses a device, moves tensors to it and back, and waits for it.

A run's result does not belong to a device: the same run may be trained on one machine's GPU and used on another's CPU.
Which device computes is therefore no part of a run's identity; each command, node and worker chooses its own by
`choose_devices`. Everything else asks `Device.of(network)` where the network is and moves tensors through it, so that
transfers and waits can be found, counted and kept out of the loops over batches (`tests/laws/test_device_law.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgraft.core.device_choice import AUTO, CHOICE
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Examples, Network

PINNED = frozenset({"cuda"})
"""Kinds of devices that read pinned memory while they compute."""
WITHOUT_FLOAT64 = frozenset({"mps"})


@dataclass(frozen=True)
class Device:
    """A device, and the only way of tensors onto it, off it, and of numbers out of it."""

    torch_device: torch.device

    @classmethod
    def of(cls, network: Network) -> Device:
        """Return the device that this network is on."""
        return cls(next(network.parameters()).device)

    @property
    def kind(self) -> str:
        """The kind of device: cpu, cuda, mps."""
        return self.torch_device.type

    @property
    def is_host(self) -> bool:
        """Whether this is the CPU, where nothing is copied and nobody waits."""
        return self.torch_device.type == "cpu"

    @property
    def widest(self) -> torch.dtype:
        """The widest floating-point type of this device, for sums of many small terms."""
        if self.kind in WITHOUT_FLOAT64:
            return torch.float32
        return torch.float64

    def put(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device; the copy may still be running, and operations on the device wait for it."""
        if self.kind in PINNED and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self.torch_device, non_blocking=True)

    def put_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on this device; those already there are not copied."""
        return {name: self.put(tensor) for name, tensor in tensors.items()}

    def view(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the same tensors by name, each moved to this device when it is read, and once."""
        return _MovedWhenRead(tensors, self)

    def making(self) -> AbstractContextManager[object]:
        """Return a context in which torch's factories (`torch.zeros(n)`) allocate on this device."""
        if self.is_host:
            return nullcontext()
        return self.torch_device

    def wait(self) -> None:
        """Wait until the device has done what it was given; on the host it always has."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def autocast(self, precision: str | None) -> AbstractContextManager[object]:
        """Return a context in which products are computed in this precision (`float16`, `bfloat16`); None: float32."""
        if precision is None:
            return nullcontext()
        return torch.autocast(self.kind, getattr(torch, precision))

    def cache_words(self, precision: str | None = None) -> list[str]:
        """Return the words by which a cached result of this device differs from one of the CPU in float32; [] there."""
        words = []
        if not self.is_host:
            words.append(f"computed on {self.kind}")
        if precision is not None:
            words.append(f"in {precision}")
        return words


class _MovedWhenRead(Mapping[str, Tensor]):
    """Tensors of which a device gets those that are read."""

    def __init__(self, tensors: Mapping[str, Tensor], device: Device) -> None:
        self._tensors = tensors
        self._device = device
        self._moved: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._moved:
            self._moved[name] = self._device.put(self._tensors[name])
        return self._moved[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


HOST = Device(torch.device("cpu"))
"""The host's own memory and processor."""


def fetch(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, which waits for the device; on the host it is returned as it is."""
    return tensor.cpu()


def fetch_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the host."""
    return {name: fetch(tensor) for name, tensor in tensors.items()}


def read(tensor: Tensor) -> list[float]:
    """Return the numbers of a flat tensor; one wait for all of them."""
    numbers: list[float] = fetch(tensor).tolist()
    return numbers


def precision_of(network: Network) -> str | None:
    """Return the precision in which this network evaluates (`model.amp`); None: float32."""
    precision: str | None = getattr(network, "amp", None)
    return precision


def evaluation_precision(network: Network) -> AbstractContextManager[object]:
    """Return a context in which passes without gradients are computed in the network's own precision."""
    return Device.of(network).autocast(precision_of(network))


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return these numbers as a vector on the device; made once, because every batch asks for the same."""
    return Device(device).put(torch.tensor(values))


@runtime_checkable
class PreparesOnDevice(Protocol):
    """Examples that send something smaller than their inputs to a device and finish them there."""

    def batches_on(self, device: Device, draws: Sequence[tuple[Tensor, torch.Generator | None]]) -> list[Tensor]:
        """Return on this device what `batch` returns for each of these arguments, up to the device's rounding."""
        ...


def inputs_on(device: Device, examples: Examples, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return the inputs of these rows on the device; a generator selects the training transform."""
    if not device.is_host and isinstance(examples, PreparesOnDevice):
        return examples.batches_on(device, [(rows, generator)])[0]
    return device.put(examples.batch(rows, generator))


# ---- the choice ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Devices:
    """The devices of a command, in the order of its choice: the first computes what one process does alone."""

    all: tuple[torch.device, ...]

    @property
    def first(self) -> torch.device:
        """The device of this process."""
        return self.all[0]

    @cached_property
    def label(self) -> str:
        """The devices as a sentence names them."""
        return ",".join(str(device) for device in self.all)

    def of_worker(self, number: int) -> torch.device:
        """Return the device of a worker process; workers are spread over the devices in turn."""
        return self.all[number % len(self.all)]

    def share_of_gpus(self, workers: int) -> float:
        """Return the share of a GPU of each of so many worker processes; 0 where none is chosen."""
        gpus = sum(device.type == "cuda" for device in self.all)
        return min(1.0, gpus / workers)


def choose_devices(choice: str = AUTO) -> Devices:
    """Return the devices of this name that this machine has, or raise `E-CONFIG-DEVICE`.

    `choice` is a device (cpu, cuda, cuda:1, mps), several with commas between them, or `auto`.
    """
    name = choice
    if name == AUTO:
        name = os.environ.get(CHOICE) or AUTO
    if name == AUTO:
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
    words = [word.strip() for word in name.split(",")]
    devices = tuple(_usable(word) for word in words)
    if len(set(devices)) < len(devices):
        raise FedgraftError("E-CONFIG-DEVICE", f"device={name!r} names a device twice", "name each once", device=name)
    return Devices(devices)


def _usable(name: str) -> torch.device:
    """Return the device of this name if a tensor can be made on it here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise FedgraftError(
            "E-CONFIG-DEVICE",
            f"the device {name!r} cannot be used here ({reason})",
            f"set device=cpu, --device cpu or {CHOICE}=cpu",
            device=name,
        ) from None
    return device


def refuse_fork(devices: Sequence[torch.device], workers: int) -> None:
    """Raise `E-ENGINES-FORK-DEVICE` where worker processes would be forks of a process that uses an accelerator.

    A fork inherits the memory of the driver's context but not the context: its first call fails or hangs.
    """
    for device in devices:
        if device.type != "cpu":
            raise FedgraftError(
                "E-ENGINES-FORK-DEVICE",
                f"{workers} forked workers cannot use the device {device} of their parent",
                "unset FEDGRAFT_START, so that workers on an accelerator are spawned, or set workers=1",
                device=str(device),
                workers=workers,
            )


# ---- precision and repetition -------------------------------------------------------------------------------------


@contextmanager
def repeatable() -> Iterator[None]:
    """Let CUDA compute the same bits each time, and matrix products of float32 in TF32; both are as before afterwards.

    On a CPU neither exists, and nothing is changed.
    """
    if not torch.cuda.is_available():
        yield
        return
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may split sums as it likes
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.backends.cudnn.deterministic = before[2]
        torch.backends.cudnn.benchmark = before[3]
        torch.use_deterministic_algorithms(before[4], warn_only=before[5])
