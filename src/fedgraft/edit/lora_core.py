"""Fed-SB (Singhal et al. 2025): W = W0 + s B R A with B and A fixed and orthonormal; only the r x r core R trains.

The change is linear in R, so the mean of cores is the mean of models: exact under plain, secure and private sums, and
r² numbers a layer travel whatever its width. B and A are the top singular vectors of the clients' mean gradient at the
pretrained weights (the paper: of the first full update), or of the weights themselves (LoRA-XS), which asks nobody.
R starts at zero, so that the adapted network computes what it did; the paper starts at that first update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedgraft.core.messages import Scalar
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace, Part, select
from fedgraft.edit.lora import adapted
from fedgraft.edit.trainable import Ask

CORE_SUFFIX = ".lora_B.default.parametrizations.weight.original"


class _Left(nn.Module):
    """B R as the second factor of a low-rank layer, with B fixed."""

    def __init__(self, left: Tensor) -> None:
        super().__init__()
        self.left: Tensor
        self.register_buffer("left", left, persistent=False)

    def forward(self, core: Tensor) -> Tensor:
        """(out, rank) from (rank, rank)."""
        return self.left @ core


def directions(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The top singular vectors of a matrix: left (out, rank) and right (rank, in)."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u[:, :rank].float().contiguous(), v[:rank].float().contiguous()


def gradient_directions(network: Network, names: list[str], ask: Ask, rank: int, images: int) -> dict[str, Tensor]:
    """The top directions of the clients' summed gradient in each named layer; sums, so they may be hidden."""
    whole = select(network, lambda name: True, buffers=False)
    weights = {f"{name}.weight" for name in names}
    settings: dict[str, Scalar] = {
        "names": "\n".join(sorted(weights)),
        "share": min(1.0, images / max(1, ask.examples)),
        "draw": 0,
    }
    flat = ask.sums("gradient", whole.gather(network), settings)["gradient"]
    shapes = {n: tuple(p.shape) for n, p in network.named_parameters() if n in weights}
    parts = dict(zip(shapes, flat.split([torch.Size(s).numel() for s in shapes.values()]), strict=True))
    return _named({name: directions(parts[f"{name}.weight"].view(shapes[f"{name}.weight"]), rank) for name in names})


def weight_directions(network: Network, names: list[str], rank: int) -> dict[str, Tensor]:
    """The top directions of each named layer's own weights."""
    tensors = dict(network.named_parameters())
    return _named({name: directions(tensors[f"{name}.weight"].detach().cpu(), rank) for name in names})


def _named(found: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{side}/{name}": t for name, pair in found.items() for side, t in zip(("left", "right"), pair, strict=True)
    }


def fix_factors(network: Network, found: Mapping[str, Tensor]) -> None:
    """Put the fixed factors into an adapted network and leave a core of zeros between them."""
    for name, layer in adapted(network).items():
        device = layer.lora_A["default"].weight.device
        layer.lora_A["default"].weight.data.copy_(found[f"right/{name}"])
        inner = layer.lora_B["default"]
        parametrize.register_parametrization(inner, "weight", _Left(found[f"left/{name}"].to(device)), unsafe=True)
        rank = found[f"left/{name}"].shape[1]
        inner.parametrizations.weight.original = nn.Parameter(torch.zeros(rank, rank, device=device))


def core_space(network: Network, dense: list[str]) -> EditSpace:
    """The cores, and the tensors trained densely beside them."""
    named = dict(network.named_parameters())
    names = [n for n in named if n.endswith(CORE_SUFFIX)] + [n for n in named if n in dense]
    return EditSpace(tuple(Part(n, tuple(named[n].shape)) for n in names))
