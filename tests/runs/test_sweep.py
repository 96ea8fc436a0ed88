"""Sweeps: what is searched, that nothing is repeated or lost whatever is killed, pruning, and the tables.

Most tests put a small stand-in for a run in place, which keeps to the run folder's rules (lock, status, metrics,
summary) and whose accuracy is a known function of the learning rate: one for this process, one for others; slow ones
use the real one.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.tiny import CNN

from fedgraft.cli import sweep as cli_sweep
from fedgraft.config.load import load
from fedgraft.consortium import claims, search, sweep
from fedgraft.consortium.claims import Claims
from fedgraft.consortium.search import Search, SearchPlan, Trial, best_so_far, diverged_at
from fedgraft.consortium.search_space import Axis, grid_settings, parse_axis
from fedgraft.consortium.search_tables import best_trial, setting_rows
from fedgraft.consortium.slurm import write_array_script
from fedgraft.consortium.sweep import Cell, finished_summary, folder_of, run_many
from fedgraft.core.errors import FedgraftError
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.tracking import Progress

TINY = [
    CNN,
    "data.image_size=16",
    "data.source=digits",
    "data.limit=120",
    "partition.clients=4",
    "local.steps=2",
    "local.batch_size=8",
    "rounds.total=4",
    "rounds.evaluate_every=1",
    "rounds.checkpoint_every=1",
    "name=tiny.1",
]

STAND_IN = """
import fcntl, json, math, os, sys, time, tomllib
from pathlib import Path
file, folder = Path(sys.argv[1]), Path(sys.argv[2])
config = tomllib.loads(file.read_text())
digest = folder.name.rsplit("-", 1)[1]
rate, total = config["local"]["lr"], config["rounds"]["total"]
folder.mkdir(exist_ok=True)
lock = open(folder / ".lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("the run folder is in use")
def put(name, value):
    (folder / (name + ".tmp")).write_text(json.dumps(value))
    (folder / (name + ".tmp")).rename(folder / name)
def status(word):
    put("run.json", {"config_digest": digest, "status": word})
if (folder / "summary.json").exists():
    status("finished")
    sys.exit(0)
with open(folder.parent / "starts.log", "a") as log:
    log.write(digest + "\\n")
status("running")
(folder / "metrics.jsonl").write_text("")
good = 1 - abs(math.log10(rate) + 1) / 4 + config["seed"] / 1000
try:
    for number in range(1, total + 1):
        time.sleep(60 if rate == 100 and number == 3 else float(os.environ.get("STAND_IN_PAUSE", "0")))
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"round": number, "accuracy": good * number / total}) + "\\n")
        if rate == 9:
            status("failed")
            sys.exit("it broke at once")
except KeyboardInterrupt:
    status("interrupted")
    sys.exit(130)
result = {"accuracy": good, "loss": 0.0}
put("summary.json", {"validation": result, "test": {"accuracy": good - 0.1}, "bytes_up": 1000,
    "best_round": total * (rate != 0.2), "bytes_down": 2000, "seconds": 0.1, "rounds": total})
status("finished")
"""

PARENT = """
import sys
from pathlib import Path
from fedgraft.consortium import sweep
from fedgraft.config.load import load
from fedgraft.consortium.search import SearchPlan, Search
from fedgraft.consortium.search_space import parse_axis
program, root, kind, overrides = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[5:]
if program:
    sweep.cell_command = lambda cell, file: [sys.executable, "-IS", program, str(file), str(cell.folder)]
axes = tuple(parse_axis(one[2:]) for one in overrides if one.startswith("--"))
base = load(None, [one for one in overrides if not one.startswith("--")])
seeds = tuple(range(int(sys.argv[4])))
Search(SearchPlan(base, axes, seeds, kind, 5), root, lambda text: print(text, flush=True)).run(2)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-ins for a run in place."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(sweep, "cell_command", lambda cell, file: [sys.executable, "-IS", program, file, cell.folder])
    monkeypatch.setattr(sweep, "run_cell", stand_in_here)
    return program


