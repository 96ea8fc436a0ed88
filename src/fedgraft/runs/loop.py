"""A run: head initialisation, rounds, evaluation, checkpoints, final test, report. Resuming is the same code."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.config.load import Config, to_toml
from fedgraft.core.capabilities import Capability
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import check_place
from fedgraft.core.interrupts import InterruptMonitor
from fedgraft.core.progress import phase, shown_by, watching
from fedgraft.core.state import ServerState, from_tensors, to_tensors
from fedgraft.local.memory import one_thread
from fedgraft.report import representation_figures
from fedgraft.runs import memory_store, personal_store
from fedgraft.runs.callbacks import Callback, Checkpoints, EarlyStopping, PrivacyBudget, StopRun
from fedgraft.runs.checkpoint import Checkpoint, is_among_best
from fedgraft.runs.engines import AnyEngine, Engines, Remote
from fedgraft.runs.estimate import require_room_for_models
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import InitialModel, install, install_head, own_starts
from fedgraft.runs.measure import Measure
from fedgraft.runs.memory_store import MemoryStore
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.personal_store import PersonalStore, first_models
from fedgraft.runs.plan import check_setup
from fedgraft.runs.reporting import (
    log_round,
    report_run,
    summary_of,
    write_holdings,
    write_phases,
    write_skipped,
    write_trained,
)
from fedgraft.runs.round_log import RoundLog
from fedgraft.runs.saving import Best, client_stores, pack_run, protection_label, saved_edit
from fedgraft.runs.secrets import read_or_draw_secret, store_secret, without_cohort_size
from fedgraft.runs.setup import SECRET_BYTES, RunSetup, setup_of
from fedgraft.runs.trackers import tracker_named
from fedgraft.runs.tracking import PhaseFile, PhaseLog, Progress, ProgressDisplay, RoundLines, Silent
from fedgraft.runs.warnings import warnings_for
from fedgraft.server import sample as server
from fedgraft.server.round import RoundSummary, run_round

log = logging.getLogger("fedgraft")

SUM_NOT_OPENED = ("E-SERVER-SUM-ABORTED", "E-SERVER-SUM-COHORT")
"""Codes of errors after which a round has no measurement: clients that were in earlier secure sums are not there."""

Build = Callable[[bytes], tuple[RunSetup, Remote | None]]
"""Makes the setup of a run from the run's secret, and the engine of clients on other machines, if they are there."""
Arrivals = Callable[[int], Sequence[tuple[int, bool]]]
"""The recorded buffer of a round (from 0): each client in order of arrival, and whether its update was used."""
Wrap = Callable[[RunSetup, OpenRun, Any], Any]
"""Puts something between the server and its clients, such as attackers: `wrap(setup, opened, engine)`."""


def run(
    config: Config,
    folder: Path,
    progress: Progress | None = None,
    console: bool = True,
    build: Build | None = None,
    arrivals: Arrivals | None = None,
) -> dict[str, Any]:
    """Run a config in its folder, from the beginning or from its last good checkpoint; return the summary.

    Args:
        progress: a display; None: nothing is shown.
        console: the log also goes to the terminal.
        build: makes the setup, and the engine of clients on other machines; None: all clients are here.
        arrivals: the order of arrival of a recorded run with buffered rounds, to repeat it.
    """
    make = build or (lambda secret: (setup_of(config, secret=secret), None))
    done, _ = run_setup(make, folder, config.digest, to_toml(config), progress, console, arrivals=arrivals)
    return done


