"""A run: head initialisation, rounds, evaluation, checkpoints, final test, report. Resuming is the same code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgraft.config.build import budget
from fedgraft.config.load import Config, to_toml
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import check_place
from fedgraft.core.progress import phase, shown_by, watching
from fedgraft.core.state import ServerState, from_tensors, to_tensors
from fedgraft.local.memory import one_thread
from fedgraft.report import representation_figures
from fedgraft.runs.callbacks import Callback
from fedgraft.runs.checkpoint import Checkpoint
from fedgraft.runs.engines import AnyEngine, Engines, Remote
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.head_init import install, install_head, own_starts
from fedgraft.runs.measure import Measure
from fedgraft.runs.open_run import OpenRun, open_run
from fedgraft.runs.personal_store import PersonalStore, first_models
from fedgraft.runs.plan import check
from fedgraft.runs.reporting import describe, keep_phases, keep_skipped, noted, report_run, summary_of
from fedgraft.runs.round_log import RoundLog
from fedgraft.runs.saving import Best, pack_run, protection_of, saved_edit
from fedgraft.runs.secrets import read_or_draw_secret, store_secret, without_cohort_size
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.tracking import PhaseFile, PhaseLog, Progress, Silent, Tracking
from fedgraft.runs.warnings import warnings_for
from fedgraft.server import sample as server
from fedgraft.server.round import run_round

log = logging.getLogger("fedgraft")

Build = Callable[[bytes], tuple[RunSetup, Remote | None]]
"""Makes the setup of a run from the run's secret, and the engine of clients on other machines, if they are there."""
Wrap = Callable[[RunSetup, OpenRun, Any], Any]
"""Puts something between the server and its clients, such as attackers: `wrap(setup, opened, engine)`."""


