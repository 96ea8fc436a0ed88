"""Which tensors a mask may touch, by name: scopes, exclusions and whitelists.

Three answers for every parameter: *maskable* (the mask decides coordinate by coordinate), *dense* (whitelisted,
trained whole) or frozen. Words such as `qk` or `mlp` stand for roles of tensors (`fedgraft.core.roles`); anything
else is a glob pattern. A tensor that fuses Q, K and V (rows in this order) can be maskable in its Q and K rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.roles import WORDS, means, role
from fedgraft.edit.masks import Mask

DEFAULT_SCOPE = ("blocks", "norm")
"""All tensors of the blocks, and the final norm."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter name is meant by any word or glob pattern."""
    return any(means(p, name) if p in WORDS else fnmatchcase(name, p) for p in patterns)


@dataclass(frozen=True)
class Scope:
    """The answer for every parameter of a network. `rows` limits a maskable tensor to its first rows."""

    shapes: Mapping[str, tuple[int, ...]]
    maskable: tuple[str, ...]
    dense: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)

    def restrict(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The maskable part of each maskable tensor, as views."""
        absent = sorted(set(self.maskable) - set(tensors))
        if absent:
            raise FedgraftError(f"the scope names {absent[0]!r}, for which there is no tensor")
        return {
            name: tensors[name][: self.rows[name]] if name in self.rows else tensors[name] for name in self.maskable
        }

    def expand(self, mask: Mask) -> Mask:
        """A mask of the restricted tensors as one of whole tensors, with dense ones added."""
        whole: dict[str, Tensor] = {}
        for name, tensor in mask.items():
            whole[name] = torch.zeros(self.shapes[name], dtype=torch.bool)
            whole[name][: len(tensor)] = tensor
        return Mask(whole).with_dense({name: self.shapes[name] for name in self.dense})

    def density(self, mask: Mask) -> float:
        """Fraction of all the network's parameters that a mask trains, whitelisted ones included."""
        return mask.count / sum(torch.Size(shape).numel() for shape in self.shapes.values())


def resolve(
    shapes: Mapping[str, Sequence[int]],
    scope: Sequence[str] = DEFAULT_SCOPE,
    exclude: Sequence[str] = (),
    whitelist: Sequence[str] = (),
) -> Scope:
    """Sort parameters into maskable, dense and frozen: `exclude` freezes, `whitelist` trains densely."""
    for pattern in (*scope, *exclude, *whitelist):
        if not any(matches(name, [pattern]) for name in shapes):
            raise FedgraftError(f"{pattern!r} matches no parameter; use {', '.join(WORDS)} or a glob such as '*.mlp.*'")
    both = [name for name in shapes if matches(name, exclude) and matches(name, whitelist)]
    if both:
        raise FedgraftError(f"{both[0]!r} is both excluded (frozen) and whitelisted (trained densely)")
    dense = tuple(name for name in shapes if matches(name, whitelist))
    maskable = tuple(n for n in shapes if matches(n, scope) and not matches(n, exclude) and n not in dense)
    if not maskable and not dense:
        raise FedgraftError("the scope leaves nothing to train")
    others = [pattern for pattern in scope if pattern != "qk"]
    fused = [n for n in maskable if role(n) == "qkv" and "qk" in scope and not matches(n, others)]
    frozen = tuple(name for name in shapes if name not in maskable and name not in dense)
    sizes = {name: tuple(shape) for name, shape in shapes.items()}
    return Scope(sizes, maskable, dense, frozen, {name: shapes[name][0] * 2 // 3 for name in fused})
