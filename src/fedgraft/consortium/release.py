"""Before a model leaves: one page and one JSON for the people who must sign, with a verdict by agreed thresholds.

What is asked: can somebody who has the model and an image tell whether the image was trained on (by its loss, and in a
simulation against shadow models)? Does the model know single images of rare classes by heart? What does differential
privacy guarantee, and what not? Does the signed log agree with the folder? Whose data is it, who gains, how good is it?
Only counts enter: histograms of losses (`metrics.membership`), numbers of images, sums of metrics.

A rule is kept, broken, or open: open where the interval of its figure contains the threshold. One broken rule fails the
release; with an open one it is for the signatories to decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import has_one_model
from fedgraft.client.actions.membership import SPLITS, side_of_network
from fedgraft.consortium.preflight import MINIMUM
from fedgraft.consortium.release_rules import ReleaseRules
from fedgraft.consortium.shadows import shadow_sums, train_shadows
from fedgraft.consortium.small_counts import hide_small
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import counted
from fedgraft.core.store import write_text
from fedgraft.data.federated import FederatedData
from fedgraft.metrics import membership
from fedgraft.metrics.membership import COMMON, RARE, Attack, Gap
from fedgraft.metrics.metrics import Metric
from fedgraft.models.network import VisionNetwork
from fedgraft.report import html
from fedgraft.report.values import format_epsilon
from fedgraft.runs.adapted import Adapted, adapted
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.round_log import verify_log
from fedgraft.runs.saving import protection_label
from fedgraft.runs.tracking import Progress

SMALLEST_COUNT = MINIMUM
"""Smaller numbers of images are hidden, and with them others from which they would follow."""
MOST_CLASSES = 20
"""With more classes the page counts a site's images only in all."""
ALL_SITES = "all sites"
SHADOWS = 4
"""Shadow models unless the command says otherwise."""

Sums = Mapping[str, Tensor]


class Verdict(StrEnum):
    """What a threshold says of a figure."""

    PASS = "pass"
    FAIL = "fail"
    OPEN = "open"


@dataclass(frozen=True)
class Check:
    """One rule: what was required, what was measured, and the verdict."""

    rule: str
    site: str
    measured: str
    required: str
    verdict: Verdict


@dataclass(frozen=True)
class SiteAttack:
    """What the model gives away about the images of one site, or of all."""

    site: str
    by_loss: Attack
    before_training: Attack | None
    """The same attack on the pretrained model with a new head, which saw no image: what differs without training."""
    by_shadows: Attack | None
    rare: Gap
    common: Gap


@dataclass(frozen=True)
class Answers:
    """The sums of the sites: of the delivered model, of the one before training, and against shadow models."""

    delivered: Mapping[str, Sums]
    before: Mapping[str, Sums]
    shadows: Mapping[str, Sums]
    shadow_models: int
    rare: tuple[str, ...]
    """Names of the rare classes."""
    data: Sequence[Mapping[str, str]]
    """Counts of each site's images."""
    deployed: bool = False


@dataclass(frozen=True)
class Release:
    """Everything on the page."""

    run: str
    verdict: Verdict
    checks: tuple[Check, ...]
    attacks: tuple[SiteAttack, ...]
    facts: Mapping[str, str]
    data: Sequence[Mapping[str, str]]
    metrics: Sequence[Mapping[str, str]]
    gains: Sequence[Mapping[str, str]]
    notes: tuple[str, ...]


# ---- the sites' sums in a simulation


