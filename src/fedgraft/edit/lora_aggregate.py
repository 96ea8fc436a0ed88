"""How the low-rank factors of several clients become one model, on flat vectors.

With weights w_k and scaling s, the right answer is the dense average: sum w_k s B_k A_k. Six rules:

- `mean` (FedIT): average A and B separately. Off by s * sum w_k (B_k - B)(A_k - A).
- `frozen_a` (FFA-LoRA): A stays at its shared start, only B is trained: exact, half the traffic.
- `alternate` (RoLoRA): even rounds train B, odd rounds A: exact in each round, half the upload.
- `stack` (FLoRA): the sum of products goes into the base weights and the adapters start anew: exact.
- `residual` (FedEx-LoRA): factors are averaged and what that misses goes into the base weights: exact.
- `svd` (FlexLoRA): the sum of products is cut into its largest directions, so clients may have ranks of their own: the
  best factors of this rank, exact where the sum has no more rank than they.

A seventh, `core` (Fed-SB), trains an r x r matrix between fixed factors and needs no rule: see `lora_core`.

A vector is [A of all layers | tensors trained densely | B of all layers | base weights], where the last piece
exists for `stack` and `residual` only: it travels to the clients and is written, but neither trained nor sent
back. What a client may move in a round is always one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace, Part
from fedgraft.edit.lora import A_SUFFIX, adapted, factor_names, initial_a

Mode = Literal["mean", "frozen_a", "alternate", "stack", "residual", "svd", "core"]


@dataclass(frozen=True)
class LoraLayer:
    """One adapted layer: where its pieces lie in a vector (None: not in it) and its scaling alpha / rank."""

    name: str
    rank: int
    scaling: float
    a: slice | None  # (rank, in)
    b: slice  # (out, rank)
    w: slice | None  # (out, in)


@dataclass(frozen=True)
class LoraLayout:
    """An edit space of factors, with the map needed to multiply them."""

    mode: Mode
    space: EditSpace
    layers: tuple[LoraLayer, ...]
    a_end: int
    """A factors are the coordinates before this."""
    b_begin: int
    """B factors are the trained coordinates from this on; what lies between is trained densely."""

    @property
    def needs_each_client(self) -> bool:
        """Whether the server must see every client's factors: then a secure sum or a plain mean cannot do it."""
        return self.mode in ("stack", "residual", "svd")

    def active(self, round: int) -> slice:
        """The coordinates clients may move, and send, in this round."""
        if self.mode != "alternate":
            return slice(0, self.space.trained)
        # B goes first: while B is zero the gradient of A is zero.
        return slice(self.a_end, self.space.trained) if round % 2 == 0 else slice(0, self.b_begin)

    def first_directions(self, rank: int) -> Tensor:
        """Which trained coordinates a client of this rank moves: the first rows of A and columns of B, all else."""
        chosen = torch.ones(self.space.trained, dtype=torch.bool)
        for layer in self.layers:
            assert layer.a is not None
            chosen[layer.a].view(layer.rank, -1)[rank:] = False
            chosen[layer.b].view(-1, layer.rank)[:, rank:] = False
        return chosen

    def sent(self, update: Tensor, round: int) -> Tensor:
        """What a client sends of its update: only what it may have moved."""
        return update[self.active(round)]

    def received(self, sent: Tensor, round: int) -> Tensor:
        """The update over all trained coordinates that `sent` stands for."""
        active = self.active(round)
        if sent.shape != (active.stop - active.start,):
            raise FedgraftError(
                f"a LoRA update of shape {tuple(sent.shape)} does not fit the {active.stop - active.start} "
                f"coordinates that move in round {round}"
            )
        update = torch.zeros(self.space.trained)
        update[active] = sent
        return update

    def traffic(self, round: int) -> tuple[int, int]:
        """Coordinates a client downloads and uploads in this round; four bytes each as float32."""
        active = self.active(round)
        return self.space.size, active.stop - active.start

    def fresh(self, seed: int, round: int) -> Tensor:
        """New A factors for adapters that start anew after this round, a pure function of (seed, round)."""
        if self.mode == "frozen_a":
            raise FedgraftError("frozen_a keeps A at its shared start; there is nothing to start anew")
        first = zip(self.layers, self.space.parts, strict=False)  # the A parts come first, in the layers' order
        return torch.cat([initial_a(part.shape, seed, round, layer.name).view(-1) for layer, part in first])


