"""Similarities against independent definitions (scikit-learn, scipy, loops), their laws, and planted bugs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises
from tests.support.svcca import svcca
from torch import Tensor

from fedgraft.aggregate import similarity as sim


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=stream(seed))


def orthogonal(d: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(noise(d, d, seed=seed).double()).Q.float()


# ---- SVCCA -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(120, 30), (60, 300)])  # tall, and wide through the Gram matrix
def test_identical_representations_score_one(n: int, d: int) -> None:
    x = noise(n, d)
    assert svcca(x, x, keep=5).value == pytest.approx(1.0, abs=1e-9)  # a network is like itself


def test_unpaired_rows_are_noticed() -> None:
    """The planted bug: shuffling the images of one side must cost identical networks their score of one."""
    x = noise(256, 64)
    shuffled = x[torch.randperm(256, generator=stream(1))]
    score = svcca(x, shuffled, keep=50).value
    assert score < 0.7
    assert score == pytest.approx(sim.null_level(256, 50), abs=0.02)  # it is the level of unrelated data


def test_too_few_examples_are_refused_because_they_force_ones() -> None:
    """With 2p > n - 1 the two subspaces must meet, so unrelated data score exactly 1 (n = 64, p = 50)."""
    x, y = noise(64, 100), noise(64, 100, seed=1)
    qx, qy = sim.svcca_basis(x, 50), sim.svcca_basis(y, 50)
    forced = int((torch.linalg.svdvals(qx.T @ qy) > 1 - 1e-9).sum())
    assert forced == 2 * 50 - 63
    with raises("E-AGGREGATE-SVCCA-EXAMPLES", directions=50, examples=64):
        svcca(x, y)
    with raises("E-AGGREGATE-SVCCA-ROWS", rows=(64, 60)):
        sim.svcca_of_bases(qx, sim.svcca_basis(y[:60], 5))
    assert "few" in svcca(x, y, keep=10).warning
    assert svcca(x, y, keep=6).warning == ""


def test_closed_form_against_scikit_learn() -> None:
    from sklearn.cross_decomposition import CCA
    from sklearn.decomposition import PCA

    shared = noise(300, 6)
    x = shared @ noise(6, 20, seed=1) + 0.5 * noise(300, 20, seed=2)
    y = shared @ noise(6, 25, seed=3) + 0.5 * noise(300, 25, seed=4)
    px, py = (PCA(5).fit_transform(a.numpy().astype(np.float64)) for a in (x, y))
    a, b = CCA(5, max_iter=10_000, tol=1e-12).fit_transform(px, py)
    expected = sorted((abs(np.corrcoef(a[:, i], b[:, i])[0, 1]) for i in range(5)), reverse=True)
    found = svcca(x, y, keep=5, top=None)
    np.testing.assert_allclose(found.correlations, expected, atol=1e-5)
    assert found.value == pytest.approx(float(np.mean(expected)), abs=1e-5)


def test_closed_form_against_the_covariance_form() -> None:
    """Singular values of Cxx^-1/2 Cxy Cyy^-1/2."""
    x, y = noise(200, 8).double(), noise(200, 6, seed=1).double()
    y[:, :3] += x[:, :3]
    x, y = x - x.mean(0), y - y.mean(0)

    def root(c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(c)
        return vectors @ torch.diag(values**-0.5) @ vectors.T

    expected = torch.linalg.svdvals(root(x.T @ x) @ (x.T @ y) @ root(y.T @ y))
    torch.testing.assert_close(svcca(x, y, keep=50).correlations, expected)


def test_wide_and_tall_bases_span_the_same_space() -> None:
    x = noise(50, 40)
    wide = torch.cat([x, torch.zeros(50, 30)], 1)  # same data, more columns than rows
    a, b = sim.svcca_basis(x, 10), sim.svcca_basis(wide, 10)
    torch.testing.assert_close(a @ a.T, b @ b.T, atol=1e-8, rtol=0)
    torch.testing.assert_close(a.T @ a, torch.eye(10, dtype=torch.float64))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.floats(0.1, 100))
def test_svcca_is_symmetric_and_blind_to_rotation_shift_and_scale(seed: int, scale: float) -> None:
    x, y = noise(150, 12, seed=seed), noise(150, 12, seed=seed + 1)
    y = y + x
    base = svcca(x, y, keep=6).value
    assert svcca(y, x, keep=6).value == pytest.approx(base, abs=1e-9)
    turned = scale * (x @ orthogonal(12, seed)) + 3
    assert svcca(turned, y, keep=6).value == pytest.approx(base, abs=1e-4)
    order = torch.randperm(150, generator=stream(seed))
    assert svcca(x[order], y[order], keep=6).value == pytest.approx(base, abs=1e-9)


def test_rank_guard_and_share_of_variance() -> None:
    x = noise(100, 3) @ noise(3, 40, seed=1)  # rank 3, the other 37 directions are rounding noise
    assert sim.svcca_basis(x, 20).shape == (100, 3)
    values = torch.tensor([10.0, 3.0, 1.0, 0.1])
    planted = torch.linalg.qr(noise(100, 4).double() - noise(100, 4).double().mean(0)).Q * values
    # variances 100, 9, 1, 0.01 of 110.01: 90.9 %, 99.1 %, ...
    assert sim.svcca_basis(planted, 0.9).shape[1] == 1
    assert sim.svcca_basis(planted, 0.95).shape[1] == 2
    assert sim.svcca_basis(planted, 0.995).shape[1] == 3
    still = svcca(torch.ones(50, 4), noise(50, 4), keep=3)
    assert math.isnan(still.value)
    assert "does not vary" in still.warning


def test_null_level_against_simulation() -> None:
    for n, p, top in ((256, 50, 20), (500, 20, 20), (600, 50, None)):
        draws = [svcca(noise(n, p, seed=i), noise(n, p, seed=i + 100), p, top).value for i in range(6)]
        assert sim.null_level(n, p, top) == pytest.approx(float(np.mean(draws)), abs=0.015)
    assert sim.null_level(256, 50) == pytest.approx(0.61, abs=0.01)
    assert sim.null_level(2000, 50) == pytest.approx(0.22, abs=0.01)
    assert sim.null_level(256, 50, 1) < 2 * math.sqrt(50 / 255 * (1 - 50 / 255)) + 1e-9  # the edge of the law
    with raises("E-AGGREGATE-NULL-EXAMPLES"):
        sim.null_level(64, 50)


def test_null_correction() -> None:
    corrected = sim.null_corrected(torch.tensor([0.1, 0.6, 0.8, 1.0]), 0.6)
    torch.testing.assert_close(corrected, torch.tensor([0.0, 0.0, 0.5, 1.0]))


# ---- CKA and all pairs --------------------------------------------------------------------------------------------

PAIRWISE = {"cka_linear": sim.cka_linear, "cka_rbf": sim.cka_rbf, "cka_debiased": sim.cka_debiased}


def brute_cka(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
    n = len(k)
    h = np.eye(n) - 1 / n
    return float(np.trace(k @ h @ l @ h) / math.sqrt(np.trace(k @ h @ k @ h) * np.trace(l @ h @ l @ h)))


@pytest.mark.parametrize("d", [5, 60])
def test_pairwise_cka_against_the_definition(d: int) -> None:
    x, y = noise(20, d).double().numpy(), noise(20, 7, seed=1).double().numpy()
    y[:, :3] += x[:, :3]
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)
    assert sim.cka_linear(tx, ty) == pytest.approx(brute_cka(x @ x.T, y @ y.T))

    def kernel(a: np.ndarray) -> np.ndarray:
        distances = np.linalg.norm(a[:, None] - a[None], axis=2)
        width = 0.5 * np.median(distances[np.triu_indices(len(a), 1)])
        return np.exp(-(distances**2) / (2 * width**2))

    assert sim.cka_rbf(tx, ty, 0.5) == pytest.approx(brute_cka(kernel(x), kernel(y)))


def test_debiased_hsic_against_all_quadruples() -> None:
    """The U-statistic is the mean over ordered distinct i, j, q, r of K_ij (L_ij + L_qr - 2 L_iq)."""
    from itertools import permutations

    k, l = ((a @ a.T).numpy() for a in (noise(7, 3).double(), noise(7, 2, seed=1).double()))  # noqa: E741
    terms = [k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in permutations(range(7), 4)]
    assert sim._hsic(torch.from_numpy(k), torch.from_numpy(l)) == pytest.approx(float(np.mean(terms)))


@pytest.mark.parametrize("metric", PAIRWISE)
def test_one_product_equals_the_loop_over_pairs(metric: str) -> None:
    base = noise(30, 12)
    clients = torch.stack([base * (i % 3) / 2 + noise(30, 12, seed=i + 1) for i in range(6)])
    matrix = sim.crsm(clients, metric)
    for i in range(6):
        for j in range(6):
            assert float(matrix[i, j]) == pytest.approx(PAIRWISE[metric](clients[i], clients[j]), abs=1e-9)


MATRICES = [name for name in sim.SIMILARITIES if name != "constant"]


@pytest.mark.parametrize("metric", MATRICES)
def test_laws_of_every_matrix(metric: str) -> None:
    clients = torch.stack([noise(24, 10) + noise(24, 10, seed=i + 1) for i in range(5)])
    matrix = sim.crsm(clients, metric)
    assert matrix.shape == (5, 5)
    assert torch.equal(matrix.diagonal(), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(matrix, matrix.T)
    assert bool(((matrix >= 0) & (matrix <= 1)).all())
    order = torch.randperm(5, generator=stream(3))
    torch.testing.assert_close(sim.crsm(clients[order], metric), matrix[order][:, order])
    same = sim.crsm(clients[:1].repeat(3, 1, 1), metric)
    torch.testing.assert_close(same, torch.ones_like(same))  # identical clients, uniform rows


@pytest.mark.parametrize("metric", ["cka_linear", "cka_rbf", "cka_debiased"])
def test_cka_is_blind_to_rotation_shift_and_scale_but_not_to_any_map(metric: str) -> None:
    x, y = noise(40, 10), noise(40, 10, seed=1)
    y = y + 2 * x
    base = sim.crsm([x, y], metric)[0, 1]
    turned = 5 * (x @ orthogonal(10)) + 2
    torch.testing.assert_close(sim.crsm([turned, y], metric)[0, 1], base, rtol=1e-4, atol=1e-5)
    stretched = x * torch.logspace(-1, 1, 10)
    assert abs(float(sim.crsm([stretched, y], metric)[0, 1] - base)) > 1e-3


def test_unpaired_rows_are_noticed_by_cka() -> None:
    x = noise(100, 8)
    shuffled = x[torch.randperm(100, generator=stream(1))]
    assert sim.cka_linear(x, x) == pytest.approx(1.0)
    assert sim.cka_linear(x, shuffled) < 0.2
    assert sim.crsm([x, shuffled], "covariance")[0, 1] == pytest.approx(1.0)  # covariance does not ask for pairs


def test_debiased_is_near_zero_for_unrelated_data_where_the_plain_one_is_not() -> None:
    x, y = noise(50, 512), noise(50, 512, seed=1)
    assert sim.cka_linear(x, y) > 0.85  # the value is a function of n / d
    assert sim.cka_debiased(x, y) < 0.05
    with raises("E-AGGREGATE-CKA-EXAMPLES"):
        sim.crsm(noise(2, 3, 5), "cka_debiased")


def test_covariance_tells_classes_apart_where_unpaired_cka_cannot() -> None:
    """Two clients of one class pair and two of another, each with its own images and unequal numbers of them."""
    centres = 4 * noise(4, 32, seed=50)

    def client(classes: tuple[int, int], n: int, seed: int) -> Tensor:
        labels = torch.randint(0, 2, (n,), generator=stream(seed))
        return centres[torch.tensor(classes)[labels]] + noise(n, 32, seed=seed + 1)

    clients = [client((0, 1), 100, 1), client((0, 1), 140, 3), client((2, 3), 100, 5)]
    matrix = sim.crsm(clients, "covariance")
    assert matrix[0, 1] > 0.9
    assert matrix[0, 2] < 0.3
    equal = [c[:100] for c in clients]
    paired = sim.crsm(equal, "cka_linear")
    assert abs(float(paired[0, 1] - paired[0, 2])) < 0.1
    with raises("E-AGGREGATE-REPRESENTATIONS"):
        sim.crsm(clients, "cka_linear")


def test_rsa_against_scipy() -> None:
    from scipy.stats import spearmanr

    x, y = noise(15, 9), noise(15, 6, seed=1)
    y = y + x[:, :6]
    upper = np.triu_indices(15, 1)
    expected = spearmanr(*(1 - np.corrcoef(a.double().numpy())[upper] for a in (x, y))).statistic
    assert float(sim.crsm([x, y], "rsa")[0, 1]) == pytest.approx(max(0.0, expected))


def test_rsa_of_repeated_rows_ties_whatever_their_last_digits() -> None:
    """A client with five images shows some again; features of the same image differ in the last bits of float32."""
    from scipy.spatial.distance import pdist
    from scipy.stats import spearmanr

    generator = torch.Generator().manual_seed(3)
    few = torch.randn(5, 6, generator=generator)
    repeated = few[torch.arange(20) % 5]
    jittered = repeated * (1 + 1e-7 * torch.randn(20, 6, generator=generator))
    others = torch.randn(20, 6, generator=generator)
    ranks = pdist(repeated.double().numpy(), "correlation").round(9)
    expected = spearmanr(ranks, pdist(others.double().numpy(), "correlation")).statistic
    assert float(sim.crsm([jittered, others], "rsa")[0, 1]) == pytest.approx(max(0.0, expected), abs=1e-12)
    assert expected > 0.01


def test_label_histogram_and_constant() -> None:
    counts = torch.tensor([[3, 4, 0], [6, 8, 0], [0, 0, 5]])
    expected = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1.0]]).double()
    torch.testing.assert_close(sim.crsm(counts, "label_histogram"), expected)
    control = sim.crsm(counts, "constant", c=0.25)
    assert control.tolist() == [[1, 0.25, 0.25], [0.25, 1, 0.25], [0.25, 0.25, 1]]
    with raises("E-AGGREGATE-CONSTANT"):
        sim.crsm(counts, "constant", c=1.5)
    with raises("E-AGGREGATE-SIMILARITY-UNKNOWN"):
        sim.crsm(counts, "dice")


@pytest.mark.parametrize("metric", [m for m in MATRICES if m != "label_histogram"])
@pytest.mark.parametrize("lie", [torch.nan, torch.inf, 0.0])
def test_a_client_without_numbers_is_like_itself_only(metric: str, lie: float) -> None:
    clients = torch.stack([noise(20, 6, seed=i) for i in range(4)])
    matrix = sim.crsm(clients, metric)
    clients[1] = lie
    after = sim.crsm(clients, metric)
    assert after[1].tolist() == [0.0, 1.0, 0.0, 0.0]
    keep = torch.tensor([0, 2, 3])
    torch.testing.assert_close(after[keep][:, keep], matrix[keep][:, keep])


# ---- weights ------------------------------------------------------------------------------------------------------


def test_alignment_weights_by_hand() -> None:
    # n = (10, 30, 20, 40), layer means (1, .5, .75, .25): n s = (10, 15, 15, 10), sum 50.
    scores = torch.tensor([[1.0, 1.0], [0.4, 0.6], [0.5, 1.0], [0.0, 0.5]])
    found = sim.alignment_weights(torch.tensor([10, 30, 20, 40]), scores)
    torch.testing.assert_close(found.weights, torch.tensor([0.2, 0.3, 0.3, 0.2]).double())
    assert not found.fell_back
    # gamma 2: n s^2 = (10, 7.5, 11.25, 2.5), sum 31.25; null 0.5 and layer 0 only: s' = (1, 0, 0, 0) -> floor.
    squared = sim.alignment_weights(torch.tensor([10, 30, 20, 40]), scores, gamma=2.0).weights
    torch.testing.assert_close(squared, torch.tensor([10, 7.5, 11.25, 2.5]).double() / 31.25)
    first = sim.alignment_weights(torch.full((4,), 9), scores[:, :1], null=0.5)
    torch.testing.assert_close(first.scores, torch.tensor([1.0, 0, 0, 0]).double())
    assert float(first.weights[0]) > 0.99999


def test_equal_scores_are_fedavg_bit_for_bit() -> None:
    examples = torch.tensor([13.0, 57.0, 31.0, 99.0, 41.0], dtype=torch.float64)
    for score in (1.0, 0.37, 0.0):  # below the floor, too
        found = sim.alignment_weights(examples, torch.full((5, 3), score), gamma=3.0)
        assert torch.equal(found.weights, examples / examples.sum())


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan])
def test_a_missing_score_falls_back_to_examples(bad: float) -> None:
    scores = torch.tensor([[0.9], [bad], [0.1]])
    found = sim.alignment_weights(torch.tensor([1, 2, 1]), scores)
    assert found.fell_back
    assert found.weights.tolist() == [0.25, 0.5, 0.25]


def test_a_score_above_one_buys_nothing() -> None:
    benign = sim.alignment_weights(torch.ones(4), torch.tensor([1.0, 0.5, 0.5, 0.5])).weights
    lying = sim.alignment_weights(torch.ones(4), torch.tensor([1e9, 0.5, 0.5, 0.5])).weights
    assert torch.equal(benign, lying)


def test_a_cap_limits_the_examples_a_client_counts_as() -> None:
    # n s = (10, 15, 15, 10) as above; nobody counts as more than 12.5: (10, 12.5, 12.5, 10), sum 45.
    scores = torch.tensor([[1.0, 1.0], [0.4, 0.6], [0.5, 1.0], [0.0, 0.5]])
    found = sim.alignment_weights(torch.tensor([10, 30, 20, 40]), scores, cap=12.5).weights
    torch.testing.assert_close(found, torch.tensor([10, 12.5, 12.5, 10]).double() / 45)
    missing = sim.alignment_weights(torch.tensor([1, 9]), torch.tensor([[torch.nan], [1.0]]), cap=3)
    assert missing.weights.tolist() == [0.25, 0.75]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900), st.floats(0, 1)), min_size=1, max_size=12), st.floats(1.0, 900.0))
def test_clients_can_weigh_themselves(clients: list[tuple[int, float]], cap: float) -> None:
    """What each computes alone, normalised, is what the server computes from all; planted bug: a cap by the cohort."""
    examples, scores = (torch.tensor(column, dtype=torch.float64) for column in zip(*clients, strict=True))
    alone = [sim.counted_examples(examples[k : k + 1], scores[k : k + 1], 2.0, 0.1, cap) for k in range(len(clients))]
    found = torch.cat(alone)
    weights = sim.alignment_weights(examples, scores, 2.0, 0.1, cap).weights
    torch.testing.assert_close(found / found.sum(), weights)
    assert float(found.max()) <= cap


def test_random_weights_like() -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for seed in range(40):
        federated = sim.random_weights_like(weights, stream(seed))
        assert federated.sort().values.tolist() == weights.tolist()  # same dispersion
        assert not torch.equal(federated, weights)
        assert torch.equal(federated, sim.random_weights_like(weights, stream(seed)))
    even = torch.full((3,), 1 / 3)
    assert torch.equal(sim.random_weights_like(even, stream()), even)
    assert sim.random_weights_like(torch.ones(1), stream()).tolist() == [1.0]
