"""Callbacks: code that follows a run and may stop it. Trackers, patience and checkpoints are callbacks too.

Derive from `Callback` and override the events you need, or write a function of a round's line; `fg.run(...,
callbacks=[...])` takes both. The loop calls every callback at every event, in this order: the config's trackers, the
progress display, yours, then what saves and stops.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.config.build import budget
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import json_ready
from fedgraft.core.state import ServerState
from fedgraft.report.privacy_account import ACCOUNT_FILE

if TYPE_CHECKING:
    from fedgraft.runs.open_run import OpenRun
    from fedgraft.runs.saving import Best
    from fedgraft.runs.setup import RunSetup

log = logging.getLogger("fedgraft")
ACCOUNTS = 8
"""How often a run records its privacy account; one of fewer rounds than this records it at its end."""


@dataclass(frozen=True)
class StopRun:
    """Returned by a callback to end the run after the present round.

    The best model so far is tested and delivered as at the end of any run, and `run.json` says who stopped it and why.
    """

    reason: str
    final: bool = False
    """Whether the run is finished by it. Else its status is `stopped`, and running it again continues it."""


class Callback:
    """Called at the events of a run. It must not change what it is given, and can change the result only by stopping.

    The loop makes a new `ServerState` in every round, so a callback may keep those it has seen.
    """

    def on_run_start(self, setup: RunSetup, folder: Path, last_round: int) -> None:
        """Called before anything is computed; `last_round` is the round of the checkpoint it resumes from, or 0."""

    def on_initial_evaluation(self, line: Mapping[str, Any], state: ServerState) -> None:
        """Called once in a run, when the model that it begins with was measured: the line of round 0."""

    def on_training_start(self, setup: RunSetup, opened: OpenRun, state: ServerState) -> None:
        """Called before the first round of this process, with the state that it begins or resumes from."""

    def on_round_start(self, state: ServerState, best: Best) -> StopRun | None:
        """Called before each round, with the best model so far; return `StopRun` to end the run before it."""
        return None

    def on_evaluation(self, line: Mapping[str, Any], state: ServerState, best: Best) -> None:
        """Called when the model was measured within a round, before the round ends; `line` is not complete yet."""

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> StopRun | None:
        """Called after each round with its line of metrics.jsonl; return `StopRun` to end the run after it.

        An interrupt in here undoes the round.
        """
        return None

    def on_round_committed(self, state: ServerState) -> None:
        """Called when a round counts: all callbacks have seen its end, and an interrupt no longer undoes it."""

    def on_checkpoint(self, path: Path, state: ServerState) -> None:
        """Called when a checkpoint was written."""

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Called after the final test of a run that is finished or stopped."""

    def on_run_interrupted(self) -> None:
        """Called instead of `on_run_end` when an error or an interrupt ends the run."""


class AfterEachRound(Callback):
    """A plain function as a callback: called after each round with its line, and with the state if it takes two.

    It may return `StopRun`; whatever else it returns is ignored.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        count = len(signature(function).parameters)
        if count == 0:
            raise FedgraftError(
                "E-RUN-CALLBACK",
                f"the callback {getattr(function, '__name__', function)} takes no argument",
                "let it take a round's line, or the line and the state",
            )
        self.takes_state = count > 1

    def on_round_end(self, line: Mapping[str, Any], state: ServerState) -> StopRun | None:
        """Call the function and return its `StopRun`, if it gave one."""
        try:
            answer = self.function(line, state) if self.takes_state else self.function(line)
        except TypeError as error:
            if "must derive from BaseException" not in str(error):
                raise
            raise FedgraftError(
                "E-RUN-CALLBACK", "a callback raised fg.StopRun", "return it: all callbacks see the end of a round"
            ) from error
        if isinstance(answer, StopRun):
            return answer
        return None


def as_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as people pass them: one or several, `Callback` objects or plain functions."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Callback) or callable(callbacks):
        callbacks = [callbacks]
    made: list[Callback] = []
    for callback in callbacks if isinstance(callbacks, Iterable) else [callbacks]:
        if isinstance(callback, Callback):
            made.append(callback)
        elif callable(callback) and not isinstance(callback, type):
            made.append(AfterEachRound(callback))
        else:
            what = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
            raise FedgraftError(
                "E-RUN-CALLBACK",
                f"{what} is not a callback",
                "give a function of a round's line, or an object of a class that derives from fg.Callback",
            )
    return made


class EarlyStopping(Callback):
    """Ends a run whose score has not improved in so many evaluations; 0: never."""

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations

    def on_round_start(self, state: ServerState, best: Best) -> StopRun | None:
        """Return the stop when the best model is too old; asked before a round, so that resumed runs stop there too."""
        if self.evaluations and best.stale >= self.evaluations:
            return StopRun(f"no improvement in {best.stale} evaluations", final=True)
        return None


class PrivacyBudget(Callback):
    """Ends a run before a round that would exceed the epsilon of its config; records the account of each round."""

    def __init__(self, setup: RunSetup, folder: Path) -> None:
        self.setup = setup
        self.folder = folder

    def on_round_committed(self, state: ServerState) -> None:
        """Append what the rounds so far have spent to the record of the account, eight times in a run.

        With sampled cohorts one account takes more than half a second.
        """
        total = self.setup.config.rounds.total
        every = max(ACCOUNTS, total // ACCOUNTS)
        if state.round % every and state.round != total:
            return
        account = budget(self.setup.config, self.setup.algorithm, state.round)
        if account is None:
            return
        line = {"round": state.round, "epsilon": account.epsilon, "delta": account.delta, "target": account.target}
        with suppress(OSError), (self.folder / ACCOUNT_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_ready(line)) + "\n")

    def on_round_start(self, state: ServerState, best: Best) -> StopRun | None:
        """Return the stop when the account cannot spend another round, and log it."""
        account = budget(self.setup.config, self.setup.algorithm, state.round)
        if account is None or account.can_spend():
            return None
        log.warning("one more round would exceed epsilon %g", account.target)
        return StopRun("the privacy budget is spent", final=True)


class Checkpoints(Callback):
    """Calls `save` every few rounds, at the last round, and whenever a measured model is one to keep.

    `is_among_best(state)` says whether the model of this round was measured and is among the best so far.
    """

    def __init__(
        self,
        save: Callable[[ServerState], None],
        every: int,
        last_round: int,
        is_among_best: Callable[[ServerState], bool],
    ) -> None:
        self.save = save
        self.every = every
        self.last_round = last_round
        self.is_among_best = is_among_best

    def on_round_committed(self, state: ServerState) -> None:
        """Save the state if it is due."""
        if state.round == self.last_round or state.round % self.every == 0 or self.is_among_best(state):
            self.save(state)
