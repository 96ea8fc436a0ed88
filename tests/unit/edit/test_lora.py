"""LoRA: adapters in place, merging back, and five ways of combining factors against the dense average of B A."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import tiny
from torch import Tensor, nn

import fedgraft as fg
from fedgraft.client.context import seed_random_layers
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.edit.lora import adapter_layers, attach, detach, initial_a, merge_lora, target_layers
from fedgraft.edit.lora_aggregate import LoraAggregation, LoraLayout, aggregate_lora, lora_layout
from fedgraft.runs.setup import setup_of

peft = pytest.importorskip("peft")
WIDTH, CLASSES = 16, 5
EXACT: tuple[LoraAggregation, ...] = ("frozen_a", "alternate", "stack", "residual")


class TinyViT(nn.Module):
    """A transformers ViT of two blocks under the names the contract asks for; what is not needed here is left out."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTModel

        super().__init__()
        config = ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.backbone = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.depth, self.width, self.classes = 2, WIDTH, CLASSES
        self.label_sets = False

    @property
    def config(self) -> Any:
        """The trunk's configuration, which makes the network look like one of the library's own."""
        return self.backbone.config

    def features(self, inputs: Tensor, entry: int = 0, until: int | None = None) -> Tensor:
        """Class token (B, width)."""
        return self.backbone(pixel_values=inputs).last_hidden_state[:, 0]

    def forward(self, inputs: Tensor, entry: int = 0) -> Tensor:
        """Logits (B, classes)."""
        return self.head(self.features(inputs))

    def block_of(self, name: str) -> int:
        """Block number from the name."""
        if name.startswith("head."):
            return self.depth + 1
        if name.startswith("backbone.layers."):
            return int(name.split(".")[2])
        return self.depth if "layernorm" in name else -1


@pytest.fixture
def network() -> Any:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network: Any = TinyViT().eval()
        for p in network.parameters():  # the default start is tiny; larger weights make mistakes visible
            p.data = torch.randn(p.shape) * 0.3
    return network


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch_stream(0, "images"))


def shake(network: Network, seed: int = 0) -> None:
    """Give B values, as training would."""
    for name, layer in adapter_layers(network).items():
        layer.lora_B["default"].weight.data.normal_(generator=torch_stream(seed, "shake", name))


def bits(network: Network | nn.Module) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in network.named_parameters()}


# --- attaching and merging -------------------------------------------------------------------------------------


def test_a_freshly_adapted_network_computes_the_same_bits_and_stays_a_network(network: Any, images: Tensor) -> None:
    before, features = network(images), network.features(images)
    assert attach(network, 2, 8, ["qkv", "proj", "fc1", "fc2"], seed=1) is network
    assert torch.equal(network(images), before) and torch.equal(network.features(images), features)
    assert network.block_of("backbone.layers.1.attention.q_proj.lora_A.default.weight") == 1
    assert lora_layout(network, "mean").space.first_block(network) == 0
    assert {network.block_of(name) for name in adapter_layers(network)} == {0, 1}


def test_blocks_before_the_first_get_no_adapter(network: Any) -> None:
    attach(network, 2, 8, ["q", "fc2"], seed=1, first_block=1)
    assert {network.block_of(name) for name in adapter_layers(network)} == {1}
    assert lora_layout(network, "mean").space.first_block(network) == 1


def test_a_network_of_the_library_keeps_the_contract_and_its_entries() -> None:
    from fedgraft.models.backbones import load_network

    real = load_network("tiny", classes=3)
    inputs = torch.randn(2, 3, 16, 16, generator=torch_stream(0, "images"))
    with torch.no_grad():
        before, names = real(inputs), list(real.state_dict())
    trained = real(inputs)
    attach(real, 2, 8, ["qkv", "proj", "fc1", "fc2"], seed=1)
    with torch.no_grad():
        assert isinstance(real, Network) and torch.equal(real(inputs), before)
    torch.testing.assert_close(real(inputs), trained)  # where gradients are recorded, sums may be in another order
    assert {real.block_of(part.name) for part in lora_layout(real, "stack").space.buffers} == {0, 1}
    shake(real)
    tuned = real(inputs)
    assert not torch.allclose(tuned, before, atol=1e-3)
    torch.testing.assert_close(real(real.features(inputs, until=1), entry=1), tuned)
    merge_lora(real)
    torch.testing.assert_close(real(inputs), tuned, rtol=1e-5, atol=1e-5)
    assert list(real.state_dict()) == names


