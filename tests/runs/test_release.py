"""The page before a model leaves: what was learned by heart fails, what learned nothing does not; only counts move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises
from tests.support.machines import Machines
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.client.policy import policy_toml
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load
from fedgraft.consortium import shadows
from fedgraft.consortium.release import ALL_SITES, Answers, Release, Verdict, ask_sites, judge, write_release
from fedgraft.consortium.release_rules import EXAMPLE, ReleaseRules, read_rules
from fedgraft.core.label_sets import image_losses
from fedgraft.data.federated import FederatedData
from fedgraft.deploy.evaluate import config_for_any_model
from fedgraft.deploy.release import answers_of, ask_nodes
from fedgraft.metrics import membership
from fedgraft.metrics.evaluate import logits_of
from fedgraft.runs.adapted import adapted
from fedgraft.runs.loop import run
from fedgraft.runs.tracking import Silent

pytestmark = pytest.mark.slow
NAMES = ("north", "south", "east")
SMALL = [
    "model.name=cnn:width=32,size=16",
    "rounds.fraction=1.0",
    "local.batch_size=8",
    "partition.clients=3",
    "workers=1",
    "data.validation=0.1",
]
SMALL += ["trainable.kind=everything", "data.source=owners", "partition.kind=by_site", "engine=reference"]
SMALL += ["rounds.evaluate_every=0", "metrics=accuracy,auroc,balanced_accuracy"]
SMALL += ["select=balanced_accuracy", "model.head=random"]  # a head from the images would know some by heart
BY_HEART = ["local.epochs=10", "rounds.total=8", "local.lr=0.005", "local.optimizer=adamw"]
BARELY = ["local.steps=1", "rounds.total=1", "local.lr=0.001"]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites of noise: whoever answers rightly about a training image knows it by heart. One class is rare."""
    root = tmp_path_factory.mktemp("sites")
    stream = np.random.default_rng(1)
    for site in NAMES:
        for part, counts in (("train", (30, 8)), ("test", (40, 16))):
            for name, count in zip(("benign", "melanoma"), counts, strict=True):
                place = root / site / part / name
                place.mkdir(parents=True)
                for i in range(count):
                    Image.fromarray(stream.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(place / f"{i}.png")
    return root


def config(sites: Path, *more: str) -> Config:
    return load(None, [*SMALL, f"data.path={sites}", *more])


@pytest.fixture(scope="module")
def runs(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that learned its images by heart, and one that learned next to nothing."""
    root = tmp_path_factory.mktemp("runs")
    for name, more in (("by_heart", BY_HEART), ("barely", BARELY)):
        run(config(sites, *more), root / name, console=False)
    return {name: root / name for name in ("by_heart", "barely")}


def silent(*parts: Any) -> None:
    return None


def asked(folder: Path, count: int = 0) -> Answers:
    return ask_sites(folder, count, Silent, silent)


def released(folder: Path, answers: Answers, **rules: Any) -> Release:
    return judge(folder, answers, ReleaseRules(**rules))


def test_a_model_that_knows_its_images_by_heart_fails_and_one_that_learned_nothing_does_not(
    runs: dict[str, Path],
) -> None:
    by_heart = released(runs["by_heart"], asked(runs["by_heart"]))
    assert by_heart.verdict is Verdict.FAIL
    everywhere = {site.site: site for site in by_heart.attacks}[ALL_SITES]
    assert everywhere.by_loss.auc is not None and everywhere.before_training is not None
    assert everywhere.before_training.auc is not None
    assert everywhere.by_loss.auc.value > 0.65 and abs(everywhere.before_training.auc.value - 0.5) < 0.15
    assert everywhere.rare.gap is not None and everywhere.rare.gap.value > 0.5
    failed = {check.rule for check in by_heart.checks if check.verdict is Verdict.FAIL}
    assert {"membership by loss: area", "rare classes known by heart"} <= failed
    barely = released(runs["barely"], asked(runs["barely"]), membership_auc=0.75, memorised=0.5)
    assert barely.verdict is not Verdict.FAIL
    everywhere = {site.site: site for site in barely.attacks}[ALL_SITES]
    assert everywhere.by_loss.auc is not None and everywhere.by_loss.auc.value < 0.65


def test_rules_pass_fail_or_stay_open_by_the_interval(runs: dict[str, Path]) -> None:
    answers = asked(runs["by_heart"])
    for limit, verdict in ((0.5, Verdict.FAIL), (1.0, Verdict.PASS)):
        release = released(runs["by_heart"], answers, membership_auc=limit, memorised=None, found_at_one_percent=None)
        (check,) = (check for check in release.checks if check.site == ALL_SITES and check.rule.endswith("area"))
        assert check.verdict is verdict
    private = released(runs["by_heart"], answers, epsilon=8.0, gain=0.0, smallest_site=30)
    by_rule = {(check.rule, check.site): check.verdict for check in private.checks}
    assert by_rule["differential privacy", ALL_SITES] is Verdict.FAIL
    assert by_rule["gain of each site", ALL_SITES] is Verdict.OPEN
    assert by_rule["size of a site", "north"] is Verdict.PASS


def test_a_changed_round_fails_the_log(runs: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    changed = tmp_path / "changed"
    shutil.copytree(runs["barely"], changed)
    lines = (changed / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[-1])
    line["train_loss"] = 0.0
    (changed / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(line)]) + "\n")
    release = released(changed, asked(runs["barely"]))
    (check,) = (check for check in release.checks if check.rule == "round log")
    assert check.verdict is Verdict.FAIL


# ---- shadow models


def test_pairs_of_shadows_share_the_images_out(sites: Path) -> None:
    data = adapted_data(sites)
    for client in range(3):
        rows = set(data.rows(client).tolist())
        first = set(shadows.half_of(data, 0, 1, False).rows(client).tolist())
        second = set(shadows.half_of(data, 0, 1, True).rows(client).tolist())
        assert first | second == rows and not first & second and abs(len(first) - len(second)) <= 1
        other_pair = set(shadows.half_of(data, 0, 2, False).rows(client).tolist())
        assert other_pair not in (first, second)


def adapted_data(sites: Path) -> FederatedData:
    from fedgraft.config.federate import federate

    return federate(config(sites, *BARELY))


def test_scores_against_shadows_are_those_of_a_plain_loop(runs: dict[str, Path], tmp_path: Path) -> None:
    """Of one site, by hand: the log loss minus the mean of the models that left the image out, in deviations."""
    target = adapted(runs["barely"])
    data = target.setup.task.data
    made = shadows.train_shadows(target.setup.config, data, tmp_path, 4, Silent, silent)
    rare = torch.tensor([False, True])
    sums = shadows.shadow_sums(target, made, rare, 1)[1]

    def log_loss(one: Any, tests: bool, row: int) -> float:
        context = one.opened.context
        examples = context.tests if tests else context.examples
        logits = logits_of(one.network, examples, torch.tensor([row]))
        return float(image_losses(logits.double(), examples.labels[[row]])[0].log10())

    members, outsiders = [], []
    for row in data.rows(1).tolist():
        out = [log_loss(shadow.run, False, row) for shadow in made if row not in shadow.trained]
        assert len(out) == 2
        members.append((log_loss(target, False, row), out))
    drawn = shadows.drawn_for_tests(target.setup.config.seed, 1, len(data.test_rows(1)), 4)
    assert drawn.sum(1).tolist() == [2] * len(drawn) and 0.2 < float(drawn[:, 0].double().mean()) < 0.8
    for row, chosen in zip(data.test_rows(1).tolist(), drawn.tolist(), strict=True):
        assert chosen[0] != chosen[1] and chosen[2] != chosen[3]
        out = [log_loss(shadow.run, True, row) for shadow, one in zip(made, chosen, strict=True) if one]
        outsiders.append((log_loss(target, True, row), out))
    squares = sum(((np.array(out) - np.mean(out)) ** 2).sum() for _, out in members + outsiders)
    spread = (squares / (len(members) + len(outsiders))) ** 0.5
    for name, images in (("members", members), ("outsiders", outsiders)):
        scores = torch.tensor([(loss - np.mean(out)) / spread for loss, out in images])
        bins = membership.bins_of(scores, -6, 6)
        expected = torch.bincount(bins, minlength=membership.BINS).double()
        assert float((sums[name].sum(0) - expected).abs().sum()) <= 2  # one image at the edge of a bin


def test_shadows_find_what_was_learned_by_heart_and_are_found_again(runs: dict[str, Path]) -> None:
    said = list[str]()
    answers = ask_sites(runs["by_heart"], 2, Silent, said.append)
    assert len(said) == 2
    attack = membership.attack(membership.merge_membership(answers.shadows.values()))
    assert attack.auc is not None and attack.auc.value > 0.65
    before = {path: path.stat().st_mtime_ns for path in (runs["by_heart"] / "release").rglob("metrics.jsonl")}
    again = ask_sites(runs["by_heart"], 2, Silent, silent)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for site, sums in answers.shadows.items():
        assert all(torch.equal(sums[name], again.shadows[site][name]) for name in sums)


# ---- the page, and what leaves


def test_the_page_holds_counts_and_no_number_of_an_image(runs: dict[str, Path], tmp_path: Path) -> None:
    answers = asked(runs["by_heart"])
    for sums in (*answers.delivered.values(), *answers.before.values()):
        assert {name: tuple(part.shape) for name, part in sums.items()} == {
            "members": (2, membership.BINS),
            "outsiders": (2, membership.BINS),
            "right": (2, 2),
        }
    hostile = replace(released(runs["by_heart"], answers), run="<script>alert(1)</script>")
    page = write_release(tmp_path, hostile).read_text()
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    written = json.loads((tmp_path / "release.json").read_text())
    assert written["verdict"] == "fail" and len(written["attacks"]) == 4
    assert all("-" in row["value"] for row in written["metrics"]), "a metric without its interval"
    assert "melanoma" in written["notes"][-2]


def test_the_command_ends_with_one_where_a_rule_is_broken(runs: dict[str, Path], tmp_path: Path) -> None:
    rules = tmp_path / "release.toml"
    rules.write_text(EXAMPLE)
    words = ["release", str(runs["by_heart"]), "--shadows", "0", "--rules", str(rules), "-o", str(tmp_path / "page")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and "verdict: fail" in result.output
    assert (tmp_path / "page" / "release.html").is_file()


def test_rules_are_read_or_refused(tmp_path: Path) -> None:
    rules = tmp_path / "release.toml"
    rules.write_text(EXAMPLE)
    assert read_rules(rules) == read_rules(None) == ReleaseRules()
    for text, rule in (("membership_auc = 0.2", "membership_auc"), ("epsilonn = 1", "epsilonn")):
        rules.write_text(text)
        with raises("E-CONSORTIUM-RELEASE-RULES", rule=rule):
            read_rules(rules)
    rules.write_text("epsilon = ")
    with raises("E-CONSORTIUM-RELEASE-RULES"):
        read_rules(rules)
    with raises("E-CONSORTIUM-RELEASE-RULES"):
        read_rules(tmp_path / "nowhere.toml")


# ---- at nodes


def machines(config: Config, sites: Path, root: Path, patch: pytest.MonkeyPatch) -> Machines:
    places = [str(sites / name) for name in NAMES]
    return Machines(config, root / "there", root / "keys", patch, data=places, task="evaluate")


def at_nodes(*more: str) -> Config:
    return config_for_any_model(load(None, [*SMALL, "data.source=folder", "partition.kind=stratified", *more]))


def test_nodes_give_the_counts_of_one_place(
    sites: Path, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    folder = runs["by_heart"]
    engine = machines(at_nodes(), sites, tmp_path, monkeypatch)
    result = ask_nodes(at_nodes(), tmp_path / "out", engine, str(folder), ["melanoma"])
    assert not result["refused"]
    there = answers_of(result, NAMES)
    here = asked(folder)
    for site in NAMES:  # outsiders are the same images; which images are held out of training is each place's own
        assert torch.equal(there.delivered[site]["outsiders"], here.delivered[site]["outsiders"])
    release = judge(folder, there, ReleaseRules())
    assert release.verdict is Verdict.FAIL and release.attacks[0].before_training is None

    secure = at_nodes("privacy.aggregation=secure", "privacy.smallest_group=5")
    engine = machines(secure, sites, tmp_path / "s", monkeypatch)
    hidden = ask_nodes(secure, tmp_path / "hidden", engine, str(folder), ["melanoma"])
    assert list(hidden["clients"]) == ["all"]
    pooled = membership.merge_membership(there.delivered.values())
    only = answers_of(hidden, NAMES).delivered[ALL_SITES]
    assert all(torch.equal(only[name], pooled[name]) for name in pooled)


def test_an_owner_who_did_not_allow_it_gives_nothing(
    sites: Path, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = at_nodes()
    engine = machines(config, sites, tmp_path, monkeypatch)
    for client, also in enumerate((["evaluate"], ["evaluate", "membership"], ["membership"])):
        policy = safe_policy(config, build_algorithm(config), tuple(also))
        (engine.home(client).parent / "policy.toml").write_text(policy_toml(policy))
    result = ask_nodes(config, tmp_path / "out", engine, str(runs["barely"]))
    assert "0" in result["refused"] and "1" in result["clients"]
    with raises("E-DEPLOY-RARE-CLASS"):
        ask_nodes(config, tmp_path / "out", engine, str(runs["barely"]), ["naevus"])
