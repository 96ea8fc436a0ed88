"""Algorithms of low-rank adaptation: shared A, exact or corrected averages, factors in turn, unequal ranks.

The other aggregations of factors (`trainable.lora.aggregate`) combine with any algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from fedgraft.aggregate.codecs import codec
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.algorithms.averaging import fedavg, specified
from fedgraft.algorithms.typed_slots import Slots
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, Positive, Share, in_range
from fedgraft.edit.lora import A_SUFFIX, B_SUFFIX
from fedgraft.edit.low_rank import LowRank


def _lora(name: str, seed: int, slots: Mapping[str, Any], **options: Any) -> Algorithm:
    """Return FedAvg of low-rank factors, called `name`; `options` replace those of the trainable in `slots`.

    Raises if that trainable is not low rank; without one, the default is taken, drawn from `seed`.
    """
    own_slots = specified(slots)
    kind = own_slots.get("trainable") or LowRank(seed=seed)
    if not isinstance(kind, LowRank):
        raise FedgraftError(
            "E-ALGORITHM-LORA-KIND",
            f"{name} is about low-rank factors, and trainable.kind={kind.kind!r} has none",
            "set trainable.kind='lora'",
            algorithm=name,
            kind=kind.kind,
        )
    own_slots["trainable"] = replace(kind, **options)
    return vary(fedavg(**own_slots), name=name, own_kind=True)


def fedsa_lora(seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Guo et al. 2025: the low-rank factor A is shared, and each client keeps its own B."""
    private_b = ClientState(lambda network, name: name.endswith(B_SUFFIX), within=True)
    return vary(_lora("fedsa_lora", seed, slots), client_state=private_b)


@in_range
def fedsb(rank: Count | None = None, seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Singhal et al. 2025: only an r x r core between fixed factors trains: exact averages, r² numbers a layer.

    Args:
        rank: rank of the cores; default: 16, or that of trainable.lora
    """
    options: dict[str, Any] = {"aggregate": "core"}
    if rank is None and not slots.get("trainable"):
        rank = 16
    if rank is not None:
        options["rank"] = rank
        options["alpha"] = float(rank)
    return _lora("fedsb", seed, slots, **options)


@in_range
def flexlora(ranks: tuple[Count, ...] = (2, 4, 8), seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Bai et al. 2024: clients of unequal ranks; the server truncates the mean product to its largest directions.

    Args:
        ranks: ranks of the clients, assigned in turn
    """
    if not ranks:
        raise FedgraftError(
            "E-ALGORITHM-RANKS", "flexlora has no ranks of the clients", "give algorithm.ranks, such as [2, 4, 8]"
        )
    return _lora("flexlora", seed, slots, aggregate="svd", rank=max(ranks), ranks=tuple(ranks))


@in_range
def flasc(down: Share = 0.25, up: Share = 0.25, seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Kuo et al. 2024: low-rank factors, of which only the largest entries are sent, in both directions.

    Args:
        down: share of the coordinates that requests carry
        up: share of the coordinates that responses carry
    """
    return vary(_lora("flasc", seed, slots), download=down, compression=codec(f"top_k:{up!r}"))


def rolora(seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Chen et al. 2025: even rounds train B, odd ones A, so that averages are exact; half the upload."""
    return _lora("rolora", seed, slots, aggregate="alternate")


def la_lora(seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Liu et al. 2026: even local steps train B, odd ones A, so that noise on both is not multiplied; made for DP.

    Unlike the paper's: noise is added to the clients' sum, not to each step's gradient, so there is no filter that
    smooths noisy gradients.
    """
    return vary(_lora("la_lora", seed, slots), turns=(B_SUFFIX, A_SUFFIX))


@in_range
def lora_fair(penalty: Positive = 0.01, seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Bian et al. 2025: mean factors, then B is corrected towards the mean of the clients' products.

    Unlike the paper's: squared distance in closed form instead of a cosine by gradient steps.

    Args:
        penalty: on the correction, relative to the mean diagonal of A Aᵀ
    """
    return _lora("lora_fair", seed, slots, aggregate="fair", penalty=penalty)


@in_range
def fedrpca(scale: Positive | None = None, seed: int = 0, **slots: Unpack[Slots]) -> Algorithm:
    """Jhunjhunwala et al. 2025: robust PCA of the changes; the sparse part's mean is enlarged; scale 1 is FedAvg.

    Args:
        scale: factor on the mean of the sparse parts; default: the inverse of their share of the changes
    """
    return _lora("fedrpca", seed, slots, aggregate="rpca", sparse_scale=scale)
