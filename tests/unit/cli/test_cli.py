"""The command line: every command on one tiny finished run, and one sentence with exit code 2 for every mistake."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import rich
import torch
from PIL import Image

from fedgraft.algorithms import ALGORITHMS
from fedgraft.config import presets
from fedgraft.core.files import read_metrics
from fedgraft.report.values import size
from fedgraft.runs.folder import RunFolder

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedgraft.cli import main as cli

TINY = [
    "data.source=digits",
    "data.limit=120",
    "model.name=tiny",
    "partition.clients=4",
    "partition.kind=classes",
    "partition.classes_per_client=5",
    "local.steps=2",
    "local.batch_size=8",
    "rounds.total=3",
    "rounds.evaluate_every=1",
    "rounds.checkpoint_every=1",
    "name=tiny",
    "workers=1",
]


@dataclass
class Said:
    """What one command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything on stdout as one line."""
        return " ".join(self.out.split())


Command = Callable[..., Said]


def call(capture: pytest.CaptureFixture[str], *overrides: object) -> Said:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedgraft", *map(str, overrides)])
        capture.readouterr()
        rich.get_console().quiet = False  # -q outlives its command in this process
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    said = capture.readouterr()
    return Said(code, said.out, said.err)


@pytest.fixture
def fedgraft(capsys: pytest.CaptureFixture[str]) -> Command:
    """Call the command line as a user would."""
    return lambda *overrides: call(capsys, *overrides)


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working directory of their own, and no way to any hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("COLUMNS", "200")
        patch.setattr("rich._console", None)  # one console for the process: other tests' would have their width
        patch.chdir(tmp_path_factory.mktemp("work"))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, surroundings: None) -> Path:
    """One finished run, made by the command line."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedgraft", "run", *TINY, "-o", str(folder), "-q"])
        _quietly(cli.main)
    return folder


def _quietly(main: Callable[[], None]) -> None:
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, "the tiny run failed"


