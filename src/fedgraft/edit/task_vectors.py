"""Task arithmetic: what training did to a network, as an object that can be applied, negated, scaled and added.

An edit is the difference between a tuned network and its base on an edit space (task vectors: theta = theta_0 +
lambda * tau). It knows the digest of its base and refuses any other network.

What is exact and what is rounded, in float32:
- `Applied.undo` and leaving `applied` put back the remembered base values: the base returns bit for bit.
- Coordinates outside the space, and those whose change is zero, keep their bits; scale 0 changes nothing.
- `negate` twice is the same edit. Base + edit equals the tuned network up to one rounding of each operation.
- Adding an edit and then its negation is NOT promised to return the base: (x + t) - t rounds. Use `undo`.
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
    """A change of `scale * values` on `space`, for the network whose tensors under `scope` have the digest `base`."""

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
                f"the edit {self.name!r} has {tuple(self.values.shape)} {self.values.dtype} values for a space of "
                f"{self.space.size} float32"
            )
        if not (math.isfinite(self.scale) and bool(torch.isfinite(self.values).all())):
            raise FedgraftError(f"the edit {self.name!r} holds values that are not finite numbers")
        for part in (*self.space.parts, *self.space.buffers):
            if not part.name.startswith(self.scope):
                raise FedgraftError(f"the edit {self.name!r} moves {part.name!r}, outside its scope {self.scope!r}")

    def update(self, scale: float = 1.0) -> Tensor:
        """The difference this edit makes at a strength, float32 (space.size,)."""
        update = self.values * (self.scale * scale)
        if not torch.isfinite(update).all():
            raise FedgraftError(f"the edit {self.name!r} at strength {scale} is not finite; choose a smaller one")
        return update

    def scaled(self, factor: float) -> Edit:
        """The same edit, `factor` times as strong."""
        return replace(self, scale=self.scale * factor)

    def negate(self) -> Edit:
        """The edit in the opposite direction: it takes the task out."""
        return replace(self, scale=-self.scale)


def capture(name: str, network: Network, space: EditSpace, vector: Tensor, scope: str = "") -> Edit:
    """The edit that takes this network, which holds the base, to `vector` on `space`."""
    return Edit(name, digest(network, scope=scope, code=False), space, vector - space.gather(network), scope=scope)


@dataclass(frozen=True, eq=False)
class Applied:
    """An edit inside a network, with the base values it covered."""

    network: Network
    space: EditSpace
    before: Tensor

    def undo(self) -> None:
        """Put the base values back, bit for bit."""
        self.space.scatter(self.before, self.network)


def check_base(network: Network, edit: Edit) -> None:
    """Refuse a network that is not the one this edit was made for."""
    found = digest(network, scope=edit.scope, code=False)
    if found != edit.base:
        raise FedgraftError(
            f"the edit {edit.name!r} was made for the base {edit.base}, this network is {found}; load that base, "
            "unedited, and combine several edits with `add` before applying them"
        )
    shapes = {n: tuple(t.shape) for n, t in (*network.named_parameters(), *network.named_buffers())}
    for part in (*edit.space.parts, *edit.space.buffers):
        if shapes.get(part.name) != part.shape:
            raise FedgraftError(f"the edit {edit.name!r} moves {part.name!r} {part.shape}, which is not in its base")


def apply(network: Network, edit: Edit, scale: float = 1.0) -> Applied:
    """Write base + scale * edit into the network, in place; refuses a network that is not the edit's base."""
    check_base(network, edit)
    before = edit.space.gather(network)
    edit.space.scatter(_moved(before, edit.update(scale)), network)
    return Applied(network, edit.space, before)


@contextmanager
def applied(network: Network, edit: Edit, scale: float = 1.0) -> Iterator[Network]:
    """The network with the edit inside the `with` block, and the base again, bit for bit, after it."""
    handle = apply(network, edit, scale)
    try:
        yield network
    finally:
        handle.undo()