def stand_in_here(cell: Cell, progress: Progress) -> None:
    """The same in this process; at rate 1000 a client is dropped."""
    c = cell.config
    good = 1 - abs(math.log10(c.local.lr or 0.01) + 1) / 4 + c.seed / 1000
    folder = RunFolder.create(cell.folder, "", c.digest)
    with (cell.folder.parent / "starts.log").open("a") as log:
        log.write(c.digest + "\n")
    with folder.writing(console=False):
        folder.rewind(None)
        for number in range(1, c.rounds.total + 1):
            dropped = [{"client": 0, "reason": "NaN"}] if c.local.lr == 1000 else []
            line = {"round": number, "accuracy": good * number / c.rounds.total, "loss": 1.0, "dropped": dropped}
            folder.append(line)
            progress.update(line)
        if c.local.lr == 9:
            raise FedgraftError("it broke at once")
        result = {"validation": {"accuracy": good}, "test": {"accuracy": good - 0.1}, "best_round": c.rounds.total}
        folder.finish({**result, "bytes_up": 1000, "bytes_down": 2000, "seconds": 0.1, "rounds": c.rounds.total})


def plan(*over: str, seeds: tuple[int, ...] = (0,), **more: Any) -> SearchPlan:
    return SearchPlan(load(None, TINY), tuple(map(parse_axis, over)), seeds, **more)


def run(made: SearchPlan, root: Path, processes: int = 0) -> tuple[list[Trial], list[str]]:
    lines: list[str] = []
    return Search(made, root, lines.append).run(processes), lines


def starts(root: Path) -> Counter[str]:
    log = root / "starts.log"
    return Counter(log.read_text().split() if log.exists() else [])


# What is searched


def test_values_are_numbers_words_or_lists() -> None:
    assert parse_axis("local.lr=0.01,0.1").values == (0.01, 0.1)
    assert parse_axis("partition.kind=iid, classes").values == ("iid", "classes")
    assert parse_axis("local.nesterov=true,false").values == (True, False)
    assert parse_axis('trainable.sparse.scope=["qk","mlp"],["blocks"]').values == (["qk", "mlp"], ["blocks"])
    assert parse_axis("local.lr=log:0.001:0.1") == Axis("local.lr", (), "log", 0.001, 0.1)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("local.lr", "E-CONSORTIUM-NO-VALUES"),
        ("local.lr=", "E-CONSORTIUM-NO-VALUES"),
        ("seed=1,2", "E-CONSORTIUM-SEED-AXIS"),
        ("local.lr=log:0:1", "E-CONSORTIUM-RANGE"),
        ("local.lr=linear:2:1", "E-CONSORTIUM-RANGE"),
        ("local.steps=int:1:2.5", "E-CONSORTIUM-RANGE"),
        ("local.lr=log:1", "E-CONSORTIUM-RANGE"),
    ],
)
def test_bad_axes_are_one_sentence(word: str, code: str) -> None:
    with raises(code):
        parse_axis(word)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("local.rl=1", "there is no option 'local.rl'; the nearest one is"),
        ("local=1", "table of options"),
    ],
)
def test_an_axis_that_is_no_option_is_one_sentence(word: str, sentence: str) -> None:
    with pytest.raises(FedgraftError, match=sentence):
        parse_axis(word)


def test_grid_is_every_combination_and_refuses_ranges() -> None:
    axes = [parse_axis("local.lr=0.1,0.2"), parse_axis("local.steps=1,2,3")]
    cells = grid_settings(axes)
    assert len(cells) == 6
    assert cells[1] == {"local.lr": 0.1, "local.steps": 2}
    with raises("E-CONSORTIUM-GRID-RANGE", key="local.lr"):
        grid_settings([parse_axis("local.lr=log:0.1:1")])


