"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside a finalizer, a weak reference's callback
or a callback from C the exception is printed and dropped, and the program goes on as if nobody had pressed Ctrl-C.
`InterruptMonitor` remembers the signal, so that a loop can ask at a safe place whether one was dropped.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class InterruptMonitor:
    """A context in which every Ctrl-C is remembered besides being raised as before.

    It does nothing outside the main thread (only there can signals be handled) and where Ctrl-C is ignored.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> InterruptMonitor:
        previous = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since this context was entered."""
        if self.interrupted:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal, then do what would have been done without this monitor."""
        self.interrupted = True
        if self._previous is not None:
            self._previous(number, frame)
