"""Partitions: invariants of every kind as properties, exact counts, refusals, and checks that notice planted bugs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.errors import raises

from fedgraft.core.errors import FedgraftError
from fedgraft.data.partition import KINDS, Partition, compress, edges_of, make_partition
from fedgraft.data.partition import quotas as class_quotas
from fedgraft.data.partition.quotas import assign_classes, chunk_counts, transport_counts


def balanced(count: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(count) % classes)


def skewed(count: int, classes: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [np.arange(classes), rng.choice(classes, count - classes, p=rng.dirichlet(np.full(classes, 5)))]
    )


TYPICAL: dict[str, dict[str, Any]] = {
    "iid": {},
    "stratified": {},
    "classes": {"per_client": 3},
    "shards": {"per_client": 2},
    "dirichlet": {"alpha": 0.5, "min_size": 1},
    "dirichlet_balanced": {"alpha": 0.5},
    "groups": {"groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]},
}


def spread(partition: Partition) -> int:
    return int(np.ptp(partition.sizes()))


def check_everything(p: Partition, exhaustive: bool = True) -> None:
    """The invariants by brute force, one client at a time."""
    owned = [set(p.train_rows(k).tolist()) for k in range(p.clients)]
    assert sum(map(len, owned)) == len(set().union(*owned))
    if exhaustive:
        assert set().union(*owned) == set(range(len(p.labels)))
    tested = [set(p.test_rows(k).tolist()) for k in range(p.clients)]
    if not p.overlap:
        assert sum(map(len, tested)) == len(set().union(*tested))
    for train, test in zip(owned, tested, strict=True):
        assert {int(p.test_labels[r]) for r in test} <= {int(p.labels[r]) for r in train}
    held = {int(p.labels[r]) for rows in owned for r in rows}
    assert set().union(*tested) == {r for r, c in enumerate(p.test_labels) if int(c) in held}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("test", ["shard", "all_of_my_classes"])
@pytest.mark.parametrize("make", [balanced, skewed])
def test_every_kind_keeps_its_promises(kind: str, test: str, make: Any) -> None:
    labels, test_labels = make(1200, 10), make(300, 10, 1)
    p = make_partition(kind, labels, test_labels, 20, 7, test=test, **TYPICAL[kind])
    check_everything(p)
    again = make_partition(kind, labels, test_labels, 20, 7, test=test, **TYPICAL[kind])
    other = make_partition(kind, labels, test_labels, 20, 8, test=test, **TYPICAL[kind])
    assert p.digest == again.digest != other.digest
    assert p.kind == kind and p.clients == 20 and p.sizes().sum() == 1200
    for k in range(20):
        assert (np.diff(p.train_rows(k)) > 0).all() and (np.diff(p.test_rows(k)) > 0).all()
    if kind not in ("dirichlet", "groups"):
        assert spread(p) <= 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6), st.booleans())
def test_exactly_n_classes(clients: int, classes: int, per_client: int, seed: int, uneven: bool) -> None:
    labels = skewed(2000, classes, seed) if uneven else balanced(2000, classes, seed)
    per_client = min(per_client, classes)
    try:
        p = make_partition("classes", labels, labels[:200], clients, seed, per_client=per_client)
    except FedgraftError as error:
        quota = -(-clients * per_client // classes)
        too_few = clients * per_client < classes and error.code == "E-DATA-CLASSES-UNCOVERED"
        assert too_few or (np.bincount(labels).min() < quota and error.code == "E-DATA-CLASS-TOO-SMALL")
        return
    check_everything(p)
    held = p.histogram(classes=classes) > 0
    assert (held.sum(axis=1) == per_client).all()
    assert np.ptp(held.sum(axis=0)) <= 1  # every class is held by as many clients, give or take one
    assert spread(p) <= 1 or "differ by up to" in p.notes[0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["iid", "stratified", "shards", "dirichlet_balanced"]), st.integers(1, 50), st.integers(0, 99))
def test_equal_kinds_are_equal_for_any_numbers(kind: str, clients: int, seed: int) -> None:
    labels = skewed(100 + seed, 7, seed)
    p = make_partition(kind, labels, labels[:40], clients, seed, **TYPICAL[kind])
    check_everything(p)
    assert spread(p) <= (2 if kind == "shards" else 1)


@pytest.mark.parametrize(("per_client", "each"), [(1, 450), (5, 90), (10, 45), (50, 9), (100, 4.5)])
def test_the_counts_of_the_literature(per_client: int, each: float) -> None:
    """K = C = 100 and 450 images per class: every client gets exactly 450, N_c classes of 450 / N_c."""
    p = make_partition("classes", balanced(45_000, 100), balanced(10_000, 100, 1), 100, 0, per_client=per_client)
    assert set(p.sizes()) == {450} and p.notes == ()
    table = p.histogram()
    assert ((table > 0).sum(axis=1) == per_client).all()
    assert set(table[table > 0]) == ({int(each)} if each == int(each) else {4, 5})
    assert set(np.diff(p.test_offsets)) == {100}


def test_all_classes_is_stratified_iid() -> None:
    p = make_partition("classes", balanced(1000, 10), None, 8, 0, per_client=10)
    assert set(p.histogram().reshape(-1)) <= {12, 13} and spread(p) <= 1
    assert len(p.tests) == 0 and p.test_rows(3).size == 0


def test_37_clients_are_made_equal_by_the_transport() -> None:
    labels = balanced(45_000, 100)
    p = make_partition("classes", labels, None, 37, 0, per_client=10)
    assert spread(p) <= 1 and p.notes == ()
    assert (p.histogram() > 0).sum(axis=1).tolist() == [10] * 37


def test_without_the_transport_37_clients_are_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_quotas, "transport_counts", lambda *_: None)
    p = make_partition("classes", balanced(45_000, 100), None, 37, 0, per_client=10)
    assert spread(p) > 100 and "differ by up to" in p.notes[0] and p.statistics()["notes"] == list(p.notes)


@pytest.mark.slow
def test_the_transport_agrees_with_linear_programming() -> None:
    """Feasible here exactly when the real-valued problem is feasible, because flows are integral."""
    from scipy.optimize import linprog

    feasible = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        clients, per_client, classes = int(rng.integers(2, 8)), int(rng.integers(1, 4)), 4
        cls = assign_classes(clients, per_client, classes, rng).reshape(-1)
        client = np.repeat(np.arange(clients), per_client)
        quota = np.bincount(cls, minlength=classes)
        supply = np.where(quota > 0, quota + rng.integers(0, 12, classes), 0)
        counts = transport_counts(cls, client, supply)
        by_class, by_client = np.eye(classes)[cls].T, np.eye(clients)[client].T
        low, high = supply.sum() // clients, -(-supply.sum() // clients)
        lp = linprog(
            np.zeros(len(cls)),
            A_eq=by_class,
            b_eq=supply,
            bounds=(1, None),
            A_ub=np.concatenate([by_client, -by_client]),
            b_ub=np.repeat([high, -low], clients),
        )
        assert (counts is not None) == lp.success
        feasible.append(lp.success)
        if counts is not None:
            assert counts.min() >= 1 and np.array_equal(by_class @ counts, supply) and np.ptp(by_client @ counts) <= 1
    assert 5 < sum(feasible) < 40  # both answers occur


def test_chunks_go_to_the_poorest() -> None:
    rng = np.random.default_rng(0)
    cls, client = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    counts = chunk_counts(cls, client, np.array([5, 5]), rng)
    assert np.bincount(client, weights=counts).tolist() == [5, 5]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000))
def test_assigned_classes_are_distinct_and_equally_used(clients: int, classes: int, per: int, seed: int) -> None:
    per = min(per, classes)
    table = assign_classes(clients, per, classes, np.random.default_rng(seed))
    assert all(len(set(row)) == per for row in table.tolist())
    assert np.ptp(np.bincount(table.reshape(-1), minlength=classes)) <= 1


@pytest.mark.slow
def test_the_order_of_classes_is_uniform() -> None:
    """Three clients, two of three classes each: every pair of classes must be as likely for every client."""
    seen = np.zeros((3, 3))
    for seed in range(3000):
        table = assign_classes(3, 2, 3, np.random.default_rng(seed))
        for client, row in enumerate(table):
            seen[client, 3 - int(row.sum())] += 1
    assert np.abs(seen / 3000 - 1 / 3).max() < 0.03


def test_stratified_is_even_in_every_class() -> None:
    table = make_partition("stratified", skewed(997, 9), None, 13, 0).histogram()
    assert (np.ptp(table, axis=0) <= 1).all() and np.ptp(table.sum(axis=1)) <= 1


def test_lognormal_sizes() -> None:
    p = make_partition("iid", balanced(5000, 10), None, 50, 0, sizes="lognormal", sigma=1.0)
    assert p.sizes().sum() == 5000 and p.sizes().min() >= 1 and p.sizes().std() > 30
    assert spread(make_partition("iid", balanced(5000, 10), None, 50, 0, sizes="lognormal", sigma=0.0)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "expected"), [(2, 1.99), (5, 4.92), (10, 9.60), (50, 39.7)])
def test_shards_hold_fewer_classes_than_their_number(shards: int, expected: float) -> None:
    """The expected number of distinct classes for K = C = 100, from sampling `shards` of a shuffled multiset."""
    labels = balanced(50_000, 100)
    means = [
        make_partition("shards", labels, None, 100, seed, per_client=shards, per_class=True).statistics()["classes"][
            "mean"
        ]
        for seed in range(5)
    ]
    assert abs(np.mean(means) - expected) < 0.02 * expected


def test_sorted_shards_are_runs_of_the_sorted_labels() -> None:
    labels = balanced(1000, 10)
    p = make_partition("shards", labels, None, 10, 0, per_client=2)
    assert set(p.sizes()) == {100} and (p.histogram() % 50 == 0).all()  # twenty shards of fifty, each of one class


def test_dirichlet_follows_alpha() -> None:
    labels = balanced(20_000, 10)

    def concentration(kind: str, alpha: float) -> float:
        table = make_partition(
            kind, labels, None, 20, 0, alpha=alpha, **({"min_size": 0} if kind == "dirichlet" else {})
        )
        share = table.histogram() / np.maximum(table.sizes()[:, None], 1)
        return float((share**2).sum(axis=1).mean())  # 0.1 when even, 1 when one class has it all

    for kind in ("dirichlet", "dirichlet_balanced"):
        values = [concentration(kind, alpha) for alpha in (0.05, 0.5, 5, 1000)]
        assert values == sorted(values, reverse=True) and values[0] > 0.4 and values[-1] < 0.2


def test_dirichlet_first_moments_match() -> None:
    """Each client's share of a class has mean 1/K and the variance of Dir(alpha): (K - 1) / (K^2 (K alpha + 1))."""
    labels, clients, alpha = balanced(100_000, 100), 10, 0.5
    share = make_partition("dirichlet", labels, None, clients, 3, alpha=alpha).histogram() / 1000
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert abs(share.mean() - 0.1) < 1e-9 and abs(share.var() / variance - 1) < 0.2


