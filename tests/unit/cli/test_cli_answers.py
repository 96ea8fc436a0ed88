"""What the command line says: help, names that can be copied at 80 columns, results kept by -q, checks before work."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest
import typer
from PIL import Image

from fedgraft.cli import help as cli_help
from fedgraft.cli import main as cli
from fedgraft.core.registry import ALGORITHMS

NAME = "a-name-that-must-be-copied-whole-from-a-terminal-of-eighty-columns-0123456789abcdef"
CLASSES = ["melanocytic-naevus-of-the-upper-left-arm-seen-from-above", "b"]
BASE = [
    "data.source=folder",
    "model.name=tiny",
    "data.image_size=16",
    "partition.kind=iid",
    "partition.clients=2",
    "local.steps=1",
    "local.batch_size=4",
    "rounds.total=1",
    "rounds.fraction=1.0",
    "workers=1",
]
Ask = Callable[..., tuple[int, str, str]]


def commands(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield from commands(command, (*above, name)) if isinstance(command, click.Group) else [(*above, name)]


ALL = list(commands(typer.main.get_command(cli.app)))  # type: ignore[arg-type]


def picture(path: Path, shade: int) -> None:
    dice = np.random.default_rng(shade)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(dice.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Images of two classes, one of them a file that is none, and a narrow terminal."""
    root = tmp_path_factory.mktemp("answers")
    for k in range(24):
        picture(root / "images" / CLASSES[k % 2] / f"{k}.png", k)
    (root / "images" / "b" / "torn.png").write_bytes(b"no picture")
    (root / "images" / "b" / "notes.txt").write_text("of no format that is read")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("COLUMNS", "80")
        patch.setattr("rich._console", None)  # one console for the process: other tests' would have their width
        yield root


