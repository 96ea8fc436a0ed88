"""The guide of four hospitals, followed word by word: every command of docs/deploy.md, in its order, on one machine.

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
        self.place, self.deployed, self.port = place, deployed, str(free_port())
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.ran: list[str] = []
        self.said = ""
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
        words, _, wanted = line.partition("  # exit code ")
        called = shlex.split(words.replace("9400", self.port))
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
        self.call(command, int(wanted or 0))
        if called[1:3] == ["deploy", "status"]:
            self.until("all four are connected" if "runs: none" in self.said else "the run is over", command)
        self.ran.append(" ".join(called[:3]))

    def until(self, what: str, command: list[str]) -> None:
        """What a reader does with `status`: look again."""
        for _ in range(200):
            if "the run is" in what and "running" not in self.said and "starting" not in self.said:
                return
            if "connected" in what and self.said.count(": connected") == 4:
                return
            time.sleep(1.5)
            self.call(command, 0)
        raise AssertionError(f"{what}: never; {self.said}")

    def call(self, command: list[str], code: int) -> None:
        done = subprocess.run(
            command, cwd=self.place, env=self.environment, text=True, capture_output=True, timeout=600, check=False
        )
        self.said = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(command[2:])[:300]} ended with {done.returncode}: {self.said}"


def needs_server(called: list[str]) -> bool:
    return (called[1] == "deploy" and called[2] in NEEDS_SERVER) or called[1] == "export"


@pytest.fixture
def follower(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Follower]:
    pytest.importorskip("cryptography")
    made = Follower(tmp_path, request.param)
    yield made
    for process in made.nodes:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    if made.deployed:
        made.call([sys.executable, "-m", "fedgraft", "deploy", "stop", "fed"], 0)


PAGE = (ROOT / "docs" / "deploy.md").read_text().partition("## A rehearsal on one machine")[0]


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize("follower", [False], indirect=True)
def test_files_keys_policies_and_the_rehearsal_can_be_followed(follower: Follower) -> None:
    follower.follow(PAGE)
    assert {"fedgraft deploy init", "fedgraft deploy policy", "fedgraft worth rehearsal"} <= set(follower.ran)
    told = json.loads((follower.place / "rehearsal-without-south-approximate" / "unlearned.json").read_text())
    assert told["exact"] is False and told["distance"] > 0
    assert len(json.loads((follower.place / "rehearsal/worth/worth.json").read_text())["balanced_accuracy"]) == 4


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.parametrize("follower", [True], indirect=True)
def test_the_whole_guide_can_be_followed(follower: Follower) -> None:
    pytest.importorskip("flwr")
    follower.follow(PAGE.partition("## Step 10")[0])
    assert {f"fedgraft deploy {name}" for name in NEEDS_SERVER} - {"fedgraft deploy node"} <= set(follower.ran)
    found = json.loads((follower.place / "preflight" / "preflight.json").read_text())
    assert len(found["sites"]) == 4 and "class_case" not in {one["kind"] for one in found["findings"]}
    summary = json.loads((follower.place / "run" / "summary.json").read_text())
    judged = json.loads((follower.place / "run" / "evaluation.json").read_text())
    assert judged["clients"] == summary["clients"] and not judged["refused"]  # the same model, asked again
    assert (follower.place / "adapted" / "config.json").is_file()


def test_a_command_that_the_page_has_wrong_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with"):
        Follower(tmp_path, False).follow("```\nfedgraft deploy keys north\n```")
