"""The scope of a mask: which tensors it may touch, by name, with exclusions and whitelists.

Every parameter is *maskable* (the mask decides coordinate by coordinate), *dense* (whitelisted, trained whole) or
frozen. Keywords such as `qk` or `mlp` stand for roles of tensors (`fedgraft.core.roles`); anything else is a glob
pattern. A tensor that fuses Q, K and V (rows in this order) can be maskable in its Q and K rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.roles import WORDS, covers, role
from fedgraft.edit.masks import Mask

DEFAULT_SCOPE = ("blocks", "norm")
"""All tensors of the blocks, and the final norm."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any keyword or glob pattern matches a parameter name."""
    for pattern in patterns:
        if pattern in WORDS:
            if covers(pattern, name):
                return True
        elif fnmatchcase(name, pattern):
            return True
    return False


@dataclass(frozen=True)
class Scope:
    """The role of every parameter of a network. `rows` limits a maskable tensor to its first rows."""

    shapes: Mapping[str, tuple[int, ...]]
    maskable: tuple[str, ...]
    dense: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)

    def restrict(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the maskable part of each maskable tensor, as views."""
        absent = sorted(set(self.maskable) - set(tensors))
        if absent:
            raise FedgraftError(
                "E-EDIT-SCOPE-TENSOR",
                f"the scope names {absent[0]!r}, for which there is no tensor",
                "pass the tensors of the network that the scope was made for",
                name=absent[0],
            )
        restricted = {}
        for name in self.maskable:
            tensor = tensors[name]
            if name in self.rows:
                tensor = tensor[: self.rows[name]]
            restricted[name] = tensor
        return restricted

    def expand(self, mask: Mask) -> Mask:
        """Return a mask of the restricted tensors as one of whole tensors, with the dense tensors added."""
        whole: dict[str, Tensor] = {}
        for name, tensor in mask.items():
            whole[name] = torch.zeros(self.shapes[name], dtype=torch.bool)
            whole[name][: len(tensor)] = tensor
        return Mask(whole).with_dense({name: self.shapes[name] for name in self.dense})

    def density(self, mask: Mask) -> float:
        """Return the fraction of all the network's parameters that a mask trains, dense ones included."""
        return mask.count / sum(torch.Size(shape).numel() for shape in self.shapes.values())


def resolve(
    shapes: Mapping[str, Sequence[int]],
    scope: Sequence[str] = DEFAULT_SCOPE,
    exclude: Sequence[str] = (),
    whitelist: Sequence[str] = (),
) -> Scope:
    """Return the scope that sorts parameters into maskable, dense and frozen, by keywords or globs of their names.

    Args:
        shapes: shape of every parameter of the network.
        scope: tensors that the mask chooses from.
        exclude: frozen ones among them.
        whitelist: tensors that are trained whole.
    """
    for pattern in (*scope, *exclude, *whitelist):
        if not any(matches(name, [pattern]) for name in shapes):
            raise FedgraftError(
                "E-EDIT-SCOPE-PATTERN",
                f"{pattern!r} matches no parameter",
                f"use {', '.join(WORDS)} or a glob such as '*.mlp.*'",
                pattern=pattern,
            )
    maskable = []
    dense = []
    frozen = []
    for name in shapes:
        excluded = matches(name, exclude)
        whitelisted = matches(name, whitelist)
        if excluded and whitelisted:
            raise FedgraftError(
                "E-EDIT-SCOPE-BOTH",
                f"{name!r} is both excluded (frozen) and whitelisted (trained densely)",
                "remove it from one of the two",
                name=name,
            )
        if whitelisted:
            dense.append(name)
        elif matches(name, scope) and not excluded:
            maskable.append(name)
        else:
            frozen.append(name)
    if not maskable and not dense:
        raise FedgraftError(
            "E-EDIT-SCOPE-EMPTY", "the scope leaves nothing to train", "widen the scope or exclude less"
        )
    rows = {}
    if "qk" in scope:
        other_patterns = [pattern for pattern in scope if pattern != "qk"]
        for name in maskable:
            if role(name) == "qkv" and not matches(name, other_patterns):
                rows[name] = shapes[name][0] * 2 // 3
    sizes = {name: tuple(shape) for name, shape in shapes.items()}
    return Scope(sizes, tuple(maskable), tuple(dense), tuple(frozen), rows)