@pytest.fixture
def ask(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    def asked(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedgraft", *map(str, words)])
        code = 0
        capsys.readouterr()
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return asked


@pytest.fixture
def run(work: Path, ask: Ask) -> Path:
    """One run of these images, the torn one left out; made once."""
    folder = work / "runs" / NAME
    if not folder.exists():
        code, said, told = ask("run", *BASE, "data.path=images", "data.unreadable=skip", "-q", "-o", folder)
        assert code == 0, told
        (work / "said.txt").write_text(said)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_help_has_an_example_and_says_what_arguments_mean(words: tuple[str, ...], ask: Ask) -> None:
    code, said, _ = ask(*words, "--help")
    assert code == 0 and f"fedgraft {' '.join(words)}" in said.partition("Example:")[2], said
    assert "\\[" not in said and "RANGE" not in said and "WORDS" not in said
    arguments = re.findall(r"Arguments:\n((?:  .+\n)+)", said)
    assert all(re.match(r"  \S+ +\S", line) for block in arguments for line in block.splitlines() if line[2] != " ")


def test_every_example_is_of_a_command_and_every_command_has_a_group() -> None:
    assert set(cli_help.EXAMPLES) == {" ".join(words) for words in ALL}
    grouped = [name for groups in (cli_help.GROUPS, cli_help.TOOLS) for names in groups.values() for name in names]
    assert {words[0] for words in ALL} == set(grouped) and len(grouped) == len(set(grouped))


def test_help_shows_a_dozen_commands_and_tools_the_rest(ask: Ask) -> None:
    first = ask("--help")[1]
    rest = ask("tools")[1]
    for name in (name for names in cli_help.GROUPS.values() for name in names):
        assert re.search(rf"^  {name} ", first, re.MULTILINE), name
    for name in (name for names in cli_help.TOOLS.values() for name in names):
        assert re.search(rf"^  {name} ", rest, re.MULTILINE), name
        assert not re.search(rf"^  {name} ", first, re.MULTILINE), name
    assert len(re.findall(r"^  [a-z-]+  ", first, re.MULTILINE)) <= 14
    assert ask("tools", "algorithms") == ask("algorithms")
    assert ask("tools", "nothing")[0] == 2


def test_tab_completes_commands(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README's line for a shell's start file asks for it."""
    monkeypatch.setenv("_FEDGRAFT_COMPLETE", "zsh_source")
    assert "zsh_complete" in ask()[1]
    monkeypatch.setenv("_FEDGRAFT_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", "fedgraft pre")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert [word for word in ask()[1].split() if word.startswith("pre")] == ["presets", "predict", "preflight"]


def test_quiet_keeps_the_result_and_drops_the_progress(run: Path, work: Path) -> None:
    said = (work / "said.txt").read_text()
    assert "test accuracy" in said and "round 1 of 1" not in said and str(run) in said.replace("\n", "")
    assert (run / "log.txt").read_text().count(
        "1 file among the images is of no format that is read, and left out"
    ) == 1
    assert "top-5" not in said and "next:" not in said  # of two classes; what to try is no result


def test_a_run_leaves_out_what_it_cannot_read_and_lists_it(run: Path) -> None:
    assert json.loads((run / "summary.json").read_text())["data"]["skipped"] == 1
    assert "torn.png" in (run / "skipped.txt").read_text()


@pytest.mark.slow
def test_names_are_never_cut_at_eighty_columns(run: Path, ask: Ask, tmp_path: Path) -> None:
    other = run.with_name(f"{NAME}-2")
    shutil.copytree(run, other, dirs_exist_ok=True)
    listed = ask("list", run.parent)[1]
    assert f" {run}\n" in listed and f" {other}\n" in listed and "None" not in listed  # as `show` takes them
    shorter = [line.replace(str(other), "").replace(str(run), "") for line in listed.splitlines()]
    assert max(map(len, shorter)) <= 80  # a name alone may be longer than the terminal is wide
    assert NAME in ask("show", run)[1] and CLASSES[0] in ask("evaluate", run)[1]
    assert f"{NAME}-2\n" in ask("compare", run, other, "-o", tmp_path / "both")[1]
    shown = ask("algorithms")[1]
    assert all(re.search(rf"^{name} ", shown, re.M) for name in ALGORITHMS)


def test_comparing_runs_of_other_data_warns(
    run: Path, ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    text = (other / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace('path = "images"', 'path = "elsewhere"'))
    assert ask("compare", run, other, "-o", tmp_path / "both")[0] == 0
    assert "used different data" in caplog.text and "cannot be compared" in caplog.text


@pytest.mark.slow
def test_a_damaged_finished_run_says_what_can_be_done(run: Path, ask: Ask, tmp_path: Path) -> None:
    hurt = tmp_path / "hurt"
    shutil.copytree(run, hurt)
    for file in (hurt / "checkpoints").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
    code, _, told = ask("evaluate", hurt)
    assert code == 2 and f"fedgraft resume {hurt}" in told.splitlines()[-1]
    assert ask("resume", hurt, "-q")[0] == 0 and ask("evaluate", hurt)[0] == 0


def test_a_run_of_another_version_says_so(run: Path, ask: Ask, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    (old / "config.toml").write_text("[moves]\nkind = 'head'\n" + (old / "config.toml").read_text())
    code, _, told = ask("evaluate", old)
    assert code == 2 and "no config of this version" in told and "environment.json" in told


def test_images_alone_make_a_run(work: Path, ask: Ask, tmp_path: Path) -> None:
    """A folder by class; one by owner, whose owners become the clients; a wish about clients wins over these."""
    small = [word for word in BASE if not word.startswith(("data.source", "partition.", "rounds.fraction"))]
    code, said, told = ask("run", "images", *small, "data.unreadable=skip", "--dry-run")
    assert code == 0 and "data: folder," in said and "of 10 clients" in said, told
    for place in range(16):
        picture(tmp_path / "owned" / ("north", "south")[place % 2] / "ab"[place // 2 % 2] / f"{place}.png", place)
    code, said, told = ask("run", tmp_path / "owned", *small, "--dry-run")
    assert code == 0 and "data: owners," in said and "2 of 2 clients" in said, told
    said = ask("run", tmp_path / "owned", *small, "partition.clients=4", "rounds.fraction=1.0", "--dry-run")[1]
    assert "4 of 4 clients" in said


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run", "nothing-of-the-kind"], "`fedgraft presets` lists the presets"),
        (["run", "zzqq.xxyy=1"], "`fedgraft options --all` lists them"),
        (["run", "dta.source=folder"], "the nearest one is 'data"),
        (["run", "runs"], "nor a directory of images by class"),
    ],
)
def test_only_what_is_near_is_suggested(words: list[str], part: str, run: Path, ask: Ask) -> None:
    code, _, told = ask(*words)
    assert code == 2 and part in told and len(told.splitlines()) == 1


def test_words_for_the_wrong_folder(run: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run given as data names `resume`; an export to a folder in use is refused before a network is loaded."""
    assert f"fedgraft resume {run}" in ask("run", run)[2]
    monkeypatch.setattr("fedgraft.runs.deliver.adapted", lambda *_, **__: pytest.fail("the network was loaded"))
    code, _, told = ask("export", run, run)
    assert code == 2 and "already holds something" in told


@pytest.mark.slow
def test_predictions_as_text_csv_and_json(run: Path, ask: Ask, work: Path) -> None:
    images = ["images/b/1.png", f"images/{CLASSES[0]}/0.png"]
    rows = list(csv.reader(io.StringIO(ask("predict", run, *images, "--top", 2, "--csv")[1])))
    assert rows[0] == ["image", "label", "score", "label_2", "score_2", "error"] and [r[0] for r in rows[1:]] == images
    assert all({row[1], row[3]} == set(CLASSES) and float(row[2]) >= float(row[4]) for row in rows[1:])
    found = json.loads(ask("predict", run, *images, "--json")[1])
    assert [one["image"] for one in found] == images
    for row, line in zip(rows[1:], ask("predict", run, *images)[1].splitlines(), strict=True):
        assert line == f"{row[0]}\t{row[1]}  {100 * float(row[2]):.1f} %"
    code, said, told = ask("predict", run, "images/b/torn.png", images[0])
    assert code == 1 and "torn.png" in said and "1 of 2 images" in told


def test_one_image_can_be_evaluated(run: Path, ask: Ask, tmp_path: Path) -> None:
    picture(tmp_path / "one" / "b" / "1.png", 1)
    code, said, _ = ask("evaluate", run, "--data", tmp_path / "one")
    assert code == 0 and " of 1; " in said and re.search(r"^ *b +1 ", said, re.M)
    assert json.loads(ask("evaluate", run, "--data", tmp_path / "one", "--json")[1])["images"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.name=fedalign", "data.unreadable=skip", "algorithm.probe=500"], "the probe needs 500"),
        ([], "torn.png"),
        (["data.unreadable=skip", "partition.kind=dirichlet", "partition.clients=500"], "client"),
    ],
)
@pytest.mark.parametrize("plan", [True, False])
def test_checked_before_work_starts_and_by_the_plan(overrides: list[str], part: str, plan: bool, ask: Ask) -> None:
    """Probe, unreadable files, too many clients: one sentence, no folder, whether planned or run."""
    code, _, told = ask("run", *BASE, "data.path=images", *overrides, *(["--dry-run"] if plan else ["-o", "never"]))
    assert code == 2 and part in told.splitlines()[-1] and told.splitlines()[-1].startswith("fedgraft: ")
    assert not Path("never").exists()


@pytest.mark.slow
def test_a_private_run_says_first_what_it_promises(ask: Ask, tmp_path: Path) -> None:
    words = [*BASE, "data.path=images", "data.unreadable=skip", "privacy.dp.noise=1", "-o", tmp_path / "dp"]
    code, said, told = ask("run", *words, "algorithm.weighting=uniform", "rounds.sampling=poisson", "-q")
    assert code == 0, told
    rows = [line.strip("│ ") for line in said.splitlines() if line.startswith("│")]
    assert re.match(r"privacy +│ epsilon \S+ at delta \S+ for each client", rows[0]), rows[0]