def run_setup(
    build: Build,
    folder: Path,
    identity: str,
    text: str,
    progress: Progress | None = None,
    console: bool = True,
    callbacks: Sequence[Callback] = (),
    wrap: Wrap | None = None,
    arrivals: Arrivals | None = None,
) -> tuple[dict[str, Any], tuple[RunSetup, OpenRun, ServerState] | None]:
    """Run in a folder, or continue there; return the summary, and the open run with its last state.

    Args:
        build: makes the setup from the run's secret, and the engine of clients on other machines.
        identity: what decides the bytes of the result; the folder belongs to one identity.
        text: the config as TOML, for the folder.
        progress: a display; None: nothing is shown.
        console: the log also goes to the terminal.
        callbacks: the user's.
        wrap: puts something between the server and its clients.
        arrivals: as for `run`.

    The second is None where the run was finished before, so that this call computed nothing.
    """
    if progress is None or progress.look is None:
        display: AbstractContextManager[Any] = nullcontext()
    else:
        display = shown_by(progress.look)
    with one_thread(), display:
        check_place(folder, "--folder")  # whatever is wrong with a run is reported before its folder exists
        finished = is_finished(folder)
        if finished and (folder / "report.html").exists():
            log.info("%s is already finished", folder)
            return RunFolder.create(folder, text, identity).summary(), None
        if finished:  # only its report is missing, and nothing in a report follows from the secret
            setup, _ = build(os.urandom(SECRET_BYTES))
            record = RunFolder.create(folder, text, identity)
            log.info("%s is already finished", folder)
            report_run(record, setup)
            return record.summary(), None
        secret = read_or_draw_secret(folder)
        setup, remote = build(secret)
        check_setup(setup)
        record = RunFolder.create(folder, text, identity)
        store_secret(folder, secret, needed=bool(setup.federation.secret))
        watchers = watching(PhaseLog(), PhaseFile(folder))
        # Closing the engines ends their workers: none outlives the run.
        with record.writing(console=console), watchers, closing(Engines(setup, remote)) as engines:
            running = _Run(setup, engines, record, progress or Silent(), callbacks, secret, wrap, arrivals)
            summary = running.go()
        began = time.perf_counter()
        with phase("figures and report"):
            report_run(record, setup)
        write_phases(folder, {**running.phases, "figures and report": time.perf_counter() - began})
        return summary, (setup, running.opened, running.state)


def is_finished(folder: Path) -> bool:
    """Return whether a folder holds a finished run."""
    return (folder / "run.json").exists() and RunFolder.open(folder).status == "finished"


def _first_stop(answers: Iterable[tuple[Callback, StopRun | None]]) -> StopRun | None:
    """Return the first final stop, else the first stop, with the callback's name in its reason; None to go on.

    `answers` are the callbacks with what each returned. All are read, so that each callback is called every round.
    """
    stops = []
    for callback, stop in answers:
        if stop is not None and not stop.final:
            stop = replace(stop, reason=f"{type(callback).__name__}: {stop.reason}")
        if stop is not None:
            stops.append(stop)
    for stop in stops:
        if stop.final:
            return stop
    return stops[0] if stops else None


