"""Blocks computed with fewer products are the blocks of `transformers`: answers and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedgraft.core.rng import torch_stream
from fedgraft.edit.lora import attach
from fedgraft.edit.sample_gradients import SampleSquares
from fedgraft.models import vit_blocks
from fedgraft.models.network import VisionNetwork, draw_head
from fedgraft.models.quiet import quiet

ENTRY = 1
CHOICES: dict[str, Callable[[VisionNetwork, str], bool]] = {
    "last blocks": lambda net, name: net.block_of(name) >= ENTRY,
    "body of the last blocks": lambda net, name: ENTRY <= net.block_of(name) < net.depth,
    "no norms": lambda net, name: net.block_of(name) >= ENTRY and "norm" not in name,
    "query and key": lambda net, name: "q_proj.weight" in name or "k_proj.weight" in name,
    "everything": lambda net, name: True,
}


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax of `transformers` goes through float32 whatever it is given, which would hide small mistakes."""
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


def network(kind: str = "vit", bias: bool = True) -> VisionNetwork:
    """Four blocks with weights far from zero, so that every term of a gradient counts."""
    import transformers as t

    config, made = (t.ViTConfig, t.ViTModel) if kind == "vit" else (t.DeiTConfig, t.DeiTModel)
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 48, "image_size": 32, "patch_size": 8, "qkv_bias": bias}
    with quiet():
        backbone = made(config(**sizes, attn_implementation="eager"), add_pooling_layer=False)
    stream = torch_stream(0, "blocks")
    for parameter in backbone.parameters():
        parameter.data.normal_(0.1, 0.3, generator=stream)
    return VisionNetwork(backbone, draw_head(24, 5, 0), 32).double()


def tokens(net: VisionNetwork, count: int = 6) -> Tensor:
    """What enters the first block that trains."""
    images = torch.randn(count, 3, 32, 32, generator=torch_stream(0, "images"), dtype=torch.float64)
    with torch.no_grad():
        return net.features(images, 0, ENTRY)


def gradients(net: VisionNetwork, hidden: Tensor, whole: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients; `whole`: by the modules of `transformers` themselves."""
    net.zero_grad()
    logits = net.head(net.cut.run(net.backbone, hidden, ENTRY, net.depth, whole))
    torch.nn.functional.cross_entropy(logits, torch.arange(len(hidden)) % 5).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def check_same_logits(net: VisionNetwork, hidden: Tensor) -> None:
    (logits, found), (expected, every) = gradients(net, hidden, False), gradients(net, hidden, True)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    assert found.keys() == every.keys()
    for name, gradient in every.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("kind", "bias"), [("vit", True), ("deit", True), ("vit", False)])
def test_answers_and_gradients_are_those_of_transformers(kind: str, bias: bool, choice: str) -> None:
    net = network(kind, bias)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(CHOICES[choice](net, name))
    check_same_logits(net, tokens(net))


def test_adapters_run_as_they_are() -> None:
    net = network()
    attach(net, 2, 4.0, ("k", "v"), seed=0)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=torch_stream(0, name))
    check_same_logits(net.double(), tokens(net))


@pytest.mark.parametrize("part", ["", "attention", "attention.q_proj", "attention.v_proj", "attention.o_proj", "mlp"])
@pytest.mark.parametrize("place", [1, 3])
def test_who_watches_a_layer_sees_it_called(part: str, place: int) -> None:
    """Of the last block only the class token is computed, so the block and its attention are not called there."""
    net, seen = network(), []
    hidden = tokens(net)
    layer = net.blocks[place].get_submodule(part)
    hook = layer.register_forward_hook(lambda *_: seen.append(1))
    net(hidden, ENTRY)
    hook.remove()
    assert len(seen) == (0 if place == 3 and part in ("", "attention") else 1)


def test_per_sample_gradients_see_every_layer() -> None:
    net = network()
    hidden, wanted = tokens(net), [name for name, _ in net.named_parameters() if net.block_of(name) >= ENTRY]
    squares = SampleSquares(net, wanted)
    with squares.watching():
        logits = squares.forward(net, hidden, ENTRY)
        squares.backward(logits, torch.ones_like(logits))
    expected = {name: torch.zeros_like(squares.sums[name]) for name in wanted}
    for row in hidden:
        net.zero_grad()
        net.head(net.cut.run(net.backbone, row[None], ENTRY, net.depth, True)).sum().backward()
        for name in wanted:
            grad = net.get_parameter(name).grad
            expected[name] += 0 if grad is None else grad.square()
    for name in wanted:
        torch.testing.assert_close(squares.sums[name], expected[name], rtol=1e-8, atol=1e-10)


def test_products_that_nothing_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient goes back to the norm behind fixed inputs, and the last block's tokens get no keys and values."""
    net = network()
    hidden, shapes = tokens(net), []
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(net.block_of(name) >= ENTRY)

    class Listening(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                shapes.append(tuple(found.shape))
            return found

    with Listening():
        net(hidden, ENTRY).sum().backward()
    rows, width = hidden.shape[0] * hidden.shape[1], hidden.shape[2]
    # For all tokens: two blocks, of each one product for query, key and value, and none of their own.
    assert shapes.count((rows, 3 * width)) == 2
    # Forward: o_proj and fc2 of two blocks. Back: the inputs of o_proj and fc1, and of the joined product but one.
    assert shapes.count((rows, width)) == 4 + 4 + 1


def test_without_gradients_the_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept features have the bits they had: nothing here is asked while none are recorded."""
    net = network()
    hidden = tokens(net)
    monkeypatch.setattr(vit_blocks, "_joined_projections", None)
    monkeypatch.setattr(vit_blocks, "_attend_by_tokens", None)
    with torch.no_grad():
        net(hidden, ENTRY)
    with pytest.raises(TypeError):
        net(hidden, ENTRY)


def test_torch_func_differentiates_the_last_blocks() -> None:
    from torch.func import functional_call, grad, vmap

    net = network()
    hidden = tokens(net, 3)
    weights = {name: p.detach() for name, p in net.named_parameters() if net.block_of(name) >= ENTRY}

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(net, values, (row[None], ENTRY)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(weights, hidden)
    net.zero_grad()
    net.head(net.cut.run(net.backbone, hidden, ENTRY, net.depth, True)).square().sum().backward()
    for name in weights:
        torch.testing.assert_close(each[name].sum(0), net.get_parameter(name).grad, rtol=1e-8, atol=1e-9)


def test_a_plain_layer_is_a_linear_layer_and_nothing_else() -> None:
    """A layer that computes something of its own on top of a linear one is called, not read."""

    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    net = network()
    for block in net.blocks:
        layer: Any = block.attention.k_proj  # type: ignore[union-attr]
        layer.__class__ = Twice
    check_same_logits(net, tokens(net))
