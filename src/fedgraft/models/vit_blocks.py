"""The blocks of a plain ViT or DeiT, computed with fewer products than their own modules take.

In training (wherever gradients are recorded) a block is computed here:

- queries, keys and values are one product, and their scale is put on the query's weights;
- behind fixed inputs (the first block that trains) the norm's weights are put into that product: its input is then
  fixed, so the product that would carry a gradient back to the norm falls away;
- of the last block only the class token is computed, without keys and values of the other tokens: the product of a
  query with a key is a product with the token itself, and the mean of values is the value of the mean.

These are the block's own sums in another order, the same within rounding. A module that is not called has no hooks
called either: where a layer that would be skipped has hooks, or is no plain linear layer (an adapter), the modules run
as they are. So they do without gradients, so that the bits of cached features do not depend on this module.

Layers of several clients (`packed_layers`) are computed in the same order, with a product for each client.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from fedgraft.models.packed_layers import PackedLinear, PackedNorm, by_token, packed_product


def tokens_of(block: Any, hidden: Tensor) -> Tensor:
    """Return the output of a plain ViT block for its tokens (B, T, D), with query, key and value as one product.

    Where hooks or frozen layers forbid that, the block itself is called. The scale and shift of the first norm are
    folded into the product where nothing before it needs a gradient.
    """
    attention = block.attention
    norm = block.layernorm_before
    if not _has_no_hooks(block, attention) or not _can_be_one_product(attention):
        return block(hidden)
    folded = not hidden.requires_grad and norm.weight.requires_grad and _has_no_hooks(norm)
    if type(attention.q_proj) is PackedLinear:
        projected = _packed_projections(attention, norm, hidden, folded)
        return _after_projection(block, hidden, projected)
    weight, bias = _joined_projections(attention)
    if folded:
        bias = bias + (weight * norm.bias).sum(1)
        projected = linear(layer_norm(hidden, norm.normalized_shape, eps=norm.eps), weight * norm.weight, bias)
    else:
        projected = linear(norm(hidden), weight, bias)
    return _after_projection(block, hidden, projected)


def _after_projection(block: Any, hidden: Tensor, projected: Tensor) -> Tensor:
    """Return the output of a block from its input (B, T, D) and its queries, keys and values (B, T, 3 D)."""
    attention = block.attention
    shares = projected.unflatten(-1, (3, -1, attention.head_dim))  # (B, T, 3, heads, head_dim)
    query, key, value = shares.permute(2, 0, 3, 1, 4).contiguous().unbind(0)  # (B, heads, T, head_dim)
    mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return hidden + block.mlp(block.layernorm_after(hidden))


def class_token_of(block: Any, hidden: Tensor) -> Tensor:
    """Return the output of a block for the class token alone (B, 1, D), the only one read after the last block."""
    attention = block.attention
    if torch.is_grad_enabled() and _are_packed(attention.q_proj, attention.k_proj, attention.v_proj):
        mixed = _packed_attention(attention, block.layernorm_before, hidden)
        token = hidden[:, :1] + attention.o_proj(mixed.unsqueeze(1))
        return token + block.mlp(block.layernorm_after(token))
    normed = block.layernorm_before(hidden)
    query = attention.q_proj(normed[:, :1].contiguous()).unflatten(-1, (-1, attention.head_dim))  # (B, 1, heads, ...)
    if torch.is_grad_enabled() and _are_plain_linear(attention.k_proj, attention.v_proj):
        mixed = _attend_by_tokens(attention, query, normed)  # (B, heads * head_dim)
    else:
        mixed = _attend_by_elements(attention, query, normed)
    token = hidden[:, :1] + attention.o_proj(mixed.unsqueeze(1))
    return token + block.mlp(block.layernorm_after(token))


def _attend_by_elements(attention: Any, query: Tensor, normed: Tensor) -> Tensor:
    """Return the attention of one query to all tokens, (B, heads * head_dim), by their keys and values.

    `query` is (B, 1, heads, head_dim), `normed` are the tokens (B, T, D). One query is no matrix: the rounding of a
    product with it may depend on where its row lies in memory, so features would depend on their neighbours. Products
    element by element, summed, do not, and take no longer.
    """
    key = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)
    value = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    share = ((query.transpose(1, 2) * key).sum(-1) * attention.scaling).softmax(-1)  # (B, heads, T)
    return (share.unsqueeze(-1) * value).sum(2).flatten(1)


def _attend_by_tokens(attention: Any, query: Tensor, normed: Tensor) -> Tensor:
    """Return what `_attend_by_elements` returns, up to rounding, without a key or a value for each token.

    It uses q·(Kn) = (Kᵀq)·n, and Σ a (Vn) = V Σ a n. The bias of the keys adds the same to every token's score, which
    the softmax takes away again; it stays in the sum so that its gradient, rounding around zero, is there as in the
    block itself.
    """
    scaled = query.squeeze(1).transpose(0, 1) * attention.scaling  # (heads, B, head_dim)
    key = attention.k_proj.weight.unflatten(0, (-1, attention.head_dim))  # (heads, head_dim, D)
    value = attention.v_proj.weight.unflatten(0, (-1, attention.head_dim))
    scores = (scaled @ key).transpose(0, 1) @ normed.transpose(1, 2)  # (B, heads, T)
    if attention.k_proj.bias is not None:
        offset = (scaled * attention.k_proj.bias.view(-1, 1, attention.head_dim)).sum(-1)  # (heads, B)
        scores = scores + offset.t().unsqueeze(-1)
    mean = scores.softmax(-1) @ normed  # (B, heads, D)
    mixed = (mean.transpose(0, 1) @ value.transpose(1, 2)).transpose(0, 1).flatten(1)  # (B, heads * head_dim)
    if attention.v_proj.bias is None:
        return mixed
    return mixed + attention.v_proj.bias


def _packed_attention(attention: Any, norm: nn.Module, hidden: Tensor) -> Tensor:
    """Return what `_attend_by_tokens` returns, for c clients with weights of their own: (c * b, heads * head_dim).

    `norm` is the block's first norm, `hidden` are the tokens that it reads (c * b, T, D). A packed norm's weight and
    bias are put on the query and on the mean of the tokens, which are small, instead of on every token.
    """
    clients = attention.q_proj.clients
    head_dim = attention.head_dim
    if isinstance(norm, PackedNorm):
        tokens = norm.normalised(hidden)
        first = norm.scaled(tokens[:, :1].contiguous())
    else:
        tokens = norm(hidden)
        first = tokens[:, :1].contiguous()
    query = attention.q_proj(first).view(clients, -1, first.shape[-1]) * attention.scaling
    query = query.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (c, heads, b, head_dim)
    towards = query @ attention.k_proj.weight.unflatten(1, (-1, head_dim))  # (c, heads, b, D)
    offset = query.new_zeros(())
    if attention.k_proj.bias is not None:
        key_bias = attention.k_proj.bias.expand(clients, -1).unflatten(-1, (-1, 1, head_dim))  # (c, heads, 1, head_dim)
        offset = (query * key_bias).sum(-1)  # (c, heads, b)
    if isinstance(norm, PackedNorm):
        offset = offset + (towards * by_token(norm.bias).unsqueeze(-2)).sum(-1)
        towards = towards * by_token(norm.weight).unsqueeze(-2)
    scores = towards.transpose(1, 2).flatten(0, 1) @ tokens.transpose(1, 2)  # (c * b, heads, T)
    if offset.dim():
        scores = scores + offset.transpose(1, 2).flatten(0, 1).unsqueeze(-1)
    mean = (scores.softmax(-1) @ tokens).unflatten(0, (clients, -1)).transpose(1, 2)  # (c, heads, b, D)
    if isinstance(norm, PackedNorm):
        mean = torch.addcmul(by_token(norm.bias).unsqueeze(-2), mean, by_token(norm.weight).unsqueeze(-2))
    value = attention.v_proj.weight.unflatten(1, (-1, head_dim)).transpose(2, 3)  # (c, heads, D, head_dim)
    mixed = (mean @ value).transpose(1, 2).flatten(2)  # (c, b, heads * head_dim)
    if attention.v_proj.bias is not None:
        mixed = mixed + by_token(attention.v_proj.bias)
    return mixed.flatten(0, 1)


def _packed_projections(attention: Any, norm: nn.Module, hidden: Tensor, folded: bool) -> Tensor:
    """Return queries (scaled), keys and values of c clients as one product, (c * b, T, 3 D).

    `folded`: the weights of the norm are put into the product, as in `tokens_of`.
    """
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    clients = attention.q_proj.clients
    weights = []
    biases = []
    for layer, factor in zip(layers, (attention.scaling, 1.0, 1.0), strict=True):
        weights.append(layer.weight * factor)
        bias = layer.bias
        if bias is None:
            bias = layer.weight.new_zeros(layer.weight.shape[1])
        biases.append(bias.expand(clients, -1) * factor)
    weight = torch.cat(weights, 1)  # (c, 3 D, D)
    all_biases = torch.cat(biases, 1)  # (c, 3 D)
    if not folded or not isinstance(norm, PackedNorm):
        return packed_product(clients, norm(hidden), weight, all_biases)
    all_biases = all_biases + (weight * by_token(norm.bias)).sum(2)
    return packed_product(clients, norm.normalised(hidden), weight * by_token(norm.weight), all_biases)


def _joined_projections(attention: Any) -> tuple[Tensor, Tensor]:
    """Return weights (3 D, D) and biases (3 D,) of query, key and value, the query's scaled."""
    query = attention.q_proj
    key = attention.k_proj
    value = attention.v_proj
    weight = torch.cat([query.weight * attention.scaling, key.weight, value.weight])
    if query.bias is None:
        return weight, weight.new_zeros(len(weight))
    return weight, torch.cat([query.bias * attention.scaling, key.bias, value.bias])


def _can_be_one_product(attention: Any) -> bool:
    """Return whether query, key and value may be one product: plain layers that train all, or none of them.

    Where only some train, one product would compute the weight gradients of the others for nothing.
    """
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    if _are_packed(*layers):
        return True
    return _are_plain_linear(*layers) and len({layer.weight.requires_grad for layer in layers}) == 1


def _are_packed(*layers: nn.Module) -> bool:
    """Return whether all layers have a weight for each client."""
    return all(type(layer) is PackedLinear and layer.weight.dim() == 3 for layer in layers)


def _are_plain_linear(*layers: nn.Module) -> bool:
    """Return whether all layers are exactly `nn.Linear`, without hooks."""
    return all(type(layer) is nn.Linear for layer in layers) and _has_no_hooks(*layers)


def _has_no_hooks(*modules: Any) -> bool:
    """Return whether no hook is registered on these modules."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return False
        if module._backward_hooks or module._backward_pre_hooks:
            return False
    return True