def test_adapters_really_reach_the_output(network: Any, images: Tensor) -> None:
    before = network(images)
    for target in ("q", "k", "v", "proj", "fc1", "fc2"):
        attach(network, 2, 8, [target], seed=1)
        shake(network)
        assert not torch.allclose(network(images), before, atol=1e-4), target
        detach(network)


def test_a_is_kaiming_uniform_from_the_seed_and_the_global_generator_is_not_touched(network: Any) -> None:
    state = torch.get_rng_state()
    twins = [attach(copy.deepcopy(network), 4, 8, ["q", "fc2"], seed=s) for s in (1, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    first, second, other = (lora_layout(t, "mean").space.gather(t) for t in twins)
    assert torch.equal(first, second) and not torch.equal(first, other)
    a, b = (
        adapter_layers(twins[0])["backbone.layers.0.mlp.fc2"].__getattr__(f"lora_{x}")["default"].weight for x in "AB"
    )
    assert b.eq(0).all() and a.shape == (4, 32) and a.abs().max() <= 32**-0.5
    # Uniform on (-u, u) has standard deviation u / sqrt(3); nn.init is the independent reference.
    reference = nn.init.kaiming_uniform_(torch.empty(64, 256), a=5**0.5, generator=torch_stream(5, "reference"))
    ours = initial_a((64, 256), 5, "test")
    assert ours.std() == pytest.approx(float(reference.std()), rel=0.02)
    assert ours.abs().max() == pytest.approx(float(reference.abs().max()), rel=0.01)


def test_every_adapter_starts_from_a_draw_of_its_own(network: Any) -> None:
    attach(network, 2, 4.0, ["q", "v"], seed=3)
    starts = [layer.lora_A["default"].weight for layer in adapter_layers(network).values()]
    assert len({start.detach().numpy().tobytes() for start in starts}) == len(starts) == 4


def test_merge_gives_plain_names_the_same_outputs_and_pefts_own_result(network: Any, images: Tensor) -> None:
    plain = bits(network)
    attach(network, 3, 12, ["qkv", "fc1"], seed=1)
    shake(network)
    outputs = network(images)
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "k_proj", "v_proj", "fc1"])
    theirs = peft.get_peft_model(detach(copy.deepcopy(network)).get_submodule("backbone"), config)
    ours, wanted = dict(network.backbone.named_parameters()), dict(theirs.base_model.model.named_parameters())
    assert list(ours) == list(wanted)
    for name, parameter in wanted.items():
        parameter.data.copy_(ours[name].data)
    merged = theirs.merge_and_unload().state_dict()
    merge_lora(network)
    assert list(network.state_dict()) == list(plain) and list(network.backbone.state_dict()) == list(merged)
    assert all(torch.equal(t, merged[name]) for name, t in network.backbone.state_dict().items())
    torch.testing.assert_close(network(images), outputs, rtol=1e-5, atol=1e-5)
    changed = {name for name, value in bits(network).items() if value != plain[name]}
    assert changed == {f"{name}.weight" for name in target_layers(network, ["qkv", "fc1"])}
    assert not hasattr(network, "peft_config") and all(p.requires_grad for p in network.parameters())


def test_detach_returns_the_base_bit_for_bit_and_can_attach_again(network: Any) -> None:
    plain = bits(network)
    attach(network, 2, 4, ["q"], seed=1)
    shake(network)
    assert bits(detach(network)) == plain
    attach(network, 2, 4, ["q"], seed=1)
    assert len(adapter_layers(network)) == 2


