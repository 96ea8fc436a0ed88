"""Calibration modes, merging and adaptive sparsity; each rule beside the planted bug it must tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from tests.support.errors import raises
from torch import Tensor, nn

from fedgraft.core.errors import FedgraftError
from fedgraft.core.rng import torch_stream
from fedgraft.edit.adaptive import AdaptiveSparsity, AdaptiveState
from fedgraft.edit.calibrate import average, calibrate, energy_share, merge_masks, oneshot, progressive, softened
from fedgraft.edit.choose import choose, magnitude_scores, random_scores
from fedgraft.edit.fisher import Scores, estimate_fisher
from fedgraft.edit.masks import Mask, jaccard, union
from fedgraft.edit.scope import resolve

torch.set_num_threads(1)


def network() -> nn.Sequential:
    draw = torch_stream(0, "net")
    net = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) * 0.5)
    return net


def scorer(net: nn.Module, fixed: bool = True) -> Callable[[int], Mapping[str, Tensor]]:
    """Fisher scores on data of its own for every round, or the same for all."""

    def score(round: int) -> Mapping[str, Tensor]:
        draw = torch_stream(1, "data", 0 if fixed else round)
        inputs = torch.randn(32, 8, generator=draw)
        return estimate_fisher(
            net, [(inputs, torch.zeros(32).long())], "rademacher", None, draw, lambda x, _: net(x)
        ).mean()

    return score


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


@pytest.mark.parametrize("strategy", ["least_sensitive", "most_sensitive"])
def test_oneshot_direction_budget_and_energy(strategy: str) -> None:
    score = scorer(network())
    result = calibrate(score, strategy, 0.1)
    total = result.mask.total
    assert result.remaining == (round(0.1 * total),) and result.total == total == 684
    values, chosen = flat(score(1)), flat(result.mask)
    if strategy == "least_sensitive":
        assert values[chosen].max() <= values[~chosen].min() and result.energy < 0.01
    else:
        assert values[chosen].min() >= values[~chosen].max() and result.energy > 0.3
    assert result.energy == pytest.approx(float(values[chosen].sum() / values.sum()), rel=1e-5)


# ---- average ----


def test_average_is_the_mean_of_different_draws() -> None:
    score = scorer(network(), fixed=False)
    result = calibrate(score, "least_sensitive", 0.2, average(3))
    mean = {n: (score(1)[n] + score(2)[n] + score(3)[n]) / 3 for n in score(1)}
    assert result.mask.digest == choose(mean, 0.2).digest
    assert result.mask.digest != calibrate(score, "least_sensitive", 0.2).mask.digest
    assert calibrate(score, "least_sensitive", 0.2, average(1)).mask.digest == choose(score(1), 0.2).digest


def test_average_over_one_fixed_draw_is_refused() -> None:
    with raises("E-EDIT-CALIBRATION-SAME-SCORES"):
        calibrate(scorer(network()), "least_sensitive", 0.2, average(3))


# ---- progressive ----


def recorded(net: nn.Module) -> tuple[Callable[[int], Mapping[str, Tensor]], list[dict[str, Tensor]]]:
    """A scorer that also notes the weights it was asked with."""
    seen: list[dict[str, Tensor]] = []
    inner = scorer(net)

    def score(round: int) -> Mapping[str, Tensor]:
        seen.append({n: p.detach().clone() for n, p in net.named_parameters()})
        return inner(round)

    return score, seen


@pytest.mark.parametrize("strategy", ["least_sensitive", "most_sensitive"])
@pytest.mark.parametrize("options", [{}, {"threshold": "per_tensor"}, {"floor": 0.02, "order": "hash"}])
def test_progressive_keeps_the_schedule_and_restores_the_weights(strategy: str, options: dict[str, object]) -> None:
    net = network()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    score, seen = recorded(net)
    weights = dict(net.named_parameters())
    result = calibrate(score, strategy, 0.1, progressive(4), weights=weights, **options)
    assert result.remaining == tuple(round(684 * 0.1 ** (r / 4)) for r in (1, 2, 3, 4)) == (385, 216, 122, 68)
    assert result.mask.count == 68
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert all(torch.equal(seen[0][n], before[n]) for n in before)  # round 1 scores the network as it is
    last = None
    for r in (1, 2, 3):  # what was scaled in round r was excluded before it, and stays so
        gone = {n: (seen[r][n] != before[n]) for n in before}
        assert sum(int(g.sum()) for g in gone.values()) == 684 - result.remaining[r - 1]
        assert all(torch.equal(seen[r][n][g], before[n][g] * 0.1) for n, g in gone.items())
        assert last is None or all(bool((last[n] <= gone[n]).all()) for n in gone)
        assert not any(bool((result.mask[n] & gone[n]).any()) for n in gone)
        last = gone


def test_planted_compounded_schedule_ends_far_below_the_target() -> None:
    """Multiplying ρ^{r/R} onto what is alive gives ρ^{(R+1)/2}: 0.8 % instead of 20 % for R=5 and ρ=0.2."""
    mode = progressive(5)
    right = [mode.remaining(r, 100_000, 0.2) for r in range(1, 6)]
    assert right == [round(100_000 * 0.2 ** (r / 5)) for r in range(1, 6)] and right[-1] == 20_000
    alive = 100_000
    for r in range(1, 6):
        alive = mode.remaining(r, alive, 0.2)  # the planted bug: a share of the survivors
    assert alive == pytest.approx(100_000 * 0.2**3, rel=0.01)
    linear = progressive(4, "linear")
    assert [linear.remaining(r, 1000, 0.2) for r in range(1, 5)] == [800, 600, 400, 200]


def test_planted_multiplied_scores_bring_excluded_coordinates_back() -> None:
    """Scores multiplied by the mask become 0, the best score there is for least-sensitive."""
    scores = {"w": torch.arange(1.0, 101.0)}
    alive = choose(scores, 0.5)
    wrong = choose({"w": scores["w"] * alive["w"]}, 0.2)
    right = choose(scores, 0.2, among=alive)
    assert not (wrong["w"] & alive["w"]).any()
    assert bool((right["w"] <= alive["w"]).all()) and right.count == 20
    infinite = choose({"w": scores["w"].masked_fill(~alive["w"], torch.inf)}, 0.2)
    assert infinite.digest == right.digest  # the same as scoring what is excluded as infinitely bad


def test_soft_one_on_fixed_data_is_oneshot_and_soft_changes_it() -> None:
    net = network()
    score, weights = scorer(net), dict(net.named_parameters())
    once = calibrate(score, "least_sensitive", 0.1, oneshot()).mask
    assert calibrate(score, "least_sensitive", 0.1, progressive(4, soft=1)).mask.digest == once.digest
    soft = calibrate(score, "least_sensitive", 0.1, progressive(4), weights=weights).mask
    hard = calibrate(score, "least_sensitive", 0.1, progressive(4, soft=0), weights=weights).mask
    assert len({once.digest, soft.digest, hard.digest}) == 3
    assert jaccard(once, soft) > 0.1


def test_weights_come_back_bitwise_after_an_error_and_with_odd_values() -> None:
    weight = torch.tensor([-0.0, 1e-45, torch.inf, torch.nan, 3.3])
    bits = weight.view(torch.int32).clone()
    alive = {"w": torch.tensor([False, False, False, False, True])}
    with pytest.raises(ZeroDivisionError), softened({"w": weight}, alive, 0.1):
        assert weight[4] == torch.tensor(3.3)
        raise ZeroDivisionError
    assert torch.equal(weight.view(torch.int32), bits)
    scaled = weight / 1
    scaled.mul_(0.1).div_(0.1)  # the planted bug: undoing the factor instead of keeping a copy
    assert not torch.equal(scaled.view(torch.int32), bits)


def test_progressive_needs_weights_and_sane_settings() -> None:
    with raises("E-EDIT-CALIBRATION-WEIGHTS"):
        calibrate(scorer(network()), "least_sensitive", 0.1, progressive(2))
    for bad in (lambda: average(0), lambda: progressive(2, "cosine"), lambda: progressive(2, soft=2)):
        with pytest.raises(FedgraftError):
            bad()


def test_magnitude_and_random_ask_once() -> None:
    net = network()
    calls: list[int] = []

    def score(round: int) -> Mapping[str, Tensor]:
        calls.append(round)
        return magnitude_scores(dict(net.named_parameters()))

    for mode in (oneshot(), average(5), progressive(4)):
        assert calibrate(score, "lowest_magnitude", 0.3, mode).mask.digest == choose(score(0), 0.3).digest
    assert calls.count(1) == 3 and max(calls) == 1


# ---- scopes, and what the report says ----


class OneHead(nn.Module):
    """One attention layer with separate Q, K, V, a token mean and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attention": OneHead()})])})
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, entry: int = 0) -> Tensor:
        return self.head(self.backbone["layers"][0]["attention"](x).mean(1))