def refused(said: Said) -> str:
    """One sentence on stderr, exit code 2, no traceback."""
    assert said.code == 2, said
    assert "Traceback" not in said.err + said.out
    lines = [line for line in said.err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("fedgraft: "), said.err
    return lines[0]


# ---- commands on a finished run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_leaves_a_whole_run_folder(finished: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "log.txt", "summary.json", "environment.json", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    assert list((finished / "checkpoints").glob("*.safetensors")) and RunFolder.open(finished).status == "finished"
    lines = read_metrics(finished)
    wanted = {
        "round",
        "accuracy",
        "loss",
        "train_loss",
        "update_norm",
        "clients",
        "bytes_up",
        "bytes_down",
        "seconds",
        "lr",
    }
    assert [line["round"] for line in lines] == [0, 1, 2, 3] and all(wanted <= set(line) for line in lines[1:])
    assert {"accuracy", "loss"} <= set(lines[0])  # the model the run began with
    pattern = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ \| (INFO|WARNING) \| .+")
    assert all(pattern.match(line) for line in (finished / "log.txt").read_text().splitlines())


def test_running_a_finished_config_again_does_not_run_it_again(finished: Path, fedgraft: Command) -> None:
    before = (finished / "metrics.jsonl").stat().st_mtime_ns
    said = fedgraft("run", *TINY, "-o", finished)
    assert said.code == 0 and "--fresh" in said.text and str(finished) in said.out.replace("\n", "")
    assert (finished / "metrics.jsonl").stat().st_mtime_ns == before
    assert fedgraft("resume", finished, "-q").code == 0


def test_a_run_folder_of_another_config_is_refused(finished: Path, fedgraft: Command) -> None:
    assert "another config" in refused(fedgraft("run", *TINY, "seed=5", "-o", finished, "-q"))
    assert "another config" in refused(fedgraft("centralized", *TINY, "-o", finished, "-q"))
    assert fedgraft("resume", finished, "-q").code == 0  # and it is still a federated run


def test_show_and_list(finished: Path, fedgraft: Command) -> None:
    shown = fedgraft("show", finished)
    assert shown.code == 0 and "finished" in shown.out and "partition.clients = 4" in shown.out
    assert "local.momentum" not in shown.out and f"{finished / 'config.toml'})" in shown.out  # defaults are not told
    assert shown.out.index("partition.clients") < shown.out.index("test accuracy")  # the result is what is left in view
    listed = fedgraft("list", finished.parent)
    assert listed.code == 0 and "tiny" in listed.out and "finished" in listed.out
    summary = json.loads((finished / "summary.json").read_text())
    assert size(summary["bytes_up"] + summary["bytes_down"]) in listed.out  # with what was sent outside the rounds


def test_runs_that_a_run_made_inside_itself_are_listed_only_there(
    finished: Path, fedgraft: Command, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "one")
    shutil.copytree(finished, tmp_path / "runs" / "one" / "worth" / "alone")
    listed = fedgraft("list", tmp_path / "runs").out
    assert "one" in listed and "alone" not in listed
    assert "alone" in fedgraft("list", tmp_path / "runs" / "one" / "worth").out


def test_a_command_that_people_expect_is_answered_with_what_there_is(fedgraft: Command) -> None:
    assert "report.html" in fedgraft("report", "x").err and "'export'" not in fedgraft("report", "x").err
    assert "did you mean 'predict'?" in fedgraft("predikt").err


def test_compare_two_runs(finished: Path, fedgraft: Command, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    said = fedgraft("compare", finished, other, "-o", tmp_path / "comparison", "--format", "png")
    assert said.code == 0 and "other" in said.out
    assert (tmp_path / "comparison" / "comparison.html").is_file() and (
        tmp_path / "comparison" / "accuracy.png"
    ).is_file()
    assert "at least two" in refused(fedgraft("compare", finished))


def test_evaluate_gives_the_summarys_test_accuracy(finished: Path, fedgraft: Command) -> None:
    said = fedgraft("evaluate", finished)
    summary = json.loads((finished / "summary.json").read_text())
    share, count = summary["test"]["accuracy"], summary["test"]["count"]
    assert said.code == 0 and re.search(rf"accuracy [\d.]+ % \({round(share * count)} of {count}; \d", said.out)


def images(root: Path, names: list[str], count: int = 2) -> Path:
    """A class-per-directory folder."""
    dice = np.random.default_rng(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(dice.integers(0, 255, (8, 8), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def test_evaluate_on_a_folder_of_ones_own(finished: Path, fedgraft: Command, tmp_path: Path) -> None:
    good = images(tmp_path / "good", ["0", "7"], 3)
    said = fedgraft("evaluate", finished, "--data", good)
    assert said.code == 0 and " of 6; " in said.out
    strange = images(tmp_path / "strange", ["0", "eleven"])
    assert "'eleven', which the model does not know" in refused(fedgraft("evaluate", finished, "--data", strange))
    refused(fedgraft("evaluate", finished, "--data", tmp_path / "nowhere"))


def test_export_is_a_transformers_folder(finished: Path, fedgraft: Command, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    target = tmp_path / "model"
    assert fedgraft("export", finished, target).code == 0
    model = AutoModelForImageClassification.from_pretrained(target)
    assert model.config.num_labels == 10
    with torch.inference_mode():
        assert model(torch.zeros(1, 3, 16, 16)).logits.shape == (1, 10)
    refused(fedgraft("export", finished, target))  # never over something that is there


def test_resume_finishes_an_interrupted_run(finished: Path, fedgraft: Command, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    (broken / "summary.json").unlink()
    state = json.loads((broken / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps({**state, "status": "interrupted"}))
    newest = sorted((broken / "checkpoints").glob("*.safetensors"))[-1]
    newest.unlink()
    shown = fedgraft("show", broken)
    assert "interrupted" in shown.out and "fedgraft resume" in shown.out
    assert fedgraft("resume", broken, "-q").code == 0
    vectors = [sorted((f / "checkpoints").glob("*.safetensors"))[-1] for f in (broken, finished)]
    from safetensors.torch import load_file

    a, b = map(load_file, vectors)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_centralized_runs_and_resumes_as_what_it_is(fedgraft: Command, tmp_path: Path) -> None:
    folder = tmp_path / "central"
    overrides = [*TINY, "centralized.epochs=1", "-o", folder, "-q"]
    assert fedgraft("centralized", *overrides).code == 0
    assert json.loads((folder / "summary.json").read_text())["kind"] == "centralised probe"
    assert fedgraft("resume", folder, "-q").code == 0
    assert fedgraft("evaluate", folder).code == 0
    assert "another config" in refused(fedgraft("run", *TINY, "-o", folder, "-q"))


def test_partition_prints_statistics_and_draws(fedgraft: Command, tmp_path: Path) -> None:
    said = fedgraft("partition", *TINY, "-o", tmp_path / "map.png")
    assert said.code == 0 and "4 clients" in said.out and (tmp_path / "map.png").stat().st_size > 1000


def test_dry_run_prints_bytes_and_steps_and_leaves_nothing(fedgraft: Command, tmp_path: Path, finished: Path) -> None:
    said = fedgraft("run", *TINY, "-o", tmp_path / "none", "--dry-run")
    assert said.code == 0 and not (tmp_path / "none").exists()
    assert "2 steps of 8 images" in said.text and "12 steps in all" in said.text
    down, up = re.search(r"bytes: ([\d.]+) kB down and ([\d.]+) kB up per client and round", said.text).groups()  # type: ignore[union-attr]
    lines = read_metrics(finished)
    assert float(down) == pytest.approx(lines[1]["bytes_down"] / 2000, rel=0.05)  # two clients a round
    assert float(up) == pytest.approx(lines[1]["bytes_up"] / 2000, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["rounds.sampling=poisson", "rounds.fraction=0.3"], ["compression.codec=int8"], ["trainable.kind=body"]],
)
def test_dry_run_plans_other_choices_too(fedgraft: Command, overrides: list[str]) -> None:
    for seed in range(3):
        assert "bytes:" in fedgraft("run", *TINY, *overrides, f"seed={seed}", "--dry-run").out


@pytest.mark.slow
def test_fresh_runs_take_the_next_free_folder(fedgraft: Command, finished: Path) -> None:
    said = fedgraft("run", *TINY, "rounds.total=1", "-o", finished, "--fresh", "-q")
    assert said.code == 0 and RunFolder.open(finished.with_name("tiny-2")).status == "finished"
    shutil.rmtree(finished.with_name("tiny-2"))


# ---- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_presets_algorithms_options_and_help(fedgraft: Command) -> None:
    listed = fedgraft("presets")
    assert listed.code == 0 and all(name in listed.out for name in presets.summaries())
    assert fedgraft("presets", "demo").out.strip() == presets.text("demo").strip()
    shown = fedgraft("algorithms")
    assert all(name in shown.out for name in ALGORITHMS)
    assert "local.lr = none  learning rate; default" in fedgraft("options").out
    helped = fedgraft("--help")
    assert helped.code == 0 and "fedgraft run demo" in helped.text


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["run", "local.lrr=1"], "nearest one is 'local.lr'"),
        (["run", "local.lr=-1"], "local.lr: Input should be greater than 0"),
        (["run", "demmo"], "nearest preset is"),
        (["presets", "demmo"], "nearest preset is"),
        (["run", "missing.toml"], "there is no config file missing.toml"),
        (["run", "demo", "lr"], "not of the form key=value"),
        (["run", "."], "nor a directory of images by class"),
        (["run", "algorithm.name=fedaverage"], "nearest one is 'fedavg"),
        (["run", "privacy.aggregation=secure", "compression.codec=int8"], "the codec int8 needs"),
        (["run", "privacy.aggregation=secure", "algorithm.robust=median"], "needs each client's update"),
        (["run", "algorithm.name=fedshibu", "algorithm.robust=median"], "has more than one model"),
        (["run", "algorithm.name=scaffold", "local.optimizer=adamw"], "local.optimizer='sgdm'"),
        (["run", "trainable.kind=body", "trainable.freeze_blocks=9"], "the network has 2 blocks"),
        (["run", "data.source=cifar100", "data.path=nowhere"], "nowhere"),
        (["run", "data.source=folder"], "folder"),
        (["run", "data.source=folder", "data.path=nowhere"], "nowhere"),
        (["run", "model.name=no/such-model"], "no/such-model"),
        (["run", "model.name=./nowhere"], "nowhere"),
        (["partition", "partition.kind=classes", "partition.classes_per_client=1"], "class"),
        (["partition", "partition.kind=classes", "partition.classes_per_client=11"], "class"),
        (["partition", "partition.clients=100000"], "client"),
        (["run", "partition.clients=100000"], "client"),
        (["partition", "partition.kind=groups"], "group"),
        (["resume", "nowhere"], "there is no run in nowhere"),
        (["show", "nowhere"], "there is no run in nowhere"),
        (["list", "nowhere"], "there are no runs in nowhere"),
        (["evaluate", "nowhere"], "there is no run in nowhere"),
        (["export", "nowhere", "target"], "there is no run in nowhere"),
        (["compare", "nowhere", "elsewhere"], "there is no run in nowhere"),
    ],
)
def test_every_mistake_is_one_sentence(fedgraft: Command, overrides: list[str], part: str) -> None:
    command, *rest = overrides
    tiny = [w for w in TINY if "source" not in w] if any("data.source" in w for w in rest) else TINY
    if command in {"run", "partition"} and (not rest or "=" in rest[0]):
        tiny = [w for w in tiny if w.split("=")[0] not in {r.split("=")[0] for r in rest}]
        rest = [*tiny, *rest]
    assert part in refused(fedgraft(command, *rest, *(["-q"] if command in {"run", "resume"} else [])))
    assert not Path("target").exists()


def test_a_corrupt_source_says_what_was_looked_for(fedgraft: Command, tmp_path: Path) -> None:
    (tmp_path / "cifar.npz").write_bytes(b"not an archive")
    text = refused(
        fedgraft("run", "data.source=cifar10", f"data.path={tmp_path / 'cifar.npz'}", "model.name=tiny", "-q")
    )
    assert "cifar.npz" in text


def test_a_bad_toml_file_is_named(fedgraft: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[local\n")
    assert "bad.toml is not valid TOML" in refused(fedgraft("run", tmp_path / "bad.toml"))


def test_a_folder_that_holds_something_else_is_not_written_to(fedgraft: Command, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    assert "not empty" in refused(fedgraft("run", *TINY, "-o", tmp_path, "-q"))
    assert "not empty" in refused(fedgraft("centralized", *TINY, "-o", tmp_path, "-q"))
    assert not (tmp_path / "centralized").exists()


def test_a_run_without_a_checkpoint_says_how_to_get_one(fedgraft: Command, finished: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(finished, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert f"fedgraft resume {bare}" in refused(fedgraft("evaluate", bare))


def test_damaged_checkpoints_fall_back_and_damaged_notes_are_named(
    fedgraft: Command, finished: Path, tmp_path: Path
) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(finished, hurt)
    newest = sorted((hurt / "checkpoints").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-7])
    assert fedgraft("evaluate", hurt).code == 0
    (hurt / "run.json").write_text("{")
    assert "run.json is damaged" in refused(fedgraft("show", hurt))


@pytest.mark.slow
def test_a_folder_in_use_is_left_alone(fedgraft: Command, finished: Path) -> None:
    folder = RunFolder.open(finished)
    with folder._locked():
        assert "in use by process" in refused(fedgraft("run", *TINY, "-o", finished, "-q"))


def test_a_tracker_that_is_not_installed_names_its_extra(fedgraft: Command, tmp_path: Path) -> None:
    missing = [n for n in ("mlflow", "wandb", "tensorboard") if importlib.util.find_spec(n) is None]
    if not missing:
        pytest.skip("all trackers are installed here")
    said = fedgraft("run", *TINY, f"track.trackers=['{missing[0]}']", "-o", tmp_path / "run", "-q")
    assert f"fedgraft[{missing[0]}]" in said.err.splitlines()[-1] and said.code == 2


@pytest.mark.slow
def test_wrong_words_for_the_shell_show_usage(fedgraft: Command) -> None:
    said = fedgraft("runn")
    assert said.code == 2 and "Traceback" not in said.err and "there is no command 'runn'" in said.err
    assert fedgraft("show").code == 2
    for words, near in ((["predct", "x"], "predict"), (["deploy", "lokal"], "local"), (["edit", "aply"], "apply")):
        told = fedgraft(*words).err
        assert told.count("did you mean") == 1 and f"did you mean '{near}'?" in told
    assert "Did you mean" not in fedgraft("run", "--drt").err and "--dry-run" in fedgraft("run", "--dry-rn").err


def test_the_sentence_check_notices_a_traceback(fedgraft: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: an error nobody turned into a sentence."""
    monkeypatch.setattr(presets, "summaries", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fedgraft("presets")


@pytest.mark.slow
def test_as_a_real_process() -> None:
    command = [sys.executable, "-c", "from fedgraft.cli.main import main; main()", "run", "local.lrr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
