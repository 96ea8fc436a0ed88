"""Progress reporting: nested phases that any code may open, and watchers that are shown them at intervals.

`advance` is an addition and calls no watcher; a thread passes the open phases to the watchers (a terminal, a log, a
file) twice a second. A phase shorter than that is never shown and costs nothing. In a worker process the phases are
reported to the parent, which merges those of all workers by name.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
EXTRACTION = "features of the frozen part"
"""The one name of feature extraction, whether workers or the process itself compute it."""
EVERY = 0.5
"""Seconds between two calls of the watchers."""
News = list[tuple[str, str, int, int]]
"""A report of a worker: for each phase its name, its unit, how many more are done, how many more there are."""


@dataclass(eq=False)
class Phase:
    """A piece of work that takes a while, for progress displays; `phase` makes it.

    `total` is 0 if its amount is unknown.
    """

    name: str
    total: int = 0
    unit: str = ""
    minor: bool = False
    """Part of something that is reported anyway: a log mentions it only if it takes long."""
    growing: bool = False
    """The total is only what is known so far, so the time left cannot be computed."""
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def advance(self, count: int = 1, more: int = 0) -> None:
        """Add `count` units done, and `more` units to the total."""
        self.done += count
        self.total += more
        if _state.relay is not None:
            _state.relay.note(self, count, more)

    @property
    def seconds(self) -> float:
        """Duration so far, or of the whole phase if it has ended."""
        if self.ended is None:
            return time.monotonic() - self.began
        return self.ended - self.began

    @property
    def rate(self) -> float:
        """Units per second."""
        seconds = self.seconds
        if seconds <= 0:
            return 0.0
        return self.done / seconds

    @property
    def left(self) -> float | None:
        """Seconds left at this rate; None if unknown."""
        if not self.done or not self.total or self.growing:
            return None
        return max(0, self.total - self.done) / self.rate

    def facts(self) -> dict[str, Any]:
        """Return the phase as plain values, for files."""
        return {
            "what": self.name,
            "unit": self.unit,
            "done": self.done,
            "total": self.total,
            "seconds": self.seconds,
            "rate": self.rate,
            "left": self.left,
        }

    def __str__(self) -> str:
        return describe_facts(self.facts())


Watcher = Callable[[Sequence[Phase]], None]


def describe_facts(facts: Mapping[str, Any]) -> str:
    """Return the facts of a phase as one line: name, units done, rate, time left."""
    parts = []
    if facts["unit"]:
        parts.append(_amount(facts["done"], facts["total"], facts["unit"]))
        if facts["done"]:
            parts.append(_speed(facts["rate"]))
    if facts["left"] is not None:
        parts.append(f"about {_clock(facts['left'])} left")
    else:
        parts.append(f"{_clock(facts['seconds'])} so far")
    return f"{facts['what']}: {', '.join(parts)}"


def _amount(done: int, total: int, unit: str) -> str:
    """Return how much is done, as text."""
    if total:
        return f"{done:,} of {total:,} {unit}"
    return f"{done:,} {unit}"


def _speed(rate: float) -> str:
    """Return the rate as units a second, or as the time of one unit."""
    if rate >= 10:
        return f"{rate:,.0f} a second"
    seconds_each = 1 / rate
    if seconds_each < 10:
        return f"{seconds_each:.2g} s each"
    return f"{_clock(seconds_each)} each"


def _clock(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s"


class Relay:
    """The reporter of a worker process: sums what its phases did and sends it to the parent at intervals.

    Nothing is sent about a task that is shorter than an interval.
    """

    def __init__(self, send: Callable[[News], None]) -> None:
        self.send = send
        self.news: dict[tuple[str, str], tuple[int, int]] = {}
        self.last = time.monotonic()
        self.reported = False
        """Whether anything was sent about the present task."""

    def note(self, phase: Phase, done: int, more: int) -> None:
        """Add units `done`, and `more` that are to be done, to the unsent ones; send if an interval is over."""
        key = (phase.name, phase.unit)
        old_done, old_more = self.news.get(key, (0, 0))
        self.news[key] = (old_done + done, old_more + more)
        if time.monotonic() - self.last > EVERY:
            self.send_unsent()

    def send_unsent(self) -> None:
        """Send the unsent units to the parent, and begin a new interval."""
        news: News = []
        for (name, unit), (done, more) in self.news.items():
            news.append((name, unit, int(done), int(more)))
        self.send(news)
        self._reset(reported=True)

    def finish_task(self) -> None:
        """Finish a task: send the rest if something was sent about it, otherwise drop it."""
        if self.reported and self.news:
            self.send_unsent()
        self._reset(reported=False)

    def _reset(self, reported: bool) -> None:
        """Forget the unsent units and begin a new interval; set whether this task was `reported`."""
        self.news = {}
        self.last = time.monotonic()
        self.reported = reported


@dataclass
class _State:
    """The phases under way and the watchers of this process; there is one instance, `_state`."""

    phases: list[Phase] = field(default_factory=list)
    watchers: list[Watcher] = field(default_factory=list)
    screen: Watcher | None = None
    """The one watcher that owns the terminal."""
    looking: Any = field(default_factory=threading.RLock)
    thread: threading.Thread | None = None
    relay: Relay | None = None

    def look(self) -> None:
        """Pass the open phases to all watchers."""
        with self.looking:
            phases = list(self.phases)
            for watcher in self.watchers:
                watcher(phases)
            if self.screen is not None:
                self.screen(phases)


_state = _State()


def _forked() -> None:
    """Start a forked process without watchers, because the thread of its parent does not exist in it."""
    global _state
    _state = _State()


# No lock of a display or a log is held while this process is forked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _state.looking.acquire(),
        after_in_parent=lambda: _state.looking.release(),
        after_in_child=_forked,
    )


@contextmanager
def phase(name: str, total: int = 0, unit: str = "", minor: bool = False, growing: bool = False) -> Iterator[Phase]:
    """Open a phase that ends with the block, and yield it.

    Args:
        name: what is done.
        total: units of work; 0: unknown.
        unit: what is counted, such as "images".
        minor: a log mentions it only if it takes long.
        growing: the total is only what is known so far.
    """
    opened = Phase(name, total, unit, minor, growing)
    _state.phases.append(opened)
    if _state.relay is not None:
        _state.relay.note(opened, 0, total)
    try:
        yield opened
    finally:
        opened.ended = time.monotonic()
        if opened in _state.phases:
            _state.phases.remove(opened)
        if not _state.phases and opened.seconds > EVERY and _state.screen is not None:
            with _state.looking:  # so that the next output does not meet half a bar on the terminal
                _state.screen([])


def counted(name: str, items: Iterable[T], total: int = 0, unit: str = "") -> Iterator[T]:
    """Yield the items, counted in a minor phase of this name; `total` default: their number, if they have a length."""
    if not total and isinstance(items, Sized):
        total = len(items)
    with phase(name, total, unit, minor=True) as item_phase:
        for item in items:
            yield item
            item_phase.advance()


def open_phases() -> list[Phase]:
    """Return the open phases, the outermost first."""
    return list(_state.phases)


@contextmanager
def watching(*watchers: Watcher) -> Iterator[None]:
    """Pass the phases to these watchers during the block, and an empty list at its end."""
    _state.watchers += watchers
    _start()
    try:
        yield
    finally:
        with _state.looking:
            for watcher in watchers:
                _state.watchers.remove(watcher)
                watcher([])


@contextmanager
def shown_by(screen: Watcher | None) -> Iterator[None]:
    """Let this watcher draw the progress on the terminal during the block; the previous one gets it back.

    None: nothing is drawn.
    """
    with _state.looking:
        previous = _state.screen
        if previous is not None:
            previous([])
        _state.screen = screen
    _start()
    try:
        yield
    finally:
        with _state.looking:
            if screen is not None:
                screen([])
            _state.screen = previous


def _start() -> None:
    """Start the thread that calls the watchers, unless it runs."""
    if _state.thread is None:
        _state.thread = threading.Thread(target=_look, args=(_state,), name="fedgraft-progress", daemon=True)
        _state.thread.start()


def _look(state: _State) -> None:
    """Call the watchers at intervals until there are none."""
    while state.watchers or state.screen is not None:
        time.sleep(EVERY)
        state.look()
    state.thread = None


@contextmanager
def merging() -> Iterator[Callable[[News], None]]:
    """Yield a function that takes the reports of workers and adds them to phases of this process, one for each name."""
    merged: dict[tuple[str, str], Phase] = {}
    with ExitStack() as stack:

        def hear(news: News) -> None:
            """Add a worker's report to the merged phases, which are opened when they are first reported."""
            for name, unit, done, more in news:
                if (name, unit) not in merged:
                    if any(opened.name == name for opened in _state.phases):
                        continue  # this process counts it itself
                    merged[name, unit] = stack.enter_context(phase(name, 0, unit, minor=True, growing=True))
                merged[name, unit].advance(done, more)

        yield hear


def relay_to(send: Callable[[News], None]) -> Relay:
    """Report the phases of this process to its parent from now on, by calling `send`; return the reporter."""
    _state.relay = Relay(send)
    return _state.relay


def requests_phase(requests: Sequence[Any], label: Callable[[Any], str]) -> Any:
    """Return the phase in which these requests are carried out, counted in clients; `label` names their work."""
    if not requests:
        return phase("round", 0, "clients", minor=True)
    first = requests[0]
    return phase(label(first), len(requests), "clients", minor=first.action == "train")
