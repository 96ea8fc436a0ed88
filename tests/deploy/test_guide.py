"""The guide of four hospitals, followed literally: every command of docs/deploy.md, in its order, on one machine.

Without Flower's processes the files, keys, policies and the rehearsal are done (in the gate); with them all of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.flower_local import free_port

ROOT = Path(__file__).resolve().parents[2]
NEEDS_SERVER = ("server", "node", "status", "preflight", "submit", "audit", "evaluate", "stop")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Follower:
    """Follows the page in a folder: nodes and the server run beside it, everything else must end as the page says."""

    def __init__(self, place: Path, deployed: bool) -> None:
        self.place = place
        self.deployed = deployed
        self.port = str(free_port())
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.ran: list[str] = []
        self.output = ""
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1", "TMPDIR": str(place), "COLUMNS": "200"}
        self.environment = {**os.environ, **quiet, "HF_HUB_OFFLINE": "1"}

    def follow(self, page: str) -> None:
        end = 0
        for block in BLOCK.finditer(page):
            before, end = page[end : block.start()], block.end()
            if block[1] == "toml":
                name = re.findall(r"`([\w-]+\.toml)`", before)[-1]
                (self.place / name).write_text(block[2])
            elif block[1] == "python":
                self.call([sys.executable, "-c", block[2]], 0)
            else:
                for line in block[2].splitlines():
                    self.line(line)

    def line(self, line: str) -> None:
        text, _, exit_code = line.partition("  # exit code ")
        called = shlex.split(text.replace("9400", self.port))
        if called[:1] != ["fedgraft"] or (not self.deployed and needs_server(called)):
            return
        command = [sys.executable, "-m", "fedgraft", *called[1:]]
        if called[1:3] == ["deploy", "node"]:
            with (self.place / f"node{len(self.nodes)}.txt").open("wb") as log:
                self.nodes.append(
                    subprocess.Popen(command, cwd=self.place, env=self.environment, stdout=log, stderr=log)
                )
            return
        if called[1:3] == ["deploy", "server"]:
            command.append("--no-wait")
        self.call(command, int(exit_code or 0))
        if called[1:3] == ["deploy", "status"]:
            self.wait_for_status(command)
        self.ran.append(" ".join(called[:3]))

    def wait_for_status(self, command: list[str]) -> None:
        """Repeat `status`, as a reader would, until all four nodes are connected or the run has ended."""
        before_run = "runs: none" in self.output
        for _ in range(200):
            if before_run and self.output.count(": connected") == 4:
                return
            if not before_run and "running" not in self.output and "starting" not in self.output:
                return
            time.sleep(1.5)
            self.call(command, 0)
        raise AssertionError(f"the status never changed: {self.output}")

    def call(self, command: list[str], code: int) -> None:
        done = subprocess.run(
            command, cwd=self.place, env=self.environment, text=True, capture_output=True, timeout=600, check=False
        )
        self.output = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(command[2:])[:300]} ended with {done.returncode}: {self.output}"


def needs_server(called: list[str]) -> bool:
    return (called[1] == "deploy" and called[2] in NEEDS_SERVER) or called[1] == "export"


@pytest.fixture
def follower(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Follower]:
    pytest.importorskip("cryptography")
    started = Follower(tmp_path, request.param)
    yield started
    for process in started.nodes:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    if started.deployed:
        started.call([sys.executable, "-m", "fedgraft", "deploy", "stop", "fed"], 0)


PAGE = (ROOT / "docs" / "deploy.md").read_text().partition("## A rehearsal on one machine")[0]


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize("follower", [False], indirect=True)
def test_files_keys_policies_and_the_rehearsal_can_be_followed(follower: Follower) -> None:
    follower.follow(PAGE)
    assert {"fedgraft deploy init", "fedgraft deploy policy", "fedgraft worth rehearsal"} <= set(follower.ran)
    unlearned = json.loads((follower.place / "rehearsal-without-south-approximate" / "unlearned.json").read_text())
    assert unlearned["exact"] is False and unlearned["distance"] > 0
    assert len(json.loads((follower.place / "rehearsal/worth/worth.json").read_text())["balanced_accuracy"]) == 4


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize("follower", [True], indirect=True)
def test_the_whole_guide_can_be_followed(follower: Follower) -> None:
    pytest.importorskip("flwr")
    follower.follow(PAGE.partition("## Step 10")[0])
    assert {f"fedgraft deploy {name}" for name in NEEDS_SERVER} - {"fedgraft deploy node"} <= set(follower.ran)
    preflight = json.loads((follower.place / "preflight" / "preflight.json").read_text())
    assert len(preflight["sites"]) == 4
    assert "class_case" not in {finding["kind"] for finding in preflight["findings"]}
    summary = json.loads((follower.place / "run" / "summary.json").read_text())
    evaluation = json.loads((follower.place / "run" / "evaluation.json").read_text())
    assert evaluation["clients"] == summary["clients"] and not evaluation["refused"]  # the same model, evaluated again
    assert (follower.place / "adapted" / "config.json").is_file()


def test_a_command_that_the_page_has_wrong_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Follower(tmp_path, False).follow("```\nfedgraft deploy keys north\n```")
