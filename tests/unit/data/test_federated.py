"""Datasets divided among clients: by site, from a list, with groups that stay together, and real ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises

from fedgraft.data import Dataset, arrays, features, make_partition, parquet, partition, stratified_split, synthetic
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import rules
from fedgraft.data.pixels.rule import PixelRule
from fedgraft.data.pixels.store import ImageStore, make_store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))


def patients(count: int = 400, seed: int = 0) -> Dataset:
    """Images of three hospitals and many patients, each patient at one hospital with one to four images."""
    rng = np.random.default_rng(seed)
    group = np.sort(rng.integers(0, count // 3, count))
    x = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    site = np.array(["oslo", "bern", "aix"])[group % 3]
    return arrays(x, np.array(["a", "b"])[group % 2], sites=site, groups=group)


def test_by_site_gives_every_owner_its_own_rows() -> None:
    data = patients()
    clients = partition.by_site(data)
    assert clients.client_names == ("aix", "bern", "oslo") and clients.clients == 3
    sites, tested = data.train.columns["site"], data.test.columns["site"]
    for client, name in enumerate(clients.client_names):
        assert set(sites[clients.rows(client)]) == {name} and set(tested[clients.test_rows(client)]) == {name}
    rows = np.concatenate([clients.rows(client) for client in range(3)])
    assert sorted([*rows, *clients.validation_rows.tolist()]) == list(range(len(data.train)))
    assert sum(len(clients.test_rows(client)) for client in range(3)) == len(data.test)


@pytest.mark.parametrize("kind", ["iid", "stratified", "dirichlet_balanced", "by_site"])
def test_no_patient_is_in_two_of_train_validation_and_test(kind: str) -> None:
    data = patients()
    options: dict[str, Any] = {"alpha": 0.5} if kind == "dirichlet_balanced" else {}
    clients = partition.federate(data, kind, 3, validation=0.2, **options)
    group = data.train.columns["group"]
    train, held, test = set(group[clients.train_rows]), set(group[clients.validation_rows]), data.test.columns["group"]
    assert not train & held and not (train | held) & set(test)
    assert abs(len(clients.validation_rows) / len(data.train) - 0.2) < 0.03
    assert set(data.train.columns["site"][clients.validation_rows]) == {"oslo", "bern", "aix"}


def test_without_sites_and_groups_it_is_the_split_and_the_partition_as_they_are() -> None:
    data = synthetic(classes=4, train=200, test=40, image_size=4)
    clients = partition.dirichlet(data, 5, alpha=0.4, min_size=2, validation=0.1, seed=3)
    train, held = stratified_split(data.train.labels, 0.1, 3)
    plain = make_partition("dirichlet", data.train.labels[train], data.test.labels, 5, 3, alpha=0.4, min_size=2)
    assert clients.partition.digest == plain.digest and clients.validation_rows.tolist() == held.tolist()
    assert clients.total == len(train) and clients.largest == plain.sizes().max() and clients.classes == 4
    assert clients.histogram().tolist() == plain.histogram().tolist() and clients.client_names == tuple("01234")
    assert clients.identity[:3] == [data.train.digest, data.test.digest, plain.digest]


def test_every_way_has_a_function_of_its_own() -> None:
    data = synthetic(classes=4, train=200, test=40, image_size=4)
    made: dict[str, FederatedData] = {
        "iid": partition.iid(data, 4, seed=1),
        "stratified": partition.stratified(data, 4, seed=1),
        "classes": partition.classes(data, 4, per_client=2, seed=1),
        "shards": partition.shards(data, 4, seed=1),
        "dirichlet": partition.dirichlet(data, 4, alpha=5, min_size=1, seed=1),
        "dirichlet_balanced": partition.dirichlet_balanced(data, 4, seed=1),
        "groups": partition.groups(data, 4, groups=[[0, 1], [2, 3]], seed=1),
    }
    assert set(made) == set(partition.KINDS)
    for kind, clients in made.items():
        assert clients.partition.kind == kind and clients.total == 180 and clients.clients == 4
    assert len(partition.iid(data, 4, limit=60).train_rows) == 60


def test_a_list_of_datasets_is_one_client_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (90, 8, 8, 3), dtype=np.uint8)

    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, row: int) -> tuple[np.ndarray, str]:
            return x[30 + row], ("bee", "cow")[row % 2]

    first = arrays(x[:30], ["ant", "bee"] * 15, groups=np.arange(30) // 2)
    third = (x[60:], ["ant", "bee", "cow"] * 10)
    clients = partition.given([first, Items(), third], names=["left", "middle", "right"])
    store = clients.dataset.train
    assert clients.client_names == ("left", "middle", "right") and clients.dataset.classes == ("ant", "bee", "cow")
    assert isinstance(store, ImageStore)
    pixels = store.open(PixelRule(8))
    known = {image.tobytes(): row for row, image in enumerate(x)}
    for client in range(3):
        rows = clients.rows(client)
        for row, image in zip(rows.tolist(), pixels[rows.numpy()], strict=True):
            place = known[image.tobytes()]
            names = (["ant", "bee"] * 15, ["bee", "cow"] * 15, ["ant", "bee", "cow"] * 10)[client]
            assert place // 30 == client and store.classes[store.labels[row]] == names[place % 30]
    assert len(partition.given([first, first]).train_rows) == 2 * len(partition.given([first]).train_rows)
    with raises("E-DATA-OWNER-NAMES", names=("a", "a")):
        partition.given([first, first], names=["a", "a"])
    table = features(np.eye(8), [0, 1] * 4)
    with raises("E-DATA-MIXED-KINDS"):
        partition.given([first, table])
    assert partition.given([table, table]).clients == 2


def test_what_by_site_cannot_do_is_said() -> None:
    data = synthetic(classes=2, train=40, test=10, image_size=4)
    with raises("E-DATA-NO-COLUMN", column="site", columns=()):
        partition.by_site(data)
    with raises("E-DATA-NO-COLUMN", column="clinic", columns=("site", "group")):
        partition.by_site(patients(), column="clinic")
    with raises("E-DATA-BY-SITE-TEST"):
        partition.by_site(patients(), test="all_of_my_classes")
    by_patient = partition.by_site(patients(60), column="group", validation=0)
    assert by_patient.clients == len(set(by_patient.dataset.train.columns["group"]))
    assert by_patient.partition.notes  # no patient of the test set trains, so nobody is tested on their rows


def test_classes_that_nobody_holds_are_refused() -> None:
    store = make_store(np.zeros((20, 4, 4, 3), np.uint8), np.arange(20) % 2, ("a", "b", "c", "d"))
    data = Dataset("d", store, store)
    with raises("E-DATA-UNCOVERED", classes=("c", "d")):
        partition.iid(data, 2)
    allowed = partition.groups(data, 2, groups=[[0], [1]], allow_uncovered=True)
    assert allowed.uncovered == ("c", "d")


@pytest.mark.parametrize("classes", [10, 100])
def test_dirichlet_balanced_grows_more_uneven_as_alpha_falls(classes: int) -> None:
    """Classes of a client and the evenness of its mix fall with alpha, down to one class each."""
    labels = np.arange(100 * 90) % classes
    held, share = [], []
    for alpha in (100, 10, 1, 0.3, 0.1, 0.01, 0.001):
        table = [make_partition("dirichlet_balanced", labels, None, 100, s, alpha=alpha).histogram() for s in range(3)]
        counts = np.concatenate(table)
        assert set(counts.sum(axis=1)) == {90}
        held.append((counts > 0).sum(axis=1).mean())
        share.append(((counts / 90) ** 2).sum(axis=1).mean())
    assert all(a > b for a, b in pairwise(held))
    assert all(a < b for a, b in pairwise(share))
    assert held[-1] < 1.1 and share[-1] > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.01, 0.1, 1, 10, 100])
def test_dirichlet_balanced_holds_as_many_classes_as_the_urn_says(alpha: float) -> None:
    """Polya's urn: a class of weight a = alpha/C is missing from n draws with probability prod (alpha-a+i)/(alpha+i).

    Only the first client to draw finds every class in full; over many seeds its mean number of classes must agree.
    """
    labels, n, classes = np.arange(40 * 250) % 20, 250, 20
    i = np.arange(n)
    expected = classes * (1 - np.exp(np.log((alpha - alpha / classes + i) / (alpha + i)).sum()))
    tables = [make_partition("dirichlet_balanced", labels, None, 40, s, alpha=alpha).histogram() for s in range(150)]
    held = np.array([(table[0] > 0).sum() for table in tables])
    assert abs(held.mean() - expected) <= 4 * held.std() / len(held) ** 0.5 + 0.02


def test_a_rest_that_is_taken_by_its_amount_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken variant: with nothing wished for left, a client was given some of every class that was."""

    labels = np.arange(100 * 90) % 100
    sound = make_partition("dirichlet_balanced", labels, None, 100, 0, alpha=0.01).statistics()["classes"]["mean"]
    drawn = rules._draw_rows
    monkeypatch.setattr(rules, "_draw_rows", lambda wish, size, left, rng, c: drawn(wish, size, left, _Flat(rng), c))
    broken = make_partition("dirichlet_balanced", labels, None, 100, 0, alpha=0.01).statistics()["classes"]["mean"]
    assert sound < 2 < 5 < broken