def test_merge_of_broken_factors_is_refused_and_changes_nothing(network: Any) -> None:
    attach(network, 2, 4, ["q", "k"], seed=1)
    shake(network)
    list(adapter_layers(network).values())[-1].lora_B["default"].weight.data[0, 0] = float("nan")
    before = bits(network)
    with raises("E-EDIT-LORA-NONFINITE"):
        merge_lora(network)
    assert bits(network) == before


# --- targets and guards ----------------------------------------------------------------------------------------


class Fused(nn.Module):
    """Linear layers named as timm names them."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Module()
        blocks = [
            nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}) for _ in range(depth)
        ]
        self.backbone.blocks = nn.ModuleList(blocks)
        self.backbone.patch = nn.ModuleDict({"proj": nn.Conv2d(3, width, 2)})
        self.head = nn.Linear(width, 3)


def test_targets_by_keyword_and_glob(network: Any) -> None:
    first = "backbone.layers.0.attention."
    assert target_layers(network, ["q"]) == [f"backbone.layers.{i}.attention.q_proj" for i in range(2)]
    assert target_layers(network, ["backbone.layers.0.attention.*"]) == [first + x + "_proj" for x in "qkvo"]
    assert target_layers(network, ["qkv"]) == target_layers(network, ["q", "k", "v"])
    assert target_layers(network, ["v_proj"]) == target_layers(network, ["v"])
    assert len(target_layers(network, ["*"])) == 12  # the head is not among them
    fused: Any = Fused()
    assert len(target_layers(fused, ["qkv"])) == 2 and len(target_layers(fused, ["proj"])) == 2  # no convolution


def test_the_size_of_a_known_configuration() -> None:
    """Rank 8 on fused qkv and proj of a ViT-S: 12 * (8 * 1536 + 8 * 768) = 221,184 factors."""
    fused: Any = attach(Fused(12, 384), 8, 32, ["qkv", "proj"], seed=0)  # type: ignore[arg-type]
    assert lora_layout(fused, "mean").space.trained == 221_184
    assert {layer.scaling for layer in lora_layout(fused, "mean").layers} == {4.0}


@pytest.mark.parametrize(
    ("update", "code"),
    [
        ({"rank": 0}, "E-EDIT-LORA-OPTIONS"),
        ({"alpha": 0.0}, "E-EDIT-LORA-OPTIONS"),
        ({"alpha": float("nan")}, "E-EDIT-LORA-OPTIONS"),
        ({"dropout": 1.0}, "E-EDIT-LORA-OPTIONS"),
        ({"targets": ["q", "zz"]}, "E-EDIT-LORA-TARGET"),
        ({"targets": ["head"]}, "E-EDIT-LORA-TARGET"),
        ({"targets": []}, "E-EDIT-LORA-NO-TARGET"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(network: Any, update: dict[str, Any], code: str) -> None:
    plain = bits(network)
    with raises(code):
        attach(network, **{"rank": 2, "alpha": 4.0, "targets": ["q"], "seed": 0, **update})
    assert bits(network) == plain


WORDS = {
    "factors": ["trainable.kind=lora"],
    "Fed-SB": ["algorithm.name=fedsb"],
    "FlexLoRA": ["algorithm.name=flexlora"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_network_of_convolutions_has_no_place_for_factors(words: list[str]) -> None:
    with raises("E-EDIT-LORA-NO-LINEAR") as caught:
        setup_of(tiny("model.name=resnet18:width=4", *words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [fg.lora, fg.fedsb, fg.flexlora, fg.fedsa_lora, fg.flasc])
def test_a_module_of_ones_own_is_told_which_layers_it_has(make: Any) -> None:
    own = nn.Sequential(OrderedDict(flat=nn.Flatten(), wide=nn.Linear(192, 8), act=nn.ReLU(), fc=nn.Linear(8, 3)))
    made, network = make(), fg.module(own, "fc", image_size=8)
    kind = made.trainable if isinstance(made, fg.Algorithm) else made
    with raises("E-EDIT-LORA-TARGET"):
        kind.check(network)
    replace(kind, targets=("wide",), rank=2, ranks=()).check(network)  # what the sentence says works


def test_cores_that_are_wider_than_a_layer_are_refused_before_anybody_works() -> None:
    with raises("E-EDIT-LORA-RANK"):
        setup_of(tiny("algorithm.name=fedsb", "algorithm.rank=999"))


def test_attaching_twice_and_taking_out_nothing_are_refused(network: Any) -> None:
    for action in (merge_lora, detach, lambda n: lora_layout(n, "mean")):
        with raises("E-EDIT-LORA-NONE"):
            action(network)
    attach(network, 2, 4, ["q"], seed=0)
    with raises("E-EDIT-LORA-TWICE"):
        attach(network, 2, 4, ["k"], seed=0)
    with raises("E-EDIT-LORA-MODE"):
        lora_layout(network, "median")  # type: ignore[arg-type]
    for name in ("nowhere", next(n for n, _ in network.named_parameters() if "lora_A" in n)):
        with raises("E-EDIT-LORA-DENSE"):
            lora_layout(network, "frozen_a", [name])


def test_a_missing_peft_says_which_extra(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises("E-MISSING-EXTRA"):
        attach(network, 2, 4, ["q"], seed=0)


def test_dropout_draws_only_from_the_given_stream(network: Any, images: Tensor) -> None:
    attach(network, 2, 4, ["q", "fc1"], seed=0, dropout=0.4)
    shake(network)
    still = network(images)  # evaluation: the identity
    network.train()
    with raises("E-EDIT-LORA-STREAM"):
        network(images)
    state = torch.get_rng_state()
    draws = []
    for seed in (1, 1, 2):
        seed_random_layers(network, torch_stream(seed, "dropout"))
        draws.append(network(images))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    copy.deepcopy(network)  # a generator inside does not stop a network from being copied
    assert torch.equal(network.eval()(images), still)
    layer = adapter_layers(network)["backbone.layers.0.mlp.fc1"].lora_dropout["default"].train()
    layer.generator = torch_stream(9, "dropout")
    dropped = layer(torch.ones(200, 200))
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.6]) and dropped.mean() == pytest.approx(1, abs=0.02)


# --- combining: every rule against the dense average -----------------------------------------------------------


def effective(network: Network, layout: LoraLayout, vector: Tensor) -> dict[str, Tensor]:
    """Dense weights that a vector stands for, by peft's own arithmetic, float64."""
    layout.space.scatter(vector, network)
    layers = adapter_layers(network).items()
    return {n: m.base_layer.weight.data.double() + m.get_delta_weight("default").data.double() for n, m in layers}