def test_dirichlet_redraws_until_everyone_has_enough() -> None:
    def smallest(floor: int) -> int:
        options = {"alpha": 0.3, "min_size": floor}
        return min(
            make_partition("dirichlet", balanced(1000, 10), None, 10, s, **options).sizes().min() for s in range(9)
        )

    assert smallest(40) >= 40 > smallest(0)


def test_groups_share_no_class() -> None:
    options = {"groups": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], "clients_per_group": [3, 7]}
    table = make_partition("groups", balanced(1000, 10), balanced(200, 10), 10, 0, **options).histogram()
    assert (table[:3, 5:] == 0).all() and (table[3:, :5] == 0).all() and (table[:3, :5] > 0).all()
    p = make_partition("groups", balanced(1000, 10), None, 2, 0, groups=[[0], [1]], allow_uncovered=True)
    check_everything(p, exhaustive=False)
    assert p.statistics()["uncovered"] == list(range(2, 10)) and p.statistics()["unused_rows"] == 800


def test_uncovered_classes_are_left_out_only_when_allowed() -> None:
    labels, tests = balanced(1000, 10), balanced(100, 10)
    p = make_partition("classes", labels, tests, 4, 0, per_client=2, allow_uncovered=True)
    check_everything(p, exhaustive=False)
    assert len(p.statistics()["uncovered"]) == 2 and set(p.sizes()) == {200}
    with raises("E-DATA-CLASSES-UNCOVERED", clients=4, per_client=2, classes=10):
        make_partition("classes", labels, tests, 4, 0, per_client=2)


