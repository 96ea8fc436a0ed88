"""The edit space: which coordinates of a network may move, as one flat float32 vector.

Everything a federation does happens on such vectors. A space is a list of parts; a part is a whole tensor or
chosen positions of one. Coordinates outside the space have no place in the vector, so nothing that happens to
the vector - decay, momentum, averaging, noise - can reach them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor's share of the space: all of it, or the sorted flat positions in `index`."""

    name: str
    shape: tuple[int, ...]
    index: Tensor | None = None

    @property
    def numel(self) -> int:
        """Coordinates of the whole tensor."""
        return int(torch.Size(self.shape).numel())

    @property
    def size(self) -> int:
        """Coordinates of this part."""
        return self.numel if self.index is None else int(self.index.numel())


@dataclass(frozen=True, eq=False)
class EditSpace:
    """An ordered set of coordinates. `parts` are trained; `buffers` (batch-norm statistics) only travel along.

    Law: for any vector v of this space, `scatter(v)` then `gather()` returns v bit for bit, and no other
    coordinate of the network changes.
    """

    parts: tuple[Part, ...]
    buffers: tuple[Part, ...] = ()

    @cached_property
    def trained(self) -> int:
        """Coordinates that optimizers move: the head of every vector."""
        return sum(part.size for part in self.parts)

    @cached_property
    def size(self) -> int:
        """Length of a vector of this space."""
        return self.trained + sum(part.size for part in self.buffers)

    @cached_property
    def digest(self) -> str:
        """Identity of the set of coordinates: names, shapes and positions, not values."""
        h = hashlib.blake2b(digest_size=16)
        for part, trained in [*((p, True) for p in self.parts), *((p, False) for p in self.buffers)]:
            h.update(f"{part.name}{part.shape}{trained}".encode())
            if part.index is not None:
                h.update(part.index.to(torch.int64).numpy().tobytes())
        return h.hexdigest()

    @cached_property
    def ranges(self) -> tuple[tuple[Part, int, int], ...]:
        """Each part with where it begins and ends in the vector."""
        found, begin = [], 0
        for part in (*self.parts, *self.buffers):
            found.append((part, begin, begin + part.size))
            begin += part.size
        return tuple(found)

    def gather(self, network: Network) -> Tensor:
        """The network's present values on this space, a fresh float32 vector."""
        tensors = _tensors(network)
        vector = torch.empty(self.size)
        for part, begin, end in self.ranges:
            vector[begin:end] = _read(part, tensors[part.name])
        return vector

    def scatter(self, vector: Tensor, network: Network) -> None:
        """Write a vector of this space into the network; every other coordinate keeps its bits."""
        if vector.shape != (self.size,) or vector.dtype != torch.float32:
            raise FedgraftError(
                f"a vector of {tuple(vector.shape)} {vector.dtype} does not fit this edit space of {self.size} float32"
            )
        tensors = _tensors(network)
        with torch.no_grad():
            for part, begin, end in self.ranges:
                _write(part, tensors[part.name], vector[begin:end])

    def restrict(self, active: Tensor) -> EditSpace:
        """The space of the trained coordinates that are True in `active`; buffers do not belong to it."""
        parts = []
        for part, begin, end in self.ranges[: len(self.parts)]:
            chosen = active[begin:end].nonzero().view(-1)
            if len(chosen) == part.size:
                parts.append(part)
            elif len(chosen):
                parts.append(Part(part.name, part.shape, chosen if part.index is None else part.index[chosen]))
        return EditSpace(tuple(parts))

    def bind(self, network: Network) -> Bound:
        """Prepare a network for training on this space: gradients only where something may move."""
        return Bound(self, network)

    def without(self, unwanted: Callable[[str], bool]) -> EditSpace:
        """The space without the tensors of these names."""
        keep = lambda parts: tuple(part for part in parts if not unwanted(part.name))  # noqa: E731
        return EditSpace(keep(self.parts), keep(self.buffers))

    def slices(self) -> Mapping[str, slice]:
        """Where each tensor lies in a vector."""
        return {part.name: slice(begin, end) for part, begin, end in self.ranges}

    def first_block(self, network: Network) -> int:
        """The earliest block that holds a trained coordinate: what lies before it is fixed and can be kept."""
        return min((network.block_of(part.name) for part in self.parts), default=network.depth + 1)