def test_k_bias_without_effect_is_reported_and_head_stays_out() -> None:
    net = Attending()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch_stream(2, "w", i)))
    scope = resolve({n: tuple(p.shape) for n, p in net.named_parameters()}, ["blocks"])
    assert scope.frozen == ("head.weight", "head.bias")

    def score(round: int) -> Mapping[str, Tensor]:
        draw = torch_stream(3, "data", round)
        batch = (torch.randn(32, 5, 6, generator=draw), torch.zeros(32).long())
        return estimate_fisher(net, [batch], "rademacher", scope.maskable, draw).mean()

    result = calibrate(score, "least_sensitive", 0.1, scope=scope)
    k_bias = "backbone.layers.0.attention.k_proj.bias"
    assert result.negligible == {k_bias: 6} and result.mask[k_bias].all()
    assert "head.weight" not in result.mask
    assert not calibrate(score, "most_sensitive", 0.1, scope=scope).negligible


def test_scope_with_rows_and_whitelist_in_progressive() -> None:
    shapes = {"blocks.0.attn.qkv.weight": (6, 4), "blocks.0.mlp.fc1.weight": (5, 4), "head.weight": (2, 4)}
    scope = resolve(shapes, ["qk"], whitelist=["head"])
    live = {n: torch.randn(s, generator=torch_stream(4, n)) for n, s in shapes.items()}
    before = {n: t.clone() for n, t in live.items()}
    seen: list[Tensor] = []

    def score(round: int) -> Mapping[str, Tensor]:
        seen.append(live["blocks.0.attn.qkv.weight"].clone())
        return random_scores(live, round)

    result = calibrate(score, "least_sensitive", 0.25, progressive(2), scope=scope, weights=live)
    assert result.total == 16 and result.remaining == (8, 4)
    assert result.mask.count == 4 + 8 and set(result.mask) == {"blocks.0.attn.qkv.weight", "head.weight"}
    assert not result.mask["blocks.0.attn.qkv.weight"][4:].any()
    assert int((seen[1] != before["blocks.0.attn.qkv.weight"]).sum()) == 8  # V rows are not scaled
    assert all(torch.equal(live[n], before[n]) for n in live)