def run(
    config: Config, folder: Path, progress: Progress | None = None, console: bool = True, build: Build | None = None
) -> dict[str, Any]:
    """Run a config in its folder, from the beginning or from its last good checkpoint; returns the summary."""
    make = build or (lambda secret: (setup_of(config, secret=secret), None))
    done, _ = run_setup(make, folder, config.digest, to_toml(config), progress, console)
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
) -> tuple[dict[str, Any], tuple[RunSetup, OpenRun, ServerState] | None]:
    """Run in a folder; return the summary, and the open run with its last state where this call computed it."""
    seen = nullcontext() if progress is None or progress.look is None else shown_by(progress.look)
    with one_thread(), seen:
        check_place(folder, "--folder")  # everything that can be refused is refused before a folder exists
        done = is_finished(folder)
        made = None
        secret = b""
        if not (done and (folder / "report.html").exists()):
            secret = read_or_draw_secret(folder)
            made = build(secret)
        if made is not None and not done:
            check(made[0])
        record = RunFolder.create(folder, text, identity)
        if made is None or done:
            log.info("%s is already finished", folder)
            if made is not None:
                report_run(record, made[0])
            return record.summary(), None
        setup, remote = made
        store_secret(folder, secret, needed=bool(setup.federation.secret))
        told = watching(PhaseLog(), PhaseFile(folder))
        with record.writing(console=console), told, closing(Engines(setup, remote)) as engines:  # no worker outlives it
            work = _Run(setup, engines, record, progress or Silent(), callbacks, secret, wrap)
            summary = work.go()
        began = time.perf_counter()
        with phase("figures and report"):
            report_run(record, setup)
        keep_phases(folder, {**work.phases, "figures and report": time.perf_counter() - began})
        return summary, (setup, work.opened, work.state)


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a finished run."""
    return (folder / "run.json").exists() and RunFolder.open(folder).status == "finished"


class _Run:
    """One running run, so that its steps can be read one by one."""

    def __init__(
        self,
        setup: RunSetup,
        engines: Engines,
        record: RunFolder,
        progress: Progress,
        callbacks: Sequence[Callback],
        secret: bytes,
        wrap: Wrap | None,
    ) -> None:
        self.setup = setup
        self.config = setup.config
        self.engines = engines
        self.record = record
        self.progress = progress
        self.callbacks = callbacks
        self.remote = engines.remote
        self.secret = secret
        self.wrap = wrap
        self.best = Best()
        self.totals = {"bytes_up": 0, "bytes_down": 0}
        self.spent = 0.0
        self.unused: str | None = None
        """Why the last round's answers could not be used, as long as no round had one; then empty."""
        self.phases: dict[str, float] = {}
        """Seconds outside the rounds, since this process began."""

    def go(self) -> dict[str, Any]:
        """Everything from the first round that is not done yet to the report."""
        config = self.config
        found = self.record.resume(self._check)
        self.log = RoundLog(self.record.path, self.setup.identity, self.secret, None if found is None else found.round)
        keep_skipped(self.record.path, self.setup.task.data)
        with Tracking(config, self.record.path, 0 if found is None else found.round) as track:
            state = self._begin(track) if found is None else self._restore(found)
            for text in warnings_for(self.setup, self.opened, self.engines):
                log.warning(text)
            self.progress.start(config.rounds.total, state.round, describe(self.setup, self.opened))
            for callback in self.callbacks:
                callback.on_start(self.setup, state)
            self.state = self._rounds(state, track)
            summary = self._finish(self.state)
            track.summary = summary
        self.record.finish(summary)
        for callback in self.callbacks:
            callback.on_end(summary)
        return summary

    def _begin(self, track: Tracking) -> ServerState:
        """Head initialisation, then the state before round 1, measured: the start is on every curve."""
        began = time.perf_counter()
        head = install_head(self.setup, self.engines)
        self._open(None)
        state = server.start(
            self.setup.algorithm, self.opened.space.gather(self.setup.task.network), self.opened.space.trained
        )
        megabytes = self.setup.federation.clients * len(state.vector) * 4 / 1e6
        on_disk = self.setup.algorithm.aggregate.personal and megabytes > self.config.rounds.personal_memory_mb
        if on_disk:
            log.info("the clients' models (%.0f MB) are kept on disk", megabytes)
        own = own_starts(self.setup, self.engines, self.opened.space, head)
        state = replace(state, personal=first_models(self.record.path / "personal", len(state.vector), own, on_disk))
        line: dict[str, Any] = {"round": 0, "seconds": {}}
        found = self.measure.validation(state.vector, 0)
        line |= self.measure.line(found)
        if self.setup.algorithm.privacy.delivers_best_round:  # what private training did not make is not delivered
            self.best = Best(found.plain.accuracy, self.measure.score(found), 0, 0, state.vector)
        self.spent += time.perf_counter() - began
        self.phases["head initialisation"] = self.spent
        shared = head is not None and self.setup.algorithm.aggregate.shares  # training alone sends nothing
        self._add(self._traffic() if self.remote else head.traffic if head and shared else {})
        log.info("head initialisation (%s) took %.1f s", self.config.head, self.spent)
        self.record.append(line)
        self.log.append(line, to_tensors(state, {})[0])
        track.log(line)
        self._save(state)
        return state

    def _open(self, saved: Mapping[str, Tensor] | None) -> None:
        """Open the edit space and the engine of the rounds."""
        self.opened = open_run(self.setup, self.engines, saved)
        if self.remote is not None:
            with_probe = not self.setup.task.data.rows_known
            self.remote.open(self.setup.federation.run, self.opened.message(with_probe))
        self.engine: AnyEngine = self.remote or self.engines.training(self.setup.algorithm, self.opened.context)
        if self.wrap is not None:
            self.engine = self.wrap(self.setup, self.opened, self.engine)
        self.measure = Measure(self.setup, self.opened, self.engine)

    def _rounds(self, state: ServerState, track: Tracking) -> ServerState:
        r = self.config.rounds
        while state.round < r.total:
            if r.patience and self.best.stale >= r.patience:
                log.info("stopped after %d rounds: none of the last %d measured better", state.round, self.best.stale)
                break
            account = budget(self.config, self.setup.algorithm, state.round)
            if account is not None and not account.can_spend():
                log.warning("stopped after %d rounds: one more would exceed epsilon %g", state.round, account.target)
                break
            before = dict(self.engine.memory), self.best, self.totals, self.spent, self.unused
            try:
                state = self._one_round(state, track)
            except KeyboardInterrupt:  # half a round must not leave traces: save as it was before
                self.engine.memory, self.best, self.totals, self.spent, self.unused = before
                self._save(state)
                raise
            # What clients on other machines remember moves on every round, and the checkpoint must not fall behind.
            every = r.checkpoint_every if self.remote is None else 1
            if state.round == r.total or state.round % every == 0 or self.best.round == state.round:
                self._save(state)
        if self.unused:
            raise FedgraftError(f"nothing was trained: no answer of any round could be used, the last: {self.unused}.")
        return state

    def _one_round(self, state: ServerState, track: Tracking) -> ServerState:
        """One round, its evaluation if one is due, and its line in the record."""
        began, r, before, opened = time.perf_counter(), self.config.rounds, self._traffic(), self.opened
        new, summary = run_round(self.setup.algorithm, self.setup.federation, state, self.engine, opened.server_context)
        representation_figures.keep_mixing(self.record.path, self.config, summary)
        line = noted(summary, new.round)
        if new.round == r.total or (r.evaluate_every and new.round % r.evaluate_every == 0):
            new = self._validate(new, line)
        line |= self._traffic(before)  # all that crossed the wire, also what only a deployment sends
        self._add(line)
        line = without_cohort_size(line, self.setup.federation)
        self.spent += time.perf_counter() - began
        self.record.append(line)
        self.log.append(
            line, to_tensors(new, {})[0], updates=summary.digests, protection=protection_of(self.setup.algorithm)
        )
        track.log(line)
        self.progress.update(line)
        for callback in self.callbacks:
            callback.on_round_end(line, new)
        reasons = {rejection.client: rejection.reason for rejection in summary.rejections}
        if self.unused != "":  # where answers are private no round is skipped
            lost = reasons and (line.get("skipped") or reasons.keys() >= set(summary.cohort))
            self.unused = next(iter(reasons.values())) if lost else ""
        if line.get("skipped") and reasons and all("finite" in reason for reason in reasons.values()):
            raise FedgraftError(
                f"training diverged in round {new.round}: every client's update is infinite or not a number; lower "
                "local.lr (fedgraft find-lr finds one) or set local.clip."
            )
        return new

    def _traffic(self, before: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes that crossed the wire, since `before`, where clients are on other machines; else there is no wire."""
        then = before or {"bytes_up": 0, "bytes_down": 0}
        now = {} if self.remote is None else {"bytes_up": self.remote.received, "bytes_down": self.remote.sent}
        return {key: value - then[key] for key, value in now.items()}

    def _add(self, bytes: Mapping[str, Any]) -> None:
        self.totals = {key: value + int(bytes.get(key, 0)) for key, value in self.totals.items()}

    def _validate(self, state: ServerState, line: dict[str, Any]) -> ServerState:
        """Measure on validation images, remember the best, and let clients test themselves where asked."""
        began = time.perf_counter()
        result = self.measure.validation(state.vector, state.round)
        line |= self.measure.line(result)
        best, score = self.best, self.measure.score(result)
        stale = 0 if score > best.score + self.config.rounds.min_delta else best.stale + 1
        # Under differential privacy nothing chooses: the model after the last round is what the account speaks of.
        if score > best.score or not self.setup.algorithm.privacy.delivers_best_round:
            best = Best(result.plain.accuracy, score, state.round, 0, state.vector)
        self.best = replace(best, stale=stale)
        if self.config.personal.evaluate == "always":
            line["personal"], _ = self.measure.personal(state)
        line["seconds"] = {**line["seconds"], "evaluate": time.perf_counter() - began}
        return replace(state, losses=(*state.losses, result.plain.loss))

    def _finish(self, state: ServerState) -> dict[str, Any]:
        """What is kept of the run; the test set is seen here, once, with the best model by validation."""
        before, best = self._traffic(), state.vector if self.best.vector is None else self.best.vector
        tested = self.measure.tested(best, state.round) if self.config.rounds.test else {}
        summary = summary_of(self.setup, self.opened, state, self.best, self.record.metrics()) | tested
        summary |= {"seconds": self.spent, **self.measure.served(state, best)}
        self._add(self._traffic(before))
        for key, total in self.totals.items():  # preparations and the last test are no round's; secret rounds tell none
            inside = total if self.setup.federation.secret else sum(int(o.get(key, 0)) for o in self.record.metrics())
            summary |= {key: total} | ({f"{key}_outside_rounds": total - inside} if total > inside else {})
        return summary

    # ---- saving and restoring -------------------------------------------------------------------------------------

    def _save(self, state: ServerState) -> None:
        began, store = time.perf_counter(), state.personal if isinstance(state.personal, PersonalStore) else None
        tensors, meta = pack_run(self.setup, self.opened, state, self.engine.memory, self.best)
        meta |= {"totals": self.totals, "seconds": self.spent, "unused": self.unused}
        meta |= {"personal": store.sealed()} if store else {}
        at_best = self.best.score if self.best.round == state.round else None
        self.record.save_checkpoint(state.round, tensors, meta, best=at_best)
        if store is not None:
            store.release(self.record.checkpoints)
        self.phases["checkpoints"] = self.phases.get("checkpoints", 0.0) + time.perf_counter() - began

    def _check(self, found: Checkpoint) -> None:
        """Open the personal models on disk that a checkpoint names, or refuse it."""
        self.store: PersonalStore | None = None
        if "personal" in found.meta:
            length = len(found.tensors["vector"])
            self.store = PersonalStore.restore(self.record.path / "personal", length, found.meta["personal"])

    def _restore(self, found: Checkpoint) -> ServerState:
        """The state a checkpoint holds; the head that the run began with goes back into the network first."""
        tensors, meta = found.tensors, found.meta
        install(self.setup.task.network, tensors["head"])
        self._open(saved_edit(tensors))
        state, memories = from_tensors(found.round, tensors, meta)
        self.engine.memory = dict(memories)
        self.best = Best(**meta["best"], vector=tensors.get("best/vector"))
        self.totals, self.spent, self.unused = dict(meta["totals"]), float(meta["seconds"]), meta["unused"]
        log.info("resumed after round %d", state.round)
        return state if self.store is None else replace(state, personal=self.store)