class Bound:
    """A network whose coordinates in a space are driven by one flat vector.

    Whole tensors become views into `values`, so stepping the vector steps the network; chosen positions are
    written by index, at a cost of their number. Tensors with nothing to train get no gradient at all.
    """

    def __init__(self, space: EditSpace, network: Network) -> None:
        self.space = space
        self.network = network
        self._tensors = _tensors(network)
        device = next(iter(self._tensors.values())).device
        self.values = space.gather(network).to(device)
        self._gradient = torch.zeros(space.trained, device=device)
        self._index = {p.name: p.index.to(device) for p in space.parts if p.index is not None}
        trained = {part.name for part in space.parts}
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in trained)
            parameter.grad = None
        self._sparse = [(p, b, e) for p, b, e in space.ranges if p.index is not None]
        for part, begin, end in space.ranges[: len(space.parts)]:
            if part.index is None:
                self._tensors[part.name].data = self.values[begin:end].view(part.shape)

    @property
    def trained(self) -> int:
        """How many of the values an optimizer trainable."""
        return self.space.trained

    @cached_property
    def head(self) -> slice:
        """Where the head's coordinates lie among the trained ones; empty where it does not move."""
        found = [(b, e) for p, b, e in self.space.ranges[: len(self.space.parts)] if self._in_head(p.name)]
        return slice(found[0][0], found[-1][1]) if found else slice(0, 0)

    def _in_head(self, name: str) -> bool:
        return self.network.block_of(name) > self.network.depth

    def training_mode(self) -> None:
        """Let the network train. Statistics (batch norm) that are not in the space stay as they are, to the bit."""
        self.network.train()
        mine = {part.name for part in self.space.buffers}
        for prefix, module in self.network.named_modules():
            if getattr(module, "running_mean", None) is not None and f"{prefix}.running_mean" not in mine:
                module.eval()

    def load(self, vector: Tensor) -> None:
        """Set the values, and the network with them."""
        self.values.copy_(vector)
        self.push()
        with torch.no_grad():
            for part, begin, end in self.space.ranges[len(self.space.parts) :]:
                _write(part, self._tensors[part.name], self.values[begin:end])

    @torch.no_grad()
    def push(self) -> None:
        """Carry changed values into the tensors that are not views of them."""
        for part, begin, end in self._sparse:
            _write(part, self._tensors[part.name], self.values[begin:end])

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Take the gradients of the last backward pass as one vector of length `trained`, and clear them."""
        for part, begin, end in self.space.ranges[: len(self.space.parts)]:
            tensor = self._tensors[part.name]
            out = self._gradient[begin:end]
            if tensor.grad is None:
                out.zero_()
            elif part.index is None:
                out.copy_(tensor.grad.view(-1))
            else:
                torch.index_select(tensor.grad.view(-1), 0, self._index[part.name], out=out)
            tensor.grad = None
        return self._gradient

    @torch.no_grad()
    def pull_buffers(self) -> None:
        """Read the buffers (batch-norm statistics) back into the tail of `values`."""
        for part, begin, end in self.space.ranges[len(self.space.parts) :]:
            self.values[begin:end] = _read(part, self._tensors[part.name])


def select(network: Network, wanted: Callable[[str], bool], buffers: bool = True) -> EditSpace:
    """The space of all parameters whose name is wanted, with the float buffers of the same modules."""
    parts = tuple(Part(n, tuple(p.shape)) for n, p in network.named_parameters() if wanted(n))
    extra = tuple(
        Part(n, tuple(b.shape)) for n, b in network.named_buffers() if buffers and b.is_floating_point() and wanted(n)
    )
    if not parts:
        raise FedgraftError("the edit space is empty: no parameter of the network was selected")
    return EditSpace(parts, extra)


def masked(network: Network, mask: Mapping[str, Tensor], dense: Iterable[str] = ()) -> EditSpace:
    """The space of the coordinates that are True in `mask`, plus whole tensors named in `dense`.

    Tensors are matched by name; a name the network does not have, or another shape, is refused.
    """
    whole = set(dense)
    parameters = dict(network.named_parameters())
    unknown = sorted((set(mask) | whole) - set(parameters))
    if unknown:
        raise FedgraftError(f"the mask names {unknown[0]!r}, which this network does not have")
    parts = []
    for name, parameter in parameters.items():
        if name in whole:
            parts.append(Part(name, tuple(parameter.shape)))
        elif name in mask:
            if mask[name].shape != parameter.shape:
                raise FedgraftError(f"the mask of {name!r} is {tuple(mask[name].shape)}, not {tuple(parameter.shape)}")
            index = mask[name].reshape(-1).nonzero().view(-1)
            if len(index) == parameter.numel():
                parts.append(Part(name, tuple(parameter.shape)))
            elif len(index):
                parts.append(Part(name, tuple(parameter.shape), index))
    if not parts:
        raise FedgraftError("the edit space is empty: the mask keeps no coordinate of the network")
    return EditSpace(tuple(parts))


def _tensors(network: Network) -> dict[str, nn.Parameter | Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _read(part: Part, tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat if part.index is None else flat[part.index.to(flat.device)]


def _write(part: Part, tensor: Tensor, values: Tensor) -> None:
    if part.index is None:
        tensor.data.copy_(values.view(part.shape))
    else:
        tensor.data.view(-1).scatter_(0, part.index.to(tensor.device), values.to(tensor.device))
