"""Aggregation of LoRA factors: how the low-rank factors of several clients become one model, on flat vectors.

With weights w_k and scaling s, the exact result is the dense average: sum w_k s B_k A_k. Eight rules:

- `mean` (FedIT): average A and B separately. Off by s * sum w_k (B_k - B)(A_k - A).
- `frozen_a` (FFA-LoRA): A stays at its shared start, only B is trained: exact, half the traffic.
- `alternate` (RoLoRA): even rounds train B, odd rounds A: exact in each round, half the upload.
- `stack` (FLoRA): the sum of products is added to the base weights and the adapters restart: exact.
- `residual` (FedEx-LoRA): factors are averaged and the difference to the exact result is added to the base weights.
- `svd` (FlexLoRA): the sum of products is truncated to its largest directions, so clients may have different ranks:
  the best factors of this rank, exact where the rank of the sum is no larger.
- `fair` (LoRA-FAIR): factors are averaged, then B is corrected so that its product with the mean A comes close to the
  exact result: the least squared distance plus a penalty on the correction.
- `rpca` (FedRPCA): the clients' changes of each factor are split into a low-rank and a sparse part (robust PCA,
  `aggregate/robust_pca.py`); the first is averaged, the mean of the second is enlarged.

One more, `core` (Fed-SB), trains an r x r matrix between fixed factors and needs no rule: see `lora_core`.

A vector is [A of all layers | tensors trained densely | B of all layers | base weights]. The last piece exists for
`stack` and `residual` only: it is sent to the clients and written, but neither trained nor sent back. The coordinates
that a client may change in a round are always one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgraft.aggregate.robust_pca import robust_pca_mean
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace, Part
from fedgraft.edit.lora import A_SUFFIX, adapter_layers, factor_names, initial_a

LoraAggregation = Literal["mean", "frozen_a", "alternate", "stack", "residual", "svd", "fair", "rpca", "core"]


@dataclass(frozen=True)
class LoraLayer:
    """One adapted layer: the slices of its tensors in a vector (None: not in it) and its scaling alpha / rank."""

    name: str
    rank: int
    scaling: float
    a: slice | None  # (rank, in)
    b: slice  # (out, rank)
    w: slice | None  # (out, in)


@dataclass(frozen=True)
class LoraLayout:
    """The edit space of a network's low-rank factors, with the position of each factor; `lora_layout` makes it."""

    mode: LoraAggregation
    space: EditSpace
    layers: tuple[LoraLayer, ...]
    a_end: int
    """The coordinates before this are A factors."""
    b_begin: int
    """The trained coordinates from this on are B factors; those between are trained densely."""

    @property
    def needs_each_client(self) -> bool:
        """Whether the server must see every client's factors, so that a secure sum or a plain mean is impossible."""
        return self.mode in ("stack", "residual", "svd", "fair", "rpca")

    def active(self, round: int) -> slice:
        """Return the coordinates that clients may change, and send, in this round."""
        if self.mode != "alternate":
            return slice(0, self.space.trained)
        # B goes first: while B is zero the gradient of A is zero.
        if round % 2 == 0:
            return slice(self.a_end, self.space.trained)
        return slice(0, self.b_begin)

    def first_directions(self, rank: int) -> Tensor:
        """Return the trained coordinates of a client of this rank, bool (trained,).

        These are the first `rank` rows of A and columns of B, and all densely trained ones.
        """
        chosen = torch.ones(self.space.trained, dtype=torch.bool)
        for layer in self.layers:
            assert layer.a is not None
            chosen[layer.a].view(layer.rank, -1)[rank:] = False
            chosen[layer.b].view(-1, layer.rank)[:, rank:] = False
        return chosen

    def sent(self, update: Tensor, round: int) -> Tensor:
        """Return the part of its update that a client sends: the coordinates active in this round."""
        return update[self.active(round)]

    def received(self, sent: Tensor, round: int) -> Tensor:
        """Return the update over all trained coordinates, zero outside the part active in `round`, which was `sent`."""
        active = self.active(round)
        expected = active.stop - active.start
        if sent.shape != (expected,):
            raise FedgraftError(
                "E-EDIT-LORA-UPDATE",
                f"a LoRA update of shape {tuple(sent.shape)} does not fit the {expected} coordinates "
                f"that are active in round {round}",
                "send the active coordinates only",
                round=round,
            )
        update = torch.zeros(self.space.trained)
        update[active] = sent
        return update

    def traffic(self, round: int) -> tuple[int, int]:
        """Return the coordinates a client downloads and uploads in this round; four bytes each as float32."""
        active = self.active(round)
        return self.space.size, active.stop - active.start

    def fresh(self, seed: int, round: int) -> Tensor:
        """Return new A factors for adapters that restart after this round, a pure function of (seed, round)."""
        if self.mode == "frozen_a":
            raise FedgraftError(
                "E-EDIT-LORA-FROZEN-A",
                "the rule frozen_a keeps A at its shared start, so it has no new A factors",
                "call fresh only for the rule stack",
            )
        factors = []
        for layer, part in zip(self.layers, self.space.parts, strict=False):  # A parts come first, in layer order
            factors.append(initial_a(part.shape, seed, round, layer.name).view(-1))
        return torch.cat(factors)


