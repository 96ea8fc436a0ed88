"""Somebody else's code during a run: derive from `Callback` and override what you want to hear of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedgraft.core.state import ServerState

if TYPE_CHECKING:
    from fedgraft.runs.setup import RunSetup


class Callback:
    """Called during a run; what it does cannot change the result, because states are never changed in place."""

    def on_start(self, setup: RunSetup, state: ServerState) -> None:
        """Before the first round of this process."""

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> None:
        """After each round, with its line of metrics.jsonl and the state."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """After the final test."""