def test_energy_of_nothing() -> None:
    zeros = {"w": torch.zeros(10)}
    assert energy_share(zeros, choose(zeros, 0.5)) == 0


# ---- merging ----


def test_federated_scores_equal_central_ones() -> None:
    """Clients of different sizes send sums; the mask is that of all their data together."""
    net = network()
    draw = torch_stream(6, "data")
    inputs, labels = torch.randn(60, 8, generator=draw), torch.randint(0, 4, (60,), generator=draw)

    def score(rows: slice) -> Scores:
        return estimate_fisher(net, [(inputs[rows], labels[rows])], "true", call=lambda x, _: net(x))

    clients = [score(rows) for rows in (slice(0, 5), slice(5, 25), slice(25, 60))]
    central = score(slice(0, 60)).mean()
    shapes = {name: tuple(tensor.shape) for name, tensor in central.items()}
    sent = [c.vector() for c in clients]  # as clients send them and the server adds them up
    merged = Scores.from_vector(sent[0] + sent[1] + sent[2], shapes).mean()
    assert all(torch.allclose(merged[n], central[n], 1e-5, 1e-9) for n in central)
    assert jaccard(choose(merged, 0.1), choose(central, 0.1)) > 0.95
    means = [c.mean() for c in clients]  # the planted mistake: every client counts the same
    assert not all(torch.allclose(sum(m[n] for m in means) / 3, central[n], 0.05) for n in central)


def bits(*rows: list[int]) -> list[Mask]:
    return [Mask({"w": torch.tensor(row).bool()}) for row in rows]


def test_merging_masks() -> None:
    masks = bits([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1])
    assert merge_masks(masks, "union")["w"].tolist() == [True] * 5
    assert merge_masks(masks, "intersection")["w"].tolist() == [True, False, False, False, False]
    assert merge_masks(masks, "vote", density=0.6).count == 3
    assert merge_masks(masks, "vote", density=0.0).count == 0
    assert merge_masks(masks, "vote", density=0.4)["w"].tolist() == [True, True, False, False, False]
    with raises("E-EDIT-MASK-MERGE"):
        merge_masks(masks, "vote")
    with raises("E-EDIT-MASK-MERGE"):
        merge_masks(masks, "mean")


def test_vote_with_a_density_is_exact_for_random_masks() -> None:
    weights = {"a": torch.empty(300), "b": torch.empty(77)}
    masks = [choose(random_scores(weights, seed), 0.1) for seed in range(10)]
    for density in (0.05, 0.1, 0.5, 1.0):
        assert merge_masks(masks, "vote", density=density).count == round(density * 377)
    assert bool((flat(merge_masks(masks, "vote", density=0.05)) <= flat(union(masks))).all())


# ---- adaptive sparsity ----


def test_adaptive_sparsity_waits_for_calm_then_rises_to_its_target() -> None:
    rule = AdaptiveSparsity(0.7, 0.95, drift_limit=0.5, patience=2, force_every=15)
    state, path = rule.begin(), []
    for drift in [0.4, 0.6, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]:
        state = rule.after(state, drift)
        path.append(state.sparsity)
    assert path == [0.7, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 0.95, 0.95, 0.95]


def test_adaptive_sparsity_is_forced_and_pure() -> None:
    rule = AdaptiveSparsity(0.5, 0.9, force_every=3)
    state, path = rule.begin(), []
    for _ in range(7):
        state = rule.after(state, 9.0)
        path.append(state.sparsity)
    assert path == [0.5, 0.5, 0.6, 0.6, 0.6, 0.7, 0.7]
    assert rule.after(AdaptiveState(0.5, 1, 1), 0.0) == rule.after(AdaptiveState(0.5, 1, 1), 0.0) == AdaptiveState(0.6)
    never = AdaptiveSparsity(0.5, 0.9, force_every=0)
    state = never.begin()
    for _ in range(40):
        state = never.after(state, 9.0)
    assert state.sparsity == 0.5
    for bad in ({"start": 0.9, "target": 0.5}, {"start": 0.1, "target": 1.0}, {"start": 0.1, "target": 0.5, "step": 0}):
        with pytest.raises(FedgraftError):
            AdaptiveSparsity(**bad)