@dataclass(frozen=True)
class _Tally:
    """What a run counts from round to round; half a round must leave no trace in it."""

    best: Best
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    unused: str | None = None
    """Why the last round's answers could not be used, as long as no round had one; then empty."""

    def with_bytes(self, counts: Mapping[str, Any]) -> _Tally:
        """Return the tally with these bytes added."""
        bytes_up = self.bytes_up + int(counts.get("bytes_up", 0))
        bytes_down = self.bytes_down + int(counts.get("bytes_down", 0))
        return replace(self, bytes_up=bytes_up, bytes_down=bytes_down)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes in both directions."""
        return {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down}


class _Run:
    """A run under way in this process: head, rounds, checkpoints and final test as the methods that `go` calls."""

    def __init__(
        self,
        setup: RunSetup,
        engines: Engines,
        record: RunFolder,
        progress: Progress,
        callbacks: Sequence[Callback],
        secret: bytes,
        wrap: Wrap | None,
        arrivals: Arrivals | None,
    ) -> None:
        self.setup = setup
        self.config = setup.config
        self.engines = engines
        self.record = record
        self.remote = engines.remote
        self.secret = secret
        self.wrap = wrap
        self.arrivals = arrivals
        self.tally = _Tally(Best())
        self.stop: StopRun | None = None
        """Why the run ends before its last round, once a callback has decided that."""
        self.saved_round = -1
        """The round of the last checkpoint."""
        self.measured: tuple[int, float] | None = None
        """The last round whose model was measured on validation images in this process, and its score."""
        self.callbacks = self._all_callbacks(progress, callbacks)
        self.phases: dict[str, float] = {}
        """Seconds outside the rounds, since this process began."""

    def _all_callbacks(self, progress: Progress, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return all callbacks of this run in the order in which they are called.

        They are the config's trackers, the display `progress`, the user's `callbacks`, then stopping and checkpoints.
        """
        options = self.config.rounds
        every = options.checkpoint_every
        if self.remote is not None:
            every = 1  # clients on other machines change their memory every round: no checkpoint may fall behind
        trackers = [tracker_named(name, self.record.path) for name in self.config.track.trackers]
        return [
            *trackers,
            ProgressDisplay(progress),
            RoundLines(options.total),
            *callbacks,
            EarlyStopping(options.patience),
            PrivacyBudget(self.setup, self.record.path),
            Checkpoints(self._save, every, options.total, self._is_among_best),
        ]

    def go(self) -> dict[str, Any]:
        """Do everything from the first round that is not done yet to the final test; return the summary."""
        try:
            summary = self._train_and_test()
            self.record.finish(summary, stopped=summary.get("stopped", ""))
        except BaseException:
            for callback in self.callbacks:
                callback.on_run_interrupted()
            raise
        for callback in self.callbacks:
            callback.on_run_end(summary)
        return summary

    def _train_and_test(self) -> dict[str, Any]:
        """Begin or resume, run the rounds, test the best model; return the summary."""
        checkpoint = self.record.resume(self._open_client_files)
        last_round = None if checkpoint is None else checkpoint.round
        self.log = RoundLog(self.record.path, self.setup.identity, self.secret, last_round)
        write_skipped(self.record.path, self.setup.task.data)
        write_holdings(self.record.path, self.setup.task.data)
        for callback in self.callbacks:
            callback.on_run_start(self.setup, self.record.path, last_round or 0)
        if checkpoint is None:
            state = self._begin()
        else:
            state = self._restore(checkpoint)
        for warning in warnings_for(self.setup, self.opened, self.engines):
            log.warning(warning)
        for callback in self.callbacks:
            callback.on_training_start(self.setup, self.opened, state)
        self.state = self._rounds(state)
        return self._finish(self.state)

    # ---- before the first round

    def _begin(self) -> ServerState:
        """Make the head, open the edit space, measure the model before round 1 and record it; return its state.

        Writes round 0 to the metrics and the log, and the first checkpoint.
        """
        began = time.perf_counter()
        algorithm = self.setup.algorithm
        initial = install_head(self.setup, self.engines)
        self._open(None)
        space = self.opened.space
        state = server.start(algorithm, space.gather(self.setup.task.network), space.trained)
        state = replace(state, personal=self._first_personal_models(state, initial))
        measurement = self.measure.validation(state.vector, 0)
        line: dict[str, Any] = {"round": 0, "seconds": {}, **self.measure.metrics_entries(measurement)}
        tally = self.tally
        if algorithm.privacy.delivers_best_round:  # else only a model that private training made is delivered
            score = self.measure.score(measurement)
            tally = replace(tally, best=Best(measurement.plain.accuracy, score, 0, 0, state.vector))
        if self.remote is not None:
            tally = tally.with_bytes(self._traffic())
        elif initial is not None and Capability.EXCHANGE in algorithm.provides:  # training alone sends nothing
            tally = tally.with_bytes(initial.traffic)
        seconds = time.perf_counter() - began
        self.tally = replace(tally, seconds=tally.seconds + seconds)
        self.phases["head initialisation"] = self.tally.seconds
        log.info("before round 1 (head %s, what trains, evaluation): %.1f s", self.config.head, self.tally.seconds)
        self.record.append(line)
        self.log.append(line, to_tensors(state, {})[0])
        for callback in self.callbacks:
            callback.on_initial_evaluation(line, state)
        self._save(state)
        return state

    def _first_personal_models(self, state: ServerState, initial: InitialModel | None) -> Mapping[int, Tensor]:
        """Return the vectors that clients with models of their own start from, by client; on disk if they are large.

        `initial` is the model with the common head.
        """
        needed = self.setup.federation.clients * len(state.vector) * 4
        has_personal_models = Capability.PERSONAL_MODELS in self.setup.algorithm.provides
        on_disk = has_personal_models and needed > self._limit_in_memory
        if on_disk:
            require_room_for_models(self.setup, self.opened, self.record.path)
            log.info("the clients' models (%.0f MB) are stored on disk", needed / 1e6)
        starts = own_starts(self.setup, self.engines, self.opened.space, initial)
        return first_models(self.record.path / personal_store.KIND, len(state.vector), starts, on_disk)

    def _open(self, saved: Mapping[str, Tensor] | None) -> None:
        """Open the edit space, the engine of the rounds and the measurement, as attributes of this object.

        `saved` are the edit space's tensors in a checkpoint; None in a new run. Remote clients get them in a message.
        """
        self.opened = open_run(self.setup, self.engines, saved)
        write_trained(self.record.path, self.setup.task.network, self.opened.space)
        if self.arrivals is not None:
            server_context = replace(self.opened.server_context, arrivals=self.arrivals)
            self.opened = replace(self.opened, server_context=server_context)
        self.engine: AnyEngine
        if self.remote is None:
            self.engine = self.engines.training(self.setup.algorithm, self.opened.context)
        else:
            with_probe = not self.setup.task.data.rows_known
            self.remote.open(self.setup.federation.run, self.opened.message(with_probe))
            self.engine = self.remote
        if self.wrap is not None:
            self.engine = self.wrap(self.setup, self.opened, self.engine)
        if self.remote is None:
            self.engine.memory = self._empty_memories()
        self.measure = Measure(self.setup, self.opened, self.engine)

    # ---- rounds

    def _rounds(self, state: ServerState) -> ServerState:
        """Run rounds until all are done or a callback stops the run; return the last state.

        Checkpoints are written when callbacks or the clients' files want one, and at a stop after which the run may go
        on. An interrupt saves the state before the round under way and is raised again. Raises if no response of any
        round could be used.
        """
        with InterruptMonitor() as interrupts:
            while state.round < self.config.rounds.total:
                best = self.tally.best
                self.stop = _first_stop((callback, callback.on_round_start(state, best)) for callback in self.callbacks)
                if self.stop is not None:
                    break
                memories_before = _copied(self.engine.memory)
                tally_before = self.tally
                try:
                    interrupts.raise_if_interrupted()
                    state = self._one_round(state)
                except KeyboardInterrupt:  # half a round must not leave traces: save as it was before
                    self.engine.memory = memories_before
                    self.tally = tally_before
                    self._save(state)
                    raise
                for callback in self.callbacks:
                    callback.on_round_committed(state)
                if self.saved_round != state.round and self._files_want_checkpoint(state):
                    self._save(state)
                if self.stop is not None:
                    break
        if state.round == self.config.rounds.total:
            self.stop = None  # a stop after the last round is its usual end
        if self.stop is not None:
            log.info("stopped after %d rounds: %s", state.round, self.stop.reason)
            if not self.stop.final and self.saved_round != state.round:
                self._save(state)  # a run that is continued goes on from here
        if self.tally.unused:
            raise FedgraftError(
                "E-RUN-NOTHING-TRAINED",
                f"nothing was trained: no answer of any round could be used, the last: {self.tally.unused}",
            )
        return state

    def _one_round(self, state: ServerState) -> ServerState:
        """Run one round and its evaluation if one is due; write its line to metrics and log; return the new state.

        Also updates `tally`, sets `stop` to what the callbacks want, and stores the mixing matrix of some rounds.
        Raises if every client's update is infinite or not a number.
        """
        began = time.perf_counter()
        setup = self.setup
        options = self.config.rounds
        traffic_before = self._traffic()
        new_state, summary = run_round(
            setup.algorithm, setup.federation, state, self.engine, self.opened.server_context
        )
        representation_figures.store_mixing(self.record.path, self.config, summary)
        line = log_round(summary, new_state.round)
        is_due = bool(options.evaluate_every) and new_state.round % options.evaluate_every == 0
        if is_due or new_state.round == options.total:
            new_state = self._validate(new_state, line)
        line |= self._traffic(traffic_before)  # all messages, also those that only a deployment sends
        self.tally = self.tally.with_bytes(line)
        line = without_cohort_size(line, setup.federation)
        self.tally = replace(self.tally, seconds=self.tally.seconds + time.perf_counter() - began)
        self.record.append(line)
        tensors, _ = to_tensors(new_state, {})
        facts: dict[str, Any] = {"updates": summary.digests, "protection": protection_label(setup.algorithm)}
        if "arrivals" in line:
            facts["arrivals"] = line["arrivals"]
        self.log.append(line, tensors, **facts)
        self.stop = _first_stop((callback, callback.on_round_end(line, new_state)) for callback in self.callbacks)
        self._note_unused(summary, line)
        nonfinite = int(sum(line.get("clients", {}).get("nonfinite", ())))
        if nonfinite:
            log.warning("round %d: %d local steps had a loss or gradient that is not finite", line["round"], nonfinite)
        return new_state

    def _note_unused(self, summary: RoundSummary, line: Mapping[str, Any]) -> None:
        """Remember why no answer could be used so far; raise if every client's update is infinite or not a number."""
        reasons = {rejection.client: rejection.reason for rejection in summary.rejections}
        skipped = bool(line.get("skipped"))
        if self.tally.unused != "":  # no round has had a usable answer yet; where answers are private none is skipped
            all_rejected = reasons.keys() >= set(summary.cohort)
            unused = ""
            if reasons and (skipped or all_rejected):
                unused = next(iter(reasons.values()))
            self.tally = replace(self.tally, unused=unused)
        if skipped and reasons and all("finite" in reason for reason in reasons.values()):
            raise FedgraftError(
                "E-RUN-DIVERGED",
                f"training diverged in round {line['round']}: every client's update is infinite or not a number",
                "lower local.lr (fedgraft find-lr finds one) or set local.clip",
                round=line["round"],
            )

    def _traffic(self, before: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the bytes that crossed the wire since `before`; empty where clients are on this machine."""
        if self.remote is None:
            return {}
        earlier = before or {"bytes_up": 0, "bytes_down": 0}
        return {
            "bytes_up": self.remote.received - earlier["bytes_up"],
            "bytes_down": self.remote.sent - earlier["bytes_down"],
        }

    def _validate(self, state: ServerState, line: dict[str, Any]) -> ServerState:
        """Measure the model on validation images; return the state with the loss added.

        The numbers are added to the round's `line`, the best model is remembered, and clients test themselves if
        configured.
        """
        began = time.perf_counter()
        try:
            measurement = self.measure.validation(state.vector, state.round)
        except FedgraftError as error:
            if error.code not in SUM_NOT_OPENED:
                raise
            log.warning("round %d is not measured: %s", state.round, error)
            return state
        line |= self.measure.metrics_entries(measurement)
        best = self.tally.best
        score = self.measure.score(measurement)
        self.measured = (state.round, score)
        improved = score > best.score + self.config.rounds.min_delta
        stale = 0 if improved else best.stale + 1
        # Under differential privacy nothing is chosen: the account is about the model after the last round.
        if score > best.score or not self.setup.algorithm.privacy.delivers_best_round:
            best = Best(measurement.plain.accuracy, score, state.round, 0, state.vector)
        self.tally = replace(self.tally, best=replace(best, stale=stale))
        for callback in self.callbacks:
            callback.on_evaluation(line, state, self.tally.best)
        if self.config.personal.evaluate == "always":
            line["personal"], _ = self.measure.personal(state)
        line["seconds"] = {**line["seconds"], "evaluate": time.perf_counter() - began}
        return replace(state, losses=(*state.losses, measurement.plain.loss))

    def _finish(self, state: ServerState) -> dict[str, Any]:
        """Test the best model by validation and return the summary; the test images are used here only.

        Clients may be asked to measure on images of their own.
        """
        traffic_before = self._traffic()
        best = self.tally.best.vector
        delivered = state.vector if best is None else best
        tested: dict[str, Any] = {}
        if self.config.rounds.test:
            try:
                tested = self.measure.summarise_test(delivered, state.round)
            except FedgraftError as error:
                if error.code not in SUM_NOT_OPENED:
                    raise
                log.warning("the delivered model is not tested: %s", error)
        lines = self.record.metrics()
        summary = summary_of(self.setup, self.opened, state, self.tally.best, lines)
        summary |= tested
        if self.stop is not None and not self.stop.final:
            summary["stopped"] = self.stop.reason
        summary["seconds"] = self.tally.seconds
        summary |= self.measure.summarise_personal(state, delivered)
        self.tally = self.tally.with_bytes(self._traffic(traffic_before))
        for key, total in self.tally.totals.items():
            summary[key] = total
            if self.setup.federation.secret:  # rounds with a secret cohort do not tell their bytes
                continue
            inside_rounds = sum(int(line.get(key, 0)) for line in lines)
            if total > inside_rounds:  # preparations and the final test belong to no round
                summary[f"{key}_outside_rounds"] = total - inside_rounds
        return summary

    # ---- saving and restoring

    def _save(self, state: ServerState) -> None:
        """Write a checkpoint of the run at this state, with the clients' memories, and call the callbacks."""
        began = time.perf_counter()
        best = self.tally.best
        stores = self._stores_on_disk(state)
        memories = self.engine.memory
        if memory_store.KIND in stores:
            memories = {}  # a checkpoint refers to memories in files
        tensors, meta = pack_run(self.setup, self.opened, state, memories, best)
        meta |= {"totals": self.tally.totals, "seconds": self.tally.seconds, "unused": self.tally.unused}
        for kind, store in stores.items():
            meta[kind] = store.sealed()
        score = self._score_of(state)
        keep_best = self.config.rounds.keep_best
        path = self.record.save_checkpoint(state.round, tensors, meta, best=score, keep_best=keep_best)
        self.saved_round = state.round
        for store in stores.values():
            store.release(self.record.checkpoints)
        seconds = time.perf_counter() - began
        self.phases["checkpoints"] = self.phases.get("checkpoints", 0.0) + seconds
        for callback in self.callbacks:
            callback.on_checkpoint(path, state)

    def _score_of(self, state: ServerState) -> float | None:
        """Return the validation score by which the checkpoint of this state is ranked; None if it was not measured.

        Under differential privacy no round is preferred to another.
        """
        if self.measured is None or not self.setup.algorithm.privacy.delivers_best_round:
            return None
        round, score = self.measured
        return score if round == state.round else None

    def _is_among_best(self, state: ServerState) -> bool:
        """Return whether the model of this state was measured, and is among the best that are to be kept."""
        score = self._score_of(state)
        if score is None:
            return False
        return is_among_best(self.record.checkpoints, state.round, score, self.config.rounds.keep_best)

    def _empty_memories(self) -> MemoryStore:
        """Return the place for what clients remember: in memory, and on disk once it is large."""
        return MemoryStore(self.record.path / memory_store.KIND, self._limit_in_memory)

    @property
    def _limit_in_memory(self) -> float:
        """Bytes of all clients' models, and of all clients' memories, beyond which they lie on disk."""
        return self.config.rounds.personal_memory_mb * 1e6

    def _stores_on_disk(self, state: ServerState) -> dict[str, PersonalStore | MemoryStore]:
        """Return the stores of clients' files that this state refers to, by their word in a checkpoint's meta."""
        stores: dict[str, PersonalStore | MemoryStore] = {}
        if isinstance(state.personal, PersonalStore):
            stores[personal_store.KIND] = state.personal
        memories = self.engine.memory
        if isinstance(memories, MemoryStore) and memories.on_disk:
            stores[memory_store.KIND] = memories
        return stores

    def _files_want_checkpoint(self, state: ServerState) -> bool:
        """Return whether a checkpoint now would spare much disk in the next round."""
        next_writes = self.setup.federation.per_round
        return any(store.wants_checkpoint(next_writes) for store in self._stores_on_disk(state).values())

    def _open_client_files(self, checkpoint: Checkpoint) -> None:
        """Open the files that a checkpoint names into `self.personal_models` and `self.memories`; None without such.

        Raise `BadCheckpoint` if one is damaged.
        """
        self.personal_models, self.memories = client_stores(self.record.path, checkpoint, self._limit_in_memory)

    def _restore(self, checkpoint: Checkpoint) -> ServerState:
        """Return the state of a checkpoint; the head that the run began with goes back into the network first."""
        tensors = checkpoint.tensors
        meta = checkpoint.meta
        install(self.setup.task.network, tensors["head"])
        self._open(saved_edit(tensors))
        state, memories = from_tensors(checkpoint.round, tensors, meta)
        if self.memories is not None:
            self.engine.memory = self.memories
        else:
            self.engine.memory.update(memories)
        self.saved_round = checkpoint.round
        best = Best(**meta["best"], vector=tensors.get("best/vector"))
        totals = meta["totals"]
        self.tally = _Tally(best, totals["bytes_up"], totals["bytes_down"], float(meta["seconds"]), meta["unused"])
        log.info("resumed after round %d", state.round)
        if self.personal_models is None:
            return state
        return replace(state, personal=self.personal_models)


def _copied(memories: MutableMapping[int, ClientMemory]) -> MutableMapping[int, ClientMemory]:
    """Return a mapping with the same memories that later changes do not reach; no tensor is copied."""
    if isinstance(memories, MemoryStore):
        return memories.copy()
    return dict(memories)
