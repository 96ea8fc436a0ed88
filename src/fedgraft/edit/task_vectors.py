"""Task arithmetic (Ilharco et al. 2023): the change of a network by training, to be applied, negated, scaled, added.

An edit is the difference between a tuned network and its base on an edit space (task vectors: theta = theta_0 +
lambda * tau). It stores the digest of its base and refuses any other network.

Exactness in float32:
- `Applied.undo` and leaving `applied` restore the stored base values: the base returns bit for bit.
- Coordinates outside the space, and those whose change is zero, keep their bits; scale 0 changes nothing.
- `negate` twice is the same edit. Base + edit equals the tuned network up to one rounding of each operation.
- Adding an edit and then its negation is NOT guaranteed to return the base: (x + t) - t rounds. Use `undo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.network_digest import digest
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace, Part

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of `scale * values` on the edit space `space` of one base network; `capture` makes it.

    `base` is the digest of that network's tensors under `scope`.
    """

    name: str
    base: str
    space: EditSpace
    values: Tensor  # float32 (space.size,)
    scale: float = 1.0
    scope: str = ""
    """Prefix of the tensors the base digest covers: "" is everything, "backbone." leaves the head free to differ."""

    def __post_init__(self) -> None:
        if self.values.shape != (self.space.size,) or self.values.dtype != torch.float32:
            raise FedgraftError(
                "E-EDIT-VALUES",
                f"the edit {self.name!r} has values of shape {tuple(self.values.shape)} and type {self.values.dtype} "
                f"for a space of {self.space.size} float32 coordinates",
                "use a vector of this space",
                edit=self.name,
            )
        if not (math.isfinite(self.scale) and bool(torch.isfinite(self.values).all())):
            raise FedgraftError(
                "E-EDIT-NONFINITE",
                f"the edit {self.name!r} has values that are not finite",
                "use an earlier checkpoint or a smaller learning rate",
                edit=self.name,
            )
        for part in (*self.space.parts, *self.space.buffers):
            if not part.name.startswith(self.scope):
                raise FedgraftError(
                    "E-EDIT-OUTSIDE-SCOPE",
                    f"the edit {self.name!r} changes {part.name!r}, outside its scope {self.scope!r}",
                    "choose a scope that covers all its tensors",
                    edit=self.name,
                    tensor=part.name,
                )

    def update(self, scale: float = 1.0) -> Tensor:
        """Return the change of the base at this scale, float32 (space.size,)."""
        update = self.values * (self.scale * scale)
        if not torch.isfinite(update).all():
            raise FedgraftError(
                "E-EDIT-SCALE",
                f"the edit {self.name!r} at scale {scale} is not finite",
                "choose a smaller scale",
                edit=self.name,
                scale=scale,
            )
        return update

    def scaled(self, factor: float) -> Edit:
        """Return the same edit, `factor` times as strong."""
        return replace(self, scale=self.scale * factor)

    def negate(self) -> Edit:
        """Return the edit in the opposite direction, which removes the task."""
        return replace(self, scale=-self.scale)


def capture(name: str, network: Network, space: EditSpace, vector: Tensor, scope: str = "") -> Edit:
    """Return the edit that leads from this network, the base, to `vector` on `space`."""
    base = digest(network, scope=scope, code=False)
    return Edit(name, base, space, vector - space.gather(network), scope=scope)


@dataclass(frozen=True, eq=False)
class Applied:
    """A network with an edit applied, and the base values that the edit replaced."""

    network: Network
    space: EditSpace
    before: Tensor

    def undo(self) -> None:
        """Restore the base values, bit for bit."""
        self.space.scatter(self.before, self.network)


def check_base(network: Network, edit: Edit) -> None:
    """Raise an error if the network is not the base of this edit."""
    present = digest(network, scope=edit.scope, code=False)
    if present != edit.base:
        raise FedgraftError(
            "E-EDIT-BASE",
            f"the edit {edit.name!r} was made for the base {edit.base}, and this network is {present}",
            "load that base, unedited, and combine several edits with `add` before applying them",
            edit=edit.name,
            base=edit.base,
            network=present,
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in (*network.named_parameters(), *network.named_buffers())}
    for part in (*edit.space.parts, *edit.space.buffers):
        if shapes.get(part.name) != part.shape:
            raise FedgraftError(
                "E-EDIT-TENSOR",
                f"the edit {edit.name!r} changes {part.name!r} of shape {part.shape}, which is not in its base",
                "load the edit from its original file",
                edit=edit.name,
                tensor=part.name,
            )


def apply_edit(network: Network, edit: Edit, scale: float = 1.0) -> Applied:
    """Write base + scale * edit into the network, in place, and return the handle that undoes it.

    Raises if the network is not the edit's base.
    """
    check_base(network, edit)
    before = edit.space.gather(network)
    edit.space.scatter(_add_update(before, edit.update(scale)), network)
    return Applied(network, edit.space, before)


