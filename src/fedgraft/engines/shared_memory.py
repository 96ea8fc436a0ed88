"""Worker processes that trade bytes with this one: forks through shared memory, others through their pipe.

A `Buffer` is an unnamed file in memory that parent and child both map: it grows when a message does, needs no
space in a shared-memory mount, and is gone with the last process that holds it, however that one ended. `Workers`
each carry out one function from byte strings to byte strings, the next task going to whoever is free. A fork already
has the function and all it refers to; where processes are spawned, `spawned.py` sends it once to each.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import tempfile
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fedgraft.core import progress
from fedgraft.core.errors import FedgraftError
from fedgraft.engines.spawned import forks, packed, unpacked, without_main
from fedgraft.local.memory import keep_freed_memory

Parts = list[memoryview]
Work = Callable[[Parts], list[bytes]]
T = TypeVar("T")
R = TypeVar("R")


class Buffer:
    """Bytes that a parent and its forks both see. One side writes at a time; the pipe beside it says when."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("fedgraft"), "r+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the board
        self._map: mmap.mmap | None = None

    def write(self, parts: Sequence[bytes]) -> list[int]:
        """Put the parts side by side; returns their sizes, which the reader needs."""
        total = sum(map(len, parts))
        if total > os.fstat(self._file.fileno()).st_size:
            self._file.truncate(total)
        view, begin = self._view(total), 0
        for part in parts:
            view[begin : begin + len(part)] = part
            begin += len(part)
        return [len(part) for part in parts]

    def read(self, sizes: Sequence[int]) -> Parts:
        """Views of the parts, valid until either side writes again."""
        view, begin, found = self._view(sum(sizes)), 0, []
        for size in sizes:
            found.append(view[begin : begin + size])
            begin += size
        return found

    def _view(self, size: int) -> memoryview:
        if not size:
            return memoryview(b"")
        if self._map is None or len(self._map) < size:  # the other side has grown the file
            self._map = mmap.mmap(self._file.fileno(), os.fstat(self._file.fileno()).st_size)
        return memoryview(self._map)