def ask_sites(folder: Path, shadows: int, progress: Callable[[], Progress], report: Callable[[str], None]) -> Answers:
    """Return the sums of all sites of a simulated run; its images must be on this machine.

    Shadow models are trained in `folder`/release, or found there. `progress` makes the display of a run, `report`
    prints a line.
    """
    run = adapted(folder)
    data = run.setup.task.data
    if not data.rows_known:
        raise FedgraftError(
            "E-CONSORTIUM-RELEASE-ELSEWHERE",
            f"the images of {folder} are at its nodes",
            "ask them: fedgraft deploy release FEDERATION RUN",
            path=str(folder),
        )
    if not has_one_model(run.setup.algorithm):
        raise FedgraftError(
            "E-CONSORTIUM-RELEASE-PERSONAL",
            f"{run.setup.algorithm.name} makes a model for each client, and a release is about one",
            "release each client's own model at its site",
            algorithm=run.setup.algorithm.name,
        )
    is_rare = membership.rare_classes(data.histogram().sum(0))
    names = data.dataset.classes
    rare = tuple(name for name, flag in zip(names, is_rare, strict=True) if flag)
    before = _sums_by_site(run, run.untrained(), is_rare)
    delivered = _sums_by_site(run, run.network, is_rare)
    against_shadows: dict[str, Sums] = {}
    if shadows:
        models = train_shadows(run.setup.config, data, folder / "release", shadows, progress, report)
        for client, sums in shadow_sums(run, models, torch.from_numpy(is_rare), SMALLEST_COUNT).items():
            against_shadows[run.setup.client_names[client]] = sums
    return Answers(delivered, before, against_shadows, shadows, rare, counts_by_site(data))


def _sums_by_site(run: Adapted, network: VisionNetwork, is_rare: np.ndarray) -> dict[str, Sums]:
    """Return the sums of `metrics.membership` of a network at each site, by name of the site."""
    by_site: dict[str, Sums] = {}
    context = run.opened.context
    rare = torch.from_numpy(is_rare)
    clients = range(run.setup.task.data.clients)
    for client in counted("losses of training and test images", clients, unit="sites"):
        sides = []
        for split in SPLITS:
            side = side_of_network(network, context, client, split, rare)
            sides.append(membership.side_sums(*side, SMALLEST_COUNT))
        by_site[run.setup.client_names[client]] = membership.join_sides(*sides)
    return by_site


def counts_by_site(data: FederatedData) -> list[dict[str, str]]:
    """Return a row of counts for each site: training images, and by class where these are few; small ones hidden."""
    rows = []
    sizes = data.sizes_by_client()
    histogram = data.histogram()
    for client, name in enumerate(data.client_names):
        row = {"site": name, "training images": count_text(sizes[client])}
        if data.classes <= MOST_CLASSES:
            counts = dict(zip(data.dataset.classes, map(int, histogram[client]), strict=True))
            told = hide_small(counts, SMALLEST_COUNT)
            for label in data.dataset.classes:
                row[label] = "hidden" if told[label] is None else str(told[label])
        rows.append(row)
    return rows


# ---- from sums to verdicts


def judge(folder: Path, answers: Answers, rules: ReleaseRules) -> Release:
    """Return the page's content: the attacks from the sites' sums, the facts of the run's folder, and the verdicts."""
    record = RunFolder.open(folder)
    summary = record.summary()
    attacks = attacks_of(answers)
    log_text, mismatches = verify_log(folder)
    gains = _gains(folder)
    checks = [*_attack_checks(attacks, rules)]
    checks += _log_checks(log_text, mismatches, rules)
    checks += _privacy_checks(summary, rules)
    checks += _site_checks(answers, rules)
    checks += _gain_checks(gains, rules)
    verdicts = {check.verdict for check in checks}
    verdict = Verdict.PASS
    if Verdict.OPEN in verdicts:
        verdict = Verdict.OPEN
    if Verdict.FAIL in verdicts:
        verdict = Verdict.FAIL
    return Release(
        record.path.resolve().name,
        verdict,
        tuple(checks),
        attacks,
        _facts(summary, log_text, mismatches, folder, answers.deployed),
        answers.data,
        _metric_rows(summary),
        gains,
        _notes(answers, summary),
    )