def train(layout: LoraLayout, vector: Tensor, round: int, client: int) -> Tensor:
    """A stand-in for local training: a random step of the active coordinates, everything else untouched."""
    active = layout.active(round)
    step = torch.zeros(layout.space.trained)
    step[active] = 0.3 * torch.randn(active.stop - active.start, generator=torch_stream(0, "step", round, client))
    return (vector[: layout.space.trained] + step) - vector[: layout.space.trained]


Combine = Callable[[LoraLayout, Tensor, list[Tensor], Sequence[float], Tensor | None], Tensor]


def error(network: Network, mode: LoraAggregation, aggregate: Combine = aggregate_lora, rounds: int = 4) -> float:
    """Largest difference to the dense average over several chained rounds, with unequal weights."""
    layout, weights, worst = lora_layout(network, mode), [5.0, 1.0, 2.0], 0.0
    vector = layout.space.gather(network)
    for round in range(rounds):
        sent = [layout.sent(train(layout, vector, round, k), round) for k in range(3)]
        updates = [layout.received(s, round) for s in sent]
        wanted: dict[str, Tensor] = {}
        for update, weight in zip(updates, weights, strict=True):
            client = vector.clone()
            client[: layout.space.trained] += update
            for name, dense in effective(network, layout, client).items():
                wanted[name] = wanted.get(name, torch.zeros(dense.shape)) + weight / sum(weights) * dense
        fresh = layout.fresh(7, round) if mode == "stack" else None
        vector = aggregate(layout, vector, updates, weights, fresh)
        found = effective(network, layout, vector)
        worst = max(worst, *(float((found[n] - wanted[n]).abs().max()) for n in wanted))
    return worst