def proposals(made: SearchPlan, root: Path) -> list[Trial]:
    """What a search would try if no run ever ended."""
    search = Search(made, root)
    search.study = made.study(root)
    return list(search._proposals([]))


def test_random_draws_repeat_and_spread(tmp_path: Path) -> None:
    made = plan("local.lr=log:0.001:1", "local.steps=int:1:4", "local.momentum=0.0,0.9", kind="random", trials=80)
    first, again = ([trial.setting for trial in proposals(made, tmp_path / name)] for name in "ab")
    assert again == first and len(first) == 80
    low = sum(setting["local.lr"] < 0.001**0.5 for setting in first) / 80
    assert 0.33 < low < 0.67  # half below the geometric middle; a linear draw would put 3 % there
    counts = Counter(setting["local.steps"] for setting in first)
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) > 5
    assert {setting["local.momentum"] for setting in first} == {0.0, 0.9}
    assert all(0.001 <= setting["local.lr"] <= 1 for setting in first)


def test_optuna_learns_and_an_interruption_leaves_no_trace(tmp_path: Path, stand_in: Path) -> None:
    """The stand-in is best at 0.1; -log10 of the rate is searched from 1 to 7."""
    made = plan("local.lr=log:1e-7:0.5", kind="optuna", trials=24)
    trials, _ = run(made, tmp_path / "a")
    run(replace(made, trials=10), tmp_path / "b")
    resumed, lines = run(made, tmp_path / "b")
    assert [t.setting for t in resumed] == [t.setting for t in trials] and lines[0].startswith("10 of 24")

    def off(compared: list[Trial]) -> float:
        return sum(abs(math.log10(t.setting["local.lr"]) + 1) for t in compared) / len(compared)

    # A uniform draw over 6.7 decades is 2.7 off on average, with deviation 1.9, so the mean of fifteen is hardly ever
    # below 2.7 - 3 * 1.9 / sqrt(15) = 1.2: a search that learns is, one that is told nothing is not.
    assert off(trials[9:]) < 1.2 < off(proposals(made, tmp_path / "c")[9:])


def test_what_a_killed_sweep_left_is_tried_first(tmp_path: Path, stand_in: Path) -> None:
    made, root = plan("local.lr=log:0.001:1", kind="optuna", trials=3), tmp_path / "s"
    killed = Search(made, root)
    killed.study = made.study(root)
    begun = next(killed._proposals([])).setting  # asked for, and then nothing more was heard
    killed.study.enqueue_trial({"local.lr": 0.5})  # killed between a queue and its answer
    trials, _ = run(made, root)
    assert {"local.lr": 0.5} in [t.setting for t in trials] and begun in [t.setting for t in trials]
    states = Counter(old.state.name for old in made.study(root).get_trials())
    assert states == {"COMPLETE": 3, "FAIL": 1}