def lora_layout(network: Network, mode: LoraAggregation, dense: Iterable[str] = ()) -> LoraLayout:
    """Return the edit space of an adapted network under the rule `mode`, with the position of its factors.

    `dense` names further tensors that are trained as a whole.
    """
    modes = get_args(LoraAggregation)
    if mode not in modes:
        raise FedgraftError(
            "E-EDIT-LORA-MODE",
            f"there is no LoRA aggregation {mode!r}",
            f"choose one of {', '.join(modes)}",
            mode=mode,
        )
    layers = adapter_layers(network)
    if not layers:
        raise FedgraftError(
            "E-EDIT-LORA-NONE", "this network has no LoRA adapters", "attach them before opening their space"
        )
    a_names = []
    b_names = []
    w_names = []
    for a_name, b_name, w_name in factor_names(network):
        if mode != "frozen_a":
            a_names.append(a_name)
        b_names.append(b_name)
        w_names.append(w_name)
    dense_names = _dense_names(network, dense, {*a_names, *b_names, *w_names})
    parts = {}
    for name, parameter in network.named_parameters():
        parts[name] = Part(name, tuple(parameter.shape))
    trained_parts = [parts[name] for name in (*a_names, *dense_names, *b_names)]
    base_parts = []
    if mode in ("stack", "residual"):
        base_parts = [parts[name] for name in w_names]
    space = EditSpace(tuple(trained_parts), tuple(base_parts))
    slices = space.slices()
    lora_layers = []
    for (name, layer), (a_name, b_name, w_name) in zip(layers.items(), factor_names(network), strict=True):
        rank = layer.r["default"]
        scaling = layer.scaling["default"]
        lora_layers.append(LoraLayer(name, rank, scaling, slices.get(a_name), slices[b_name], slices.get(w_name)))
    a_end = 0
    if a_names:
        a_end = slices[a_names[-1]].stop
    b_begin = slices[b_names[0]].start
    return LoraLayout(mode, space, tuple(lora_layers), a_end, b_begin)


def _dense_names(network: Network, dense: Iterable[str], taken: set[str]) -> list[str]:
    """Return the requested tensors that are trained densely beside the factors, in the network's order.

    `taken` are the names of factors and base weights, which cannot be requested.
    """
    requested = set(dense)
    known = [name for name, _ in network.named_parameters()]
    for name in sorted(requested):
        if name not in known or name in taken or name.endswith(A_SUFFIX):
            raise FedgraftError(
                "E-EDIT-LORA-DENSE",
                f"{name!r} cannot be trained beside the LoRA factors: it is one of them or does not exist",
                "name parameters of the plain network",
                name=name,
            )
    return [name for name in known if name in requested]


def aggregate_lora(
    layout: LoraLayout,
    vector: Tensor,
    updates: Sequence[Tensor],
    weights: Sequence[float],
    fresh: Tensor | None = None,
    penalty: float = 0.01,
    sparse_scale: float | None = None,
) -> Tensor:
    """Return the server's next vector from the clients' updates of the trained coordinates.

    Args:
        vector: the present one, (space.size,).
        updates: one per client, (trained,).
        weights: shares of the clients, which need not sum to one.
        fresh: for `stack`, the A factors to continue with.
        penalty: for `fair`, on the correction of B, relative to the mean diagonal of A Aᵀ.
        sparse_scale: for `rpca`, the factor on the mean of the sparse parts; None: see `robust_pca_mean`.

    Products are summed in float64 and rounded once. For the three rules without base weights this is vector + mean
    update.
    """
    share, changes = _checked(layout, vector, updates, weights)  # (m,), (m, trained)
    if layout.mode == "stack" and (fresh is None or fresh.shape != (layout.a_end,)):
        raise FedgraftError(
            "E-EDIT-LORA-FRESH",
            f"the rule stack needs {layout.a_end} new A coordinates",
            "pass layout.fresh(seed, round)",
        )
    trained = layout.space.trained
    client_factors = vector[:trained].double() + changes  # (m, trained)
    new = vector.clone()
    new[:trained] = (vector[:trained].double() + share @ changes).float()
    if not layout.needs_each_client:
        return new
    for layer in layout.layers:
        assert layer.a is not None
        if layout.mode == "rpca":
            for factor in (layer.a, layer.b):
                combined = robust_pca_mean(changes[:, factor], share, sparse_scale)
                new[factor] = (vector[factor].double() + combined).float()
            continue
        product = _product(share, client_factors[:, layer.b], client_factors[:, layer.a], layer.rank)  # (out, in)
        if layout.mode == "svd":
            _write_largest_directions(new, layer, product)
            continue
        if layout.mode == "fair":
            _correct_b(new, layer, product, penalty)
            continue
        assert layer.w is not None
        if layout.mode == "residual":  # minus the product of the averaged factors, as rounded to float32
            all_weight = torch.ones(1, dtype=torch.float64)
            product -= _product(all_weight, new[None, layer.b].double(), new[None, layer.a].double(), layer.rank)
        new[layer.w] = (vector[layer.w].double() + layer.scaling * product.view(-1)).float()
    if fresh is not None and layout.mode == "stack":
        new[: layout.a_end] = fresh
        new[layout.b_begin : trained] = 0.0
    return new