@dataclass(frozen=True)
class _Post:
    """One end of what a worker and its parent say to each other: a header, and bytes beside or behind it."""

    pipe: Connection
    board: Buffer | None

    def put(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        sizes = [len(part) for part in parts] if self.board is None else self.board.write(parts)
        head = json.dumps(header | {"sizes": sizes}).encode()
        behind = () if self.board is not None else parts
        self.pipe.send_bytes(b"".join([len(head).to_bytes(4, "little"), head, *behind]))

    def get(self) -> tuple[dict[str, Any], Parts]:
        data = memoryview(self.pipe.recv_bytes())
        begin = 4 + int.from_bytes(data[:4], "little")
        header = json.loads(bytes(data[4:begin]))
        if self.board is not None:
            return header, self.board.read(header["sizes"])
        ends = list(accumulate(header["sizes"], initial=begin))
        return header, [data[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    post: _Post

    @property
    def pipe(self) -> Connection:
        return self.post.pipe

    def give(self, parts: Sequence[bytes]) -> None:
        # A worker that is gone shows itself when its answer is awaited, where the task has a name.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.post.put({}, parts)

    def take(self, task: str, hear: Callable[[progress.News], None]) -> Parts | None:
        """Its answer; None when it only said how far it is."""
        try:
            header, parts = self.post.get()
        except (EOFError, ConnectionResetError):
            self.process.join(1)
            raise FedgraftError(
                f"the worker process of {task} died (exit code {self.process.exitcode}), probably for lack of memory; "
                "run again with fewer workers."
            ) from None
        if "news" in header:
            hear(header["news"])
            return None
        if "refused" in header:
            raise FedgraftError(header["refused"])
        if "failed" in header:
            raise FedgraftError(f"the worker process of {task} failed: {header['failed']}") from RuntimeError(
                header["trace"]
            )
        return parts


class Workers:
    """So many workers, each on one thread. They see this process as it was when the crew was made."""

    def __init__(self, work: Work, workers: int) -> None:
        if torch.get_num_threads() != 1:
            raise FedgraftError(
                f"worker processes compute on one thread, and this one computes on {torch.get_num_threads()}, "
                "which gives other bits; call torch.set_num_threads(1) before."
            )
        self._forks = forks()
        self._work = work if self._forks else packed(work)
        self._workers: list[_Worker] = []
        # The pid keeps a fork that inherits this object from ending its siblings.
        self._end = weakref.finalize(self, _end, self._workers, os.getpid())
        for _ in range(workers):
            self._hire()

    def _hire(self) -> _Worker:
        """One more worker."""
        context: Any = get_context("fork" if self._forks else "spawn")
        mine, theirs = context.Pipe()
        board = Buffer() if self._forks else None
        others = [mine, *(worker.pipe for worker in self._workers)] if self._forks else []
        process = context.Process(target=_serve, args=(self._work, _Post(theirs, board), others), daemon=True)
        with warnings.catch_warnings(), nullcontext() if self._forks else without_main():
            # Python 3.12 warns of any fork beside threads; a worker takes no lock that a thread here may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._workers.append(_Worker(process, _Post(mine, board)))
        return self._workers[-1]

    def _replace(self, late: _Worker) -> _Worker:
        """Kill a worker that hangs and put another in its place."""
        late.process.kill()
        late.process.join()
        late.pipe.close()
        self._workers.remove(late)
        return self._hire()

    def map(
        self,
        tasks: Sequence[T],
        send: Callable[[T], Sequence[bytes]],
        receive: Callable[[T, Parts], R],
        name: Callable[[T], str],
        deadline: float | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> list[R | None]:
        """Carry out the tasks, each by the next free worker; results in the order of the tasks.

        `send` makes a task's bytes when its turn comes, `receive` reads its answer at once. Any error, Ctrl-C
        included, ends the crew: what is under way is of no use any more. A task that takes longer than `deadline`
        seconds gives None; its worker is killed and another one goes on. What workers are at is a phase here too.
        """
        waiting = deque(range(len(tasks)))
        busy: dict[object, tuple[int, _Worker]] = {}
        ends: dict[object, float] = {}
        results: dict[int, R] = {}

        def next_task(worker: _Worker) -> None:
            if waiting:
                index = waiting.popleft()
                busy[worker.pipe] = index, worker
                worker.give(send(tasks[index]))
                ends[worker.pipe] = math.inf if deadline is None else time.monotonic() + deadline

        try:
            with progress.merging() as hear:
                for worker in list(self._workers):
                    next_task(worker)
                while busy:
                    first = min(ends[pipe] for pipe in busy)
                    left = None if deadline is None else max(0.0, first - time.monotonic())
                    for pipe in wait([worker.pipe for _, worker in busy.values()], left):
                        index, worker = busy[pipe]
                        if (parts := worker.take(name(tasks[index]), hear)) is None:
                            continue
                        del busy[pipe]
                        results[index] = receive(tasks[index], parts)
                        done()
                        next_task(worker)
                    for late in [pipe for pipe in busy if ends[pipe] <= time.monotonic()]:
                        _, worker = busy.pop(late)
                        next_task(self._replace(worker))
        except BaseException:
            self.close()
            raise
        return [results.get(index) for index in range(len(tasks))]

    def close(self) -> None:
        """End the workers. Also happens when the crew is collected, and at exit."""
        self._end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _end(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.pipe.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
    workers.clear()


def _serve(work: Work | bytes, post: _Post, inherited: list[Connection]) -> None:
    """A worker's life: one task after another until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:  # a copy of a parent's end would keep that pipe open after the parent's death
        other.close()
    torch.set_num_threads(1)
    keep_freed_memory()
    relay = progress.relay_to(lambda news: post.put({"news": news}))
    carry_out = unpacked(work) if isinstance(work, bytes) else work
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            _, parts = post.get()
            header: dict[str, Any] = {}
            answer: Sequence[bytes] = ()
            try:
                answer = carry_out(parts)
            except FedgraftError as error:
                header = {"refused": str(error)}
            except Exception as error:
                header = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            relay.between()
            post.put(header, answer)
