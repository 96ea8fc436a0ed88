"""Runs that travel in one file: found again elsewhere, with the same numbers, and without a path of another machine."""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from pathlib import Path

import pytest
from reproduction.kept import pack, unpack
from reproduction.question import load_question
from reproduction.reproduce import TUNING_SEED, Work, reproduce
from reproduction.runs import FinishedRuns, curve, finished_attacks, measure_of
from tests.support.errors import raises

from fedgraft.config.load import from_folder, load, to_toml
from fedgraft.consortium.attack import AttackPlan
from fedgraft.consortium.attacked import OUTCOME
from fedgraft.runs.folder import RunFolder


def _run(root: Path, data: str, seed: int, status: str = "finished") -> Path:
    """A folder as a run leaves it, without running one."""
    config = load(None, [f"data.path={data}/pacs", "data.source=parquet", "model.name=/a/net", f"seed={seed}"])
    run = RunFolder.create(root / f"run-{config.digest}", to_toml(config), config.digest)
    with run.writing(console=False):
        for r in range(3):
            clients = {"ids": [0, 1], "drift": [0.5, 1.5], "weight": [0.4, 0.6]}
            run.append(
                {"round": r, "accuracy": 0.1 * r, "loss": 1.0, "clients": clients, "bytes_up": 8}
                | ({"seconds": {"aggregate": 0.1 * r}} if r else {})
            )
        summary = {"test": {"accuracy": 0.1 * seed}, "bytes_up": 10, "bytes_down": 20, "seconds": 1.0}
        balanced = {"one": 0.2, "another": 0.5}
        summary["clients"] = {name: {"balanced_accuracy": {"value": value}} for name, value in balanced.items()}
        if status == "finished":
            run.finish(summary)
    return run.path


def test_a_finished_run_is_found_again_at_another_place(tmp_path: Path) -> None:
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "runs.zip"
    made = _run(here, "/one/data", 1)
    _run(here, "/one/data", 2, status="interrupted")
    assert pack(here, file, {"DATA": "/one/data", "MODEL": "/a/net"}) == 1, "what is not finished stays"
    assert unpack(file, there, {"DATA": "/other", "MODEL": "/b/net"}) == 1
    assert unpack(file, there, {"DATA": "/other", "MODEL": "/b/net"}) == 0, "what is there is left as it is"
    wanted = load(None, ["data.path=/other/pacs", "data.source=parquet", "model.name=/b/net", "seed=1"])
    found = FinishedRuns(there).get(wanted, False)
    assert found is not None and from_folder(found).data.path == "/other/pacs"
    for measure in ("test", "megabytes", "spread", "last", "dispersion", "seconds:aggregate"):
        assert measure_of(found, measure) == measure_of(made, measure), measure
    assert curve(found) == curve(made)
    assert measure_of(found, "seconds:aggregate") == pytest.approx(0.15)
    assert measure_of(found, "dispersion") == pytest.approx(20.0)  # 0.1 around a mean of 0.5
    assert measure_of(found, "balanced") == pytest.approx(35.0)  # the mean over clients of 20 and 50 %


def test_no_place_of_the_machine_is_in_the_file(tmp_path: Path) -> None:
    _run(tmp_path / "runs", "/one/data", 1)
    pack(tmp_path / "runs", tmp_path / "runs.zip", {"DATA": "/one/data", "MODEL": "/a/net"})
    with zipfile.ZipFile(io.BytesIO(lzma.decompress((tmp_path / "runs.zip").read_bytes()))) as archive:
        whole = b"".join(archive.read(name) for name in archive.namelist())
    assert b"/one" not in whole and b"/a/net" not in whole and b"DATA/pacs" in whole


def test_packing_again_keeps_what_was_packed_before_and_gives_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "runs.zip"
    _run(tmp_path / "first", "/d", 1)
    _run(tmp_path / "second", "/d", 2)
    pack(tmp_path / "first", file, {"DATA": "/d"})
    assert pack(tmp_path / "second", file, {"DATA": "/d"}) == 2
    before = file.read_bytes()
    pack(tmp_path / "first", file, {"DATA": "/d"})
    assert file.read_bytes() == before


def test_a_file_that_points_outside_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(whole := io.BytesIO(), "w") as archive:
        archive.writestr("../x/run.json", "{}")
    (tmp_path / "runs.zip").write_bytes(lzma.compress(whole.getvalue()))
    with raises("E-REPRODUCTION-ARCHIVE", name="../x/run.json"):
        unpack(tmp_path / "runs.zip", tmp_path / "runs", {})


def test_a_cell_of_an_attack_table_is_found_by_what_its_config_means(tmp_path: Path) -> None:
    config = load(None, ["partition.clients=10", "trainable.kind=head"])
    plan = AttackPlan(config, ["scaling"], ["mean"])
    wanted = {one.attack: cell for one, cell in plan.cells(tmp_path / "attack-now").items()}
    old = to_toml(wanted["scaling"].config).replace("head_clients = 1.0\n", "")  # before that option existed
    assert old != to_toml(wanted["scaling"].config)
    run = RunFolder.create(tmp_path / "attack-before" / wanted["scaling"].folder.parent.name / "run-1", old, "1")
    with run.writing(console=False):
        run.finish({"seconds": 1.0})
    assert finished_attacks(tmp_path) == {}, "the model was not measured"
    (run.path / OUTCOME).write_text("{}")
    known = finished_attacks(tmp_path)
    found = {one.attack: cell.folder for one, cell in plan.cells(tmp_path / "attack-now", known).items()}
    assert found == {"benign": wanted["benign"].folder, "scaling": run.path}


def test_reading_an_attack_table_runs_nothing_and_finds_what_is_finished(tmp_path: Path) -> None:
    """It came back empty once, and `q6 --read` wrote an empty page over the numbers."""
    preset = load_question("q6").parts["attacks"]
    work = Work("q6-attacks", preset, "tiny", (1,), tmp_path, report=lambda line: None, read=True)
    assert not reproduce(work).measured_at_all
    for seed in (TUNING_SEED, 1):
        plan = AttackPlan(
            work.cells[0].config(seed=seed),
            ("scaling", "backdoor_boosted"),
            ("mean", "median"),
            0.2,
            ("stratified", "dirichlet:0.5"),
            (seed,),
        )
        for one, cell in plan.cells(tmp_path / f"attack-{seed}").items():
            run = RunFolder.create(cell.folder, to_toml(cell.config), "1")
            with run.writing(console=False):
                run.finish({"seconds": 1.0})
            left = {"accuracy": 0.4 if one.attack == "scaling" else 0.5, "backdoor": 0.25}
            (run.path / OUTCOME).write_text(json.dumps(left))
    found = reproduce(work)
    assert found.measured_at_all and {c.label for c in found.cells} == set(found.values)
    assert found.values["IID/mean"] == {"test": {1: 50.0}, "last": {1: 40.0}, "best": {1: 25.0}}
