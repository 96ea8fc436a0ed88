"""What takes long says how far it is: phases that any layer may open, and watchers that look at them by time.

`advance` is an addition and calls nobody; a thread shows the open phases to the watchers (a terminal, a log, a file)
twice a second. What is over before that is never seen and costs nothing. In a worker process the same phases are told
to the parent, where those of all workers are one.
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
"""What is computed by workers and by the process itself goes by one name."""
EVERY = 0.5
"""Seconds between two looks."""
News = list[tuple[str, str, int, int]]
"""What a worker says: the phase, its unit, how many more are done, how many more there are."""


@dataclass(eq=False)
class Phase:
    """Something that takes a while; `total` is 0 where nobody knows how much there is."""

    what: str
    total: int = 0
    unit: str = ""
    minor: bool = False
    """Part of something that is told anyway: a log mentions it only when it lasts."""
    growing: bool = False
    """The total is what is known so far, so nothing can be said about the time left."""
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def advance(self, count: int = 1, more: int = 0) -> None:
        """So many are done since the last call, and so many more have turned up."""
        self.done += count
        self.total += more
        if _state.relay is not None:
            _state.relay.note(self, count, more)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that the rest will take at this rate; None where that cannot be said."""
        known = self.done and self.total and not self.growing
        return max(0, self.total - self.done) / self.rate if known else None

    def facts(self) -> dict[str, Any]:
        """The phase as plain values."""
        numbers = {"done": self.done, "total": self.total, "seconds": self.seconds, "rate": self.rate}
        return {"what": self.what, "unit": self.unit, **numbers, "left": self.left}

    def __str__(self) -> str:
        return told(self.facts())


Watcher = Callable[[Sequence[Phase]], None]


def told(facts: Mapping[str, Any]) -> str:
    """The facts of a phase as one line: what, how far, how quick, how long still."""
    done, total, unit = facts["done"], facts["total"], facts["unit"]
    parts = [f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"] if unit else []
    if done and unit:
        each = 1 / facts["rate"]
        slow = f"{each:.2g} s each" if each < 10 else f"{_clock(each)} each"
        parts.append(f"{facts['rate']:,.0f} a second" if facts["rate"] >= 10 else slow)
    ends = facts["left"] is not None
    parts.append(f"about {_clock(facts['left'])} left" if ends else f"{_clock(facts['seconds'])} so far")
    return f"{facts['what']}: {', '.join(parts)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60:02d} min"
        if minutes >= 60
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{rest} s"
    )


class Relay:
    """A worker's side: what its phases did, told to the parent now and then; of a short task nothing is told."""

    def __init__(self, send: Callable[[News], None]) -> None:
        self.send, self.news, self.last, self.spoke = send, dict[tuple[str, str], list[int]](), time.monotonic(), False

    def note(self, phase: Phase, done: int, more: int) -> None:
        """Add this up, and tell it if it is time."""
        found = self.news.setdefault((phase.what, phase.unit), [0, 0])
        found[0], found[1] = found[0] + done, found[1] + more
        if time.monotonic() - self.last > EVERY:
            self.tell()

    def tell(self) -> None:
        """Tell what is new."""
        self.send([(what, unit, *map(int, numbers)) for (what, unit), numbers in self.news.items()])  # type: ignore[misc]
        self.news, self.last, self.spoke = {}, time.monotonic(), True

    def between(self) -> None:
        """A task is over: the rest of what was told about it, or nothing at all."""
        if self.spoke and self.news:
            self.tell()
        self.news, self.last, self.spoke = {}, time.monotonic(), False


@dataclass
class _State:
    phases: list[Phase] = field(default_factory=list)
    watchers: list[Watcher] = field(default_factory=list)
    screen: Watcher | None = None
    """The one watcher that owns the terminal."""
    looking: Any = field(default_factory=threading.RLock)
    thread: threading.Thread | None = None
    relay: Relay | None = None

    def look(self) -> None:
        with self.looking:
            phases = list(self.phases)
            for watcher in [*self.watchers, *([self.screen] if self.screen else [])]:
                watcher(phases)


_state = _State()


def _forked() -> None:
    """A fork watches nothing: no thread of its parent is there."""
    global _state
    _state = _State()


# Nobody holds a lock of a display or a log while this process is copied.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _state.looking.acquire(),
        after_in_parent=lambda: _state.looking.release(),
        after_in_child=_forked,
    )


@contextmanager
def phase(what: str, total: int = 0, unit: str = "", minor: bool = False, growing: bool = False) -> Iterator[Phase]:
    """Something long that begins here and ends with the block."""
    one = Phase(what, total, unit, minor, growing)
    _state.phases.append(one)
    if _state.relay is not None:
        _state.relay.note(one, 0, total)
    try:
        yield one
    finally:
        one.ended = time.monotonic()
        if one in _state.phases:
            _state.phases.remove(one)
        if not _state.phases and one.seconds > EVERY and _state.screen is not None:
            with _state.looking:  # whoever prints next finds the terminal free, not half a bar
                _state.screen([])


def counted(what: str, items: Iterable[T], total: int = 0, unit: str = "") -> Iterator[T]:
    """The items one after another, as a minor phase."""
    with phase(what, total or (len(items) if isinstance(items, Sized) else 0), unit, minor=True) as told:
        for item in items:
            yield item
            told.advance()


def open_phases() -> list[Phase]:
    """The phases that are open now, the outermost first."""
    return list(_state.phases)


@contextmanager
def watching(*watchers: Watcher) -> Iterator[None]:
    """Show the phases to these as long as the block lasts, and once more at its end, when none is left of them."""
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
    """Let this one have the terminal; whoever had it before gets it back."""
    with _state.looking:
        if (before := _state.screen) is not None:
            before([])
        _state.screen = screen
    _start()
    try:
        yield
    finally:
        with _state.looking:
            if screen is not None:
                screen([])
            _state.screen = before


def _start() -> None:
    if _state.thread is None:
        _state.thread = threading.Thread(target=_look, args=(_state,), name="fedgraft-progress", daemon=True)
        _state.thread.start()


def _look(state: _State) -> None:
    while state.watchers or state.screen is not None:
        time.sleep(EVERY)
        state.look()
    state.thread = None


@contextmanager
def merging() -> Iterator[Callable[[News], None]]:
    """Takes what workers say, and has one phase for all that they call the same."""
    found: dict[tuple[str, str], Phase] = {}
    with ExitStack() as stack:

        def hear(news: News) -> None:
            for what, unit, done, more in news:
                if (what, unit) not in found and any(one.what == what for one in _state.phases):
                    continue  # this process counts it by itself
                if (what, unit) not in found:
                    found[what, unit] = stack.enter_context(phase(what, 0, unit, minor=True, growing=True))
                found[what, unit].advance(done, more)

        yield hear


def relay_to(send: Callable[[News], None]) -> Relay:
    """From now on this process's phases are told to its parent."""
    _state.relay = Relay(send)
    return _state.relay


def requests_phase(requests: Sequence[Any], label: Callable[[Any], str]) -> Any:
    """Return the phase in which these requests are carried out, counted in clients; `label` names their work."""
    if not requests:
        return phase("round", 0, "clients", minor=True)
    first = requests[0]
    return phase(label(first), len(requests), "clients", minor=first.action == "train")