def lora_layout(network: Network, mode: Mode, dense: Iterable[str] = ()) -> LoraLayout:
    """The edit space of an adapted network under one of these rules, with the map of its factors."""
    if mode not in get_args(Mode):
        raise FedgraftError(f"the LoRA aggregation {mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
    layers = adapted(network)
    if not layers:
        raise FedgraftError("this network has no LoRA adapters; attach them before asking for their space")
    a, b, w = (list(names) for names in zip(*factor_names(network), strict=True))
    a = [] if mode == "frozen_a" else a
    extra = _dense_names(network, dense, {*a, *b, *w})
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    tail = [Part(n, shapes[n]) for n in w] if mode in ("stack", "residual") else []
    space = EditSpace(tuple(Part(n, shapes[n]) for n in (*a, *extra, *b)), tuple(tail))
    where = space.slices()
    mapped = tuple(
        LoraLayer(name, layer.r["default"], layer.scaling["default"], where.get(i), where[j], where.get(k))
        for (name, layer), (i, j, k) in zip(layers.items(), factor_names(network), strict=True)
    )
    a_end = max((where[n].stop for n in a), default=0)
    return LoraLayout(mode, space, mapped, a_end, min(where[n].start for n in b))


def _dense_names(network: Network, dense: Iterable[str], taken: set[str]) -> list[str]:
    """Tensors trained beside the factors, in the network's order."""
    wanted, known = set(dense), [name for name, _ in network.named_parameters()]
    for name in sorted(wanted):
        if name not in known or name in taken or name.endswith(A_SUFFIX):
            raise FedgraftError(f"{name!r} cannot be trained beside the LoRA factors: it is one of them or not there")
    return [name for name in known if name in wanted]


def aggregate_lora(
    layout: LoraLayout, vector: Tensor, updates: Sequence[Tensor], weights: Sequence[float], fresh: Tensor | None = None
) -> Tensor:
    """The server's next vector from the clients' updates of the trained coordinates.

    Weights are shares and need not sum to one. `stack` also takes `fresh`, the A factors to go on with. Products
    are summed in float64 and rounded once. For the three rules without base weights this is vector + mean update.
    """
    share, moved = _checked(layout, vector, updates, weights)  # (m,), (m, trained)
    if layout.mode == "stack" and (fresh is None or fresh.shape != (layout.a_end,)):
        raise FedgraftError(f"stacking needs {layout.a_end} fresh A coordinates: pass layout.fresh(seed, round)")
    trained = layout.space.trained
    client = vector[:trained].double() + moved  # (m, trained)
    new = vector.clone()
    new[:trained] = (vector[:trained].double() + share @ moved).float()
    if not layout.needs_each_client:
        return new
    for layer in layout.layers:
        assert layer.a is not None
        wanted = _product(share, client[:, layer.b], client[:, layer.a], layer.rank)  # (out, in)
        if layout.mode == "svd":
            _cut(new, layer, wanted)
            continue
        assert layer.w is not None
        if layout.mode == "residual":  # minus what the averaged factors, as rounded for the wire, give already
            one = torch.ones(1, dtype=torch.float64)
            wanted -= _product(one, new[None, layer.b].double(), new[None, layer.a].double(), layer.rank)
        new[layer.w] = (vector[layer.w].double() + layer.scaling * wanted.view(-1)).float()
    if fresh is not None and layout.mode == "stack":
        new[: layout.a_end] = fresh
        new[layout.b_begin : trained] = 0.0
    return new


def _cut(new: Tensor, layer: LoraLayer, wanted: Tensor) -> None:
    """The largest directions of this product as factors, strongest first; where there is none, A keeps its rows."""
    assert layer.a is not None
    u, s, v = torch.linalg.svd(wanted, full_matrices=False)
    rank = min(layer.rank, int((s > 1e-7 * s[0]).sum()) if float(s[0]) > 0 else 0)
    root = s[:rank].sqrt()
    a, b = new[layer.a].view(layer.rank, -1), torch.zeros(len(wanted), layer.rank)
    a[:rank] = (root[:, None] * v[:rank]).float()
    b[:, :rank] = (u[:, :rank] * root).float()
    new[layer.b] = b.view(-1)


def _product(share: Tensor, b: Tensor, a: Tensor, rank: int) -> Tensor:
    """sum_k share_k B_k A_k as one product of the stacked factors."""
    m = len(share)
    left = (share[:, None, None] * b.reshape(m, -1, rank)).permute(1, 0, 2).reshape(-1, m * rank)  # (out, m r)
    return left @ a.reshape(m * rank, -1)  # (out, in)


def _checked(
    layout: LoraLayout, vector: Tensor, updates: Sequence[Tensor], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Shares that sum to one and the updates as one float64 matrix."""
    if vector.shape != (layout.space.size,):
        raise FedgraftError(f"a vector of {tuple(vector.shape)} does not fit this LoRA space of {layout.space.size}")
    if not updates or len(updates) != len(weights):
        raise FedgraftError(f"{len(updates)} LoRA updates came with {len(weights)} weights; each update needs one")
    if any(update.shape != (layout.space.trained,) for update in updates):
        raise FedgraftError(f"every LoRA update must have {layout.space.trained} coordinates, the trained ones only")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        raise FedgraftError("LoRA weights must be finite, not negative, and not all zero")
    share = torch.tensor([float(w) for w in weights], dtype=torch.float64)
    return share / share.sum(), torch.stack([update.double() for update in updates])
