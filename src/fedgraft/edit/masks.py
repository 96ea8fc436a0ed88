"""Masks: which single coordinates are trained.

True means trained. `density` is the fraction trained and `sparsity` the fraction frozen, always. A mask is keyed by
parameter name, so the order of parameters does not matter, and has a digest that server and client can compare.
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

from fedgraft.core.device import fetch
from fedgraft.core.errors import FedgraftError

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, eq=False)
class Mask(Mapping[str, Tensor]):
    """A mapping from parameter names to bool tensors, sorted by name, as `core.space.masked` takes it."""

    tensors: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.dtype != torch.bool:
                raise FedgraftError(
                    "E-EDIT-MASK-TYPE",
                    f"the mask of {name!r} is {tensor.dtype}",
                    "use bool tensors",
                    name=name,
                )
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
        """Number of coordinates of the tensors in the mask."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @cached_property
    def count(self) -> int:
        """Number of trained coordinates."""
        return sum(int(tensor.count_nonzero()) for tensor in self.tensors.values())

    @property
    def density(self) -> float:
        """Fraction trained."""
        if not self.total:
            return 0.0
        return self.count / self.total

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
        """Digest of names, shapes and bits."""
        h = hashlib.blake2b(json.dumps(self.shapes).encode(), digest_size=16)
        h.update(self.bits().numpy().tobytes())
        return h.hexdigest()

    def bits(self) -> Tensor:
        """Return all coordinates as one uint8 vector of packed bits, in order of names; one bit each."""
        if not self.tensors:
            return torch.zeros(0, dtype=torch.uint8)
        flat = torch.cat([fetch(tensor.reshape(-1)) for tensor in self.tensors.values()])
        return torch.from_numpy(np.packbits(flat.numpy()))

    @staticmethod
    def from_bits(bits: Tensor, shapes: Shapes) -> Mask:
        """Return the mask that `bits` describes for tensors of these shapes."""
        names = sorted(shapes)
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        total = sum(sizes)
        if bits.dtype != torch.uint8 or bits.shape != (-(-total // 8),):
            raise FedgraftError(
                "E-EDIT-MASK-BITS",
                f"a bitmap of shape {tuple(bits.shape)} and type {bits.dtype} does not fit {total} coordinates",
                "use a mask of the same network and the same scope",
                coordinates=total,
            )
        flat = torch.from_numpy(np.unpackbits(bits.numpy(), count=total).view(bool))
        tensors = {}
        for name, part in zip(names, flat.split(sizes), strict=True):
            tensors[name] = part.view(tuple(shapes[name])).clone()
        return Mask(tensors)

    def save(self, path: Path) -> None:
        """Write the packed bits, names, shapes and digest as one safetensors file."""
        from safetensors.torch import save

        meta = {"kind": "mask", "shapes": json.dumps(self.shapes), "digest": self.digest}
        path.write_bytes(save({"bits": self.bits()}, metadata=meta))

    @staticmethod
    def load(path: Path) -> Mask:
        """Return the mask in a file; raise an error if its bits do not match the digest stored with them."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata() or {}
                bits = file.get_tensor("bits")
            shapes = {}
            for name, shape in json.loads(meta["shapes"]).items():
                shapes[name] = tuple(map(int, shape))
            mask = Mask.from_bits(bits, shapes)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise FedgraftError(
                "E-EDIT-MASK-FILE",
                f"{path} is not a mask file: {error}",
                "give a file that `Mask.save` wrote",
                path=str(path),
            ) from error
        if mask.digest != meta.get("digest"):
            raise FedgraftError(
                "E-EDIT-MASK-DAMAGED",
                f"the mask in {path} does not match its digest, so the file is damaged",
                "create it again",
                path=str(path),
            )
        return mask

    def with_dense(self, shapes: Shapes) -> Mask:
        """Return this mask with whole tensors trained in addition, by name and shape; they count in its density."""
        tensors = dict(self.tensors)
        for name, shape in shapes.items():
            tensors[name] = torch.ones(tuple(shape), dtype=torch.bool)
        return Mask(tensors)


def _check_aligned(masks: Sequence[Mask]) -> None:
    """Raise an error unless there is a mask and all masks have the same names and shapes."""
    if not masks:
        raise FedgraftError("E-EDIT-NO-MASKS", "there is no mask to combine", "give at least one mask")
    for mask in masks[1:]:
        if mask.shapes != masks[0].shapes:
            raise FedgraftError(
                "E-EDIT-MASKS-DIFFER",
                "masks of different parameters or shapes cannot be combined",
                "combine masks of one network and one scope",
            )


def votes(masks: Sequence[Mask]) -> dict[str, Tensor]:
    """Return for each coordinate the number of masks that train it."""
    _check_aligned(masks)
    total = {name: torch.zeros(shape) for name, shape in masks[0].shapes.items()}
    for mask in masks:
        for name, tensor in mask.items():
            total[name].add_(tensor)
    return total


def vote(masks: Sequence[Mask], q: float) -> Mask:
    """Return the mask of the coordinates that at least `q` masks train."""
    return Mask({name: tensor >= q for name, tensor in votes(masks).items()})


def union(masks: Sequence[Mask]) -> Mask:
    """Return the mask of the coordinates that any mask trains."""
    return vote(masks, 1)


def intersection(masks: Sequence[Mask]) -> Mask:
    """Return the mask of the coordinates that every mask trains."""
    return vote(masks, len(masks))


def jaccard(a: Mask, b: Mask) -> float:
    """Return the size of the intersection over that of the union; 1 for two empty masks."""
    _check_aligned([a, b])
    both = 0
    for name in a:
        both += int((a[name] & b[name]).count_nonzero())
    either = a.count + b.count - both
    if not either:
        return 1.0
    return both / either


def overlap(masks: Sequence[Mask]) -> Tensor:
    """Return the Jaccard index of every pair of masks, (n, n)."""
    matrix = torch.eye(len(masks), dtype=torch.float64)
    for i in range(len(masks)):
        for j in range(i):
            index = jaccard(masks[i], masks[j])
            matrix[i, j] = index
            matrix[j, i] = index
    return matrix


def density_by(mask: Mask, group_of: Callable[[str], object]) -> dict[object, float]:
    """Return the fraction trained in each group of tensors, in order of first appearance.

    `group_of` returns the group of a tensor's name.
    """
    trained: dict[object, int] = {}
    totals: dict[object, int] = {}
    for name, tensor in mask.items():
        group = group_of(name)
        trained[group] = trained.get(group, 0) + int(tensor.count_nonzero())
        totals[group] = totals.get(group, 0) + tensor.numel()
    densities = {}
    for group, total in totals.items():
        densities[group] = trained[group] / total
    return densities
