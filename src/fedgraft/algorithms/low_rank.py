"""Low-rank adaptation as whole algorithms: what is shared exactly, in unequal ranks, or sparsely both ways.

The other ways to average factors (`trainable.lora.aggregate`) combine with any algorithm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedgraft.aggregate.codecs import codec
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.algorithms.averaging import fedavg, given
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, Share, in_range
from fedgraft.edit.lora import B_SUFFIX
from fedgraft.edit.low_rank import LowRank


def _lora(name: str, seed: int, slots: dict[str, Any], **options: Any) -> Algorithm:
    """FedAvg of low-rank factors with these options, whatever else the given kind says."""
    kind = given(slots).get("trainable") or LowRank(seed=seed)
    if not isinstance(kind, LowRank):
        raise FedgraftError(
            f"{name} is about low-rank factors, and trainable.kind={kind.kind!r} has none; set trainable.kind='lora'."
        )
    made = fedavg(**{**given(slots), "trainable": replace(kind, **options)})
    return vary(made, name=name, own_kind=True)


def fedsa_lora(seed: int = 0, **slots: Any) -> Algorithm:
    """Guo et al. 2025: of the low-rank factors A is shared, and each client keeps its B."""
    kept = ClientState(lambda network, name: name.endswith(B_SUFFIX), within=True)
    return vary(_lora("fedsa_lora", seed, slots), client_state=kept)


@in_range
def fedsb(rank: Count | None = None, seed: int = 0, **slots: Any) -> Algorithm:
    """Singhal et al. 2025: only an r x r core between fixed factors trains: exact averages, r² numbers a layer."""
    own = {"rank": rank or 16, "alpha": float(rank or 16)} if rank or not given(slots).get("trainable") else {}
    return _lora("fedsb", seed, slots, aggregate="core", **own)


@in_range
def flexlora(ranks: tuple[Count, ...] = (2, 4, 8), seed: int = 0, **slots: Any) -> Algorithm:
    """Bai et al. 2024: clients of unequal ranks; the server cuts the averaged product anew by its singular values."""
    if not ranks:
        raise FedgraftError("flexlora needs the clients' ranks; give algorithm.ranks, such as [2, 4, 8].")
    return _lora("flexlora", seed, slots, aggregate="svd", rank=max(ranks), ranks=tuple(ranks))


@in_range
def flasc(down: Share = 0.25, up: Share = 0.25, seed: int = 0, **slots: Any) -> Algorithm:
    """Kuo et al. 2024: low-rank factors, of which only the largest entries travel, in both directions."""
    return vary(_lora("flasc", seed, slots), download=down, compression=codec(f"top_k:{up!r}"))
