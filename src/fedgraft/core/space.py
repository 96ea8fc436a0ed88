"""The edit space: which coordinates of a network may change, as one flat float32 vector.

Everything a federation does happens on such vectors. A space is a list of parts; a part is a whole tensor or
selected positions of one. Coordinates outside the space have no place in the vector, so nothing that is done to
the vector - decay, momentum, averaging, noise - can reach them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedgraft.core.device import Device, fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor's share of an edit space: all of it, or the sorted flat positions in `index`.

    `shape` is the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    index: Tensor | None = None

    @property
    def numel(self) -> int:
        """Number of coordinates of the whole tensor."""
        return int(torch.Size(self.shape).numel())

    @property
    def size(self) -> int:
        """Number of coordinates of this part."""
        if self.index is None:
            return self.numel
        return int(self.index.numel())


@dataclass(frozen=True, eq=False)
class EditSpace:
    """An ordered set of coordinates. `parts` are trained; `buffers` (batch-norm statistics) are only transported.

    Law: for any vector v of this space, `scatter(v)` then `gather()` returns v bit for bit, and no other
    coordinate of the network changes.
    """

    parts: tuple[Part, ...]
    buffers: tuple[Part, ...] = ()

    @cached_property
    def trained(self) -> int:
        """Number of coordinates that an optimizer updates; they come first in every vector."""
        return sum(part.size for part in self.parts)

    @cached_property
    def size(self) -> int:
        """Length of a vector of this space: the trained coordinates, then the buffers."""
        return self.trained + sum(part.size for part in self.buffers)

    @cached_property
    def digest(self) -> str:
        """Digest of the set of coordinates: names, shapes and positions, not values."""
        h = hashlib.blake2b(digest_size=16)
        for trained, parts in ((True, self.parts), (False, self.buffers)):
            for part in parts:
                h.update(f"{part.name}{part.shape}{trained}".encode())
                if part.index is not None:
                    h.update(part.index.to(torch.int64).numpy().tobytes())
        return h.hexdigest()

    @cached_property
    def ranges(self) -> tuple[tuple[Part, int, int], ...]:
        """Each part with its begin and end in a vector of this space: the trained parts, then the buffers."""
        ranges = []
        begin = 0
        for part in (*self.parts, *self.buffers):
            end = begin + part.size
            ranges.append((part, begin, end))
            begin = end
        return tuple(ranges)

    @cached_property
    def trained_ranges(self) -> tuple[tuple[Part, int, int], ...]:
        """Each trained part with its begin and end in a vector."""
        return self.ranges[: len(self.parts)]

    @cached_property
    def buffer_ranges(self) -> tuple[tuple[Part, int, int], ...]:
        """Each buffer with its begin and end in a vector."""
        return self.ranges[len(self.parts) :]

    def gather(self, network: Network) -> Tensor:
        """Return the present values of the network on this space as a new float32 vector."""
        return fetch(self._gather(_tensors(network)))

    def _gather(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the present values of these tensors as a new float32 vector on their device."""
        device = next(iter(tensors.values())).device
        vector = torch.empty(self.size, device=device)
        for part, begin, end in self.ranges:
            vector[begin:end] = _read(part, tensors[part.name])
        return vector

    def scatter(self, vector: Tensor, network: Network) -> None:
        """Write a vector of this space into the network; every other coordinate keeps its bits."""
        if vector.shape != (self.size,) or vector.dtype != torch.float32:
            raise FedgraftError(
                "E-SPACE-VECTOR",
                f"a vector of shape {tuple(vector.shape)} and type {vector.dtype} does not fit "
                f"this edit space of {self.size} float32 coordinates",
                "use a vector of the same trainable and the same network",
                shape=tuple(vector.shape),
                size=self.size,
            )
        tensors = _tensors(network)
        vector = Device.of(network).put(vector)
        with torch.no_grad():
            for part, begin, end in self.ranges:
                _write(part, tensors[part.name], vector[begin:end])

    def restrict(self, active: Tensor) -> EditSpace:
        """Return the space of the trained coordinates that are True in `active` (trained,), without buffers."""
        parts = []
        for part, begin, end in self.trained_ranges:
            positions = active[begin:end].nonzero().view(-1)
            if len(positions) == part.size:
                parts.append(part)
            elif len(positions):
                if part.index is not None:
                    positions = part.index[positions]
                parts.append(Part(part.name, part.shape, positions))
        return EditSpace(tuple(parts))

    def bind(self, network: Network) -> Bound:
        """Bind the network to this space for training, in place; return the handle.

        Trained tensors become views of one flat vector, and only they get gradients.
        """
        return Bound(self, network)

    def without(self, excluded: Callable[[str], bool]) -> EditSpace:
        """Return the space without the tensors for whose name `excluded` returns True."""
        parts = tuple(part for part in self.parts if not excluded(part.name))
        buffers = tuple(part for part in self.buffers if not excluded(part.name))
        return EditSpace(parts, buffers)

    def slices(self) -> Mapping[str, slice]:
        """Return the slice of each tensor's coordinates in a vector of this space, by name."""
        return {part.name: slice(begin, end) for part, begin, end in self.ranges}

    def head(self, network: Network) -> slice:
        """Return the slice of the head's coordinates among the trained ones; empty if the head is frozen."""
        head_ranges = []
        for part, begin, end in self.trained_ranges:
            if network.block_of(part.name) > network.depth:
                head_ranges.append((begin, end))
        if not head_ranges:
            return slice(0, 0)
        return slice(head_ranges[0][0], head_ranges[-1][1])

    def turns(self, endings: Sequence[str]) -> list[tuple[slice, int | None]]:
        """Return the trained coordinates as slices, each with the number of the ending that its tensors' names have.

        None stands for tensors whose names have none of the endings.
        """
        slices: list[tuple[slice, int | None]] = []
        for part, begin, end in self.trained_ranges:
            turn: int | None = None
            for number, ending in enumerate(endings):
                if part.name.endswith(ending):
                    turn = number
            if slices and slices[-1][1] == turn:
                begin = slices.pop()[0].start
            slices.append((slice(begin, end), turn))
        return slices

    def first_block(self, network: Network) -> int:
        """Return the earliest block with a trained coordinate; the features before it are fixed and can be cached."""
        return min((network.block_of(part.name) for part in self.parts), default=network.depth + 1)


