"""Algorithms whose point is the choice of the weights that train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.algorithms.averaging import fedavg, specified
from fedgraft.algorithms.typed_slots import Slots
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, Rest, in_range
from fedgraft.edit.sparse import Sparse


@in_range
def ssfl(sparsity: Rest | None = None, batch: Count = 64, seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Ohib et al. 2024: one mask of the largest summed |gradient x weight| (SNIP) of a batch of every client.

    Unlike the paper's: the other weights keep their pretrained value instead of being zero.

    Args:
        sparsity: fraction of the weights in scope that is frozen; default: that of trainable.sparse
        batch: images of the batch of each client whose gradient counts
    """
    own_slots = specified(slots)
    kind = own_slots.pop("trainable", None) or Sparse(seed=seed)
    if not isinstance(kind, Sparse):
        raise FedgraftError(
            "E-ALGORITHM-SPARSE-KIND",
            f"ssfl is about a mask, and trainable.kind={kind.kind!r} has none",
            "set trainable.kind='sparse'",
            kind=kind.kind,
        )
    choice: dict[str, Any] = {
        "strategy": "saliency",
        "labels": "single_batch",
        "calibration": "oneshot",
        "batch": batch,
    }
    if sparsity is not None:
        choice["sparsity"] = sparsity
    return vary(fedavg(trainable=replace(kind, **choice), **own_slots), name="ssfl", own_kind=True)
