"""Entries, blocks, kinds and probes of VisionNetwork, for every family of backbones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from torch import nn

from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.models.backbones import load_network
from fedgraft.models.network import Dropout, VisionNetwork
from fedgraft.models.quiet import drawn_from, quiet

torch.set_num_threads(1)
ATTENTION = ("vit", "deit", "dinov2", "registers", "swiglu")
NAMES = (*ATTENTION, "resnet18", "groupnorm", "swin", "convnext", "convnextv2", "beit")


def backbone(kind: str) -> nn.Module:
    """A small backbone of each family, straight from transformers."""
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    with quiet(), drawn_from(1):
        if kind == "deit":
            return t.DeiTModel(t.DeiTConfig(intermediate_size=32, **sizes), add_pooling_layer=False)
        if kind == "registers":
            return t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**sizes))
        if kind == "swin":
            shape: dict[str, Any] = {"embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 2}
            return t.SwinModel(t.SwinConfig(image_size=32, patch_size=4, **shape))
        if kind.startswith("convnext"):
            made: Any = {
                "convnext": (t.ConvNextModel, t.ConvNextConfig),
                "convnextv2": (t.ConvNextV2Model, t.ConvNextV2Config),
            }
            model, config = made[kind]
            return model(config(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, image_size=32))
        if kind == "beit":
            return t.BeitModel(t.BeitConfig(**{**sizes, "num_hidden_layers": 1, "intermediate_size": 32}))
        return t.Dinov2Model(t.Dinov2Config(use_swiglu_ffn=kind == "swiglu", **sizes))


def network(kind: str) -> VisionNetwork:
    if kind == "vit":
        return load_network("tiny", 5)
    if kind in ("resnet18", "groupnorm"):
        return load_network(f"resnet18:width=8,norm={'group' if kind == 'groupnorm' else 'batch'}", 5)
    body = backbone(kind).eval()
    return VisionNetwork(body, nn.Linear(16, 5), 32 if kind in ("swin", "convnext", "convnextv2") else 16)


def images(net: VisionNetwork, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, net.image_size, net.image_size, generator=torch_stream(0, "test"))


@pytest.fixture(scope="module", params=NAMES)
def net(request: pytest.FixtureRequest) -> VisionNetwork:
    return network(request.param)


def test_meets_the_contract(net: VisionNetwork) -> None:
    assert isinstance(net, Network)
    assert {name.partition(".")[0] for name, _ in net.named_parameters()} == {"backbone", "head"}
    assert [name for name, _ in net.named_parameters()][-2:] == ["head.weight", "head.bias"]
    assert not net.training
    assert net(images(net)).shape == (2, 5)
    assert net.features(images(net)).shape == (2, net.width)


@torch.no_grad()
def test_a_pass_may_be_cut_at_every_entry(net: VisionNetwork) -> None:
    train_images = images(net)
    whole = net(train_images)
    for first in range(net.depth + 1):
        held = net.features(train_images, 0, until=first)
        assert torch.equal(net(held, entry=first), whole)
        for second in range(first, net.depth + 1):
            assert torch.equal(net.features(held, first, second), net.features(train_images, 0, second))


@torch.no_grad()
def test_features_are_what_transformers_gives(net: VisionNetwork) -> None:
    train_images = images(net)
    output = net.backbone(pixel_values=train_images)
    own = output.last_hidden_state[:, 0] if net.cut.inner else output.pooler_output.flatten(1)
    torch.testing.assert_close(net.features(train_images), own, rtol=0, atol=1e-5)


def wrongly_placed(net: VisionNetwork, block_of: Callable[[str], int]) -> list[str]:
    """Parameters whose block number disagrees with autograd: those behind an entry, and only those, get a gradient."""
    wrong = []
    for entry in range(net.depth + 1):
        net.zero_grad()
        held = net.features(images(net), 0, entry).detach()
        net(held, entry).square().sum().backward()
        for name, parameter in net.named_parameters():
            # Behind entry `depth` is the head alone; entry 0 includes what comes before block 0.
            behind = block_of(name) > entry if entry == net.depth else block_of(name) >= entry or entry == 0
            if (parameter.grad is not None) != behind:
                wrong.append(name)
    return wrong


def test_block_of_agrees_with_autograd(net: VisionNetwork) -> None:
    assert wrongly_placed(net, net.block_of) == []
    assert net.block_of("head.bias") == net.depth + 1


def test_a_shifted_block_of_is_noticed() -> None:
    net = network("vit")
    assert wrongly_placed(net, lambda name: net.block_of(name) + 1)
    assert wrongly_placed(net, lambda name: max(net.block_of(name), 0) if "layers.1" not in name else 0)


def test_block_numbers_of_a_vit() -> None:
    net = network("vit")
    assert net.block_of("backbone.embeddings.cls_token") == -1
    assert net.block_of("backbone.layers.1.mlp.fc1.weight") == 1
    assert net.block_of("backbone.layernorm.bias") == 2 == net.depth
    with raises("E-MODELS-PARAMETER"):
        net.block_of("body.weight")


def test_statistics_belong_to_the_block_of_their_norm() -> None:
    net = network("resnet18")
    statistics = [name for name, _ in net.named_buffers() if name.endswith("running_var")]
    assert len(statistics) == 20
    for name in statistics:
        assert net.block_of(name) == net.block_of(name.replace("running_var", "weight"))
    assert {net.block_of(name) for name in statistics} == {-1, 0, 1, 2, 3}


def test_a_fresh_head_is_a_copy_with_other_classes() -> None:
    net = network("vit")
    net.mean = (0.1, 0.2, 0.3)
    made = net.with_head(7, seed=3)
    assert (made.classes, made.mean, net.classes) == (7, net.mean, 5)
    assert torch.equal(made.features(images(net)), net.features(images(net)))
    assert torch.equal(made.head.weight, load_network("tiny", 7, seed=3).head.weight)
    with raises("E-MODELS-CLASSES", classes=0):
        net.with_head(0, 0)
    assert torch.equal(made.head.weight, net.with_head(7, seed=3).head.weight)
    assert not torch.equal(made.head.weight, net.with_head(7, seed=4).head.weight)


def test_the_entry_to_start_from() -> None:
    net = network("vit")
    assert [net.entry_for(block) for block in (-1, 0, 1, 2, 3)] == [0, 0, 1, 1, 2]
    # The final norm (block 2 = depth) must be computed, not stored: what enters block 1 does not depend on it.
    train_images, entry = images(net), net.entry_for(net.block_of("backbone.layernorm.weight"))
    before = net.features(train_images, 0, entry)
    with torch.no_grad():
        net.get_parameter("backbone.layernorm.weight").mul_(2.0)
    assert torch.equal(net.features(train_images, 0, entry), before)


@pytest.mark.parametrize(("entry", "until"), [(-1, None), (0, 9), (2, 1), (9, None)])
def test_impossible_entries_are_refused(entry: int, until: int | None) -> None:
    net = network("vit")
    with raises("E-MODELS-ENTRY", depth=2):
        net.features(images(net), entry, until)


def test_an_unknown_backbone_is_one_block() -> None:
    net = network("beit")
    assert net.depth == 1 and "counts as one block" in net.notes[0]
    assert net.default_probe_layers() == ()
    with raises("E-MODELS-ENTRY", depth=1):
        net.features(images(net), 0, 2)
    with raises("E-MODELS-PROBE-LAYER", layer="block0"):
        net.layer("block0")
    assert network("swin").notes == network("vit").notes == ()


def test_wrong_pixels_are_refused() -> None:
    with raises("E-MODELS-PIXELS", pixels=(24, 24)):
        network("vit")(torch.zeros(1, 3, 24, 24))


def test_kinds_of_layers(net: VisionNetwork) -> None:
    names = [name for name, _ in net.named_parameters()]
    kinds = {net.layer_kind(name) for name in names}
    assert {"head.weight", "head.bias", "norm.weight"} < kinds
    assert not any(kind.startswith("other") for kind in kinds) or net.config.model_type == "swin"  # patch merging
    attention = {f"{role}.{part}" for role in ("q", "k", "v", "proj") for part in ("weight", "bias")} - {"k.bias"}
    mlp = {f"{role}.{part}" for role in ("fc1", "fc2") for part in ("weight", "bias")}
    if net.config.model_type == "resnet":
        assert kinds == {"embed.weight", "conv.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    elif net.config.model_type.startswith("convnext"):
        assert mlp | {"conv.weight", "embed.weight"} <= kinds and not attention & kinds
    else:
        assert attention | mlp | {"embed.weight"} <= kinds
    if net.cut.inner:
        assert {"embed.position", "embed.token", "k.bias"} <= kinds and "conv.weight" not in kinds


def test_probe_layers_scale_with_depth() -> None:
    assert load_network("vit:width=8,depth=12,heads=1", 2).default_probe_layers() == (
        "block3.attention",
        "block6.mlp",
        "block11.attention",
    )
    assert network("resnet18").default_probe_layers() == ("block1", "block2", "block3")


def test_activations_are_those_of_the_layers(net: VisionNetwork) -> None:
    if not net.blocks:
        return
    train_images, names = images(net), net.default_probe_layers()
    found = net.activations(train_images, [*names, "block0"])
    assert set(found) == {*names, "block0"}
    entering = net.features(train_images, 0, 1)  # what leaves block 0
    mean = entering.mean(1) if entering.ndim == 3 else entering.mean((2, 3))
    torch.testing.assert_close(found["block0"], mean)
    assert all(len(module._forward_hooks) == 0 for module in net.modules())


def test_attention_probe_is_the_attention_branch() -> None:
    net = network("vit")
    block: Any = net.blocks[1]
    tokens = net.features(images(net), 0, 1)
    branch, _ = block.attention(block.layernorm_before(tokens))
    torch.testing.assert_close(net.activations(images(net), ["block1.attention"])["block1.attention"], branch.mean(1))
    for wrong in ("block2.attention", "blocks1", "block0.norm", "block0.attention.q"):
        with raises("E-MODELS-PROBE-LAYER"):
            net.layer(wrong)
    with raises("E-MODELS-PROBE-LAYER"):
        network("resnet18").layer("block0.attention")


def test_dropout_draws_from_its_own_generator() -> None:
    net = load_network("tiny", 5, dropout=0.5).train()
    train_images, state = images(net, 64), torch.get_rng_state()
    with raises("E-MODELS-DROPOUT-GENERATOR"):
        net(train_images)
    logits = []
    for seed in (1, 1, 2):
        net.dropout.generator = torch_stream(seed, "dropout")
        logits.append(net(train_images))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(net.eval()(train_images), net(train_images))


def test_dropout_keeps_the_mean() -> None:
    layer = Dropout(0.3)
    layer.generator = torch_stream(0, "dropout")
    dropped = layer(torch.ones(100_000))
    assert abs(float(dropped.mean()) - 1) < 0.01
    assert abs(float((dropped == 0).float().mean()) - 0.3) < 0.01
    with raises("E-MODELS-DROPOUT", dropout=1.0):
        Dropout(1.0)


def test_networks_can_be_copied_and_sent(net: VisionNetwork) -> None:
    net.dropout.generator = torch_stream(0, "dropout")
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(images(net)), net(images(net)))
        assert twin.head.weight.data_ptr() != net.head.weight.data_ptr()


def test_torch_func_can_differentiate_the_network() -> None:
    from torch.func import functional_call, grad, vmap

    net = network("vit")
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(values: dict[str, torch.Tensor], train_images: torch.Tensor) -> torch.Tensor:
        return functional_call(net, values, (train_images[None],)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(weights, images(net, 3))
    net.zero_grad()
    net(images(net, 3)).square().sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(each[name].sum(0), parameter.grad, rtol=1e-3, atol=1e-5)
