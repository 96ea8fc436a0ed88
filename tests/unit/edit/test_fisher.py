"""Per-sample squared gradients against torch.func and a batch-of-one loop, and variants that must be caught."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgraft.core.rng import torch_stream
from fedgraft.edit.fisher import ESTIMATORS, batch_gradient, estimate_fisher

torch.set_num_threads(1)
Sums = dict[str, Tensor]


class TinyViT(nn.Module):
    """A transformers ViT with a head, called as the contract says."""

    def __init__(self, dropout: float = 0.0, size: int = 16) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTModel

        config = ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.backbone = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(16, 5)
        self.resize = size != 16

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        if entry == 2:
            return self.head(inputs)
        out = self.backbone(inputs, interpolate_pos_encoding=self.resize).last_hidden_state
        return self.head(out[:, 0])


class TinyConv(nn.Module):
    """Strides, padding, groups, in-place activations, batch and group norms, a token mixer and loose parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.two = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.group = nn.GroupNorm(2, 8)
        self.same = nn.Conv2d(8, 6, 3, padding="same")
        self.scale = nn.Parameter(torch.rand(6, 1, 1))  # loose, in the root module
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.plain = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        x = self.act(self.norm(self.one(inputs)))
        x = self.same(F.gelu(self.group(self.two(x)))) * self.scale
        x = x.flatten(2).transpose(1, 2)  # (B, T, 6)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.plain(x.mean(1)))


def randomised(network: nn.Module) -> nn.Module:
    """Every parameter and statistic away from its special initial value."""
    draw = torch_stream(3, "weights")
    with torch.no_grad():
        for tensor in [*network.parameters(), *(b for b in network.buffers() if b.is_floating_point())]:
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=draw)).abs_() if tensor.ndim == 1 else tensor.mul_(
                1.5
            )
    return network