def attacks_of(answers: Answers) -> tuple[SiteAttack, ...]:
    """Return what the model gives away about each site's images, and about those of all sites."""
    attacks = []
    sites = list(answers.delivered)
    if len(sites) > 1:
        sites.append(ALL_SITES)  # under secure aggregation it is the only one
    for site in sites:
        delivered = _of_site(answers.delivered, site)
        assert delivered is not None
        before = _of_site(answers.before, site)
        shadows = _of_site(answers.shadows, site)
        attacks.append(
            SiteAttack(
                site,
                membership.attack(delivered),
                None if before is None else membership.attack(before),
                None if shadows is None else membership.attack(shadows),
                membership.gap(delivered, RARE),
                membership.gap(delivered, COMMON),
            )
        )
    return tuple(attacks)


def _of_site(sums: Mapping[str, Sums], site: str) -> Sums | None:
    """Return the sums of one site, or of all together; None where nobody answered."""
    if not sums:
        return None
    if site == ALL_SITES:
        return membership.merge_membership(sums.values())
    return sums.get(site)


def at_most(metric: Metric | None, limit: float) -> Verdict:
    """Return whether a figure is at most `limit`: fail if all of its interval is above, pass if none of it is."""
    if metric is None or metric.low is None or metric.high is None:
        return Verdict.OPEN
    if metric.low > limit:
        return Verdict.FAIL
    if metric.high <= limit:
        return Verdict.PASS
    return Verdict.OPEN


def _attack_checks(attacks: Sequence[SiteAttack], rules: ReleaseRules) -> list[Check]:
    """Return the checks of the attacks and of memorised rare classes, for each site and all sites."""
    checks = []
    for site in attacks:
        kinds = [("by loss", site.by_loss)]
        if site.by_shadows is not None:
            kinds.append(("against shadow models", site.by_shadows))
        for kind, attack in kinds:
            if rules.membership_auc is not None:
                verdict = at_most(attack.auc, rules.membership_auc)
                required = f"at most {rules.membership_auc:g}"
                checks.append(Check(f"membership {kind}: area", site.site, _text(attack.auc), required, verdict))
            if rules.found_at_one_percent is not None and attack.found is not None:
                verdict = at_most(attack.found, rules.found_at_one_percent)
                required = f"at most {100 * rules.found_at_one_percent:g} %"
                name = f"membership {kind}: found at 1 % false alarms"
                checks.append(Check(name, site.site, _text(attack.found), required, verdict))
        if rules.memorised is not None and site.rare.gap is not None:
            verdict = at_most(site.rare.gap, rules.memorised)
            required = f"at most {100 * rules.memorised:g} points"
            checks.append(Check("rare classes known by heart", site.site, _text(site.rare.gap), required, verdict))
    return checks


def _log_checks(log_text: str, mismatches: Sequence[str], rules: ReleaseRules) -> list[Check]:
    """Return the check of the signed log, if the rules ask for it."""
    if not rules.verified_log:
        return []
    measured = log_text
    verdict = Verdict.PASS
    if mismatches:
        measured = f"does not match: {mismatches[0]}"
        verdict = Verdict.FAIL
    elif "not signed" in log_text:
        verdict = Verdict.OPEN
    return [Check("round log", ALL_SITES, measured, "signed, and matches the folder", verdict)]


def _privacy_checks(summary: Mapping[str, Any], rules: ReleaseRules) -> list[Check]:
    """Return the check of epsilon, if the rules name one; a run without noise breaks it."""
    if rules.epsilon is None:
        return []
    account = summary.get("privacy")
    required = f"epsilon at most {rules.epsilon:g}"
    if account is None:
        return [Check("differential privacy", ALL_SITES, "no noise was added", required, Verdict.FAIL)]
    spent = float(account["epsilon"])
    verdict = Verdict.PASS if spent <= rules.epsilon else Verdict.FAIL
    measured = f"epsilon {format_epsilon(spent)} per {account['unit']}"
    return [Check("differential privacy", ALL_SITES, measured, required, verdict)]