REFUSALS: list[tuple[str, int, dict[str, Any], str]] = [
    ("random", 5, {}, "E-DATA-PARTITION-KIND"),
    ("iid", 0, {}, "E-DATA-CLIENTS"),
    ("iid", 101, {}, "E-DATA-CLIENTS"),
    ("iid", 5, {"sizes": "zipf"}, "E-DATA-SIZES"),
    ("iid", 5, {"alpha": 1}, "E-DATA-PARTITION-OPTION"),
    ("iid", 5, {"test": "none"}, "E-DATA-TEST-RULE"),
    ("stratified", 5, {"x": 1}, "E-DATA-PARTITION-OPTION"),
    ("classes", 5, {}, "E-DATA-PARTITION-OPTION-MISSING"),
    ("classes", 5, {"per_client": 0}, "E-DATA-CLASSES-PER-CLIENT"),
    ("classes", 5, {"per_client": 11}, "E-DATA-CLASSES-PER-CLIENT"),
    ("classes", 3, {"per_client": 3}, "E-DATA-CLASSES-UNCOVERED"),
    ("classes", 60, {"per_client": 2}, "E-DATA-CLASS-TOO-SMALL"),
    ("shards", 60, {"per_client": 2}, "E-DATA-SHARDS-ROWS"),
    ("shards", 7, {"per_client": 3, "per_class": True}, "E-DATA-SHARDS-CLASSES"),
    ("dirichlet", 5, {"alpha": 0}, "E-DATA-ALPHA"),
    ("dirichlet", 20, {"alpha": 1}, "E-DATA-DIRICHLET-ROWS"),
    ("dirichlet", 10, {"alpha": 0.01}, "E-DATA-DIRICHLET-DRAWS"),
    ("dirichlet_balanced", 5, {"alpha": float("nan")}, "E-DATA-ALPHA"),
    ("groups", 4, {"groups": [[0], [1]]}, "E-DATA-GROUP-MISSING"),
    ("groups", 4, {"groups": [[0, 1], [1]]}, "E-DATA-GROUP-OVERLAP"),
    ("groups", 4, {"groups": [[0], [1]], "clients_per_group": [4, 1]}, "E-DATA-GROUP-CLIENTS"),
    ("groups", 40, {"groups": [[0], list(range(1, 10))]}, "E-DATA-GROUP-ROWS"),
]


