"""Who gains: the numbers are those of the clients' own models, the verdicts follow the intervals, losers are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.errors import raises
from tests.support.tiny import tiny, without_pictures

from fedgraft.consortium.worth import Site, compare_models, comparison_configs, make_missing, summary_line, write_worth
from fedgraft.metrics.metrics import Metric
from fedgraft.runs.loop import run
from fedgraft.runs.tracking import Silent

OPTIONS = ("partition.kind=dirichlet", "partition.minimum=8", 'metrics=["accuracy"]')


@pytest.mark.slow
def test_the_page_holds_what_the_runs_themselves_measured(tmp_path: Path) -> None:
    folder, ran = tmp_path / "run", list[str]()
    with without_pictures():
        summary = run(tiny(*OPTIONS), folder, console=False)
        places = make_missing(folder, {}, Silent, ran.append)
        assert len(ran) == 2 and make_missing(folder, {}, Silent, ran.append) == places and len(ran) == 2  # not again
    write_worth(tmp_path / "page", compare_models(places, ["accuracy", "auroc"], draws=20), "run")
    record = json.loads((tmp_path / "page" / "worth.json").read_text())
    assert [s["name"] for s in record["auroc"]] == ["0", "1", "2"] and "AUROC" in (
        tmp_path / "page/worth.md"
    ).read_text()
    for site in record["accuracy"]:
        own = summary["clients"][site["name"]]["accuracy"]
        assert site["models"]["federated"]["value"] == pytest.approx(own["value"]) and site["images"] == own["n"]
        gap = site["models"]["federated"]["value"] - site["models"]["alone"]["value"]
        assert site["gain"]["value"] == pytest.approx(gap)  # paired on the same images
    assert {"worth.html", "worth.md", "worth.json"} <= {p.name for p in (tmp_path / "page").iterdir()}


def site(name: str, low: float, high: float) -> Site:
    return Site(name, 10, {}, Metric((low + high) / 2, low, high, 10, "points"))


def test_losers_are_named_and_what_holds_zero_is_not_told() -> None:
    sites = [site("north", 0.1, 0.2), site("south", -0.2, -0.1), site("east", -0.1, 0.1), Site("west", 1, {}, None)]
    line = summary_line(sites, "balanced_accuracy")
    assert Site("north", 10, {}, sites[0].gain, less_is_better=True).verdict == "loses"  # a loss that grew
    assert "gains: north" in line and "loses: south" in line and "inconclusive: east, west" in line


def test_comparisons_share_data_seed_and_training_and_one_place_is_refused() -> None:
    config = tiny("algorithm.name=fedprox", "privacy.aggregation=secure", "seed=3")
    compared = comparison_configs(config)
    contributions = comparison_configs(tiny("seed=3", "rounds.keep_contributions=true"))  # what only a mean can keep
    assert contributions["alone"].digest == comparison_configs(tiny("seed=3"))["alone"].digest
    assert compared["alone"].algorithm.name == "local_only" and compared["alone"].privacy.aggregation == "clear"
    assert compared["alone"].local == config.local and compared["alone"].seed == compared["pooled"].seed == 3
    assert compared["pooled"].partition.clients == 1 and compared["pooled"].centralized.active
    with raises("E-CONSORTIUM-ONE-SITE"):
        comparison_configs(compared["pooled"])
