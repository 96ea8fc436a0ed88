"""Masks: which single coordinates are trained, as one interchangeable object.

True means trained. `density` is the fraction trained and `sparsity` the fraction frozen, always. A mask is keyed by
parameter name, so the order of parameters plays no part, and has a digest that both ends of a wire can compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, eq=False)
class Mask(Mapping[str, Tensor]):
    """Names to bool tensors, sorted by name. It is itself a mapping, as `edit.space.masked` takes it."""

    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.dtype != torch.bool:
                raise FedgraftError(f"the mask of {name!r} is {tensor.dtype}, not bool")
        object.__setattr__(self, "tensors", {name: self.tensors[name] for name in sorted(self.tensors)})

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def total(self) -> int:
        """Coordinates of the tensors that the mask names."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @cached_property
    def count(self) -> int:
        """Coordinates that are trained."""
        return sum(int(tensor.count_nonzero()) for tensor in self.tensors.values())

    @property
    def density(self) -> float:
        """Fraction trained."""
        return self.count / self.total if self.total else 0.0

    @property
    def sparsity(self) -> float:
        """Fraction frozen."""
        return 1.0 - self.density

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @cached_property
    def digest(self) -> str:
        """Identity of the mask: names, shapes and bits."""
        h = hashlib.blake2b(json.dumps(self.shapes).encode(), digest_size=16)
        h.update(self.bits().numpy().tobytes())
        return h.hexdigest()

    def bits(self) -> Tensor:
        """All coordinates as one uint8 vector of packed bits, in order of names; an eighth of a byte each."""
        flat = [tensor.reshape(-1).cpu() for tensor in self.tensors.values()]
        return torch.from_numpy(np.packbits(torch.cat(flat).numpy() if flat else np.zeros(0, bool)))

    @staticmethod
    def from_bits(bits: Tensor, shapes: Shapes) -> Mask:
        """The mask that `bits` describes for tensors of these shapes."""
        sizes = [torch.Size(shapes[name]).numel() for name in sorted(shapes)]
        total = sum(sizes)
        if bits.dtype != torch.uint8 or bits.shape != (-(-total // 8),):
            raise FedgraftError(f"a bitmap of {tuple(bits.shape)} {bits.dtype} does not fit {total} coordinates")
        flat = torch.from_numpy(np.unpackbits(bits.numpy(), count=total).view(bool))
        parts = zip(sorted(shapes), flat.split(sizes), strict=True)
        return Mask({name: part.view(tuple(shapes[name])).clone() for name, part in parts})

    def save(self, path: Path) -> None:
        """Write the packed bits, names, shapes and digest as one safetensors file."""
        from safetensors.torch import save

        meta = {"kind": "mask", "shapes": json.dumps(self.shapes), "digest": self.digest}
        path.write_bytes(save({"bits": self.bits()}, metadata=meta))

    @staticmethod
    def load(path: Path) -> Mask:
        """Read a mask; bits that do not match the digest written with them are refused."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                meta, bits = file.metadata() or {}, file.get_tensor("bits")
            shapes = {name: tuple(map(int, shape)) for name, shape in json.loads(meta["shapes"]).items()}
            mask = Mask.from_bits(bits, shapes)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise FedgraftError(f"{path} is not a mask file: {error}") from error
        if mask.digest != meta.get("digest"):
            raise FedgraftError(f"the mask in {path} does not match its digest; the file is damaged, make it again")
        return mask

    def with_dense(self, shapes: Shapes) -> Mask:
        """This mask with whole tensors trained in addition (a whitelist), which then count in its density."""
        return Mask(
            {**self.tensors, **{name: torch.ones(tuple(shape), dtype=torch.bool) for name, shape in shapes.items()}}
        )


def _aligned(masks: Sequence[Mask]) -> Sequence[Mask]:
    if not masks:
        raise FedgraftError("there is no mask to combine")
    for mask in masks[1:]:
        if mask.shapes != masks[0].shapes:
            raise FedgraftError("masks of different parameters or shapes cannot be combined")
    return masks


def votes(masks: Sequence[Mask]) -> dict[str, Tensor]:
    """How many masks train each coordinate."""
    total = {name: torch.zeros(shape) for name, shape in _aligned(masks)[0].shapes.items()}
    for mask in masks:
        for name, tensor in mask.items():
            total[name].add_(tensor)
    return total


def vote(masks: Sequence[Mask], q: float) -> Mask:
    """Coordinates that at least `q` masks train."""
    return Mask({name: tensor >= q for name, tensor in votes(masks).items()})


def union(masks: Sequence[Mask]) -> Mask:
    """Coordinates that any mask trains."""
    return vote(masks, 1)


def intersection(masks: Sequence[Mask]) -> Mask:
    """Coordinates that every mask trains."""
    return vote(masks, len(masks))


def jaccard(a: Mask, b: Mask) -> float:
    """Size of the intersection over that of the union; 1 for two empty masks."""
    _aligned([a, b])
    both = sum(int((a[name] & b[name]).count_nonzero()) for name in a)
    either = a.count + b.count - both
    return both / either if either else 1.0


def overlap(masks: Sequence[Mask]) -> Tensor:
    """Jaccard index of every pair of masks, (n, n)."""
    matrix = torch.eye(len(masks), dtype=torch.float64)
    for i in range(len(masks)):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = jaccard(masks[i], masks[j])
    return matrix


def density_by(mask: Mask, group_of: Callable[[str], object]) -> dict[object, float]:
    """Fraction trained in each group of tensors, in order of first appearance."""
    counts: dict[object, list[int]] = {}
    for name, tensor in mask.items():
        pair = counts.setdefault(group_of(name), [0, 0])
        pair[0] += int(tensor.count_nonzero())
        pair[1] += tensor.numel()
    return {group: trained / total for group, (trained, total) in counts.items()}
