"""The blocks of a plain ViT or DeiT, computed with fewer products than their own modules take.

In training (wherever gradients are recorded) a block is computed here:

- queries, keys and values are one product, and their scale is put on the query's weights;
- behind fixed inputs (the first block that trains) the norm's weights are put into that product: its input is then
  fixed, so the product that would carry a gradient back to the norm falls away;
- of the last block only the class token is computed, and of the tokens it looks at no keys and values: what one query
  asks of a key it can ask of the token itself, and the mean of values is the value of the mean.

These are the block's own sums in another order, the same within rounding. A module that is not called has no hooks
called either: where somebody watches a layer that is passed over, or where it is no plain linear layer (an adapter),
the modules run as they are. They do without gradients too, so the bits of kept features depend on nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear


def tokens_of(block: Any, hidden: Tensor) -> Tensor:
    """What a block makes of its tokens (B, T, D)."""
    attention, norm = block.attention, block.layernorm_before
    if not _free(block, attention) or not _one_product(attention):
        return block(hidden)
    folded = not hidden.requires_grad and norm.weight.requires_grad and _free(norm)
    weight, bias = _joined(attention)
    if folded:
        bias = bias + (weight * norm.bias).sum(1)
        projected = linear(layer_norm(hidden, norm.normalized_shape, eps=norm.eps), weight * norm.weight, bias)
    else:
        projected = linear(norm(hidden), weight, bias)
    shares = projected.unflatten(-1, (3, -1, attention.head_dim))  # (B, T, 3, heads, head_dim)
    query, key, value = shares.permute(2, 0, 3, 1, 4).contiguous().unbind(0)  # (B, heads, T, head_dim)
    mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.layernorm_after(hidden))


def class_token_of(block: Any, hidden: Tensor) -> Tensor:
    """What a block makes of the class token alone (B, 1, D): the only one that is read behind the last block."""
    attention, normed = block.attention, block.layernorm_before(hidden)
    query = attention.q_proj(normed[:, :1].contiguous()).unflatten(-1, (-1, attention.head_dim))  # (B, 1, heads, ...)
    short = torch.is_grad_enabled() and _plain(attention.k_proj, attention.v_proj)
    mixed = (_by_tokens if short else _by_elements)(attention, query, normed)  # (B, heads * head_dim)
    token = hidden[:, :1] + attention.o_proj(mixed.unsqueeze(1))
    return token + block.mlp(block.layernorm_after(token))


def _by_elements(attention: Any, query: Tensor, normed: Tensor) -> Tensor:
    """What one query takes from all tokens, by their keys and values.

    One query is no matrix: a product with it may round by where its row lies in memory, and features would then be of
    their neighbours too. Products element by element, summed, do not, and take no longer.
    """
    key, value = (
        projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)
        for projection in (attention.k_proj, attention.v_proj)
    )
    seen = ((query.transpose(1, 2) * key).sum(-1) * attention.scaling).softmax(-1)  # (B, heads, T)
    return (seen.unsqueeze(-1) * value).sum(2).flatten(1)


def _by_tokens(attention: Any, query: Tensor, normed: Tensor) -> Tensor:
    """The same without a key or a value for each token: q·(Kn) = (Kᵀq)·n, and Σ a (Vn) = V Σ a n.

    The bias of the keys adds the same to every token's score, which the softmax takes away again; it stays in the sum
    so that its gradient, rounding around zero, is there as in the block itself.
    """
    asked = query.squeeze(1).transpose(0, 1) * attention.scaling  # (heads, B, head_dim)
    key, value = (
        projection.weight.unflatten(0, (-1, attention.head_dim))  # (heads, head_dim, D)
        for projection in (attention.k_proj, attention.v_proj)
    )
    scores = (asked @ key).transpose(0, 1) @ normed.transpose(1, 2)  # (B, heads, T)
    if attention.k_proj.bias is not None:
        offset = (asked * attention.k_proj.bias.view(-1, 1, attention.head_dim)).sum(-1)  # (heads, B)
        scores = scores + offset.t().unsqueeze(-1)
    mean = scores.softmax(-1) @ normed  # (B, heads, D)
    mixed = (mean.transpose(0, 1) @ value.transpose(1, 2)).transpose(0, 1).flatten(1)  # (B, heads * head_dim)
    return mixed if attention.v_proj.bias is None else mixed + attention.v_proj.bias


def _joined(attention: Any) -> tuple[Tensor, Tensor]:
    """Weights (3 D, D) and biases of query, key and value, the query's scaled."""
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    weight = torch.cat([query.weight * attention.scaling, key.weight, value.weight])
    if query.bias is None:
        return weight, weight.new_zeros(len(weight))
    return weight, torch.cat([query.bias * attention.scaling, key.bias, value.bias])


def _one_product(attention: Any) -> bool:
    """Whether query, key and value may be one product: plain layers that train all, or none of them.

    Where only some train, one product would compute the weight gradients of the others for nothing.
    """
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    return _plain(*layers) and len({layer.weight.requires_grad for layer in layers}) == 1


def _plain(*layers: nn.Module) -> bool:
    return all(type(layer) is nn.Linear for layer in layers) and _free(*layers)


def _free(*modules: Any) -> bool:
    """Whether nobody watches these modules."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules
    )
