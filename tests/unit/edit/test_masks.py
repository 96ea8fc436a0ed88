"""Masks: exact budgets whatever the ties, directions, algebra, files, scopes; and planted bugs that must be caught."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.core.roles import role
from fedgraft.edit.choose import STRATEGIES, choose, magnitude_scores, random_scores, strategy_named
from fedgraft.edit.masks import Mask, density_by, intersection, jaccard, overlap, union, vote
from fedgraft.edit.scope import resolve

torch.set_num_threads(1)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def uniform(*shapes: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    return {f"t{i}": torch.rand(s, generator=torch_stream(seed, "scores", i)) for i, s in enumerate(shapes)}


# ---- choosing ----

few = st.sampled_from([0.0, -0.0, 1.0, 1e-30, 2.5, float("inf"), -float("inf")])


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.lists(few, min_size=1, max_size=12), min_size=1, max_size=5),
    density=st.floats(0, 1),
    largest=st.booleans(),
    threshold=st.sampled_from(["global", "per_tensor", "per_block"]),
    order=st.sampled_from(["index", "hash"]),
)
def test_exactly_k_whatever_the_ties(
    values: list[list[float]], density: float, largest: bool, threshold: str, order: str
) -> None:
    scores = {f"t{i}": torch.tensor(row) for i, row in enumerate(values)}
    total = sum(map(len, values))
    mask = choose(
        scores, density, largest=largest, threshold=threshold, block_of=lambda n: n in ("t0", "t2"), order=order
    )
    assert mask.count == round(density * total) and mask.total == total
    if threshold == "global" and 0 < mask.count < total:
        inside, outside = flat(scores)[flat(mask)], flat(scores)[~flat(mask)]
        assert inside.min() >= outside.max() if largest else inside.max() <= outside.min()
    if threshold == "per_tensor":
        assert all(abs(mask[n].sum() - density * len(t)) <= 1.5 for n, t in scores.items())


def test_all_zero_scores_and_planted_quantile_overshoots() -> None:
    scores = {"a": torch.zeros(50), "b": torch.cat([torch.zeros(40), torch.ones(10)])}
    assert choose(scores, 0.1).count == 10
    assert choose(scores, 0.95, largest=True).count == 95
    by_quantile = sum(int((t <= torch.quantile(flat(scores), 0.1)).sum()) for t in scores.values())
    assert by_quantile == 90  # what a comparison with the quantile would have trained


def test_matches_a_sort() -> None:
    scores = uniform((13, 7), (40,), (3, 3, 3))
    for largest in (False, True):
        reference = torch.zeros(158, dtype=torch.bool)
        reference[flat(scores).argsort(descending=largest)[:37]] = True
        assert torch.equal(flat(choose(scores, k=37, largest=largest)), reference)


def test_sparsity_is_the_fraction_frozen() -> None:
    mask = choose(uniform((100,)), density=0.2)
    assert (mask.density, mask.sparsity, mask.count) == (0.2, 0.8, 20)


def test_order_of_names_and_ties_play_no_part() -> None:
    """Keys are names. A choice keyed by position would change when parameters are listed in another order."""
    scores = {f"t{i}": torch.randint(0, 3, (20,), generator=torch_stream(1, "x", i)).float() for i in range(4)}
    turned = dict(reversed(scores.items()))
    for order in ("index", "hash"):
        assert choose(scores, 0.3, order=order).digest == choose(turned, 0.3, order=order).digest
    one, two = random_scores(scores, 5), random_scores(turned, 5)
    assert all(torch.equal(one[n], two[n]) for n in scores)

    def by_position(scores: dict[str, Tensor]) -> Mask:  # the planted bug
        joined = torch.cat(list(scores.values()))
        chosen = torch.zeros_like(joined, dtype=torch.bool)
        chosen[joined.argsort(stable=True)[:24]] = True
        return Mask(dict(zip(scores, chosen.split(20), strict=True)))

    assert by_position(scores).digest != by_position(turned).digest


def test_index_order_fills_by_position_and_hash_spreads() -> None:
    scores = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    by_index = choose(scores, k=500)
    assert by_index["a"][:500].all() and by_index.count == 500
    by_hash = choose(scores, k=500, order="hash")
    assert 200 < int(by_hash["a"].sum()) < 300
    half = int(by_hash["a"][:500].sum())
    assert 80 < half < 170
    alone = choose({"a": scores["a"]}, k=500, order="hash")  # the same positions rank first in any company
    assert bool((by_hash["a"] <= alone["a"]).all())


def test_floor_keeps_the_budget() -> None:
    scores = {"low": torch.rand(900) * 0.1, "high": 1 + torch.rand(100), "tiny": 5 + torch.rand(3)}
    assert int(choose(scores, k=90)["high"].sum()) == 0
    mask = choose(scores, k=90, floor=0.05)
    assert mask.count == 90
    assert [int(mask[n].sum()) for n in ("high", "low", "tiny")] == [5, 84, 1]
    smallest = scores["high"].argsort()[:5]
    assert mask["high"][smallest].all()
    with raises("E-EDIT-FLOOR"):
        choose(scores, k=90, floor=0.2)


def test_per_tensor_and_per_block_share_out_by_size() -> None:
    scores = uniform((100,), (50,), (7,), (143,))
    mask = choose(scores, 0.1, threshold="per_tensor")
    assert mask.count == 30
    assert density_by(mask, str) == pytest.approx({"t0": 0.1, "t1": 0.1, "t2": 1 / 7, "t3": 14 / 143})
    blocks = {"t0": 0, "t1": 0, "t2": 1, "t3": 1}
    mask = choose(scores, 0.2, threshold="per_block", block_of=blocks.__getitem__)
    assert density_by(mask, blocks.__getitem__) == {0: 0.2, 1: 0.2}
    with raises("E-EDIT-BLOCK-OF"):
        choose(scores, 0.2, threshold="per_block")


def test_among_is_never_left_even_for_better_scores() -> None:
    scores = {"a": torch.tensor([0.0, 0.0, 5.0, torch.inf]), "b": torch.tensor([torch.inf, 1.0])}
    among = {"a": torch.tensor([False, False, True, True]), "b": torch.tensor([True, False])}
    mask = choose(scores, k=3, among=among)
    assert all(torch.equal(mask[n], among[n]) for n in among)
    with raises("E-EDIT-ELIGIBLE"):
        choose(scores, k=4, among=among)
    # per tensor: the share of 'b' (2 of 6) is limited by its room, and the rest goes elsewhere
    assert choose(scores, k=3, among=among, threshold="per_tensor").count == 3


def test_refusals() -> None:
    scores = uniform((4,))
    with raises("E-EDIT-SCORES-NAN"):
        choose({"t0": torch.tensor([1.0, torch.nan])}, 0.5)
    for options in ({}, {"density": 0.5, "k": 2}, {"density": 1.5}, {"k": 5}, {"k": -1}):
        with pytest.raises(FedgraftError):
            choose(scores, **options)
    with raises("E-EDIT-THRESHOLD"):
        choose(scores, 0.5, threshold="layer")
    with raises("E-EDIT-ORDER"):
        choose(scores, 0.5, order="luck")
    with raises("E-EDIT-NO-SCORES"):
        choose({}, 0.5)
    with raises("E-CORE-UNKNOWN-NAME"):
        strategy_named("important")


@pytest.mark.slow
def test_above_two_to_the_24() -> None:
    """Nearly as many coordinates as ViT-S/16 has; torch.quantile refuses this size."""
    scores = {f"t{i}": torch.rand(900_000, generator=torch_stream(0, "big", i)) for i in range(19)}
    assert sum(t.numel() for t in scores.values()) > 2**24
    mask = choose(scores, 0.1)
    assert mask.count == 1_710_000
    assert flat(scores)[flat(mask)].max() <= flat(scores)[~flat(mask)].min()
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(flat(scores), 0.1)
    zeros = {n: torch.zeros_like(t) for n, t in scores.items()}
    assert choose(zeros, 0.1).count == 1_710_000


def test_strategies_train_what_their_names_say() -> None:
    weights = {"w": torch.tensor([-3.0, 0.1, 2.0, -0.2])}
    trained = {
        name: choose(magnitude_scores(weights), k=2, largest=strategy_named(name).largest)["w"].tolist()
        for name in ("lowest_magnitude", "highest_magnitude")
    }
    assert trained["lowest_magnitude"] == [False, True, False, True]
    assert trained["highest_magnitude"] == [True, False, True, False]
    assert {n: (s.scores, s.largest) for n, s in ((n, strategy_named(n)) for n in STRATEGIES)} == {
        "least_sensitive": (None, False),  # the clients' Fisher scores
        "most_sensitive": (None, True),
        "lowest_magnitude": (magnitude_scores, False),
        "highest_magnitude": (magnitude_scores, True),
        "random": (random_scores, False),
        "saliency": (None, True),
    }
    mask = choose(random_scores({"w": torch.empty(10000)}, 3), 0.1)
    assert 70 < int(mask["w"][:1000].sum()) < 130
    assert mask.digest != choose(random_scores({"w": torch.empty(10000)}, 4), 0.1).digest


# ---- the object ----


def test_mask_survives_its_file_and_damage_is_refused(tmp_path: Path) -> None:
    mask = choose(uniform((13, 7), (40,), (3, 1, 3)), 0.3)
    path = tmp_path / "mask.safetensors"
    mask.save(path)
    back = Mask.load(path)
    assert back.digest == mask.digest and back.shapes == mask.shapes
    assert all(torch.equal(back[n], mask[n]) for n in mask)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0b1000_0000
    path.write_bytes(raw)
    with raises("E-EDIT-MASK-DAMAGED"):
        Mask.load(path)
    path.write_bytes(b"hello")
    with raises("E-EDIT-MASK-FILE"):
        Mask.load(path)
    with raises("E-EDIT-MASK-FILE"):
        Mask.load(tmp_path / "absent")


def test_bits_are_an_eighth_of_a_byte_and_match_numpy() -> None:
    mask = choose(uniform((1001,)), 0.5)
    assert mask.bits().numpy().tobytes() == np.packbits(mask["t0"].numpy()).tobytes()
    assert len(mask.bits()) == 126
    assert Mask.from_bits(mask.bits(), mask.shapes).digest == mask.digest
    with raises("E-EDIT-MASK-BITS"):
        Mask.from_bits(mask.bits()[1:], mask.shapes)


def test_digest_sees_names_shapes_and_bits() -> None:
    a = Mask({"a": torch.tensor([[True, False]])})
    others = [
        {"b": a["a"]},
        {"a": a["a"].view(2, 1)},
        {"a": ~a["a"]},
        {"a": a["a"], "c": torch.zeros(0, dtype=torch.bool)},
    ]
    assert len({a, *(Mask(o) for o in others)}) == 5
    assert a == Mask({"a": a["a"].clone()}) and a != a["a"]
    assert Mask({"x": a["a"], "a": a["a"]}).digest == Mask({"a": a["a"], "x": a["a"]}).digest
    with raises("E-EDIT-MASK-TYPE"):
        Mask({"a": torch.ones(2)})


def test_algebra() -> None:
    rows = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]]
    masks = [Mask({"a": torch.tensor(row).bool()}) for row in rows]
    assert union(masks)["a"].tolist() == [True, True, True, False]
    assert intersection(masks)["a"].tolist() == [True, False, False, False]
    assert vote(masks, 2)["a"].tolist() == [True, True, False, False]
    assert jaccard(masks[0], masks[1]) == 1 / 3
    assert overlap(masks).tolist() == [[1, 1 / 3, 1], [1 / 3, 1, 1 / 3], [1, 1 / 3, 1]]
    nothing = Mask({"a": torch.zeros(4, dtype=torch.bool)})
    assert jaccard(nothing, nothing) == 1 and jaccard(nothing, masks[0]) == 0
    with raises("E-EDIT-MASKS-DIFFER"):
        union([masks[0], Mask({"b": masks[0]["a"]})])
    with raises("E-EDIT-NO-MASKS"):
        union([])


def test_independent_masks_overlap_as_expected() -> None:
    """Union density of m independent masks is 1-(1-ρ)^m: 0.65 for ten at 0.1."""
    masks = [choose(random_scores({"a": torch.empty(20000)}, seed), 0.1) for seed in range(10)]
    assert union(masks).density == pytest.approx(1 - 0.9**10, abs=0.01)


def test_mask_fits_the_edit_space() -> None:
    from fedgraft.core.space import masked

    network = torch.nn.Linear(6, 5)
    mask = choose(magnitude_scores(dict(network.named_parameters())), 0.4)
    space = masked(network, mask)  # type: ignore[arg-type]
    assert space.trained == mask.count == 14


# ---- scopes ----

SHAPES = {
    "backbone.embeddings.cls_token": (1, 1, 4),
    "backbone.embeddings.patch_embeddings.projection.weight": (4, 3, 2, 2),
    "backbone.layers.0.attention.q_proj.weight": (4, 4),
    "backbone.layers.0.attention.k_proj.bias": (4,),
    "backbone.layers.0.attention.v_proj.weight": (4, 4),
    "backbone.layers.0.attention.o_proj.weight": (4, 4),
    "backbone.layers.0.layernorm_before.weight": (4,),
    "backbone.layers.0.mlp.fc1.weight": (8, 4),
    "backbone.layers.0.mlp.fc1.bias": (8,),
    "backbone.encoder.layer.11.attention.attention.query.weight": (4, 4),
    "backbone.blocks.1.attn.qkv.weight": (12, 4),
    "backbone.blocks.1.attn.qkv.bias": (12,),
    "backbone.layernorm.weight": (4,),
    "head.weight": (3, 4),
    "head.bias": (3,),
}


def short(names: tuple[str, ...]) -> list[str]:
    return [name.removeprefix("backbone.") for name in names]


def test_words_mean_what_they_say() -> None:
    assert short(resolve(SHAPES, ["qk"]).maskable) == [
        "layers.0.attention.q_proj.weight",
        "layers.0.attention.k_proj.bias",
        "encoder.layer.11.attention.attention.query.weight",
        "blocks.1.attn.qkv.weight",
        "blocks.1.attn.qkv.bias",
    ]
    assert short(resolve(SHAPES, ["norm"]).maskable) == ["layers.0.layernorm_before.weight", "layernorm.weight"]
    assert short(resolve(SHAPES, ["mlp"]).maskable) == ["layers.0.mlp.fc1.weight", "layers.0.mlp.fc1.bias"]
    assert short(resolve(SHAPES, ["head"]).maskable) == ["head.weight", "head.bias"]
    assert len(resolve(SHAPES, ["attention"]).maskable) == 7
    assert short(resolve(SHAPES, ["*.layers.0.*bias"]).maskable) == [
        "layers.0.attention.k_proj.bias",
        "layers.0.mlp.fc1.bias",
    ]
    default = resolve(SHAPES)
    assert short(default.frozen) == [
        "embeddings.cls_token",
        "embeddings.patch_embeddings.projection.weight",
        "head.weight",
        "head.bias",
    ]
    assert not default.rows


def test_fused_qkv_is_maskable_in_its_first_two_thirds() -> None:
    scope = resolve(SHAPES, ["qk"])
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    cut = scope.restrict(tensors)
    assert cut["backbone.blocks.1.attn.qkv.weight"].shape == (8, 4)
    mask = scope.expand(choose(cut, 1.0))
    assert mask["backbone.blocks.1.attn.qkv.weight"].sum(1).tolist() == [4] * 8 + [0] * 4
    assert mask["backbone.blocks.1.attn.qkv.bias"].tolist() == [True] * 8 + [False] * 4
    assert not resolve(SHAPES, ["qk", "attention"]).rows  # asked for as attention, V belongs to it


def test_excluded_is_frozen_and_whitelisted_is_dense_and_counted() -> None:
    scope = resolve(SHAPES, exclude=["backbone*bias", "norm"], whitelist=["head"])
    assert not any(n.endswith("bias") for n in scope.maskable) and scope.dense == ("head.weight", "head.bias")
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    cut = scope.restrict(tensors)
    chosen = choose(cut, 0.25)
    mask = scope.expand(chosen)
    assert chosen.density == 0.25
    assert mask.count == chosen.count + 15 and mask.total == chosen.total + 15
    assert mask["head.weight"].all() and "backbone.layernorm.weight" not in mask
    assert scope.density(mask) == mask.count / sum(torch.Size(s).numel() for s in SHAPES.values())


def test_scope_refusals() -> None:
    with raises("E-EDIT-SCOPE-PATTERN"):
        resolve(SHAPES, ["qkk"])
    with raises("E-EDIT-SCOPE-BOTH"):
        resolve(SHAPES, exclude=["head"], whitelist=["head.bias"])
    with raises("E-EDIT-SCOPE-EMPTY"):
        resolve(SHAPES, ["head"], exclude=["head"])
    with raises("E-EDIT-SCOPE-TENSOR"):
        resolve(SHAPES, ["head"]).restrict({})


def test_kinds() -> None:
    kinds = [role(name) for name in SHAPES]
    assert kinds == [
        "embed",
        "embed",
        "q",
        "k",
        "v",
        "proj",
        "norm",
        "fc1",
        "fc1",
        "q",
        "qkv",
        "qkv",
        "norm",
        "head",
        "head",
    ]
    mask = Mask({"backbone.layers.0.mlp.fc1.weight": torch.ones(4).bool(), "head.bias": torch.zeros(2).bool()})
    assert density_by(mask, role) == {"fc1": 1.0, "head": 0.0}
