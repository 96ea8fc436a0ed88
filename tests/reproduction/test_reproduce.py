"""Presets, verdicts, and what a reproduction leaves."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedgraft.runs.parts import partition_options
from reproduction.claims import ANOTHER, CONTRADICTED, SUPPORTED, UNDECIDED, UNMEASURED, UNSEEN
from reproduction.claims_rows import ROWS, of_kind
from reproduction.drawing import FIGURES
from reproduction.page import group_rows, write
from reproduction.preset import SCALES, Claim, cells, load_preset, names, parse
from reproduction.reproduce import Found, PersonalModels, Work, carry_out
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.data.partition import make_partition
from fedgraft.errors import FedgraftError
from fedgraft.report.statistics import paired
from reproduction import claims, reproduce, studies
from reproduction import page as reproduce_page

PRESET = """
title = "A"
question = "Q?"
rows = [54]
baseline = "small"
base = { trainable = { kind = "head" }, rounds = { total = 2, fraction = 0.5, evaluate_every = 1 } }
axes = [{ name = "rate", levels = { small = { local = { lr = 0.01 } }, large = { local = { lr = 0.1 } } } }]
scales.paper = { core_minutes = 1 }
scales.laptop = { core_minutes = 1 }
scales.tiny = { core_minutes = 1, target = 1.0 }
reported = [{ cell = "large", value = 12.5, document = "a table" }]
claims = [{ row = 55, text = "large is better", document = "d", left = "large", right = "small" }]
figures = [{ kind = "F1" }]
"""


def work(preset: str, tmp_path: Path, seeds: tuple[int, ...] = (1, 2)) -> Work:
    return Work("a", parse(preset, "a"), "tiny", seeds, tmp_path / "runs", 0, report=lambda text: None)


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_every_table_figure_and_experiment_has_a_preset() -> None:
    found = claims.listing()
    assert {row for row, *_ in found} == {row for row, (kind, _) in ROWS.items() if set(kind) & set("TFE")}
    assert [row for row, _, _, presets in found if not presets] == []


def test_the_kinds_of_the_rows() -> None:
    assert set(range(196, 228)) <= set(of_kind("TFE")) and len(of_kind("TFE")) == 59 and len(of_kind("L")) == 12
    spec = Path(__file__).parents[3] / "shared" / "spec" / "CHECKLIST.md"
    if not spec.is_file():
        pytest.skip("the documents' own checklist is not here")
    rows = re.findall(r"^\| (\d+) \|[^|]+\| ([A-Z/+,]+) \|", spec.read_text(), re.MULTILINE)
    kinds = {int(row): re.sub(r"[^A-Z]", "", kind) for row, kind in rows if set(kind) & set("TFEL")}
    assert kinds == {row: kind for row, (kind, _) in ROWS.items()}


def test_every_claim_of_the_checklist_has_a_measurement() -> None:
    assert [row for row in of_kind("L") if not claims.claims_of(row)] == []
    judged = {claim.row for name in names() for claim in load_preset(name).claims}
    assert judged <= set(of_kind("L"))


def test_the_rows_are_those_of_the_checklist() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checklist.md").read_text()
    said = {int(n): item for n, item in re.findall(r"^\| (\d+) \| (.+?) \|", text, re.MULTILINE)}
    for row, (_, overrides) in ROWS.items():
        assert said[row].replace("“", "'").replace("”", "'") == overrides


@pytest.mark.parametrize("name", names())
def test_a_preset_is_whole(name: str) -> None:
    preset = load_preset(name)
    for scale in SCALES:
        for cell in cells(preset, scale, name):
            network = cell.config().model.name
            assert {"paper": "dino" in network or network == "resnet18", "laptop": True, "tiny": True}[scale]
    assert all(figure.kind in FIGURES for figure in preset.figures)
    axes = {axis.name for axis in preset.axes}
    for figure in preset.figures:
        assert {figure.lines, figure.panels} <= {*axes, ""} and figure.x in {*axes, "round"}
    assert not preset.study or preset.study in {*studies.WHOLE, "matched"}
    assert preset.scales["laptop"].core_minutes <= 170


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", ["paper", "laptop"])
def test_what_a_preset_deals_can_be_dealt(name: str, scale: Any) -> None:
    preset = load_preset(name)
    classes = int(preset.data.removeprefix("cifar"))
    configs = [cell.config() for cell in cells(preset, scale, name)]
    for config in {(c.data.limit, c.partition.model_dump_json()): c for c in configs}.values():
        d, p = config.data, config.partition
        labels = np.arange(min(d.limit or 50_000, int(50_000 * (1 - d.validation)))) % classes
        federated = make_partition(
            p.kind, labels, np.arange(10_000) % classes, p.clients, 1, **partition_options(config)
        )
        assert len(federated.sizes()) == p.clients and federated.sizes().min() > 0


def test_all_kinds_of_the_documents_are_drawn_by_some_preset() -> None:
    drawn = {figure.kind for name in names() for figure in load_preset(name).figures}
    assert {f"F{i}" for i in range(1, 30)} <= drawn


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('title = "A"', 'title = "A', "not valid TOML"),
        ('title = "A"', 'title = "A"\nheading = "A"', "heading"),
        ("rows = [54]", "rows = []", "rows"),
        ('cell = "large"', 'cell = "huge"', "no cell 'huge'"),
        ('baseline = "small"', 'baseline = "tall"', "no level of the last axis"),
        ("scales.paper = { core_minutes = 1 }", "", "scale paper is missing"),
        ("local = { lr = 0.1 }", "local = { rate = 0.1 }", "nearest one is"),
        ("core_minutes = 1, target", 'core_minutes = 1, only = { rate = ["x"] }, target', "no such axis or level"),
        ('kind = "F1"', 'kind = "F1", where = { depth = "2" }', "no such axis or level"),
    ],
)
def test_a_broken_preset_is_one_sentence(old: str, new: str, sentence: str) -> None:
    assert old in PRESET
    with pytest.raises(FedgraftError, match=sentence) as caught:
        parse(PRESET.replace(old, new), "a")
    assert "\n" not in str(caught.value)


def test_an_unknown_name_and_study_are_one_sentence() -> None:
    with pytest.raises(FedgraftError, match="the nearest is 'editing'"):
        load_preset("editin")
    with pytest.raises(FedgraftError, match="there is no study"):
        studies.named("x")


def test_levels_come_before_what_the_scale_says_last() -> None:
    text = PRESET.replace("core_minutes = 1, target", "core_minutes = 1, then = { local = { lr = 0.5 } }, target")
    assert {cell.config().local.lr for cell in cells(parse(text, "a"), "tiny", "a")} == {0.5}
    assert {cell.config().local.lr for cell in cells(parse(text, "a"), "laptop", "a")} == {0.01, 0.1}


def test_a_best_rate_at_an_end_is_held_against_a_further_one() -> None:
    assert reproduce.widen([0.1, 0.3, 1.0], 1.0) == [0.1, 0.3, 1.0, 3.33]
    assert reproduce.widen([0.1, 0.3, 1.0], 0.1) == [0.0333, 0.1, 0.3, 1.0]
    assert reproduce.widen([0.1, 0.3, 1.0], 0.3) == [0.1, 0.3, 1.0]
    assert reproduce.widen([1e-12], 1e-12) == [1e-12]


def test_the_list_grows_until_the_best_is_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = parse(PRESET + 'tuning = { rates = { "*" = [0.1, 0.3, 1.0] } }', "a")
    work = Work("a", preset, "laptop", (1,), tmp_path)
    asked: list[str] = []

    def no_runs(work: Work, wanted: reproduce.Wanted) -> dict[str, Path]:
        asked[:] = list(wanted)
        return {label: Path(label) for label in wanted}

    monkeypatch.setattr(reproduce, "carry_out", no_runs)
    monkeypatch.setattr(reproduce, "measure_of", lambda p, m: abs(float(p.name.split("lr ")[1]) - 2.7))
    assert set(reproduce.tune(work, cells(preset, "laptop", "a")).values()) == {3.33}
    assert [label.split("lr ")[1] for label in asked] == 2 * ["0.1", "0.3", "1", "3.33", "11.1"]


def test_runs_that_choose_a_rate_are_short_and_leave_the_test_set_alone() -> None:
    found = {cell.label: cell for cell in cells(load_preset("editing"), "paper", "editing", "D")}
    config = found["N_c=10/random"].config(seed=2)
    short = reproduce._short(config, 0.009, 0.34)
    assert (short.rounds.total, short.rounds.evaluate_every, short.rounds.test) == (6, 0, False)
    assert (config.rounds.total, config.rounds.test) == (20, True)


# ---- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expect", "gaps", "verdict"),
    [
        ("more", [2.0, 2.1, 1.9], SUPPORTED),
        ("more", [-2.0, -2.1, -1.9], CONTRADICTED),
        ("more", [2.0, -1.0, 0.5], UNSEEN),
        ("less", [-2.0, -2.1, -1.9], SUPPORTED),
        ("less", [2.0, 2.1, 1.9], CONTRADICTED),
        ("same", [0.0, 0.0, 0.0], SUPPORTED),
        ("same", [0.1, -0.1, 0.05], SUPPORTED),
        ("same", [5.0, 5.1, 4.9], CONTRADICTED),
        ("same", [-5.0, -5.1, -4.9], CONTRADICTED),
        ("same", [3.0, -3.0, 1.0], UNSEEN),
        ("same", [0.9, 1.0, 1.1], UNDECIDED),
        ("more", [2.0], UNMEASURED),
    ],
)
def test_the_rule_of_verdicts(expect: Any, gaps: list[float], verdict: str) -> None:
    claim = Claim(row=1, text="t", document="d", left="a", expect=expect)
    assert claims.server_context(claim, paired([0.0] * len(gaps), {"x": gaps})[0]) == verdict


def planted(tmp_path: Path, small: list[float], large: list[float], **update: Any) -> Found:
    made = work(PRESET, tmp_path, tuple(range(1, len(small) + 1)))
    claim = made.preset.claims[0].model_copy(update=update)
    made = Work("a", made.preset.model_copy(update={"claims": [claim]}), "tiny", made.seeds, made.runs, 0)
    values = {"small": {"test": small}, "large": {"test": large}}
    return Found(made, cells(made.preset, "tiny", "a"), values=values)


def test_verdicts_on_planted_numbers(tmp_path: Path) -> None:
    small, large = [50.0, 51.0, 52.0], [55.0, 56.1, 56.9]
    assert claims.verdicts(planted(tmp_path, small, large))[0].verdict == SUPPORTED
    assert claims.verdicts(planted(tmp_path, large, small))[0].verdict == CONTRADICTED
    found = claims.verdicts(planted(tmp_path, small, large, number=5.0, expect="same", margin=0.5))[0]
    assert found.verdict == SUPPORTED and "large - small: 5 [" in found.numbers and "3 seeds" in found.numbers
    ratio = claims.verdicts(planted(tmp_path, small, large, ratio=True, number=1.0))[0]
    assert ratio.verdict == SUPPORTED
    elsewhere = claims.verdicts(planted(tmp_path, small, large, scales=["paper"], number=80.0))[0]
    assert elsewhere.verdict == ANOTHER and elsewhere.numbers.endswith("claimed of another network: 80")
    assert claims.verdicts(planted(tmp_path, small, large, measure="finetuned"))[0].verdict == UNMEASURED


def test_many_claims_are_corrected_together(tmp_path: Path) -> None:
    found = planted(tmp_path, [50.0, 51.0, 52.0], [50.9, 52.1, 53.2])
    alone = claims.verdicts(found)[0]
    many = found.work.preset.model_copy(update={"claims": [found.work.preset.claims[0]] * 20})
    found.work = Work("a", many, "tiny", found.work.seeds, found.work.runs, 0)
    assert alone.verdict == SUPPORTED and claims.verdicts(found)[0].verdict == UNSEEN
    elsewhere = found.work.preset.claims[0].model_copy(update={"scales": ["paper"]})  # not judged, so not counted
    few = many.model_copy(update={"claims": [found.work.preset.claims[0], *[elsewhere] * 19]})
    found.work = Work("a", few, "tiny", found.work.seeds, found.work.runs, 0)
    assert claims.verdicts(found)[0].verdict == SUPPORTED


def test_the_summary_has_every_claim_and_says_what_is_missing(tmp_path: Path) -> None:
    page = claims.summary(tmp_path)
    assert {int(n) for n in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == set(of_kind("L"))
    assert page.count(UNMEASURED) >= len(of_kind("L"))
    name, claim = claims.claims_of(114)[0]
    (tmp_path / name).mkdir()
    verdict = claims.Verdict(114, claim.text, claim.document, name, SUPPORTED, "0.1 [0, 0.2]", "laptop")
    claims.keep([verdict], tmp_path / name)
    assert "0.1 [0, 0.2] | **supported**" in claims.summary(tmp_path)


# ---- running and writing ---------------------------------------------------------------------------------------------


def test_a_reproduction_runs_once_and_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = work(PRESET, tmp_path)
    page = write(reproduce.reproduce(made), tmp_path / "out").read_text()
    assert "12.5 (a table)" in page and "minus small" in page and "rounds to 1 %" in page
    assert f"`{made.command}`" in page and "large is better" in page
    folder = tmp_path / "out" / "a"
    assert {p.name for p in folder.iterdir()} == {
        "F1.png", "claims.json", "report.html", "runs.csv", "table.csv", "table.tex",
    }  # fmt: skip
    with (folder / "runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert r"\toprule" in (folder / "table.tex").read_text()
    assert json.loads((folder / "claims.json").read_text())[0]["preset"] == "a"

    def refuse(*ignored: object) -> None:
        raise AssertionError("a finished run was repeated")

    monkeypatch.setattr(reproduce, "_run_here", refuse)
    again = Work("other", made.preset, "tiny", made.seeds, made.runs, 0, report=lambda text: None)
    reproduce.reproduce(again)  # another preset that needs the same runs
    more = Work("other", made.preset, "tiny", (*made.seeds, 3), made.runs, 0, report=lambda text: None)
    with pytest.raises(AssertionError, match="repeated"):
        reproduce.reproduce(more)


def test_runs_are_found_by_what_they_are(tmp_path: Path) -> None:
    made = work(PRESET, tmp_path, (1,))
    config = cells(made.preset, "tiny", "a")[0].config(seed=1)
    wanted = {"x": (config, False), "same": (config, False)}
    done = carry_out(made, wanted)
    assert done["x"] == done["same"]
    moved = done["x"].rename(done["x"].with_name("another-name"))
    text = (moved / "config.toml").read_text()
    assert PersonalModels(made.runs).get(config, False) == moved
    (moved / "config.toml").write_text(text.replace("seed = 1", "seed = 2"))
    assert PersonalModels(made.runs).get(config, False) is None
    (moved / "config.toml").write_text(text + "\n[gone]\nx = 1\n")
    assert PersonalModels(made.runs).get(config, False) is None
    assert PersonalModels(made.runs).get(config, True) is None


def test_tuning_takes_the_rate_that_ends_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PRESET.replace('baseline = "small"', 'baseline = "small"\ntuning = { rates = { "*" = [0.3, 0.7] } }')
    made = work(text, tmp_path)
    made = Work("a", made.preset, "laptop", (1,), made.runs, 0, report=lambda text: None)
    seen: list[Any] = []

    def fake(work: Work, wanted: Any) -> dict[str, Path]:
        seen.extend(config for config, _ in wanted.values())
        return {label: Path(f"lr{config.local.lr}") for label, (config, _) in wanted.items()}

    monkeypatch.setattr(reproduce, "carry_out", fake)
    monkeypatch.setattr(reproduce, "measure_of", lambda folder, measure, *rest: abs(float(folder.name[2:]) - 0.7))
    assert reproduce.tune(made, cells(made.preset, "laptop", "a")) == {"small": 0.7, "large": 0.7}
    assert {config.seed for config in seen} == {0}
    shared = text.replace('"*" = [0.3, 0.7] }', '"*" = [0.3, 0.7] }, at = { rate = "small" }')
    made = Work("a", parse(shared, "a"), "laptop", (1,), made.runs, 0, report=lambda text: None)
    seen.clear()
    assert reproduce.tune(made, cells(made.preset, "laptop", "a")) == {"small": 0.7, "large": 0.7}
    assert len(seen) == 2 + 3  # the list, then once more with a rate beyond its best


def test_rows_show_the_difference_to_the_baseline(tmp_path: Path) -> None:
    found = planted(tmp_path, [50.0, 51.0, 52.0], [55.0, 56.0, 57.0])
    small, large = group_rows(found, found.cells)
    assert small["minus small, 95 % interval"] == "–" and large["minus small, 95 % interval"].startswith("+5.00 [")
    assert large["reported (%)"] == "12.5 (a table)" and small["test of the best round (%)"] == "51.00 ± 1.00"


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_preset_finishes_at_tiny_scale(name: str, tmp_path: Path) -> None:
    preset = load_preset(name)
    made = Work(name, preset, "tiny", (1,), tmp_path / "runs", 0, report=lambda text: None)
    page = write(reproduce.reproduce(made), tmp_path / "out")
    text = page.read_text()
    assert all(note in text for note in preset.notes)
    shown = re.findall(r"!\[.*?\]\((.+?)\)", text)
    assert len(shown) == len(preset.figures) and all((page.parent / file).is_file() for file in shown)
    report = (page.parent / name / "report.html").read_text()
    assert "http" not in report.replace("http://www.w3.org", "").replace("http-equiv", "")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_list_names_every_row_and_preset() -> None:
    said = CliRunner().invoke(app, ["reproduce", "--list"])
    assert said.exit_code == 0
    listed = {int(line.split()[0]) for line in said.output.splitlines() if line.strip()[:1].isdigit()}
    assert listed == {row for row, (kind, _) in ROWS.items() if set(kind) & set("TFE")}
    assert all(f"\n{name} " in said.output for name in names())


def test_the_command_writes_a_page_and_the_summary(tmp_path: Path) -> None:
    overrides = ["reproduce", "settings", "--scale", "tiny", "--out", str(tmp_path), "--summary"]
    said = CliRunner().invoke(app, overrides)
    assert said.exit_code == 0, said.output
    assert "`rounds.fraction`" in (tmp_path / "settings.md").read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert "[settings](settings.md)" in summary and "not run yet: `fedgraft reproduce editing`" in summary


def test_the_report_does_not_say_where_the_data_lay(tmp_path: Path) -> None:
    preset = load_preset("align")
    made = Work("align", preset, "laptop", (1,), tmp_path, 0, "/somewhere/private")
    every = cells(preset, "laptop", "align", made.data)
    assert "/somewhere/private" in str(every[0].config())
    (text,) = reproduce_page._config(Found(made, every, {every[0].label: 0.123})).values()
    assert "/somewhere/private" not in text and "lr = 0.123" in text


def test_digits_do_not_take_the_place_of_real_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for overrides in (["settings"], ["settings", "--scale", "tiny"]):
        assert CliRunner().invoke(app, ["reproduce", *overrides]).exit_code == 0
    assert (tmp_path / "docs/results/settings.md").exists() and (tmp_path / "docs/results/tiny/settings.md").exists()


def test_all_goes_on_after_a_failure_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reproduction.preset.names", lambda: ["secure", "settings"])
    said = CliRunner().invoke(app, ["reproduce", "--all", "--data", str(tmp_path / "nowhere")])
    assert isinstance(said.exception, FedgraftError) and str(said.exception).startswith("secure could not be finished")
    assert (tmp_path / "docs/results/settings.md").exists() and (tmp_path / "docs/results/summary.md").exists()
    assert said.output.count("nowhere") == 1 and "--data" in said.output  # once, not once for each run


def test_damaged_claims_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "secure").mkdir()
    for text in ("[{", '[{"row": 1}]', '[{"row": 1, "text": "t", "colour": 2}]'):
        (tmp_path / "secure" / "claims.json").write_text(text)
        with pytest.raises(FedgraftError, match="reproduce that experiment again"):
            claims.summary(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [[], ["editing", "--scale", "huge"], ["nothing"], ["--list", "--scale", "x"], ["--list", "--format", "gif"]],
)
def test_wrong_words_are_refused(overrides: list[str]) -> None:
    said = CliRunner().invoke(app, ["reproduce", *overrides])
    assert said.exit_code != 0 and isinstance(said.exception, FedgraftError)
