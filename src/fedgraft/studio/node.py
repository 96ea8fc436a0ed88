"""A data owner's view of the own node: its connection, its work, what left it and when, under which protection.

Everything is read from the node's own folder beside its key; nothing of another node is there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.files import json_ready
from fedgraft.deploy.audit import EVENTS, place_in_run, read_entries
from fedgraft.deploy.node_loop import ANSWERED, CONNECTED, UNREACHABLE, WORKING
from fedgraft.report.sections import Charts, Grid, Section, Texts
from fedgraft.report.values import size

_LINES = 300
"""Lines of the audit log that are shown."""
_LOG_BYTES = 32_000


class NodeView:
    """The view of the node whose private folder is `home`."""

    def __init__(self, home: Path, title: str) -> None:
        self.home = home
        self.title = title

    def state(self) -> dict[str, Any]:
        """Return the node's present state for the page."""
        log = self._log()
        sections: list[Section] = []
        problem = ""
        cards: list[tuple[str, str, str]] = []
        try:
            entries = self._entries()
            cards += _traffic_cards(entries)
            sections += [
                Section("What left this node, the newest first", [Grid(_audit_rows(entries))]),
                Section("Bytes that left, by protection", [Charts(_traffic_charts(entries))]),
            ]
            sections += self._ledger(cards)
            sections.append(Section("The owner's policy", [Texts(self._policy(), "list")]))
        except FedgraftError as error:
            problem = str(error)
        sections.append(Section("Log of the node", [Texts([log], "code")], folded=True))
        return json_ready(
            {
                "title": self.title,
                "problem": problem,
                "now": _doing(log),
                "cards": cards,
                "sections": [section.as_json() for section in sections if section],
            }
        )

    def _entries(self) -> list[dict[str, Any]]:
        """Return the lines of the audit log; raise at the first that was changed. None yet: an empty list."""
        path = self.home / "audit.jsonl"
        if not path.is_file():
            return []
        return list(read_entries(path))

    def _ledger(self, cards: list[tuple[str, str, str]]) -> list[Section]:
        """Return the tables of the ledger of the node's data: epsilon by run, and questions about the images.

        To `cards` the epsilon of all runs is added, and a warning where a peer proved that the ledger is an old one.
        """
        from fedgraft.deploy.node_state import NodeState

        ledger = NodeState(self.home).data_ledger()
        runs = []
        for run, (latest, count, _) in sorted(ledger.rounds.items()):
            epsilon, delta = ledger.spent.get(run, (0.0, 0.0))
            row = {"run": run, "hidden rounds": count, "latest": int(latest) + 1}
            runs.append({**row, "epsilon": f"{epsilon:.4g}", "delta": f"{delta:.2g}"})
        for run, (epsilon, delta) in sorted(ledger.spent.items()):
            if run not in ledger.rounds:
                row = {"run": run, "hidden rounds": 0, "latest": 0}
                runs.append({**row, "epsilon": f"{epsilon:.4g}", "delta": f"{delta:.2g}"})
        questions = []
        for rows, asked in sorted(ledger.asked.items()):
            over = ", ".join(map(str, ledger.sets.get(rows, []))) or "this node alone"
            questions.append({"images": rows, "questions outside the rounds": len(asked), "sums over clients": over})
        cards.append(("Epsilon of all runs together", f"{ledger.epsilon:.4g}", f"delta {ledger.delta:.2g}"))
        if ledger.proven:
            cards.append(("Ledger", "RESTORED", "a peer holds a newer one; the node answers nothing"))
        return [
            Section("Privacy account by run", [Grid(runs)]),
            Section("Questions about the images", [Grid(questions)]),
        ]

    def _policy(self) -> list[str]:
        """Return the owner's rules in words."""
        from fedgraft.client.policy import in_words
        from fedgraft.deploy.node_state import NodeState

        try:
            policy = NodeState(self.home).policy()
        except Refused as error:
            return [str(error)]
        if policy is None:
            return ["There is no policy.toml beside the key: every honest request is carried out."]
        return in_words(policy)

    def _log(self) -> str:
        """Return the end of the node's log."""
        path = self.home / "node.log"
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - _LOG_BYTES))
            return file.read().decode(errors="replace")


def _doing(log: str) -> dict[str, str]:
    """Return the connection and the work of a node by the last lines of its log."""
    connection = "starting"
    work = ""
    for line in log.splitlines():
        if line.startswith(CONNECTED):
            connection = "connected"
            work = ""
        elif line.strip() == UNREACHABLE:
            connection = "the server does not answer; trying again"
        elif line.startswith(WORKING):
            connection = "connected"
            work = line.removeprefix(WORKING).strip().partition(".")[0]
        elif line.strip() == ANSWERED:
            connection = "connected"
            work = ""
    return {"connection": connection, "work": work}


def _traffic_cards(entries: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return cards: bytes that left, responses, refusals."""
    answers = [entry for entry in entries if entry["kind"] not in EVENTS]
    refused = [entry for entry in entries if entry["kind"] == "refused"]
    sent = sum(entry["bytes"] for entry in answers)
    rules = "no request was refused"
    if refused:
        rules = str(refused[-1].get("why", ""))[:120]
    return [
        ("Left this node", size(sent), f"in {len(answers)} responses"),
        ("Refused", str(len(refused)), rules),
        ("Audit log", f"{len(entries)} lines", "hash chain intact"),
    ]


def _audit_rows(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest lines of the audit log as rows of text."""
    rows = []
    for entry in reversed(entries[-_LINES:]):
        action = str(entry.get("action", ""))
        if entry.get("sums"):
            action += f" of {entry['sums']}"
        left = EVENTS.get(entry["kind"], "")
        protection = str(entry.get("why", ""))
        if not left:
            left = size(entry["bytes"])
            protection = str(entry["protection"])
        rows.append(
            {
                "line": str(entry["n"]),
                "when": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"])),
                "action": action,
                "in the run": place_in_run(entry),
                "what left": left,
                "protection, or why nothing left": protection,
            }
        )
    return rows


def _traffic_charts(entries: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the chart of the bytes that left by protection; none if nothing left."""
    by_protection: dict[str, int] = {}
    for entry in entries:
        if entry["kind"] not in EVENTS:
            key = str(entry["protection"])
            by_protection[key] = by_protection.get(key, 0) + entry["bytes"]
    if not by_protection:
        return []
    series = [{"name": "left", "y": [count / 1e6 for count in by_protection.values()]}]
    return [
        {"kind": "bars", "title": "Left this node", "unit": " MB", "categories": list(by_protection), "series": series}
    ]
