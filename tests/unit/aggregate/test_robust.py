"""Robust rules against definitions in plain loops, against Flower's own functions, and against planted liars."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from torch import Tensor

from fedgraft.aggregate import robust
from fedgraft.aggregate.mean import CHUNK, weighted_mean


def stack(clients: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed))


def ones(updates: Tensor) -> Tensor:
    return torch.ones(len(updates))


RULES: dict[str, robust.Rule] = {
    "median": robust.median(),
    "trimmed_mean": robust.trimmed_mean(0.2),
    "krum": robust.krum(2),
    "multi_krum": robust.multi_krum(2),
    "bulyan": robust.bulyan(2),
    "geometric_median": robust.geometric_median(),
    "centered_clipping": robust.centered_clipping(),
    "nnm_trimmed": robust.prepared(robust.trimmed_mean(0.2), robust.nearest_mixing(2)),
    "clip_nnm_median": robust.prepared(robust.median(), robust.clip_norms(), robust.nearest_mixing(2)),
}
by_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


# ---- definitions, in loops ----------------------------------------------------------------------------------------


def loop_krum(updates: np.ndarray, attackers: int) -> list[float]:
    m = len(updates)
    scores = []
    for i in range(m):
        others = sorted(float(((updates[i] - updates[j]) ** 2).sum()) for j in range(m) if j != i)
        scores.append(sum(others[: max(1, m - attackers - 2)]))
    return scores


def loop_bulyan(updates: np.ndarray, attackers: int) -> np.ndarray:
    left, chosen = list(range(len(updates))), []
    for _ in range(len(updates) - 2 * attackers):
        scores = loop_krum(updates[left], attackers)
        chosen.append(left.pop(int(np.argmin(scores))))
    kept = updates[chosen]
    out = []
    for column in kept.T:
        nearest = sorted(column, key=lambda v: abs(v - np.median(column)))[: len(kept) - 2 * attackers]
        out.append(np.mean(nearest))
    return np.array(out)


@pytest.mark.parametrize("clients", [11, 12])
def test_coordinate_rules_against_numpy(clients: int) -> None:
    updates = stack(clients, CHUNK + 5)
    wide = updates.numpy().astype(np.float64)
    np.testing.assert_allclose(robust.median()(updates, ones(updates)), np.median(wide, 0), rtol=1e-6, atol=1e-7)
    cut = np.sort(wide, 0)[2:-2].mean(0)
    np.testing.assert_allclose(robust.trimmed_mean(0.2)(updates, ones(updates)), cut, rtol=1e-6, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2), st.integers(0, 3), st.integers(0, 10_000))
def test_distance_rules_against_loops(attackers: int, more: int, seed: int) -> None:
    updates = stack(4 * attackers + 3 + more, 6, seed)
    wide = updates.numpy().astype(np.float64)
    scores = loop_krum(wide, attackers)
    distances = robust.squared_distances(updates)
    np.testing.assert_allclose(robust.krum_scores(distances, attackers), scores, rtol=1e-9)
    assert torch.equal(robust.krum(attackers)(updates, ones(updates)), updates[int(np.argmin(scores))])
    best = np.argsort(scores)[: len(updates) - attackers]
    expected = wide[best].mean(0)
    np.testing.assert_allclose(robust.multi_krum(attackers)(updates, ones(updates)), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        robust.bulyan(attackers)(updates, ones(updates)), loop_bulyan(wide, attackers), rtol=1e-5, atol=1e-6
    )


def test_unsquared_distances_would_choose_another_client() -> None:
    """Krum sums squared distances. Of 0, 1, 2, 3, 7, 8 with f = 0 each takes its 4 nearest. Squared, 2 scores
    1+1+4+25 = 31 and 3 scores 1+4+9+16 = 30; unsquared, 2 scores 1+1+2+5 = 9 and 3 scores 1+2+3+4 = 10."""
    updates = torch.tensor([[0.0], [1.0], [2.0], [3.0], [7.0], [8.0]])
    assert robust.krum(0)(updates, torch.ones(6)).item() == 3.0
    unsquared = robust.squared_distances(updates).sqrt()
    assert updates[int(robust.krum_scores(unsquared, 0).argmin())].item() == 2.0


def test_geometric_median_minimises_the_sum_of_distances() -> None:
    from scipy.optimize import minimize

    updates = stack(9, 4, 3)
    updates[0] += 30
    wide = updates.numpy().astype(np.float64)
    found = robust.geometric_median()(updates, ones(updates)).numpy()
    best = minimize(lambda z: np.linalg.norm(wide - z, axis=1).sum(), wide.mean(0), tol=1e-12).x
    np.testing.assert_allclose(found, best, atol=1e-4)


def test_geometric_median_of_three_points_by_hand() -> None:
    # Equilateral triangle: the Fermat point is the centroid. A majority at one point holds the median there.
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]])
    torch.testing.assert_close(robust.geometric_median()(triangle, torch.ones(3)), triangle.mean(0))
    majority = torch.tensor([[1.0, 2.0]] * 3 + [[50.0, 0.0], [0.0, -80.0]])
    torch.testing.assert_close(robust.geometric_median()(majority, torch.ones(5)), majority[0], atol=1e-4, rtol=0)


def loop_centered_clipping(updates: np.ndarray, tau: float | None, iterations: int) -> np.ndarray:
    centre = np.median(updates, axis=0)
    if tau is None:
        tau = float(np.median([np.sqrt(((row - centre) ** 2).sum()) for row in updates]))
    for _ in range(iterations):
        total = np.zeros_like(centre)
        for row in updates:
            difference = row - centre
            length = float(np.sqrt((difference**2).sum()))
            total += difference * min(1.0, tau / length) if length > 0 else difference
        centre = centre + total / len(updates)
    return centre


@pytest.mark.parametrize("tau", [None, 0.5, 3.0, 1e9])
@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_centered_clipping_against_a_loop(tau: float | None, iterations: int) -> None:
    updates = stack(9, 40, 3)
    updates[0] += 30
    found = robust.centered_clipping(tau, iterations)(updates, ones(updates)).numpy()
    wide = updates.numpy().astype(np.float64)
    np.testing.assert_allclose(found, loop_centered_clipping(wide, tau, iterations), rtol=1e-5, atol=1e-6)
    if tau == 1e9:  # nothing is clipped: the plain mean
        np.testing.assert_allclose(found, wide.mean(0), rtol=1e-5, atol=1e-6)


def test_one_liar_moves_the_clipped_centre_by_no_more_than_its_share() -> None:
    updates = stack(9, 40, 3)
    near = robust.centered_clipping(1.0, 1)(updates, ones(updates))
    updates[0] *= 1e6
    far = robust.centered_clipping(1.0, 1)(updates, ones(updates))
    start = float((robust.median()(updates, ones(updates)) - robust.median()(stack(9, 40, 3), torch.ones(9))).norm())
    assert float((far - near).norm()) <= start * 2 + 2 * 1.0 / 9 + 1e-5


def test_centered_clipping_refuses_numbers_outside_their_range() -> None:
    for wrong in ({"tau": 0.0}, {"tau": -1.0}, {"iterations": 0}):
        with raises("E-CORE-RANGE"):
            robust.centered_clipping(**wrong)  # type: ignore[arg-type]


def test_nearest_mixing_against_a_loop() -> None:
    updates = stack(7, 5)
    mixed = robust.nearest_mixing(2)(updates)
    for i in range(7):
        request = sorted(range(7), key=lambda j: float((updates[i] - updates[j]).square().sum()))[:5]
        torch.testing.assert_close(mixed[i], updates[request].mean(0))


def test_clip_norms() -> None:
    updates = torch.tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0], [0.0, 0.0]])
    clipped = robust.clip_norms(1.0)(updates)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.6, 0.8], [0.0, 0.0]]))
    assert torch.equal(clipped[1], updates[1])  # short ones keep their bits
    norms = robust.clip_norms()(updates).norm(dim=1)  # median of (5, 0.5, 50, 0) is 2.75
    torch.testing.assert_close(norms, torch.tensor([2.75, 0.5, 2.75, 0.0]))


def test_distances_are_symmetric_to_the_last_bit() -> None:
    """Two updates that are each other's nearest tie under Krum: the lower number wins, not a product's rounding."""
    stack = torch.randn(7, 203, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distances = robust.squared_distances(stack)
    assert torch.equal(distances, distances.T)


def test_bulyan_breaks_ties_by_the_lower_client() -> None:
    """Bulyan's last choices have one neighbour each, so they always tie: compared with a loop over differences."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        stack = torch.randn(7, 165, generator=generator)
        rows = stack.double().numpy()
        candidates = list(range(7))
        selected = []
        while len(selected) < 5:
            scores = []
            for i in candidates:
                squares = sorted(((rows[i] - rows[j]) ** 2).sum() for j in candidates if j != i)
                scores.append(sum(squares[: max(1, len(candidates) - 3)]))
            selected.append(candidates.pop(scores.index(min(scores))))
        chosen = rows[selected]
        nearest = np.argsort(np.abs(chosen - np.median(chosen, axis=0)), axis=0, kind="stable")[:3]
        expected = np.take_along_axis(chosen, nearest, axis=0).mean(0)
        np.testing.assert_allclose(robust.bulyan(1)(stack, torch.ones(7)).numpy(), expected, atol=1e-6)