def _write_largest_directions(new: Tensor, layer: LoraLayer, product: Tensor) -> None:
    """Write the largest singular directions of the product as factors of the layer into `new`, strongest first.

    Where the product has fewer directions than the rank, A keeps its other rows and B is zero.
    """
    assert layer.a is not None
    u, s, v = torch.linalg.svd(product, full_matrices=False)
    numerical_rank = 0
    if float(s[0]) > 0:
        numerical_rank = int((s > 1e-7 * s[0]).sum())
    rank = min(layer.rank, numerical_rank)
    root = s[:rank].sqrt()
    a = new[layer.a].view(layer.rank, -1)
    b = torch.zeros(len(product), layer.rank)
    a[:rank] = (root[:, None] * v[:rank]).float()
    b[:, :rank] = (u[:, :rank] * root).float()
    new[layer.b] = b.view(-1)


def _correct_b(new: Tensor, layer: LoraLayer, product: Tensor, penalty: float) -> None:
    """Add to the mean B in `new` the correction D with the least |product - (B + D) A|² + λ |D|².

    A is the mean in `new`; λ is `penalty` times the mean diagonal of A Aᵀ. Where all clients have the same A the
    product is B A already, and nothing changes.
    """
    assert layer.a is not None
    a = new[layer.a].view(layer.rank, -1).double()
    b = new[layer.b].view(-1, layer.rank).double()
    gram = a @ a.T  # (rank, rank)
    damping = penalty * gram.diagonal().mean() * torch.eye(layer.rank, dtype=torch.float64)
    missing = (product - b @ a) @ a.T  # (out, rank)
    correction = torch.linalg.solve(gram + damping, missing.T).T
    new[layer.b] = (b + correction).float().view(-1)


def _product(share: Tensor, b: Tensor, a: Tensor, rank: int) -> Tensor:
    """Return sum_k share_k B_k A_k, (out, in), as one product of the stacked factors b (m, out r) and a (m, r in)."""
    m = len(share)
    left = (share[:, None, None] * b.reshape(m, -1, rank)).permute(1, 0, 2).reshape(-1, m * rank)  # (out, m r)
    return left @ a.reshape(m * rank, -1)  # (out, in)


def _checked(
    layout: LoraLayout, vector: Tensor, updates: Sequence[Tensor], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return shares that sum to one and the updates as one float64 matrix; raise an error for wrong sizes."""
    if vector.shape != (layout.space.size,):
        raise FedgraftError(
            "E-EDIT-LORA-VECTOR",
            f"a vector of shape {tuple(vector.shape)} does not fit this LoRA space of {layout.space.size} coordinates",
            "use a vector of this layout",
        )
    if not updates or len(updates) != len(weights):
        raise FedgraftError(
            "E-EDIT-LORA-COUNT",
            f"there are {len(updates)} LoRA updates and {len(weights)} weights",
            "give one weight for each update, and at least one update",
        )
    for update in updates:
        if update.shape != (layout.space.trained,):
            raise FedgraftError(
                "E-EDIT-LORA-UPDATE",
                f"a LoRA update of shape {tuple(update.shape)} does not fit the {layout.space.trained} "
                "trained coordinates",
                "send the trained coordinates only",
            )
    finite = all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not finite or sum(weights) <= 0:
        raise FedgraftError(
            "E-EDIT-LORA-WEIGHTS",
            "client weights of LoRA updates must be finite, not negative and not all zero",
            "check the weighting rule",
        )
    share = torch.tensor([float(weight) for weight in weights], dtype=torch.float64)
    return share / share.sum(), torch.stack([update.double() for update in updates])
