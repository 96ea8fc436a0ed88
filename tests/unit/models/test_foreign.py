"""A user's own module as a network: the same logits, entries that compose, and what is refused or said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from torch import Tensor, nn

from fedgraft.client.context import seed_random_layers
from fedgraft.core.network_digest import digest
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.models import VisionNetwork, module, original

torch.set_num_threads(1)
BLOCKS = ("layer1", "layer2", "layer3")


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, 2), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)) + self.shortcut(x))


class Own(nn.Module):
    """Like torchvision's: a stem, three blocks, something between two of them, a tail and a head called fc."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.layer1, self.layer2, self.layer3 = Residual(4, 6), Residual(6, 8), Residual(8, 8)
        self.between = nn.Conv2d(6, 6, 1)
        self.norm, self.drop, self.fc = nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(torch.relu(self.bn1(self.conv1(x))) * self.scale)
        x = self.layer3(self.layer2(self.between(x)))
        return self.fc(self.drop(self.norm(x.mean((2, 3)))))


@pytest.fixture
def own() -> Own:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Own()
        with torch.no_grad():
            net.train()(torch.randn(8, 3, 16, 16))  # statistics that are not 0 and 1
    return net.eval()


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch_stream(0, "test"))


@torch.no_grad()
@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_it_answers_as_the_module_does(own: Own, blocks: Any) -> None:
    before = copy.deepcopy(own.state_dict())
    net = module(own, blocks=blocks, image_size=16, mean=(0.1, 0.2, 0.3))
    assert isinstance(net, Network) and isinstance(net, VisionNetwork)
    assert (net.depth, net.width, net.classes, net.mean) == (3 if blocks else 1, 8, 5, (0.1, 0.2, 0.3))
    assert torch.equal(net(images()), own(images()))
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    net.head.weight.mul_(2)
    net.get_parameter("backbone.conv1.weight").mul_(2)
    assert torch.equal(original(net)(images()), net(images())) and isinstance(original(net), Own)
    assert not torch.equal(own(images()), net(images()))


@torch.no_grad()
def test_entries_compose_with_any_batch(own: Own) -> None:
    net = module(own, blocks=BLOCKS, image_size=16)
    for count in (1, 7):
        for entry in range(4):
            held = net.features(images(count), 0, entry)
            assert torch.equal(net(held, entry), net(images(count)))
            for until in range(entry, 4):
                assert torch.equal(net.features(held, entry, until), net.features(images(count), 0, until))
    assert not any(layer._forward_pre_hooks for layer in net.modules())


def test_blocks_of_tensors_agree_with_autograd(own: Own) -> None:
    net = module(own, blocks=BLOCKS, image_size=16)
    for entry in range(4):
        net.zero_grad()
        net(net.features(images(), 0, entry).detach(), entry).square().sum().backward()
        for name, parameter in net.named_parameters():
            behind = net.block_of(name) > entry if entry == net.depth else net.block_of(name) >= entry or entry == 0
            assert (parameter.grad is not None and bool(parameter.grad.any())) == behind, (name, entry)
    named = {"scale": -1, "bn1.running_var": -1, "between.weight": 0, "layer3.bn.running_mean": 2, "norm.bias": 3}
    assert {name: net.block_of(f"backbone.{name}") for name in named} == named
    kinds = {
        name: net.layer_kind(f"backbone.{name}") for name in ("layer1.shortcut.0.weight", "layer1.shortcut.1.bias")
    }
    assert list(kinds.values()) == ["conv.weight", "norm.bias"]


def test_nothing_before_an_entry_learns_from_the_black_image(own: Own) -> None:
    net = module(own, blocks=BLOCKS, image_size=16).train()
    seed_random_layers(net, torch_stream(0, "dropout"))
    before = {name: value.clone() for name, value in net.named_buffers()}
    net(torch.randn(4, 6, 8, 8, generator=torch_stream(1, "held")), 1)
    for name, value in net.named_buffers():
        assert torch.equal(value, before[name]) == (net.block_of(name) < 1), name
    assert all(layer.training for layer in net.modules())


def test_its_dropout_draws_from_the_given_stream(own: Own) -> None:
    net, state = module(own, image_size=16).train(), torch.get_rng_state()
    with raises("E-MODELS-DROPOUT-GENERATOR"):
        net(images())
    seed_random_layers(net, torch_stream(0, "dropout"))
    assert not torch.equal(net(images()), net(images()))
    assert torch.equal(torch.get_rng_state(), state)


def test_lists_of_blocks_probes_and_digests() -> None:
    body = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), body, nn.Linear(12, 2, bias=False))
    net, whole = (module(plain, "3", blocks, image_size=4) for blocks in ("2", None))
    pixels = torch.randn(2, 3, 4, 4, generator=torch_stream(0, "x"))
    assert torch.equal(net(pixels), plain(pixels)) and net.depth == 3
    assert "no bias" in net.notes[0] and not net.head.bias.any()
    assert "counts as one block" in whole.notes[0]
    assert set(net.activations(pixels, net.default_probe_layers())) == {"block0", "block1", "block2"}
    assert digest(net, 1) != digest(net, 2) and digest(net) == digest(copy.deepcopy(net))
    body[0] = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
    body[0].load_state_dict(net.blocks[0].state_dict())
    assert digest(module(plain, "3", image_size=4)) != digest(whole)  # the same tensors, another function


class Softmax(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class Skipping(Own):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        first = self.between(self.layer1(x))
        skipped = nn.functional.pad(first.mean((2, 3)), (0, 2))
        return self.fc(self.norm(self.layer3(self.layer2(first)).mean((2, 3)) + skipped))


class Random(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1, self.training))


@pytest.mark.parametrize(
    ("kind", "head", "blocks", "size", "code"),
    [
        (Own, "classifier", None, 16, "E-MODELS-HEAD"),
        (Own, "fc", ("layer1", "layer9"), 16, "E-MODELS-BLOCK"),
        (Softmax, "fc", None, 16, "E-MODELS-AFTER-HEAD"),
        (Skipping, "fc", BLOCKS, 16, "E-MODELS-BLOCK-ENTRY"),
        (Own, "fc", ("layer2", "layer1"), 16, "E-MODELS-BLOCK-ORDER"),
        (Random, "fc", None, 16, "E-MODELS-RANDOM"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind: type[Own], head: str, blocks: Any, size: int, code: str) -> None:
    state = torch.get_rng_state()
    net = kind().eval()
    torch.set_rng_state(state)
    with raises(code):
        module(net, head, blocks, image_size=size)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_wrong_size_and_other_random_layers_are_said() -> None:
    flat = nn.Sequential(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(48, 2))
    with raises("E-MODELS-FOREIGN-SIZE", size=8):
        module(flat, "2", image_size=8)
    assert "'0' (Dropout2d) is off" in module(flat, "2", image_size=4).notes[1]
    with raises("E-MODELS-NOT-FOREIGN"):
        from fedgraft.models import model

        original(model("tiny", 2))