def test_distances_survive_cancellation() -> None:
    """float32 Gram distances of near-equal long vectors are noise; ours are the true ones, and never negative."""
    base = stack(1, 5000)[0] * 100
    updates = torch.stack([base, base + 1e-3 * stack(1, 5000, 1)[0]])
    updates = torch.cat([updates, updates[1:] + 2e-3])
    wide = updates.double()
    exact = (wide[:, None] - wide[None]).square().sum(2)
    torch.testing.assert_close(robust.squared_distances(updates), exact, rtol=1e-3, atol=1e-8)
    gram = updates @ updates.T
    single = gram.diagonal()[:, None] + gram.diagonal()[None] - 2 * gram
    assert not torch.allclose(single.double(), exact, rtol=1e-1)


# ---- laws ---------------------------------------------------------------------------------------------------------


@by_rule
def test_equal_changes_come_back(rule: robust.Rule) -> None:
    update = stack(1, 40)[0]
    assert torch.equal(rule(update.repeat(11, 1), torch.ones(11)), update)


@pytest.mark.parametrize("name", [n for n in RULES if n != "bulyan"])
def test_client_order_does_not_matter(name: str) -> None:
    """Bulyan's last Krum picks score by one neighbour, where mutual neighbours tie; it takes the first client."""
    rule, updates = RULES[name], stack(12, 33)
    shuffled = updates[torch.randperm(12, generator=torch.Generator().manual_seed(4))]
    torch.testing.assert_close(rule(updates, torch.ones(12)), rule(shuffled, torch.ones(12)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in RULES if "clip" not in n])