def images(count: int, size: int = 16, classes: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch_stream(0, "images")
    inputs = torch.randn(count, 3, size, size, generator=draw)
    return inputs, torch.randint(0, classes, (count,), generator=draw)


def by_loop(network: nn.Module, inputs: Tensor, targets: Tensor, reduction: Callable[[Tensor], Tensor]) -> Sums:
    """One backward pass per sample: the plainest reference."""
    network = copy.deepcopy(network).eval()
    sums = {n: torch.zeros_like(p) for n, p in network.named_parameters()}
    for i in range(len(inputs)):
        network.zero_grad()
        reduction(F.cross_entropy(network(inputs[i : i + 1]), targets[i : i + 1], reduction="none")).backward()
        for name, parameter in network.named_parameters():
            sums[name] += parameter.grad**2
    return sums


def by_vmap(network: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
    network = copy.deepcopy(network).eval()
    parameters = {n: p.detach() for n, p in network.named_parameters()}

    def loss(values: Sums, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(network, values, (x[None],)), y[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, inputs, targets)
    return {name: g.square().sum(0) for name, g in found.items()}


def same(a: Sums, b: Sums, rtol: float = 1e-5) -> bool:
    """Equal up to rounding; sums that are zero in exact arithmetic are compared on the scale of their tensor's kin."""
    level = torch.cat([t.reshape(-1) for t in b.values()]).mean().item()
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol, rtol * 1e-3 * level) for n in b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for fused attention
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=["single", "double"])
@pytest.mark.parametrize("build", [TinyViT, lambda: TinyViT(size=24), TinyConv], ids=["vit", "resized", "conv"])
def test_hooks_equal_loop_and_vmap(build: Callable[[], nn.Module], dtype: torch.dtype, rtol: float) -> None:
    network = randomised(build()).to(dtype)
    inputs, targets = images(7, 24 if getattr(network, "resize", False) else 16)
    inputs = inputs.to(dtype)
    batches = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:], 0)]
    scores = estimate_fisher(network, batches, "true")
    assert scores.samples == 7 and all(t.dtype == dtype for t in scores.tensors.values())
    loop = by_loop(network, inputs, targets, torch.sum)
    assert same(dict(scores.tensors), loop, rtol)
    assert all(t.max() > 0 for t in loop.values())  # every parameter takes part in the comparison
    if isinstance(network, TinyConv):
        network.act.inplace = False  # vmap and in-place do not mix
    if not getattr(network, "resize", False):
        assert same(dict(scores.tensors), by_vmap(network, inputs, targets), rtol)


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize("build", [TinyViT, TinyConv])
def test_pieces_of_any_size_give_the_same_sums(
    build: Callable[[], nn.Module], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers are taken one sample at a time, smaller ones a few at a time, tiny ones all at once."""
    from fedgraft.edit import layer_rules

    network = randomised(build()).double()
    inputs, targets = images(7)
    batches = [(inputs.double(), targets)]
    whole = estimate_fisher(network, batches, "true").tensors
    monkeypatch.setattr(layer_rules, "_PIECE", piece)
    assert same(dict(estimate_fisher(network, batches, "true").tensors), dict(whole), 1e-11)


def test_planted_mean_reduction_is_caught() -> None:
    """A mean over the batch before squaring, or a loss divided by B, is not the per-sample sum."""
    network = randomised(TinyViT())
    inputs, targets = images(6)
    right = by_loop(network, inputs, targets, torch.sum)
    assert same(right, dict(estimate_fisher(network, [(inputs, targets)], "true").tensors))
    assert not same({n: t / 36 for n, t in right.items()}, right)  # δ of a mean-reduced loss
    assert not same(dict(batch_gradient(network, [(inputs, targets)]).tensors), right)


def test_planted_token_shortcut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """(δ²)ᵀ(x²) is right for the head, which sees one token, and wrong for layers that see several."""
    from fedgraft.edit import layer_rules

    def shortcut(total: Tensor, left: Tensor, right: Tensor) -> None:
        total.add_(torch.einsum("bot,bti->oi", left**2, right**2))

    network = randomised(TinyViT())
    inputs, targets = images(6)
    right = by_loop(network, inputs, targets, torch.sum)
    monkeypatch.setattr(layer_rules, "_add_products", shortcut)
    wrong = dict(estimate_fisher(network, [(inputs, targets)], "true").tensors)
    assert torch.allclose(wrong["head.weight"], right["head.weight"], 1e-5)
    name = "backbone.layers.0.mlp.fc1.weight"
    assert not torch.allclose(wrong[name], right[name], 0.1)


def test_eval_mode_whatever_the_flag_and_planted_train_mode_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    network = randomised(TinyViT(dropout=0.5)).train()
    inputs, targets = images(6)
    right = by_loop(network, inputs, targets, torch.sum)
    assert same(dict(estimate_fisher(network, [(inputs, targets)], "true").tensors), right)
    monkeypatch.setattr(network, "eval", lambda: network)  # the planted bug: eval mode never set
    torch.manual_seed(0)
    assert not same(dict(estimate_fisher(network, [(inputs, targets)], "true").tensors), right)


def test_network_is_left_as_it_was_also_after_an_error() -> None:
    network = TinyConv().train()
    network.norm.eval()
    network.two.weight.requires_grad_(False)
    network.head.weight.grad = torch.ones_like(network.head.weight)
    before = {n: t.clone() for n, t in network.state_dict().items()}
    inputs, targets = images(4)

    def check() -> None:
        assert network.training and not network.norm.training and network.two.training
        assert [n for n, p in network.named_parameters() if not p.requires_grad] == ["two.weight"]
        assert [n for n, p in network.named_parameters() if p.grad is not None] == ["head.weight"]
        assert bool((network.head.weight.grad == 1).all())
        assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())
        assert not any(m._forward_hooks for m in network.modules())

    for estimator in ESTIMATORS.values():
        estimator(network, [(inputs, targets)], "true")
        check()
        with pytest.raises(RuntimeError):
            estimator(network, [(inputs[:, :2], targets)], "true")
        check()


def test_subset_of_names_and_no_work_before_it() -> None:
    network = randomised(TinyViT())
    inputs, targets = images(4)
    everything = estimate_fisher(network, [(inputs, targets)], "true").tensors
    names = ["backbone.layers.1.mlp.fc1.bias", "head.bias"]
    some = estimate_fisher(network, [(inputs, targets)], "true", names).tensors
    assert list(some) == names
    assert all(torch.equal(some[n], everything[n]) for n in names)
    reached: list[str] = []
    network.backbone.layers[0].register_full_backward_hook(lambda *_: reached.append("block 0"))
    estimate_fisher(network, [(inputs.requires_grad_(False), targets)], "true", names)
    assert not reached


def test_entry_and_lambda() -> None:
    """Cached features enter behind the trunk, whose parameters then have gradient zero."""
    network = TinyViT()
    features, targets = torch.randn(6, 16, generator=torch_stream(1, "x")), images(6)[1]
    scores = estimate_fisher(network, [(features, targets, 2)], "true").tensors
    assert all(bool((t == 0).all()) == (not n.startswith("head")) for n, t in scores.items())
    plain = nn.Sequential(network.head)
    found = estimate_fisher(plain, [(features, targets)], "true", call=lambda x, _: plain(x)).tensors
    assert torch.equal(found["0.weight"], scores["head.weight"])


def test_autocast_around_is_switched_off() -> None:
    network = randomised(TinyViT())
    inputs, targets = images(3)
    plain = estimate_fisher(network, [(inputs, targets)], "true").tensors
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cast = estimate_fisher(network, [(inputs, targets)], "true").tensors
    assert all(torch.equal(plain[n], cast[n]) for n in plain)
