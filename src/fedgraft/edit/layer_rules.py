"""Per-layer rules that turn a layer's input and output gradient into sums of squared per-sample gradients.

Every rule takes the layer, its input x and the gradient δ of its output, both with the samples first, and adds
Σ_n g_n² of the parameters in `sums` to their running totals, in place. Gradients are formed in small pieces and
discarded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SquareSums = Mapping[str, Tensor]
"""Running totals of one module, by the parameter's name inside it."""
LayerRule = Callable[[Any, Tensor, Tensor, SquareSums], None]

# Per-sample gradients are formed in pieces of about this many numbers (1 MB), so that squaring finds them in cache.
_PIECE = 1 << 18


def _add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σ_n (left_n right_n)² to total (out, in); left is (B, out, T) and right (B, T, in)."""
    if left.shape[2] == 1:  # with one token the square of the product is the product of the squares
        total.addmm_(left[:, :, 0].square().t(), right[:, 0].square())
        return
    step = max(1, min(len(left), _PIECE // total.numel()))
    buffer = left.new_empty(step, *total.shape)
    for begin in range(0, len(left), step):
        a = left[begin : begin + step]
        b = right[begin : begin + step]
        if step == 1:
            torch.mm(a[0], b[0], out=buffer[0])
            total.addcmul_(buffer[0], buffer[0])
        else:
            piece = buffer[: len(a)]
            torch.bmm(a, b, out=piece)
            total.add_(piece.square_().sum(0))


def _linear(module: nn.Linear, x: Tensor, delta: Tensor, sums: SquareSums) -> None:
    """Add the squared per-sample gradients of a linear layer to `sums`, in place: g_n = δ_n' x_n over tokens.

    `x` is the layer's input, `delta` the gradient of its output.
    """
    x = x.reshape(len(x), -1, x.shape[-1])  # (B, T, in)
    delta = delta.reshape(len(delta), -1, delta.shape[-1])  # (B, T, out)
    if "bias" in sums:
        sums["bias"].add_(delta.sum(1).square_().sum(0))
    if "weight" in sums:
        _add_products(sums["weight"], delta.transpose(1, 2), x)


def _conv2d(module: nn.Conv2d, x: Tensor, delta: Tensor, sums: SquareSums) -> None:
    """Add the squared per-sample gradients of a convolution to `sums`, in place.

    The gradient is a product of the output gradient `delta` and the unfolded input x.
    """
    delta = delta.flatten(2)  # (B, out, L)
    if "bias" in sums:
        sums["bias"].add_(delta.sum(2).square_().sum(0))
    if "weight" not in sums:
        return
    groups = module.groups
    taps = module.weight[0].numel()
    total = sums["weight"].view(groups, -1, taps)  # (g, out/g, in/g * kh * kw)
    step = max(1, 16 * _PIECE // (taps * groups * delta.shape[2]))
    for begin in range(0, len(x), step):
        part = F.unfold(x[begin : begin + step], module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
        right = part.view(len(part), groups, taps, -1).transpose(2, 3)  # (b, g, L, taps)
        left = delta[begin : begin + step].reshape(len(part), groups, -1, delta.shape[2])  # (b, g, out/g, L)
        if groups == 1:
            _add_products(total[0], left[:, 0], right[:, 0])
        else:
            total.add_((left @ right).square_().sum(0))


def _layer_norm(module: nn.LayerNorm, x: Tensor, delta: Tensor, sums: SquareSums) -> None:
    """Add the squared per-sample gradients of a layer norm's scale and shift to `sums`, in place.

    `x` is the layer's input, `delta` the gradient of its output.
    """
    shape = module.normalized_shape
    parts = {"bias": delta}
    if "weight" in sums:
        parts["weight"] = delta * F.layer_norm(x, shape, None, None, module.eps)
    for key, total in sums.items():
        total.add_(parts[key].reshape(len(x), -1, *shape).sum(1).square_().sum(0))


def _channel_norm(normalised: Tensor, delta: Tensor, sums: SquareSums) -> None:
    """Add the squared per-sample gradients of a scale and a shift per channel to `sums`, in place.

    `normalised` are the inputs (B, C, ...) after normalisation, `delta` the gradient of the output.
    """
    parts = {"bias": delta, "weight": delta * normalised}
    for key, total in sums.items():
        total.add_(parts[key].reshape(*delta.shape[:2], -1).sum(2).square_().sum(0))


def _group_norm(module: nn.GroupNorm, x: Tensor, delta: Tensor, sums: SquareSums) -> None:
    _channel_norm(F.group_norm(x, module.num_groups, None, None, module.eps), delta, sums)


def _batch_norm(module: nn.BatchNorm2d, x: Tensor, delta: Tensor, sums: SquareSums) -> None:
    x = F.batch_norm(x, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
    _channel_norm(x, delta, sums)


_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
}
# These use the weights of their children without calling them, so their forward pass is repeated as a whole.
OPAQUE = (nn.MultiheadAttention,)


def rule_of(module: nn.Module) -> LayerRule | None:
    """Return the rule of a known layer; None for other layers and for subclasses with their own `forward`."""
    if isinstance(module, nn.Conv2d) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return None
    for kind, rule in _RULES.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return rule
    return None