def test_translation(name: str) -> None:
    """Adding one vector to all changes adds it to the result (clipping is about length and does not do this)."""
    updates, shift = stack(11, 20), 3 * stack(1, 20, 9)[0]
    before, after = (RULES[name](c, torch.ones(11)) for c in (updates, updates + shift))
    torch.testing.assert_close(after, before + shift, rtol=1e-4, atol=1e-4)


@by_rule
def test_claimed_weights_do_not_matter(rule: robust.Rule) -> None:
    updates = stack(11, 20)
    claimed = torch.ones(11)
    claimed[0] = 1e9
    assert torch.equal(rule(updates, torch.ones(11)), rule(updates, claimed))
    assert not torch.allclose(robust.mean_rule()(updates, torch.ones(11)), robust.mean_rule()(updates, claimed))


@by_rule
@pytest.mark.parametrize("lie", [1e6, -1e20, torch.nan, torch.inf, -torch.inf])
def test_planted_liars_are_outvoted(rule: robust.Rule, lie: float) -> None:
    """Two attackers of eleven; the result stays near the benign mean, while the plain mean is carried away."""
    target = stack(1, 50, 7)[0]
    updates = target + 0.1 * stack(11, 50, 8)
    benign = updates[2:].mean(0)
    updates[:2] = lie
    kept = updates.clone()
    assert (rule(updates, torch.ones(11)) - benign).abs().max() < 0.5
    assert torch.equal(updates, kept) or lie != lie  # the input stack is not touched
    far = robust.mean_rule()(updates, torch.ones(11)) - benign
    assert not bool((far.abs() < 0.5).all())