@pytest.mark.parametrize(("kind", "clients", "options", "code"), REFUSALS)
def test_infeasible_requests_are_refused_with_the_reason(
    kind: str, clients: int, options: dict[str, Any], code: str
) -> None:
    with raises(code):
        make_partition(kind, balanced(100, 10), balanced(20, 10), clients, 0, **options)


@pytest.mark.parametrize("labels", [[0.5, 1.0], [-1, 0], [[0, 1]]])
def test_bad_labels_are_refused(labels: Any) -> None:
    with raises("E-DATA-LABELS", split="training"):
        make_partition("iid", np.array(labels), None, 1, 0)


def build(**update: Any) -> Partition:
    fields: dict[str, Any] = {
        "kind": "hand",
        "labels": np.array([0, 0, 1, 1]),
        "test_labels": np.array([0, 1]),
        "offsets": np.array([0, 2, 4]),
        "rows": np.arange(4),
        "test_offsets": np.array([0, 1, 2]),
        "tests": np.arange(2),
    }
    return Partition(**(fields | update))


PLANTED: list[tuple[dict[str, Any], str]] = [
    ({"rows": np.array([0, 1, 1, 3])}, "E-DATA-PARTITION-OVERLAP"),
    ({"rows": np.array([0, 1, 2, 4])}, "E-DATA-PARTITION-ROWS"),
    ({"offsets": np.array([0, 2, 3])}, "E-DATA-PARTITION-OFFSETS"),
    ({"offsets": np.array([0, 5, 4])}, "E-DATA-PARTITION-OFFSETS"),
    ({"offsets": np.array([0, 4])}, "E-DATA-PARTITION-CLIENTS"),
    ({"tests": np.array([1, 1])}, "E-DATA-PARTITION-OVERLAP"),
    ({"tests": np.array([1, 0])}, "E-DATA-TEST-CLASS"),
]