@contextmanager
def applied(network: Network, edit: Edit, scale: float = 1.0) -> Iterator[Network]:
    """Yield the network with `scale` times the edit added, in place; the base is restored, bit for bit, after it."""
    handle = apply_edit(network, edit, scale)
    try:
        yield network
    finally:
        handle.undo()


def _add_update(before: Tensor, update: Tensor) -> Tensor:
    """Return before + update, with untouched bits where the update is zero."""
    # Without `where`, -0.0 + 0.0 would become 0.0: another bit pattern, another digest.
    return torch.where(update == 0, before, before + update)


def sweep_scale(
    network: Network, edit: Edit, lambdas: Sequence[float], evaluate: Callable[[Network], T]
) -> list[tuple[float, T]]:
    """Return (lambda, evaluation of base + lambda * edit) for every lambda; the base is restored afterwards."""
    check_base(network, edit)
    before = edit.space.gather(network)
    results = []
    try:
        for strength in lambdas:
            edit.space.scatter(_add_update(before, edit.update(strength)), network)
            results.append((strength, evaluate(network)))
    finally:
        edit.space.scatter(before, network)
    return results


Merge = Callable[[Tensor, Tensor], Tensor]
"""(vectors (m, k), weights (m,)) -> one vector."""


def add_edits(
    edits: Sequence[Edit], scales: Sequence[float] | None = None, name: str = "", merge: Merge | None = None
) -> Edit:
    """Return the sum of edits of one base, on the union of their spaces; summed in float64, rounded once.

    `scales` multiply the edits (None: 1 each). With `merge` (TIES, DARE, Fisher) return its weighted mean instead;
    scales are then the weights. `name` is the new edit's.
    """
    if not edits:
        raise FedgraftError("E-EDIT-ADD-NONE", "there are no edits to add", "give at least one")
    if scales is None:
        factors = [1.0] * len(edits)
    else:
        factors = [float(scale) for scale in scales]
    if len(factors) != len(edits):
        raise FedgraftError(
            "E-EDIT-ADD-SCALES",
            f"there are {len(edits)} edits and {len(factors)} scales",
            "give one scale for each edit",
        )
    first = edits[0]
    for edit in edits[1:]:
        if (edit.base, edit.scope) != (first.base, first.scope):
            raise FedgraftError(
                "E-EDIT-ADD-BASES",
                f"the edits {first.name!r} and {edit.name!r} belong to different bases",
                "combine edits of one base only",
                edits=(first.name, edit.name),
            )
    name = name or " + ".join(edit.name for edit in edits)
    space = union_space([edit.space for edit in edits])
    if merge is not None:
        rows = torch.zeros(len(edits), space.size)
        for row, edit in zip(rows, edits, strict=True):
            row[positions(edit.space, space)] = edit.update()
        merged = merge(rows, torch.tensor(factors, dtype=torch.float64))
        return Edit(name, first.base, space, merged, scope=first.scope)
    total = torch.zeros(space.size, dtype=torch.float64)
    for edit, factor in zip(edits, factors, strict=True):
        total[positions(edit.space, space)] += edit.values.double() * (edit.scale * factor)
    return Edit(name, first.base, space, total.float(), scope=first.scope)


def union_space(spaces: Sequence[EditSpace]) -> EditSpace:
    """Return the space of all coordinates of these spaces, tensors in order of appearance; trained if in any."""
    trained_names: set[str] = set()
    joined: dict[str, Part] = {}
    for space in spaces:
        trained_names |= {part.name for part in space.parts}
        for part in (*space.parts, *space.buffers):
            if part.name in joined:
                joined[part.name] = _join(joined[part.name], part)
            else:
                joined[part.name] = part
    parts = []
    buffers = []
    for name, part in joined.items():
        if name in trained_names:
            parts.append(part)
        else:
            buffers.append(part)
    return EditSpace(tuple(parts), tuple(buffers))


def _join(left: Part, right: Part) -> Part:
    """Return the part with the coordinates of both parts of one tensor."""
    if left.shape != right.shape:
        raise FedgraftError(
            "E-EDIT-ADD-SHAPES",
            f"{left.name!r} has the shape {left.shape} in one edit and {right.shape} in another",
            "combine edits of one base only",
            tensor=left.name,
        )
    if left.index is None or right.index is None:
        return Part(left.name, left.shape)
    index = torch.cat([left.index, right.index]).unique()  # sorted
    if len(index) == left.numel:
        return Part(left.name, left.shape)
    return Part(left.name, left.shape, index)


def positions(inner: EditSpace, outer: EditSpace) -> Tensor:
    """Return the position of each coordinate of `inner` in a vector of `outer`, which contains it."""
    outer_parts = {part.name: (part, begin) for part, begin, _ in outer.ranges}
    pieces = []
    for part, _, _ in inner.ranges:
        outer_part, begin = outer_parts[part.name]
        if part.index is None:
            index = torch.arange(part.numel)
        else:
            index = part.index
        if outer_part.index is not None:
            index = torch.searchsorted(outer_part.index, index)
        pieces.append(begin + index)
    return torch.cat(pieces)