def test_degenerate_settings_are_the_plain_mean() -> None:
    updates = stack(7, 30)
    plain = weighted_mean(updates, torch.ones(7))
    torch.testing.assert_close(robust.trimmed_mean(0.0)(updates, torch.ones(7)), plain)
    assert torch.equal(robust.multi_krum(0, keep=7)(updates, torch.ones(7)), plain)
    torch.testing.assert_close(robust.bulyan(0)(updates, torch.ones(7)), plain)
    mixed = robust.nearest_mixing(0)(updates)
    torch.testing.assert_close(mixed, plain.expand_as(mixed))
    assert torch.equal(robust.clip_norms(1e9)(updates), updates)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "enough"),
    [(robust.krum(2), 7), (robust.multi_krum(2), 7), (robust.bulyan(1), 7), (robust.bulyan(2), 11)],
)
def test_bounds(rule: robust.Rule, enough: int) -> None:
    rule(stack(enough, 4), torch.ones(enough))
    with raises("E-AGGREGATE-TOO-FEW-RESPONSES", least=enough, clients=enough - 1):
        rule(stack(enough - 1, 4), torch.ones(enough - 1))


def test_other_refusals() -> None:
    with raises("E-AGGREGATE-TOO-FEW-RESPONSES", least=5):
        robust.nearest_mixing(2)(stack(4, 3))
    with raises("E-AGGREGATE-TRIM-SHARE"):
        robust.trimmed_mean(0.5)
    with raises("E-AGGREGATE-CLIP-NORM"):
        robust.clip_norms(0.0)
    with raises("E-AGGREGATE-KRUM-KEEP"):
        robust.multi_krum(1, keep=9)(stack(7, 3), torch.ones(7))
    with raises("E-CORE-UNKNOWN-NAME"):
        robust.robust_aggregator("mode")
    with raises("E-AGGREGATE-NO-UPDATES"):
        robust.median()(torch.zeros(0, 3), torch.zeros(0))


def test_the_table_builds_every_rule() -> None:
    for name in robust.AGGREGATORS:
        rule: robust.Rule = robust.AGGREGATORS.build(name, {}, attackers=1, responses=9)
        assert rule(stack(9, 5), torch.ones(9)).shape == (5,)


# ---- Flower's functions on the same arrays -----------------------------------------------------------------------


@pytest.fixture
def flower() -> object:
    """Flower prints a deprecation notice on import; only its pure functions on arrays are used here."""
    return pytest.importorskip("flwr.server.strategy.aggregate")


@pytest.mark.filterwarnings("ignore")
def test_parity_with_flower(flower: object) -> None:
    updates = stack(11, 64, 5)
    results = [([row.numpy()[:40].reshape(8, 5), row.numpy()[40:]], 10) for row in updates]

    def flat(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([a.ravel() for a in arrays])

    def check(ours: robust.Rule, theirs: Callable[[], list[np.ndarray]]) -> None:
        np.testing.assert_allclose(ours(updates, torch.ones(11)), flat(theirs()), rtol=1e-5, atol=1e-6)

    f = flower
    check(robust.median(), lambda: f.aggregate_median(results))  # type: ignore[attr-defined]
    check(robust.trimmed_mean(0.2), lambda: f.aggregate_trimmed_avg(results, 0.2))  # type: ignore[attr-defined]
    check(robust.krum(2), lambda: f.aggregate_krum(results, 2, 0))  # type: ignore[attr-defined]
    # Flower leaves the number kept to the caller; ours is m - f by default. It also weighs the kept changes by their
    # number of examples, a claim a liar can inflate; the counts are equal here, so both are the plain mean.
    check(robust.multi_krum(2), lambda: f.aggregate_krum(results, 2, 9))  # type: ignore[attr-defined]
    # Flower removes chosen results from the list it is given, hence the copy.
    check(robust.bulyan(2), lambda: f.aggregate_bulyan(list(results), 2, f.aggregate_krum, to_keep=0))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
def test_flower_weighs_multi_krum_by_claimed_examples(flower: object) -> None:
    updates = stack(11, 20, 5)
    results = [([row.numpy()], 10_000 if i == 3 else 1) for i, row in enumerate(updates)]
    theirs = flower.aggregate_krum(results, 0, 11)[0]  # type: ignore[attr-defined]
    np.testing.assert_allclose(theirs, updates[3].numpy(), atol=1e-2)
    torch.testing.assert_close(robust.multi_krum(0, keep=11)(updates, torch.ones(11)), updates.mean(0))
