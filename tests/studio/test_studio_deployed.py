"""The studio of a deployed federation in a real browser: a rehearsal, a node killed and restarted, an owner's page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.studio import NEEDS_BROWSER, chromium, complaints, served, wait_until

pytest.importorskip("starlette", reason="the extra `studio` is not installed")
pytest.importorskip("uvicorn", reason="the extra `studio` is not installed")
pytest.importorskip("flwr", reason="needs the extra 'flower'")

from tests.support.hospitals import Hospitals, federated

from fedgraft.config.load import load
from fedgraft.studio.views import studio_of

pytestmark = [pytest.mark.slow, pytest.mark.deploy, NEEDS_BROWSER]
OPTIONS = [
    "model.name=tiny",
    "data.limit=160",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=2000",
    "rounds.evaluate_every=0",
    "local.steps=1",
    "local.batch_size=16",
    "engine=reference",
    "workers=1",
    "rounds.test=false",
]
SECONDS = 240.0


def policy(hospitals: Hospitals, client: int, text: str) -> None:
    """Write the policy of a node's owner beside its key."""
    (hospitals.root / f"node-{client}" / "policy.toml").write_text(text)


def start_with_studio(hospitals: Hospitals, client: int) -> tuple[subprocess.Popen[str], str]:
    """Start a node as its owner does, with its own page; return its process and the page's address."""
    key = hospitals.root / f"node-{client}" / f"node-{client}.key"
    words = ["deploy", "node", "--superlink", hospitals.server.address, "--ca", str(hospitals.fed.authority)]
    words += ["--key", str(key), "--id", str(client), "--studio"]
    command = [sys.executable, "-m", "fedgraft", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line):
            return process, match[0]
    raise AssertionError("the node printed no address")


def number_of_round(page: Any) -> int:
    """The round that the federation's view shows; -1 without a run."""
    text = page.locator("main").inner_text()
    match = re.search(r"round (\d+) of 2000", text)
    return int(match[1]) if match else -1


def wait_for(page: Any, selector: str) -> None:
    page.wait_for_selector(selector, timeout=SECONDS * 1000)


def test_a_rehearsal_with_a_node_killed_and_restarted(tmp_path: Path) -> None:
    config = load(None, OPTIONS)
    with chromium() as browser, federated(tmp_path / "f", config, 3) as hospitals:
        policy(hospitals, 0, "rounds = 5000\nleast_images = 6\n")
        policy(hospitals, 2, "rounds_per_day = 3\n")
        owner, address = start_with_studio(hospitals, 0)
        try:
            for client in (1, 2):
                hospitals.start(client)
            follow(browser, hospitals, tmp_path, address)
        finally:
            owner.terminate()
            owner.wait(60)


def follow(browser: Any, hospitals: Hospitals, tmp_path: Path, address: str) -> None:
    """Go through the rehearsal as the coordinator sees it, then as the owner of node 0 does."""
    with served(studio_of(hospitals.fed.path, True, tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address)
        for name in ("node-0", "node-1", "node-2"):
            wait_for(page, f".node.connected[data-node={name}]")
        assert page.locator("nav a:text-is('New run')").count() == 0, "the config is what the owners agreed to"
        page.click("[data-action=plan]")
        wait_for(page, "#plan-text:has-text('2,000 rounds'), #plan-text:has-text('2000 rounds')")
        page.click("[data-action=preflight]")
        wait_for(page, "h2:text-is('Where the owners\\' policies differ')")
        policies = page.locator("section:has(h2:text-is('Where the owners\\' policies differ'))").inner_text()
        assert "least_images" in policies and "5000" in policies and "not set" in policies
        wait_for(page, "summary:has-text('preflight: done'), summary:has-text('preflight: ended with 1')")
        page.click("[data-action=start]")
        wait_until(lambda: number_of_round(page) >= 5, "the first rounds are shown", SECONDS)
        wait_for(page, "section:has(h2:text-is('Refusals by rule')) td:text-is('rounds_per_day')")
        (number,) = {record["id"] for record in hospitals.fed.runs() if "preflight" not in record["folder"]}
        assert page.locator(f"h2:text-is('Run {number}')").count() == 1, "the whole number, which no double holds"
        hospitals.kill(1)
        wait_for(page, ".node.absent[data-node=node-1]")
        hospitals.start(1)
        wait_for(page, ".node.connected[data-node=node-1]")
        reached = number_of_round(page)
        wait_until(lambda: number_of_round(page) > reached, "the run goes on", SECONDS)
        assert "in none" not in page.locator("[data-node=node-0]").inner_text()
        wait_for(page, "h2:text-is('Rounds and nodes')")
        page.click("[data-action=stop]")
        wait_for(page, ".badge:text-matches('stopped|interrupted')")
        assert [text for text in messages if "400" not in text] == []
        page.close()
    own = browser.new_page()
    messages = complaints(own)
    own.goto(address)
    wait_for(own, "h1:has-text('node-0')")
    wait_for(own, "td:text-is('train')")
    shown = own.locator("main").inner_text()
    assert "hash chain intact" in shown and "rounds = 5000" in shown
    assert "node-1" not in shown and "node-2" not in shown, "an owner sees the own node only"
    assert messages == []
    own.close()