@pytest.mark.parametrize(("update", "code"), PLANTED)
def test_planted_bugs_are_noticed_at_construction(update: dict[str, Any], code: str) -> None:
    build()
    with raises(code):
        build(**update)


def test_planted_bugs_in_the_quotas_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = balanced(100, 10)
    twice = np.array([[0, 0], *([[c % 10, (c + 1) % 10] for c in range(9)])])
    monkeypatch.setattr(class_quotas, "assign_classes", lambda *_: twice)
    with raises("E-DATA-QUOTA-CLASSES"):
        make_partition("classes", labels, None, 10, 0, per_client=2)
    monkeypatch.undo()
    monkeypatch.setattr(class_quotas, "chunk_counts", lambda cls, *_: np.full(len(cls), 4))
    with raises("E-DATA-QUOTA-ROWS"):
        make_partition("classes", labels, None, 10, 0, per_client=2)


def test_statistics_and_histogram_against_loops() -> None:
    labels, tests = skewed(500, 6), skewed(90, 6, 2)
    p = make_partition("dirichlet", labels, tests, 9, 1, alpha=0.4, min_size=2)
    sizes = [len(p.train_rows(k)) for k in range(9)]
    classes = [len(set(labels[p.train_rows(k)].tolist())) for k in range(9)]
    found = p.statistics()
    assert found["samples"] == {"mean": np.mean(sizes), "std": np.std(sizes), "min": min(sizes), "max": max(sizes)}
    assert found["classes"]["mean"] == np.mean(classes) and found["classes"]["max"] == max(classes)
    assert found["test_samples"]["mean"] == 10 and found["uncovered"] == [] and found["clients"] == 9
    table = [np.bincount(labels[p.train_rows(k)], minlength=6).tolist() for k in range(9)]
    assert p.histogram(labels, 6).tolist() == table == p.histogram().tolist()
    client, cls, count = edges_of(p.offsets, p.rows, labels)
    assert count.tolist() == [table[k][c] for k, c in zip(client, cls, strict=True)] and count.sum() == 500


def test_test_shards_follow_the_training_shares() -> None:
    labels, tests = balanced(4000, 10), balanced(1000, 10, 1)
    p = make_partition("dirichlet", labels, tests, 12, 0, alpha=0.5, min_size=0)
    expected = p.histogram() * 100 / 400
    table = np.stack([np.bincount(tests[p.test_rows(k)], minlength=10) for k in range(12)])
    assert np.abs(table - expected).max() < 1 and (table.sum(axis=0) == 100).all()
    even = make_partition("stratified", balanced(4000, 10), balanced(905, 10, 1), 100, 0)
    assert np.ptp(np.diff(even.test_offsets)) <= 1


def test_compress_leaves_out_rows_without_an_owner() -> None:
    offsets, rows = compress(np.array([1, -1, 0, 1, 3]), 4)
    assert offsets.tolist() == [0, 1, 3, 3, 4] and rows.tolist() == [2, 0, 3, 4]


def test_overlapping_tests_of_unreasonable_size_are_refused() -> None:
    labels = balanced(50_000, 10)
    with raises("E-DATA-TEST-OVERLAP-SIZE"):
        make_partition("stratified", labels, labels, 5000, 0, test="all_of_my_classes")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_tens_of_thousands_of_clients(kind: str) -> None:
    """Size, not speed: that so many labels pass through every kind with the promises kept."""
    options = TYPICAL[kind] | ({"groups": [list(range(50)), list(range(50, 100))]} if kind == "groups" else {})
    options |= {"min_size": 0} if kind == "dirichlet" else {}
    clients = 100_000 if kind == "classes" else 20_000  # once the whole size will do
    p = make_partition(kind, balanced(10 * clients, 100), balanced(2 * clients, 100, 1), clients, 0, **options)
    assert len(p.rows) == 10 * clients and len(p.tests) == 2 * clients
    assert kind == "dirichlet" or set(p.sizes()) == {10}