class Bound:
    """A network whose coordinates in an edit space are driven by one flat vector, `values`; `EditSpace.bind` makes it.

    Whole tensors become views into `values`, so stepping the vector steps the network; selected positions are written
    by index, at a cost proportional to their number. Tensors without trained coordinates get no gradient.
    """

    def __init__(self, space: EditSpace, network: Network) -> None:
        self.space = space
        self.network = network
        self._tensors = _tensors(network)
        device = Device.of(network)
        self.values = space._gather(self._tensors)
        self._gradient = torch.zeros(space.trained, device=device.torch_device)
        self._index: dict[str, Tensor] = {}
        """The positions of sparse parts, on the device: every step reads gradients and writes values there."""
        for part in (*space.parts, *space.buffers):
            if part.index is not None:
                self._index[part.name] = device.put(part.index)
        trained_names = {part.name for part in space.parts}
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in trained_names)
            parameter.grad = None
        self._sparse_ranges = [entry for entry in space.ranges if entry[0].index is not None]
        for part, begin, end in space.trained_ranges:
            if part.index is None:
                self._tensors[part.name].data = self.values[begin:end].view(part.shape)

    @property
    def trained(self) -> int:
        """Number of values that an optimizer updates."""
        return self.space.trained

    @cached_property
    def head(self) -> slice:
        """The slice of the head's coordinates among the trained ones; empty if the head is frozen."""
        return self.space.head(self.network)

    def turns(self, endings: Sequence[str]) -> list[tuple[slice, int | None]]:
        """Return the trained coordinates as slices, each with its turn, as `EditSpace.turns` does."""
        return self.space.turns(endings)

    def training_mode(self) -> None:
        """Put the network into training mode. Batch-norm statistics outside the space keep their bits."""
        self.network.train()
        buffer_names = {part.name for part in self.space.buffers}
        for prefix, module in self.network.named_modules():
            if getattr(module, "running_mean", None) is None:
                continue
            if f"{prefix}.running_mean" not in buffer_names:
                module.eval()

    def load(self, vector: Tensor) -> None:
        """Set `values` to a vector of the space, and with it the network's weights and buffers."""
        self.values.copy_(vector)
        self.push()
        with torch.no_grad():
            for part, begin, end in self.space.buffer_ranges:
                _write(part, self._tensors[part.name], self.values[begin:end])

    @torch.no_grad()
    def push(self) -> None:
        """Write changed values of single positions into their tensors; whole tensors are views and need no write."""
        for part, begin, end in self._sparse_ranges:
            flat = self._tensors[part.name].data.view(-1)
            flat.scatter_(0, self._index[part.name], self.values[begin:end])

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return the gradients of the last backward pass as one vector of length `trained`, and clear them.

        The vector is reused by the next call.
        """
        for part, begin, end in self.space.trained_ranges:
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

    def trained_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that hold trained coordinates, by name."""
        return {part.name: self._tensors[part.name] for part in self.space.parts}

    def coordinates(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the trained coordinates of several images' tensors by name, (b, *shape) each, as rows (b, trained)."""
        columns = []
        for part, _, _ in self.space.trained_ranges:
            flat = tensors[part.name].flatten(1)
            columns.append(flat if part.index is None else flat[:, self._index[part.name]])
        return torch.cat(columns, 1)

    @torch.no_grad()
    def pull_buffers(self) -> None:
        """Read the buffers (batch-norm statistics) of the network into the tail of `values`."""
        for part, begin, end in self.space.buffer_ranges:
            self.values[begin:end] = _read(part, self._tensors[part.name])


def select(network: Network, included: Callable[[str], bool], buffers: bool = True) -> EditSpace:
    """Return the space of all parameters for whose name `included` returns True.

    With `buffers` the floating-point buffers (batch-norm statistics) of such names are part of it. An empty selection
    is an error.
    """
    parts = []
    for name, parameter in network.named_parameters():
        if included(name):
            parts.append(Part(name, tuple(parameter.shape)))
    buffer_parts = []
    if buffers:
        for name, buffer in network.named_buffers():
            if buffer.is_floating_point() and included(name):
                buffer_parts.append(Part(name, tuple(buffer.shape)))
    if not parts:
        raise FedgraftError(
            "E-SPACE-EMPTY",
            "the edit space is empty because no parameter of the network was selected",
            "select at least one parameter",
        )
    return EditSpace(tuple(parts), tuple(buffer_parts))


def masked(network: Network, mask: Mapping[str, Tensor], dense: Iterable[str] = ()) -> EditSpace:
    """Return the space of the coordinates that are True in `mask`, plus the whole tensors named in `dense`.

    Tensors are matched by name; a name the network does not have, or another shape, is refused.
    """
    dense_names = set(dense)
    parameters = dict(network.named_parameters())
    unknown = sorted((set(mask) | dense_names) - set(parameters))
    if unknown:
        raise FedgraftError(
            "E-SPACE-MASK-NAME",
            f"the mask names {unknown[0]!r}, which this network does not have",
            "use a mask of the same network",
            name=unknown[0],
        )
    parts = []
    for name, parameter in parameters.items():
        shape = tuple(parameter.shape)
        if name in dense_names:
            parts.append(Part(name, shape))
        elif name in mask:
            if mask[name].shape != parameter.shape:
                raise FedgraftError(
                    "E-SPACE-MASK-SHAPE",
                    f"the mask of {name!r} has the shape {tuple(mask[name].shape)}, not {shape}",
                    "use a mask of the same network",
                    name=name,
                )
            index = mask[name].reshape(-1).nonzero().view(-1)
            if len(index) == parameter.numel():
                parts.append(Part(name, shape))
            elif len(index):
                parts.append(Part(name, shape, index))
    if not parts:
        raise FedgraftError(
            "E-SPACE-EMPTY",
            "the edit space is empty because the mask keeps no coordinate of the network",
            "choose a larger density",
        )
    return EditSpace(tuple(parts))


def _tensors(network: Network) -> dict[str, nn.Parameter | Tensor]:
    """Return all parameters and buffers of the network by name."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _read(part: Part, tensor: Tensor) -> Tensor:
    """Return the values of a part's coordinates in its tensor, as a flat vector (part.size,)."""
    flat = tensor.detach().reshape(-1)
    if part.index is None:
        return flat
    return flat[Device(flat.device).put(part.index)]


def _write(part: Part, tensor: Tensor, values: Tensor) -> None:
    """Write the flat values (part.size,) of a part into its tensor, in place."""
    if part.index is None:
        tensor.data.copy_(values.view(part.shape))
    else:
        tensor.data.view(-1).scatter_(0, Device(tensor.device).put(part.index), values)
