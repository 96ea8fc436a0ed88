"""Run a finished run again from its config and compare every round with its log: `fedgraft verify RUN --replay`.

Rounds follow from config and data, except for the order in which clients answered a server that does not wait for all
of them (buffered rounds). That order is in the log, so a run on other machines can be repeated on this one, if the data
is here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.config.load import from_folder
from fedgraft.core.errors import FedgraftError
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run
from fedgraft.runs.round_log import NAME, read_entries


class RecordedArrivals:
    """The order of arrival in the entries of a log, by round; call it with a round, counted from 0."""

    def __init__(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        self.entries = entries

    def __call__(self, round: int) -> Sequence[tuple[int, bool]]:
        """Return each client of the round's buffer, and whether its update was used; nothing beyond the log."""
        entry = self.entries.get(round + 1, {})
        return [(int(client), bool(used)) for client, _, used in entry.get("arrivals", ())]


def replay_differences(folder: Path) -> list[str]:
    """Return how a repetition of the run in `folder` differs from its log, round by round; empty: not at all.

    The repetition lies in a temporary folder, on the data that the config names. Raises for a run that a config cannot
    repeat: made from objects, or with noise from a secret.
    """
    record = RunFolder.open(folder)
    config = from_folder(folder)
    if config.digest != record.config_digest:
        raise FedgraftError(
            "E-RUN-REPLAY-CONFIG",
            f"{folder / 'config.toml'} does not make this run: it was changed, or the run was made from objects",
            "restore it, or repeat the script",
        )
    if config.privacy.dp is not None and config.privacy.dp.secret:
        raise FedgraftError(
            "E-RUN-REPLAY-SECRET", "the noise of this run follows from a secret, so nobody can repeat it"
        )
    logged = read_entries(folder / NAME)
    with tempfile.TemporaryDirectory() as temporary:
        repeated = Path(temporary) / "replay"
        run(config, repeated, console=False, arrivals=RecordedArrivals(logged))
        again = read_entries(repeated / NAME)
    differences = []
    for round, entry in logged.items():
        if round not in again:
            differences.append(f"round {round} is not repeated")
        elif again[round]["state"] != entry["state"]:
            differences.append(f"round {round} ends with another state")
    return differences
