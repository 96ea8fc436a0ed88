"""Forgetting a client: the replay has the bytes of a run that never had it, for every kind of state a run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.tiny import same_bits, tensors_of, tiny, without_pictures
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import merge, validate
from fedgraft.consortium.unlearn import plan_replay, subtract, unlearn_client
from fedgraft.data.federated import FederatedData
from fedgraft.runs.loop import run
from fedgraft.runs.setup import setup_of

COMMON = ["rounds.total=4", "rounds.fraction=0.5", "partition.clients=4", "rounds.checkpoint_every=1", "seed=1"]
KINDS = {
    "fedavg": ["model.head=random"],
    "sparse": ["trainable.kind=sparse", "trainable.sparse.samples=16", "trainable.sparse.rounds=1"],
    "lora": ["trainable.kind=lora", "model.head=random"],
    "scaffold": ["algorithm.name=scaffold", "model.head=random"],
    "weighted": ["loss.class_weights=federation", "model.head=random"],
}


def first_rounds(folder: Path, clients: int) -> dict[int, int]:
    """The first round of each client, by the run's record."""
    seen: dict[int, int] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for client in (line.get("clients") or {}).get("ids", []):
            seen.setdefault(client, line["round"])
    return {k: seen.get(k, 99) for k in range(clients)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_bytes_of_a_run_that_never_had_the_client(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*COMMON, *KINDS[kind])
    with without_pictures():
        run(config, tmp_path / "run", console=False)
        first = first_rounds(tmp_path / "run", 4)
        client = max((k for k in first if first[k] < 99), key=lambda k: first[k])  # the one that came last
        replay = plan_replay(tmp_path / "run", str(client))
        unlearn_client(replay, tmp_path / "run", console=False)
        never = validate(merge(config.table, {"partition": {"without": [str(client)]}}))
        real = FederatedData.rows

        def guarded(self: FederatedData, k: int) -> object:
            assert k != client, "the run looked at the images of a client that it never had"
            return real(self, k)

        monkeypatch.setattr(FederatedData, "rows", guarded)
        run(never, tmp_path / "never", console=False)
    forgotten, fresh, old = (tensors_of(tmp_path / n) for n in (f"run-without-{client}", "never", "run"))
    assert same_bits(forgotten, fresh)
    assert not same_bits({"v": forgotten["vector"]}, {"v": old["vector"]})  # it had learned from the client
    made_from_all = kind in ("sparse", "weighted")
    assert replay.start == (0 if made_from_all else first[client] - 1)
    record = json.loads((tmp_path / f"run-without-{client}" / "unlearned.json").read_text())
    assert record["exact"] and record["rounds"] == 4 - replay.start


def test_the_closed_form_head_is_that_of_the_others_sums(tmp_path: Path) -> None:
    """With no rounds, forgetting solves the sums of the others; the statistics are additive."""
    config = tiny("rounds.total=0")
    with without_pictures():
        run(config, tmp_path / "run", console=False)
        unlearn_client(plan_replay(tmp_path / "run", "2"), tmp_path / "run", console=False)
        run(tiny("rounds.total=0", 'partition.without=["2"]'), tmp_path / "never", console=False)
    assert same_bits(tensors_of(tmp_path / "run-without-2"), tensors_of(tmp_path / "never"))
    assert not same_bits(tensors_of(tmp_path / "run-without-2"), tensors_of(tmp_path / "run"))


def test_strangers_and_the_last_client_are_refused(tmp_path: Path) -> None:
    with without_pictures():
        run(tiny("rounds.total=1"), tmp_path / "run", console=False)
    with raises("E-RUN-UNKNOWN-CLIENT", client="west"):
        plan_replay(tmp_path / "run", "west")
    with raises("E-RUN-NOBODY-LEFT", option="without"):
        run(tiny('partition.without=["0","1","2"]'), tmp_path / "nobody", console=False)
    done = CliRunner().invoke(app, ["unlearn", str(tmp_path / "run"), "--client", "1", "--dry-run"])
    assert done.exit_code == 0 and "took part in 1 of 1 rounds" in done.output and "cannot be recalled" in done.output


@pytest.mark.parametrize("rounds", [1, 4])
def test_subtracting_is_exact_for_one_round_and_measured_for_more(rounds: int, tmp_path: Path) -> None:
    """In the first round nobody has learned from the client yet, so the mean without it is the exact model."""
    config = tiny("model.head=random", "rounds.fraction=1", f"rounds.total={rounds}", "rounds.keep_contributions=true")
    source = tmp_path / "run"
    with without_pictures():
        run(config, source, console=False)
        assert (
            subtract(plan_replay(source, "1", tmp_path / "early", fast=True), source, console=False)["unlearned"][
                "distance"
            ]
            is None
        )
        unlearn_client(plan_replay(source, "1"), source, console=False)
        outcome = subtract(plan_replay(source, "1", fast=True), source, console=False)["unlearned"]
    record = json.loads((tmp_path / "run-without-1-approximate" / "unlearned.json").read_text())
    assert record == outcome and record["exact"] is False and record["rounds"] == 0
    near = outcome["distance"] / outcome["of_the_run"]
    assert near < (1e-5 if rounds == 1 else 0.8) and (rounds == 1 or near > 1e-3)
    assert "contribution/1" not in tensors_of(tmp_path / "run-without-1-approximate")
    plain = tmp_path / "plain"
    with without_pictures():
        run(tiny("model.head=random", "rounds.fraction=1", f"rounds.total={rounds}"), plain, console=False)
        with raises("E-CONSORTIUM-NO-CONTRIBUTIONS"):
            subtract(plan_replay(plain, "1", fast=True), plain, console=False)
    assert same_bits({"v": tensors_of(plain)["vector"]}, {"v": tensors_of(source)["vector"]})  # keeping changes nothing
    for option in ("privacy.aggregation=secure", "algorithm.name=scaffold"):
        with raises("E-RUN-CONTRIBUTIONS"):
            run(tiny("rounds.keep_contributions=true", option), tmp_path / "no", console=False)


PRIVATE = [
    "algorithm.weighting=uniform",
    "rounds.sampling=poisson",
    "privacy.dp.noise=0.5",
    "privacy.dp.delta=0.01",
    "model.head=random",
]
UNNAMED = {
    "private": [*PRIVATE, "privacy.dp.secret=false"],
    "private and hidden": [*PRIVATE, "privacy.dp.secret=false", "privacy.aggregation=secure"],
    "hidden": ["privacy.aggregation=secure", "model.head=random"],
}


@pytest.mark.parametrize("kind", UNNAMED)
def test_a_client_of_protected_rounds_is_forgotten(kind: str, tmp_path: Path) -> None:
    """Private rounds do not say who took part: the replay must not keep any of them and call the model exact."""
    config = tiny(*COMMON, "rounds.fraction=1", *UNNAMED[kind])
    with without_pictures():
        run(config, tmp_path / "run", console=False)
        replay = plan_replay(tmp_path / "run", "2")
        unlearn_client(replay, tmp_path / "run", console=False)
        never = validate(merge(config.table, {"partition": {"without": ["2"]}}))
        run(never, tmp_path / "never", console=False)
    forgotten, fresh, old = (tensors_of(tmp_path / name) for name in ("run-without-2", "never", "run"))
    for name in ("vector", "best/vector"):
        assert same_bits({name: forgotten[name]}, {name: fresh[name]})
    assert not same_bits({"v": forgotten["vector"]}, {"v": old["vector"]})
    record = json.loads((tmp_path / "run-without-2" / "unlearned.json").read_text())
    assert record["exact"] and record["from_round"] == 0 and record["rounds"] == 4
    assert record["took_part"] == (4 if kind == "hidden" else None)
    with raises("E-CONSORTIUM-NO-CONTRIBUTIONS"):
        subtract(plan_replay(tmp_path / "run", "2", fast=True), tmp_path / "run", console=False)


def test_a_round_that_names_nobody_may_have_had_the_client(tmp_path: Path) -> None:
    """A skipped round, and one that refused the client, depend on it."""
    config = tiny(*COMMON, "rounds.fraction=1", "model.head=random")
    source = tmp_path / "run"
    with without_pictures():
        run(config, source, console=False)
    path = source / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def start_with(**second: object) -> int:
        others = {"clients": {"ids": [0, 1, 3]}, "dropped": []}
        changed = [{**line, **others} for line in lines]
        changed[2] |= second
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        return plan_replay(source, "2").start

    assert start_with() == 4
    assert start_with(clients={"ids": [0, 2]}) == 1
    assert start_with(dropped=[{"client": 2, "reason": "its update is too long"}]) == 1
    assert start_with(clients=None, skipped=True) == 1


def test_a_replay_that_kept_too_many_rounds_is_not_called_exact(tmp_path: Path) -> None:
    config = tiny(*COMMON, "rounds.fraction=1", "model.head=random")
    with without_pictures():
        run(config, tmp_path / "run", console=False)
        replay = plan_replay(tmp_path / "run", "2")
        unlearn_client(replay, tmp_path / "run", console=False)
        record = tmp_path / "run-without-2" / "unlearned.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "from_round": 3}))
        with raises("E-CONSORTIUM-LATER-START", round=3):
            unlearn_client(replay, tmp_path / "run", console=False)


def test_a_fast_forgetting_delivers_no_model_with_the_client(tmp_path: Path) -> None:
    """The best round of the run came before the last one, and the run stopped early: neither comes back."""
    config = tiny(
        "model.head=random",
        "rounds.fraction=1",
        "rounds.total=6",
        "rounds.keep_contributions=true",
        "rounds.patience=1",
        "rounds.checkpoint_every=1",
        "local.lr=1e-6",
    )
    source = tmp_path / "run"
    with without_pictures():
        before = run(config, source, console=False)
        assert before["rounds"] < 6 and before["best_round"] < before["rounds"]
        summary = subtract(plan_replay(source, "1", fast=True), source, console=False)
    old, new = tensors_of(source), tensors_of(tmp_path / "run-without-1-approximate")
    expected = old["vector"] - old["contribution/1"]
    assert same_bits({"v": new["best/vector"]}, {"v": expected})
    assert same_bits({"v": new["vector"]}, {"v": expected})
    assert summary["rounds"] == before["rounds"] and summary["unlearned"]["rounds"] == 0


def test_the_images_of_a_forgotten_client_do_not_choose_the_best_round(tmp_path: Path) -> None:
    """Without validation images the model is measured on the clients' own."""
    config = tiny("model.head=random", "data.validation=0", "rounds.total=1")
    with without_pictures():
        run(config, tmp_path / "run", console=False)
        replay = plan_replay(tmp_path / "run", "1")
    assert replay.start == 0
    setup = setup_of(replay.config)
    own = set(setup.task.data.rows(1).tolist())
    judging = set(setup.evaluation_rows.tolist())
    assert judging == set(setup.task.data.train_rows.tolist()) - own
