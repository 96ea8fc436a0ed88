"""Fed-SB (Singhal et al. 2025): W = W0 + s B R A with B and A fixed and orthonormal; only the r x r core R is trained.

The change is linear in R, so the mean of cores is the mean of models: exact under plain, secure and private sums, and
r² numbers per layer are sent whatever its width. B and A are the top singular vectors of the clients' mean gradient at
the pretrained weights (the paper: of the first full update), or of the weights themselves (LoRA-XS), which needs no
client. R starts at zero, so the adapted network computes what it did before; the paper starts at that first update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedgraft.core.device import Device, fetch
from fedgraft.core.messages import Scalar
from fedgraft.core.protocols import Network
from fedgraft.core.space import EditSpace, Part, select
from fedgraft.edit.lora import adapter_layers
from fedgraft.edit.trainable import Ask

CORE_SUFFIX = ".lora_B.default.parametrizations.weight.original"


class _Left(nn.Module):
    """B R as the second factor of a low-rank layer, with B fixed."""

    def __init__(self, left: Tensor) -> None:
        super().__init__()
        self.left: Tensor
        self.register_buffer("left", left, persistent=False)

    def forward(self, core: Tensor) -> Tensor:
        """Return (out, rank) from (rank, rank)."""
        return self.left @ core


def directions(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the top singular vectors of a matrix: left (out, rank) and right (rank, in)."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u[:, :rank].float().contiguous(), v[:rank].float().contiguous()


def gradient_directions(network: Network, names: list[str], ask: Ask, rank: int, images: int) -> dict[str, Tensor]:
    """Return the top directions of the clients' summed gradient in each named layer, as "left/..." and "right/...".

    `ask` sends the requests to the clients, `images` is the number of images of the gradient over all clients, `rank`
    the number of directions. Only sums are needed, so they can be computed by secure aggregation.
    """
    all_parameters = select(network, lambda name: True, buffers=False)
    weight_names = {f"{name}.weight" for name in names}
    settings: dict[str, Scalar] = {
        "names": "\n".join(sorted(weight_names)),
        "share": min(1.0, images / max(1, ask.examples)),
        "draw": 0,
    }
    flat = ask.sums("gradient", all_parameters.gather(network), settings)["gradient"]
    gradients = {}
    begin = 0
    for name, parameter in network.named_parameters():
        if name in weight_names:
            end = begin + parameter.numel()
            gradients[name] = flat[begin:end].view(parameter.shape)
            begin = end
    factors: dict[str, Tensor] = {}
    for name in names:
        factors |= _factors(name, gradients[f"{name}.weight"], rank)
    return factors


def weight_directions(network: Network, names: list[str], rank: int) -> dict[str, Tensor]:
    """Return the top `rank` directions of each named layer's own weights, as "left/..." and "right/..."."""
    tensors = dict(network.named_parameters())
    factors: dict[str, Tensor] = {}
    for name in names:
        factors |= _factors(name, fetch(tensors[f"{name}.weight"].detach()), rank)
    return factors


def _factors(name: str, matrix: Tensor, rank: int) -> dict[str, Tensor]:
    """Return the two fixed factors of one layer by the names under which they are stored."""
    left, right = directions(matrix, rank)
    return {f"left/{name}": left, f"right/{name}": right}


def fix_factors(network: Network, factors: Mapping[str, Tensor]) -> None:
    """Write the fixed factors into an adapted network, in place, with a core of zeros between them."""
    for name, layer in adapter_layers(network).items():
        device = layer.lora_A["default"].weight.device
        layer.lora_A["default"].weight.data.copy_(factors[f"right/{name}"])
        inner = layer.lora_B["default"]
        left = Device(device).put(factors[f"left/{name}"])
        parametrize.register_parametrization(inner, "weight", _Left(left), unsafe=True)
        rank = left.shape[1]
        inner.parametrizations.weight.original = nn.Parameter(torch.zeros(rank, rank, device=device))


def core_space(network: Network, dense: list[str]) -> EditSpace:
    """Return the space of the cores and of the tensors trained densely beside them."""
    core_parts = []
    dense_parts = []
    for name, parameter in network.named_parameters():
        part = Part(name, tuple(parameter.shape))
        if name.endswith(CORE_SUFFIX):
            core_parts.append(part)
        if name in dense:
            dense_parts.append(part)
    return EditSpace((*core_parts, *dense_parts))