@pytest.fixture
def adapted_network(network: Any) -> Network:
    return attach(network, 3, 6, ["q", "fc1", "fc2"], seed=4)  # square, wide and tall layers; scaling 2


@pytest.mark.parametrize("mode", EXACT)
def test_the_exact_rules_equal_the_dense_average_over_chained_rounds(
    adapted_network: Network, mode: LoraAggregation
) -> None:
    assert error(adapted_network, mode) < 1e-5


def test_alternating_rounds_begin_with_b(adapted_network: Network) -> None:
    """While B is zero, A has no gradient: a first round of A would be idle."""
    layout = lora_layout(adapted_network, "alternate")
    for round in range(4):
        moving = layout.active(round)
        names = {part.name for part, begin, end in layout.space.ranges if moving.start <= begin and end <= moving.stop}
        assert {"lora_B" in name for name in names} == {round % 2 == 0}


def test_the_factor_mean_is_off_by_the_known_covariance(adapted_network: Network) -> None:
    assert error(adapted_network, "mean", rounds=1) > 1e-2
    layout = lora_layout(adapted_network, "mean")
    vector = layout.space.gather(adapted_network)
    updates = [train(layout, vector, 0, k) for k in range(2)]
    new = aggregate_lora(layout, vector, updates, [3.0, 1.0])
    torch.testing.assert_close(new, vector + 0.75 * updates[0] + 0.25 * updates[1])
    clients = [effective(adapted_network, layout, vector + c) for c in updates]
    found = effective(adapted_network, layout, new)
    for layer in layout.layers:
        # With shares p and 1-p the error of averaged factors is s p (1-p) (B1-B2)(A1-A2).
        assert layer.a is not None
        b = (updates[0] - updates[1])[layer.b].view(-1, layer.rank).double()
        a = (updates[0] - updates[1])[layer.a].view(layer.rank, -1).double()
        wanted = 0.75 * clients[0][layer.name] + 0.25 * clients[1][layer.name]
        torch.testing.assert_close(wanted - found[layer.name], 2.0 * 0.1875 * b @ a, rtol=1e-4, atol=1e-5)


def _no_scaling(layout: LoraLayout, *rest: Any) -> Tensor:
    bare = tuple(dataclasses.replace(layer, scaling=1.0) for layer in layout.layers)
    return aggregate_lora(dataclasses.replace(layout, layers=bare), *rest)


def _no_weights(layout: LoraLayout, vector: Tensor, updates: list[Tensor], weights: Any, fresh: Any) -> Tensor:
    return aggregate_lora(layout, vector, updates, [1.0] * len(updates), fresh)


def _weights_averaged(layout: LoraLayout, vector: Tensor, updates: list[Tensor], weights: Any, fresh: Any) -> Tensor:
    """Averages the vectors themselves, as one would weights, and forgets the products."""
    new = vector.clone()
    total = sum(weights)
    new[: layout.space.trained] = sum(
        (w / total * (vector[: layout.space.trained] + c) for c, w in zip(updates, weights, strict=True)),
        torch.zeros(layout.space.trained),
    )
    return new