def test_optuna_missing_names_the_extra_and_a_grid_does_without(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    for more in ({"kind": "random"}, {"kind": "optuna"}, {"prune_after": 1}):
        with raises("E-MISSING-EXTRA"):
            run(plan("local.lr=0.1,0.2", **more), tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert len(run(plan("local.lr=0.1,0.2"), tmp_path / "s")[0]) == 2


@pytest.mark.parametrize(
    ("update", "code"),
    [
        ({"kind": "gird"}, "E-CONSORTIUM-SEARCH-KIND"),
        ({"seeds": ()}, "E-CONSORTIUM-SEEDS"),
        ({"seeds": (1, 1)}, "E-CONSORTIUM-SEEDS"),
        ({"axes": (Axis("local.lr", (1,)), Axis("local.lr", (2,)))}, "E-CONSORTIUM-AXIS-TWICE"),
        ({"base": load(None, [*TINY, "data.validation=0"])}, "E-CONSORTIUM-NO-VALIDATION"),
    ],
)
def test_bad_plans_are_one_sentence(update: dict[str, Any], code: str) -> None:
    with raises(code):
        SearchPlan(**{"base": load(None, TINY), "axes": (), "seeds": (0,), **update})


def test_a_wrong_value_is_refused_before_anything_runs(tmp_path: Path, stand_in: Path) -> None:
    with pytest.raises(FedgraftError, match=r"local\.lr"):
        run(plan("local.lr=0.1,-1"), tmp_path / "s")
    with raises("E-CONSORTIUM-SAME-RUN"):
        run(plan("local.lr=0.1,0.10"), tmp_path / "s")
    with raises("E-CONSORTIUM-SAME-RUN"):
        run(plan("workers=1,2"), tmp_path / "s")  # the number of workers does not change a result
    assert not (tmp_path / "s").exists()


# Carrying it out


def test_grid_over_seeds_chooses_by_validation_and_writes_tables(tmp_path: Path, stand_in: Path) -> None:
    root = tmp_path / "s"
    trials, lines = run(plan("local.lr=0.001,0.1,0.01", "partition.kind=iid,stratified", seeds=(0, 1)), root, 2)
    assert len(trials) == 6 and all(t.status == "finished" for t in trials)
    first = best_trial(trials)
    assert first is not None and first.setting == {"local.lr": 0.1, "partition.kind": "iid"}
    assert len([line for line in lines if "validation" in line]) == 12 and lines[-1].startswith("[12/12]")
    assert "left" in lines[0] and "left" not in lines[-1]
    assert set(starts(root).values()) == {1} and len(starts(root)) == 12
    with (root / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["local.lr"] for row in table] == ["0.1", "0.1", "0.01", "0.01", "0.001", "0.001"]
    # Accuracy 1 and 1.001 by seed: mean 1.0005, deviation (n-1) 0.001 / sqrt(2)
    assert (table[0]["validation (%)"], table[0]["test (%)"]) == ("100.05 ± 0.07", "90.05 ± 0.07")
    assert "| 0.1 | iid | 2 | 100.05 ± 0.07 | 90.05 ± 0.07 | 0.003 | best |" in (root / "table.md").read_text()
    assert r"0.1 & iid & 2 & 100.05 $\pm$ 0.07" in (root / "table.tex").read_text()
    with (root / "runs.csv").open() as file:
        every = list(csv.DictReader(file))
    assert len(every) == 12 and float(every[0]["validation"]) == pytest.approx(0.5) and every[0]["bytes_up"] == "1000"


def test_a_second_sweep_repeats_nothing_and_a_larger_one_adds(tmp_path: Path, stand_in: Path) -> None:
    root = tmp_path / "s"
    run(plan("local.lr=0.1,0.01"), root)
    trials, lines = run(plan("local.lr=0.1,0.01,0.001", seeds=(0, 1)), root)
    assert lines[0] == "2 of 6 runs were finished before"
    assert len(starts(root)) == 6 and set(starts(root).values()) == {1}
    assert sum(len(t.summaries) for t in trials) == 6


def test_a_failure_is_named_after_all_others_are_done(tmp_path: Path, stand_in: Path) -> None:
    root, made = tmp_path / "s", plan("local.lr=9.0,0.1,0.01")
    for processes in (0, 2):
        with raises("E-CONSORTIUM-RUNS-FAILED"):
            run(made, root, processes)
    assert "| 9.0 | 0 |  |  |  | failed |" in (root / "table.md").read_text()
    assert (root / "table.md").read_text().count("finished") == 1 and "best" in (root / "table.md").read_text()


def test_random_search_has_the_wanted_number_of_different_settings(tmp_path: Path, stand_in: Path) -> None:
    trials, _ = run(plan("local.lr=log:0.001:1", kind="random", trials=4), tmp_path / "a")
    assert len({t.setting["local.lr"] for t in trials}) == 4
    trials, _ = run(plan("local.lr=0.1,0.01,0.001", kind="random", trials=9), tmp_path / "b")
    assert sorted(t.setting["local.lr"] for t in trials) == [0.001, 0.01, 0.1]  # there are no more than three


def test_searches_share_a_folder_and_their_runs(tmp_path: Path, stand_in: Path) -> None:
    root = tmp_path / "s"
    first, _ = run(plan("local.lr=0.1,0.01", kind="optuna", trials=2), root)
    other, lines = run(plan("local.lr=0.01,0.1,0.2", kind="random", trials=3), root)
    assert len(first) == 2 and len(other) == 3 and set(starts(root).values()) == {1} and len(starts(root)) == 3
    assert len([line for line in lines if "seed=0" in line]) == 1 and "local.lr=0.2" in lines[-1]


def test_optuna_on_few_values_ends_when_all_are_known(tmp_path: Path, stand_in: Path) -> None:
    trials, _ = run(plan("local.lr=0.1,0.01", kind="optuna", trials=8), tmp_path / "s")
    assert sorted(t.setting["local.lr"] for t in trials) == [0.01, 0.1]


def test_a_search_without_a_new_proposal_ends(tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`workers` does not change a result, so three numbers of them are one run."""
    monkeypatch.setattr(search, "_REPEATS", 20)
    trials, _ = run(plan("workers=int:1:3", kind="random", trials=3), tmp_path / "s")
    assert len(trials) == 1 and list(starts(tmp_path / "s").values()) == [1]


# Pruning


def test_progress_is_the_best_so_far(tmp_path: Path) -> None:
    lines = [{"round": 1, "accuracy": 0.5}, {"round": 2}, {"round": 3, "accuracy": 0.4}, {"round": 4, "accuracy": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"round": 5, "acc')
    assert best_so_far(tmp_path) == {1: 0.5, 3: 0.5, 4: 0.7}


def test_divergence_is_seen_in_the_metrics(tmp_path: Path) -> None:
    good = {"round": 1, "accuracy": 0.5, "loss": 1.0, "train_loss": 2.0, "dropped": []}
    for bad in ({"dropped": [{"client": 0}]}, {"loss": None}, {"train_loss": None}, {}):
        (tmp_path / "metrics.jsonl").write_text(
            json.dumps(good) + "\n" + json.dumps({**good, "round": 2, **bad}) + "\n"
        )
        assert diverged_at(tmp_path) == (2 if bad else 0)


# Rates 0.1, 0.09 and 0.11 give about 1, 0.99 and 0.99 times round / 4; 0.0001 gives a fourth of it.
PRUNED = "local.lr=0.1,0.09,0.11,0.0001"


@pytest.mark.parametrize("after", [1, 2])
def test_settings_behind_the_median_are_stopped_recorded_and_not_repeated(
    tmp_path: Path, stand_in: Path, after: int
) -> None:
    root, made = tmp_path / "s", plan(PRUNED, seeds=(0, 1), prune_after=after)
    trials, lines = run(made, root)
    assert [t.status for t in trials] == ["finished"] * 3 + ["pruned"]
    folder = folder_of(trials[3].runs[0], root)
    assert max(best_so_far(folder)) == after + 1 and RunFolder.open(folder).status == "interrupted"
    assert f"pruned: {25 * (after + 1) / 4:.2f} % in round {after + 1}" in lines[-1] and lines[-1].startswith("[7/")
    assert "pruned" in (root / "table.md").read_text().splitlines()[-1]
    assert trials[3].runs[1].digest not in starts(root)  # the other seed of a stopped setting is left out
    before = starts(root)
    again, _ = run(made, root)
    assert starts(root) == before and [t.pruned for t in again] == [t.pruned for t in trials]
    assert best_trial(again) is not None
    finished_all, _ = run(plan(PRUNED, seeds=(0, 1)), root)  # a sweep without --prune does not care
    assert [t.status for t in finished_all] == ["finished"] * 4
    assert [t.status for t in run(made, root)[0]] == ["finished"] * 4  # and what is finished stays so


def test_the_median_needs_three_finished_settings_and_spares_who_is_at_it(tmp_path: Path, stand_in: Path) -> None:
    trials, _ = run(plan("local.lr=0.1,0.09,0.0001", prune_after=1), tmp_path / "s")
    assert all(t.status == "finished" for t in trials)
    trials, _ = run(plan("local.lr=0.0001,0.001,0.1,0.01,0.001001", prune_after=1), tmp_path / "t")
    assert [t.status for t in trials] == ["finished"] * 4 + ["pruned"]  # 0.01 is above the median of three


def test_a_hanging_run_is_stopped_in_its_process(tmp_path: Path, stand_in: Path) -> None:
    root, over = tmp_path / "s", "local.lr=0.1,0.09,0.11,100.0"  # the last one hangs after two rounds
    trials, _ = run(plan(over, prune_after=1), root, 1)
    assert [t.status for t in trials] == ["finished"] * 3 + ["pruned"]
    assert RunFolder.open(folder_of(trials[3].runs[0], root)).status == "interrupted"


def test_a_pruned_proposal_is_finished_by_the_same_search_without_pruning(tmp_path: Path, stand_in: Path) -> None:
    root, made = tmp_path / "s", plan("local.lr=log:1e-7:0.5", kind="random", trials=12, prune_after=1)
    trials, _ = run(made, root)
    assert {t.status for t in trials} == {"finished", "pruned"}
    again, _ = run(replace(made, prune_after=0), root)
    assert [t.setting for t in again] == [t.setting for t in trials] and {t.status for t in again} == {"finished"}


def test_diverged_runs_are_stopped_where_asked(tmp_path: Path, stand_in: Path) -> None:
    trials, _ = run(plan("local.lr=0.1,1000.0", stop_diverged=True), tmp_path / "s")
    assert [t.pruned for t in trials] == ["", "diverged in round 1"]
    before = starts(tmp_path / "s")
    run(plan("local.lr=0.1,1000.0", stop_diverged=True), tmp_path / "s")
    assert starts(tmp_path / "s") == before


def test_ctrl_c_is_no_pruning(tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(cell: Cell, progress: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run_cell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(plan("local.lr=0.1", prune_after=1), tmp_path / "s")


# Interrupted


def begin(program: Path | str, root: Path, kind: str, seeds: int, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, str(program), str(root), kind, str(seeds), *TINY, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(root: Path, count: int, parent: subprocess.Popen[str]) -> None:
    """Until so many runs are finished."""
    until = time.monotonic() + 240
    while len(list(root.glob("*/summary.json"))) < count:
        assert parent.poll() is None, parent.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["grid", "optuna"])
@pytest.mark.slow
def test_fifteen_runs_interrupted_twice(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "0.05")
    root = tmp_path / "s"
    values = ",".join(str(round(0.01 * k, 2)) for k in range(1, 6))
    over = f"--local.lr={values}" if kind == "grid" else "--local.lr=log:0.001:0.9"
    for count, stop in ((3, signal.SIGKILL), (8, signal.SIGINT)):
        parent = begin(stand_in, root, kind, 3, over)
        wait_for(root, count, parent)
        parent.send_signal(stop)
        parent.wait(60)
        assert parent.returncode != 0
    parent = begin(stand_in, root, kind, 3, over)
    out = parent.communicate(timeout=240)[0]
    assert parent.returncode == 0, out
    assert out.splitlines()[-1].startswith("[15/15]")
    with (root / "runs.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len({row["digest"] for row in table}) == 15
    assert len(list(root.glob("*/summary.json"))) == 15
    assert set(starts(root)) == {row["digest"] for row in table}
    assert sum(starts(root).values()) <= 15 + 2 * 2  # only those that were going can have begun again


def cell_of(root: Path) -> Cell:
    config = load(None, [*TINY, "local.lr=0.1"])
    return Cell("one", config, folder_of(config, root))


def test_a_run_that_outlived_a_killed_sweep_is_waited_for(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "0.3")
    cell = cell_of(tmp_path / "s")
    orphan = sweep._start(cell)
    while not (cell.folder / "metrics.jsonl").exists():
        time.sleep(0.01)
    trials, _ = run(plan("local.lr=0.1"), tmp_path / "s", 2)
    assert trials[0].status == "finished" and starts(tmp_path / "s") == {cell.config.digest: 1}
    assert orphan.wait(10) == 0


def test_a_run_killed_from_outside_is_begun_once_more(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "0.3")
    cell, begun, real = cell_of(tmp_path / "s"), list[subprocess.Popen[bytes]](), sweep._start
    monkeypatch.setattr(sweep, "_start", lambda cell: begun.append(real(cell)) or begun[-1])
    thread = threading.Thread(target=sweep._run_in_child, args=(cell, threading.Event()))
    thread.start()
    for again in (1, 2):
        while starts(tmp_path / "s")[cell.config.digest] < again or sweep.status_of(cell.folder) != "running":
            time.sleep(0.01)
        os.kill(begun[-1].pid, signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive() and len(begun) == 2 and finished_summary(cell.folder) is None


def test_a_run_that_ignores_the_request_to_stop_is_killed(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(99)"
    )
    monkeypatch.setattr(sweep, "cell_command", lambda *_: [sys.executable, str(stubborn)])
    monkeypatch.setattr(sweep, "_GRACE", 0.2)
    cell, stop = cell_of(tmp_path / "s"), threading.Event()
    thread = threading.Thread(target=sweep._run_in_child, args=(cell, stop))
    thread.start()
    while sweep.last_output_line(cell.folder) != "1":
        time.sleep(0.01)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_run_many_keeps_its_order_and_names_with_dots_apart(tmp_path: Path, stand_in: Path) -> None:
    runs = {str(rate): load(None, [*TINY, f"local.lr={rate}"]) for rate in (0.3, 0.1, 0.2)}
    outcomes = run_many(runs, tmp_path / "s", report=lambda _: None)
    assert run_many(runs, tmp_path / "s", 0, report=lambda _: None) == outcomes and set(
        starts(tmp_path / "s").values()
    ) == {1}
    assert list(outcomes) == ["0.3", "0.1", "0.2"]
    assert len(list((tmp_path / "s").glob("*.toml"))) == 3  # `tiny.1-digest` must not become `tiny.toml`
    with raises("E-CONSORTIUM-RUNS-FAILED"):
        run_many({"bad": load(None, [*TINY, "local.lr=9"]), **runs}, tmp_path / "s", report=lambda _: None)


# The command


def test_the_command_prints_the_table_and_the_best(
    tmp_path: Path, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_sweep.sweep(TINY, ["local.lr=0.1,0.01"], "0,1", "grid", 20, 0, 2, tmp_path / "s")
    output = capsys.readouterr().out
    assert "best on validation: local.lr=0.1" in output and "100.05 ± 0.07" in output and "table.md" in output
    assert "the start" not in output
    cli_sweep.sweep(TINY, ["local.lr=0.2,0.001"], "0", "grid", 20, 0, 2, tmp_path / "t")
    assert "no improvement over the initial model" in capsys.readouterr().out
    with raises("E-CLI-SEEDS", seeds="a"):
        cli_sweep.sweep(TINY, ["local.lr=0.1"], "a")


# Several machines


def test_a_run_is_claimed_by_one_process_and_taken_over_only_when_abandoned(tmp_path: Path) -> None:
    first, second = Claims(tmp_path), Claims(tmp_path)
    run_folder = tmp_path / "run-1"
    with first.active(), second.active():
        assert first.take(run_folder) and first.take(run_folder) and not second.take(run_folder)
        first.give_back(run_folder)
        assert second.take(run_folder) and not first.take(run_folder)
        claim = tmp_path / "run-1.claim"
        edge = claim.stat().st_mtime - claims.ABANDONED
        os.utime(claim, (edge + 5, edge + 5))
        assert not first.take(run_folder)
        os.utime(claim, (edge - 5, edge - 5))
        assert first.take(run_folder)
        second.give_back(run_folder)  # it lost the claim: the new owner's stays
        assert claim.exists() and not second.take(run_folder)
    assert not list(tmp_path.iterdir())


def test_the_claim_of_a_process_that_was_killed_here_is_free_at_once(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    content = {"owner": "somebody", "host": socket.gethostname(), "process": ended.pid}
    (tmp_path / "run-1.claim").write_text(json.dumps(content))
    (tmp_path / "run-2.claim").write_text(json.dumps({**content, "host": "elsewhere"}))
    mine = Claims(tmp_path)
    with mine.active():
        assert mine.take(tmp_path / "run-1") and not mine.take(tmp_path / "run-2")


def test_two_processes_divide_a_grid_and_both_have_all_results(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_POLL", 0.01)
    made = plan("local.lr=0.01,0.03,0.1,0.3", seeds=(0, 1))
    search.write_plan(made, tmp_path / "s")
    assert search.joined_plan(tmp_path / "s") == made
    results: dict[str, list[Trial]] = {}

    def work(name: str) -> None:
        results[name] = run(search.joined_plan(tmp_path / "s"), tmp_path / "s")[0]

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(starts(tmp_path / "s").values()) == [1] * 8
    for trials in results.values():
        assert [trial.status for trial in trials] == ["finished"] * 4
    assert not list((tmp_path / "s").glob("*.claim"))


def test_what_cannot_be_joined_is_one_sentence(tmp_path: Path) -> None:
    with raises("E-CONSORTIUM-JOIN"):
        search.joined_plan(tmp_path)
    (tmp_path / search.PLAN_FILE).write_text("[]")
    with raises("E-CONSORTIUM-JOIN"):
        search.joined_plan(tmp_path)


def test_the_script_for_slurm_joins_the_grid(tmp_path: Path) -> None:
    (tmp_path / "my sweep").mkdir()
    text = write_array_script(tmp_path / "my sweep", 3).read_text()
    assert "#SBATCH --array=0-2" in text and "#SBATCH --job-name=fedgraft-my-sweep" in text
    last = text.strip().splitlines()[-1]
    assert shlex.split(last)[-4:] == ["--join", str(tmp_path / "my sweep"), "--processes", "0"]
    subprocess.run(["bash", "-n", tmp_path / "my sweep" / "sweep.sbatch"], check=True)


def test_rows_of_nothing() -> None:
    assert setting_rows([]) == [] and best_trial([]) is None


def test_the_command_line_still_starts_without_torch() -> None:
    code = "import sys, fedgraft.cli.main; sys.exit('torch' in sys.modules or 'optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_real_runs_killed_and_gone_on_with(tmp_path: Path) -> None:
    """One kill with real runs; every kind of stop, many times, is above with stand-ins."""
    root, over = tmp_path / "s", "--local.lr=0.01"
    parent = begin("", root, "grid", 2, over)
    wait_for(root, 1, parent)
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    parent = begin("", root, "grid", 2, over)
    out = parent.communicate(timeout=400)[0]
    assert parent.returncode == 0, out
    summaries = [json.loads(path.read_text()) for path in root.glob("*/summary.json")]
    assert len(summaries) == 2 and all(0 <= s["test"]["accuracy"] <= 1 for s in summaries)
    with (root / "runs.csv").open() as file:
        assert len({row["digest"] for row in csv.DictReader(file)}) == 2
