"""The coordinator's view of a deployed federation: who is connected, what each node does, who took part, what it cost.

It shows what `deploy.status` reads. Links are timed between two looks: the door reports how many bytes of each message
and answer have passed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready
from fedgraft.deploy.door_link import describe_transfer
from fedgraft.deploy.folder import FederationFolder, describe_contributions
from fedgraft.deploy.preflight_answers import ANSWERS_FILE, missing_answers, with_node_names
from fedgraft.deploy.status import FederationStatus, federation_status
from fedgraft.report.charts import account_charts
from fedgraft.report.preflight_view import preflight_sections
from fedgraft.report.privacy_account import read_account
from fedgraft.report.run_index import run_name
from fedgraft.report.run_record import current_phases
from fedgraft.report.run_view import time_left
from fedgraft.report.sections import Charts, Grid, Matrix, Section, Texts
from fedgraft.report.values import size, total_of

_QUERIES = ("preflight", "evaluations", "comparisons", "releases")
"""Folders of a federation to which questions write; runs write elsewhere."""
_FRESH_SECONDS = 1.5
"""A state this old is shown to a second page without asking the server again."""


class FederationView:
    """The view of one federation; several pages may ask at once."""

    def __init__(self, federation: FederationFolder) -> None:
        self.federation = federation
        self._lock = threading.Lock()
        self._last: tuple[float, dict[str, Any]] | None = None
        self._passed: dict[str, tuple[float, int, int]] = {}
        """By node: when its link was looked at last, and the bytes down and up by then."""

    def run_folders(self) -> list[Path]:
        """Return the folders of the federation's runs, wherever `deploy submit --folder` put them, without questions.

        A folder is there once.
        """
        folders = []
        for record in self.federation.runs():
            folder = Path(record["folder"]).resolve()
            if folder not in folders and not self._is_query(folder):
                folders.append(folder)
        return folders

    def state(self) -> dict[str, Any]:
        """Return the federation's present state for the page."""
        with self._lock:
            now = time.monotonic()
            if self._last is None or now - self._last[0] > _FRESH_SECONDS:
                self._last = (now, self._read())
            return self._last[1]

    def _read(self) -> dict[str, Any]:
        """Return the state as it is now."""
        problem = ""
        try:
            status = federation_status(self.federation)
        except FedgraftError as error:  # the server has just been stopped or is about to answer
            problem = str(error)
            status = FederationStatus("", 0, (), None)
        config = self.federation.config
        total = config.rounds.total
        left = None
        if status.rounds and not status.run_over:
            left = time_left(status.rounds, total)
        phases: list[str] = []
        run = ""
        is_query = False
        if status.folder is not None:
            is_query = self._is_query(status.folder)
            run = self._run_name(status)
            if not status.run_over:
                phases = current_phases(status.folder)
        last_round = None
        if status.rounds:
            last_round = status.rounds[-1]["round"]
        return json_ready(
            {
                "problem": problem,
                "path": str(self.federation.path),
                "address": status.address,
                "nodes": self._nodes(status),
                "run": None if status.run is None else str(status.run),  # larger than JavaScript counts exactly
                "run_name": run,
                "query": status.folder.name if is_query and status.folder is not None else "",
                "run_status": status.run_status,
                "reason": status.reason,
                "round": last_round,
                "total": total,
                "left": left,
                "phases": phases,
                "waits_for": list(status.waits_for),
                "sent": [size(total_of(status.rounds, "bytes_up")), size(total_of(status.rounds, "bytes_down"))],
                "sections": [section.as_json() for section in self._sections(status) if section],
            }
        )

    def _run_name(self, status: FederationStatus) -> str:
        """Return the name under which the studio lists the latest run; empty for one that has just begun."""
        assert status.folder is not None
        if not (status.folder / "run.json").is_file():
            return ""
        return run_name(status.folder.resolve(), self.federation.path)

    def _is_query(self, folder: Path) -> bool:
        """Return whether the run in a folder is a question to the nodes, such as a preflight: it has no rounds."""
        try:
            place = folder.resolve().relative_to(self.federation.path).parts[0]
        except (ValueError, IndexError):
            return False
        return place in _QUERIES

    def _nodes(self, status: FederationStatus) -> list[dict[str, Any]]:
        """Return each node: whether it is connected, what it does now, how fast its link is, where its updates are."""
        lines = [line for line in status.rounds if line["round"]]
        contributions: Mapping[int, str] | None = {}
        if lines:
            contributions = describe_contributions(lines)
        moving = {str(transfer["name"]): transfer for transfer in status.transfers}
        nodes = []
        for node in status.nodes:
            connection = "not connected"
            if not node.registered:
                connection = "no key registered"
            elif node.online:
                connection = "connected"
            contributed = "not recorded: differential privacy covers who took part"
            if contributions is not None:
                contributed = contributions.get(node.number, "in none of the rounds so far")
            row = {"number": node.number, "name": node.name, "connection": connection, "contributed": contributed}
            transfer = moving.get(node.name)
            if transfer is not None:
                row |= {"now": describe_transfer(transfer), **self._link(node.name, transfer)}
            elif node.online and not status.run_over and status.run is not None:
                row["now"] = "has no request"
            nodes.append(row)
        return nodes

    def _link(self, name: str, transfer: Mapping[str, Any]) -> dict[str, Any]:
        """Return bytes and speed of a node's link, from this look and the last one."""
        now = time.monotonic()
        down = int(transfer["down"])
        up = int(transfer["up"])
        before = self._passed.get(name)
        self._passed[name] = (now, down, up)
        link: dict[str, Any] = {"down": size(down), "up": size(up)}
        if before is not None and now > before[0] and down >= before[1] and up >= before[2]:
            moved = down - before[1] + up - before[2]
            if moved:
                link["speed"] = f"{size(moved / (now - before[0]))}/s"
        return link

    def _sections(self, status: FederationStatus) -> list[Section]:
        """Return the tables and charts below the nodes."""
        names = self.federation.names
        refusals = []
        for refusal in status.refusals:
            client = refusal["client"]
            name = names[client] if client < len(names) else str(client)
            row = {"node": name, "rule": refusal["rule"], "times": refusal["times"], "last round": refusal["last"]}
            refusals.append(row)
        account: list[Any] = []
        if status.folder is not None:
            account = account_charts(read_account(status.folder))
        return [
            Section("Refusals by rule", [Grid(refusals)]),
            Section("Rounds and nodes", self._participation(status)),
            Section("Privacy account", [Charts(account)]),
            *self._preflight(),
        ]

    def _participation(self, status: FederationStatus) -> list[Any]:
        """Return whose updates are in which of the last forty rounds; nothing where that is not recorded."""
        lines = [line for line in status.rounds if line["round"] and "ids" in (line.get("clients") or {})][-40:]
        if not lines:
            return []
        rows = {}
        for number, name in enumerate(self.federation.names):
            rows[name] = [int(number in line["clients"]["ids"]) for line in lines]
        note = Texts(["Whose updates are in which of the last rounds; an empty cell is a missing update."])
        return [note, Matrix(rows, [line["round"] for line in lines], corner="node")]

    def _preflight(self) -> list[Section]:
        """Return the last preflight side by side, and its findings; nothing if there was none."""
        path = self.federation.path / "preflight" / ANSWERS_FILE
        if not path.is_file():
            return []
        from fedgraft.consortium.site_faults import findings

        names = self.federation.names
        try:
            answers = json.loads(path.read_text(encoding="utf-8"))
            sites, shared = with_node_names(answers, names)
            problems = [*findings(sites, self.federation.config.data.image_size, shared)]
            problems += missing_answers(answers, names)
            return preflight_sections(sites, [asdict(found) for found in problems])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return [Section("Preflight", [Texts([f"{path.name} cannot be read: {error}"])])]