def _moved(before: Tensor, update: Tensor) -> Tensor:
    # Without the choice -0.0 + 0.0 would become 0.0: another bit pattern, another digest.
    return torch.where(update == 0, before, before + update)


def sweep(
    network: Network, edit: Edit, lambdas: Sequence[float], evaluate: Callable[[Network], T]
) -> list[tuple[float, T]]:
    """Evaluate base + lambda * edit for every lambda, each from the base; the base is back afterwards."""
    check_base(network, edit)
    before = edit.space.gather(network)
    found = []
    try:
        for strength in lambdas:
            edit.space.scatter(_moved(before, edit.update(strength)), network)
            found.append((strength, evaluate(network)))
    finally:
        edit.space.scatter(before, network)
    return found


Merge = Callable[[Tensor, Tensor], Tensor]
"""(vectors (m, k), weights (m,)) -> one vector."""


def add(
    edits: Sequence[Edit], scales: Sequence[float] | None = None, name: str = "", merge: Merge | None = None
) -> Edit:
    """The sum of edits of one base, on the union of their spaces; summed in float64, rounded once.

    With `merge` (TIES, DARE, Fisher) its mean of them instead; scales are then its weights.
    """
    if not edits:
        raise FedgraftError("there are no edits to add; give at least one")
    factors = [1.0] * len(edits) if scales is None else [float(s) for s in scales]
    if len(factors) != len(edits):
        raise FedgraftError(f"{len(edits)} edits came with {len(factors)} scales; each edit needs one")
    first = edits[0]
    for edit in edits[1:]:
        if (edit.base, edit.scope) != (first.base, first.scope):
            raise FedgraftError(f"the edits {first.name!r} and {edit.name!r} belong to different bases")
    space = union([edit.space for edit in edits])
    if merge is not None:
        rows = torch.zeros(len(edits), space.size)
        for row, edit in zip(rows, edits, strict=True):
            row[positions(edit.space, space)] = edit.update()
        merged = merge(rows, torch.tensor(factors, dtype=torch.float64))
        return Edit(name or " + ".join(e.name for e in edits), first.base, space, merged, scope=first.scope)
    total = torch.zeros(space.size, dtype=torch.float64)
    for edit, factor in zip(edits, factors, strict=True):
        total[positions(edit.space, space)] += edit.values.double() * (edit.scale * factor)
    return Edit(name or " + ".join(e.name for e in edits), first.base, space, total.float(), scope=first.scope)


def union(spaces: Sequence[EditSpace]) -> EditSpace:
    """All coordinates of these spaces, tensors in the order they first appear; trained if trained in any."""
    trained = {part.name for space in spaces for part in space.parts}
    joined: dict[str, Part] = {}
    for space in spaces:
        for part in (*space.parts, *space.buffers):
            joined[part.name] = _join(joined[part.name], part) if part.name in joined else part
    parts = tuple(part for name, part in joined.items() if name in trained)
    return EditSpace(parts, tuple(part for name, part in joined.items() if name not in trained))


def _join(one: Part, other: Part) -> Part:
    if one.shape != other.shape:
        raise FedgraftError(f"{one.name!r} is {one.shape} in one edit and {other.shape} in another")
    if one.index is None or other.index is None:
        return Part(one.name, one.shape)
    index = torch.cat([one.index, other.index]).unique()  # sorted
    return Part(one.name, one.shape, None if len(index) == one.numel else index)


def positions(inner: EditSpace, outer: EditSpace) -> Tensor:
    """Where each coordinate of `inner` lies in a vector of `outer`, which contains it."""
    at = {part.name: (part, begin) for part, begin, _ in outer.ranges}
    found = []
    for part, _, _ in inner.ranges:
        whole, begin = at[part.name]
        index = torch.arange(part.numel) if part.index is None else part.index
        found.append(begin + (index if whole.index is None else torch.searchsorted(whole.index, index)))
    return torch.cat(found)