def _site_checks(answers: Answers, rules: ReleaseRules) -> list[Check]:
    """Return the check of the smallest site, if the rules name a size."""
    if not rules.smallest_site:
        return []
    checks = []
    for row in answers.data:
        site, size = row["site"], row["training images"]
        enough = size.isdigit() and int(size) >= rules.smallest_site
        verdict = Verdict.PASS if enough else Verdict.FAIL
        checks.append(Check("size of a site", site, f"{size} images", f"at least {rules.smallest_site}", verdict))
    return checks


def _gain_checks(gains: Sequence[Mapping[str, str]], rules: ReleaseRules) -> list[Check]:
    """Return the checks that no site loses more than the rules allow; open where `fedgraft worth` was not run."""
    if rules.gain is None:
        return []
    required = f"at least {rules.gain:+g}"
    if not gains:
        return [Check("gain of each site", ALL_SITES, "not measured: fedgraft worth", required, Verdict.OPEN)]
    checks = []
    for row in gains:
        low, high = float(row["low"]), float(row["high"])
        verdict = Verdict.OPEN
        if low >= rules.gain:
            verdict = Verdict.PASS
        if high < rules.gain:
            verdict = Verdict.FAIL
        measured = f"{row['gain']} ({row['low']} to {row['high']})"
        checks.append(Check(f"gain, {row['metric']}", row["site"], measured, required, verdict))
    return checks


# ---- facts of the folder


def _facts(
    summary: Mapping[str, Any], log_text: str, mismatches: Sequence[str], folder: Path, deployed: bool
) -> dict[str, str]:
    """Return what the page says of the run as a whole, by name."""
    from fedgraft.client.policy import from_table, in_words
    from fedgraft.config.agreement import policy_of_config
    from fedgraft.config.build import build_algorithm
    from fedgraft.config.load import from_folder

    config = from_folder(folder)
    algorithm = build_algorithm(config)
    facts = {
        "algorithm": f"{algorithm.name}, {summary.get('rounds')} rounds, delivered: round {summary.get('best_round')}",
        "protection of updates": protection_label(algorithm),
        "round log": log_text if not mismatches else f"does not match: {'; '.join(mismatches[:3])}",
        "config": config.fingerprint,
    }
    account = summary.get("privacy")
    if account is None:
        facts["differential privacy"] = "none: no noise was added"
    else:
        unit = "image of a client" if account["unit"] == "record" else "client with all of its images"
        facts["differential privacy"] = (
            f"epsilon {format_epsilon(account['epsilon'])} at delta {account['delta']:.3g}; the unit is one {unit}"
        )
        outside = account.get("not_covered") or []
        outside = [*outside, "the figures of this page, which are counts about training images without noise"]
        facts["outside of epsilon"] = "; ".join(outside)
    implied = policy_of_config(config, algorithm)
    facts["rules of the config at every node"] = "; ".join(in_words(implied))
    if config.policy:
        facts["the config's own policy"] = "; ".join(in_words(from_table(config.policy, "the config's policy")))
    facts["policies of the owners"] = "a simulation has none"
    if deployed:
        facts["policies of the owners"] = (
            "each node's own (deploy preflight tells its rules), in force beside the config's: who answered allowed "
            "this "
            "config and the action 'membership'; what left a node its owner sees with `fedgraft deploy ledger`"
        )
    return facts


def count_text(images: int) -> str:
    """Return a number of images as text; a small one is hidden."""
    if 0 < images < SMALLEST_COUNT:
        return f"<{SMALLEST_COUNT}"
    return str(images)


def _metric_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the pooled metrics of the run's test with their intervals."""
    rows = []
    for name, values in (summary.get("metrics") or {}).items():
        if values:
            metric = Metric(**values)
            rows.append({"metric": name, "value": str(metric), "images": str(metric.n)})
    test = summary.get("test") or {}
    if not rows and test.get("count"):
        images = int(test["count"])
        hits = round(images * test["accuracy"])
        low, high = membership.wilson(hits, images)
        accuracy = Metric(hits / images, low, high, images, "%", hits)
        rows.append({"metric": "accuracy", "value": str(accuracy), "images": str(images)})
    return rows