def _no_restart(layout: LoraLayout, vector: Tensor, updates: list[Tensor], weights: Any, fresh: Any) -> Tensor:
    new = aggregate_lora(layout, vector, updates, weights, fresh)
    new[: layout.space.trained] = vector[: layout.space.trained] + updates[0]
    return new


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stack", "residual"])
@pytest.mark.parametrize("broken", [_no_scaling, _no_weights, _weights_averaged, _no_restart])
def test_planted_bugs_are_seen(adapted_network: Network, mode: LoraAggregation, broken: Combine) -> None:
    assert error(adapted_network, mode, broken) > 1e-3


def test_alternating_with_both_factors_moving_is_seen(
    adapted_network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraLayout, "active", lambda self, round: slice(0, self.space.trained))
    assert error(adapted_network, "alternate") > 1e-2


def test_one_client_is_plain_training(adapted_network: Network) -> None:
    for mode in ("mean", "alternate", "stack", "residual"):
        layout = lora_layout(adapted_network, mode)
        vector = layout.space.gather(adapted_network)
        update = layout.received(layout.sent(train(layout, vector, 0, 0), 0), 0)
        alone = vector.clone()
        alone[: layout.space.trained] += update
        wanted = effective(adapted_network, layout, alone)
        fresh = layout.fresh(0, 0) if mode == "stack" else None
        found = effective(adapted_network, layout, aggregate_lora(layout, vector, [update], [9.0], fresh))
        assert all(torch.allclose(found[n], wanted[n], atol=1e-6) for n in wanted)
        layout.space.scatter(vector, adapted_network)


def test_no_change_leaves_every_bit_of_the_base(adapted_network: Network) -> None:
    for mode in ("mean", "frozen_a", "alternate", "stack", "residual"):
        layout = lora_layout(adapted_network, mode)
        vector = layout.space.gather(adapted_network)
        still = [torch.zeros(layout.space.trained)] * 3
        fresh = layout.fresh(0, 0) if mode == "stack" else None
        new = aggregate_lora(layout, vector, still, [1, 2, 3], fresh)
        begin = layout.a_end if mode == "stack" else 0
        assert torch.equal(new[begin:], vector[begin:])


def test_restarts_are_a_function_of_seed_and_round(adapted_network: Network) -> None:
    layout = lora_layout(adapted_network, "stack")
    start = layout.space.gather(adapted_network)[: layout.a_end]
    one, again, other = layout.fresh(1, 0), layout.fresh(1, 0), layout.fresh(1, 1)
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(layout.fresh(4, 0), start)
    vector = layout.space.gather(adapted_network)
    new = aggregate_lora(layout, vector, [train(layout, vector, 0, 0)], [1.0], one)
    assert torch.equal(new[: layout.a_end], one) and new[layout.b_begin : layout.space.trained].eq(0).all()
    with raises("E-EDIT-LORA-FROZEN-A"):
        lora_layout(adapted_network, "frozen_a").fresh(1, 0)


def test_traffic_counts_what_is_trained_and_downloaded(adapted_network: Network) -> None:
    a = 2 * 3 * (16 + 16 + 32)  # blocks * rank * inputs of q, fc1, fc2
    b = 2 * 3 * (16 + 32 + 16)
    w = 2 * (16 * 16 + 16 * 32 + 32 * 16)
    counts = {mode: [lora_layout(adapted_network, mode).traffic(r) for r in (0, 1)] for mode in (*EXACT, "mean")}
    assert counts == {
        "mean": [(a + b, a + b)] * 2,
        "frozen_a": [(b, b)] * 2,
        "alternate": [(a + b, b), (a + b, a)],
        "stack": [(a + b + w, a + b)] * 2,
        "residual": [(a + b + w, a + b)] * 2,
    }