class _Flat:
    """A generator whose Dirichlet is even."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.multinomial = rng.multinomial

    def dirichlet(self, concentration: np.ndarray) -> np.ndarray:
        return np.full(len(concentration), 1 / len(concentration))


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ham10000-sites", "pacs"])
def test_real_sites(name: str, shared_data: Path) -> None:
    if not (shared_data / name).is_dir():
        pytest.skip(f"needs {name} in the data of FEDGRAFT_SHARED")
    data = parquet(shared_data / name)
    clients = partition.by_site(data)
    group = data.train.columns["group"]
    assert clients.clients == 4 and len(data.classes) == 7 and len(data.train) + len(data.test) in (10_015, 9_991)
    assert not set(group[clients.train_rows]) & set(group[clients.validation_rows])
    assert not set(group) & set(data.test.columns["group"])
    expected = {
        "ham10000-sites": {"rosendahl": 456, "vidir_modern": 675, "vidir_molemax": 790, "vienna_dias": 87},
        "pacs": {"art_painting": 410, "cartoon": 469, "photo": 333, "sketch": 793},
    }[name]
    assert {n: len(clients.test_rows(k)) for k, n in enumerate(clients.client_names)} == expected
    few = data.test.take(np.arange(0, len(data.test), 200))
    assert isinstance(few, ImageStore) and len(few.where(0).split("row")) == 2