def _gains(folder: Path) -> list[dict[str, str]]:
    """Return the gain of each site as `fedgraft worth` measured it; empty where it was not run."""
    path = folder / "worth" / "worth.json"
    if not path.is_file():
        return []
    rows = []
    for metric, sites in json.loads(path.read_text(encoding="utf-8")).items():
        for site in sites:
            gain = site["gain"]
            if gain is not None and gain["low"] is not None:
                row = {"site": site["name"], "metric": metric, "verdict": site["verdict"]}
                row |= {"gain": f"{gain['value']:+.4f}", "low": f"{gain['low']:+.4f}", "high": f"{gain['high']:+.4f}"}
                rows.append(row)
    return rows


def _notes(answers: Answers, summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sentences that say what the figures mean, and what they do not show."""
    notes = [
        "The attacker has the model and an image with its label, and asks whether the image was trained on. An area of "
        "0.5 is guessing. Members are a site's training images, outsiders its own test images.",
        "Before training is the pretrained model with a new head, which saw no image of the run: its area shows how "
        "far the two sets differ by themselves. Where areas before and after are alike, training gave nothing away.",
        "A rule is open where the 95 % interval contains its threshold: more images would be needed to say.",
    ]
    if answers.shadow_models:
        notes.append(
            f"{answers.shadow_models} shadow models were trained, each on half of every site's images. Stronger "
            "attackers train hundreds; the figure is a lower bound of what they find."
        )
    else:
        notes.append("No shadow models were trained: an attacker who trains some finds more than the loss alone shows.")
    if answers.rare:
        notes.append(f"Rare are classes with less than half of an even share of the images: {', '.join(answers.rare)}.")
    else:
        notes.append("No class has less than half of an even share of the images, so none is rare.")
    if summary.get("privacy") is None:
        notes.append("Without differential privacy nothing is guaranteed against attacks that were not tried.")
    return tuple(notes)


# ---- the page


def write_release(folder: Path, release: Release) -> Path:
    """Write release.json and release.html to `folder`; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "release.json", json.dumps(asdict(release), indent=2) + "\n")
    title = f"Release of {release.run}: {release.verdict.value}"
    tables: dict[str, Sequence[Mapping[str, Any]]] = {
        "Rules": [{**asdict(check), "verdict": check.verdict.value} for check in release.checks],
        "What the model gives away": [_attack_row(site) for site in release.attacks],
        "The run": [{"": name, "value": value} for name, value in release.facts.items()],
        "Data": release.data,
        "Quality": release.metrics,
    }
    if release.gains:
        tables["Who gains"] = release.gains
    tables["Signed"] = [{"name": "", "institution": "", "date": ""} for _ in range(3)]
    return html.write_tables(folder / "release.html", title, tables, release.notes)


def _attack_row(site: SiteAttack) -> dict[str, str]:
    """Return one site's row: the area of each attack, and how much better the model knows its training images."""
    return {
        "site": site.site,
        "training images": count_text(site.by_loss.members),
        "test images": count_text(site.by_loss.outsiders),
        "area by loss": _text(site.by_loss.auc),
        "before training": "–" if site.before_training is None else _text(site.before_training.auc),
        "against shadows": "–" if site.by_shadows is None else _text(site.by_shadows.auc),
        "found at 1 % false alarms": _text(site.by_loss.found),
        "gap, rare classes": _text(site.rare.gap),
        "gap, other classes": _text(site.common.gap),
    }


def _text(metric: Metric | None) -> str:
    """Return a figure with its interval as text; "too few images" for None."""
    if metric is None:
        return "too few images"
    scale, unit, digits = 1.0, "", 3
    if metric.unit:
        scale, unit, digits = 100.0, f" {metric.unit}", 1
    text = f"{scale * metric.value:.{digits}f}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" ({scale * metric.low:.{digits}f} to {scale * metric.high:.{digits}f})"
    return text