def test_a_head_trained_beside_the_factors_is_averaged_in_every_rule(adapted_network: Network) -> None:
    for mode in ("mean", "frozen_a", "alternate", "stack", "residual"):
        layout = lora_layout(adapted_network, mode, ["head.weight", "head.bias"])
        head = slice(layout.a_end, layout.b_begin)
        assert head.stop - head.start == CLASSES * (WIDTH + 1)
        vector = layout.space.gather(adapted_network)
        for round in (0, 1):
            updates = [train(layout, vector, round, k) for k in (0, 1)]
            assert all(c[head].ne(0).all() for c in updates)
            fresh = layout.fresh(0, 0) if mode == "stack" else None
            new = aggregate_lora(layout, vector, updates, [1.0, 3.0], fresh)
            torch.testing.assert_close(new[head], vector[head] + 0.25 * updates[0][head] + 0.75 * updates[1][head])


@pytest.mark.parametrize(
    ("updates", "weights", "code"),
    [
        ([], [], "E-EDIT-LORA-COUNT"),
        ([0], [1.0, 1.0], "E-EDIT-LORA-COUNT"),
        ([0], [float("nan")], "E-EDIT-LORA-WEIGHTS"),
        ([0, 0], [1.0, -0.5], "E-EDIT-LORA-WEIGHTS"),
        ([0], [0.0], "E-EDIT-LORA-WEIGHTS"),
        ([1], [1.0], "E-EDIT-LORA-UPDATE"),
    ],
)
def test_impossible_sums_are_refused(adapted_network: Network, updates: list[int], weights: Any, code: str) -> None:
    layout = lora_layout(adapted_network, "residual")
    vector = layout.space.gather(adapted_network)
    given = [torch.zeros(layout.space.size if whole else layout.space.trained) for whole in updates]
    with raises(code):
        aggregate_lora(layout, vector, given, weights)


def test_wrong_lengths_are_refused(adapted_network: Network) -> None:
    layout = lora_layout(adapted_network, "alternate")
    vector = layout.space.gather(adapted_network)
    with raises("E-EDIT-LORA-UPDATE"):
        layout.received(vector, 0)
    with raises("E-EDIT-LORA-VECTOR"):
        aggregate_lora(layout, vector[1:], [vector], [1.0])
    stack = lora_layout(adapted_network, "stack")
    with raises("E-EDIT-LORA-FRESH"):
        aggregate_lora(stack, stack.space.gather(adapted_network), [torch.zeros(stack.space.trained)], [1.0])


# --- with the real training step -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "frozen_a", "alternate", "stack", "residual"])
def test_federated_training_moves_the_factors_and_not_one_frozen_bit(
    adapted_network: Network, images: Tensor, mode: LoraAggregation
) -> None:
    layout = lora_layout(adapted_network, mode)
    start = bits(adapted_network)
    vector, labels = layout.space.gather(adapted_network), torch.tensor([0, 1, 2, 3])
    for round in range(3):
        active, updates, tail = layout.active(round), [], vector[layout.space.trained :]
        for client in range(2):
            bound = layout.space.bind(adapted_network)
            bound.load(vector)
            for _ in range(2):
                loss = nn.functional.cross_entropy(adapted_network(images + client), labels)
                loss.backward()
                bound.values[active] -= 0.5 * bound.gradient()[active]
            assert torch.equal(layout.space.gather(adapted_network)[layout.space.trained :], tail)
            updates.append(layout.received((bound.values - vector)[active], round))
        fresh = layout.fresh(0, round) if mode == "stack" else None
        vector = aggregate_lora(layout, vector, updates, [1.0, 1.0], fresh)
    layout.space.scatter(vector, adapted_network)
    end = bits(adapted_network)
    moved = {name for name in end if end[name] != start[name]}
    wanted = {part.name for part in (*layout.space.parts, *layout.space.buffers)}
    assert moved == {n for n in wanted if not (mode == "stack" and ".lora_B." in n)}  # stacking ends with B = 0
    merged = effective(adapted_network, layout, vector)
    merge_lora(adapted_network)
    for name, weight in merged.items():
        torch.testing.assert_close(adapted_network.get_submodule(name).weight.data.double(), weight, rtol=0, atol=1e-6)
