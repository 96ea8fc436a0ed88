"""Worker processes that exchange bytes with this one: forks through shared memory, spawned ones through a pipe.

A `SharedBuffer` is an unnamed file in memory that parent and child both map: it grows with the messages, needs no
space in a shared-memory mount, and disappears with the last process that maps it, however that process ended.
`Workers` run one function from byte strings to byte strings; the next task goes to whichever worker is free. A fork
already has the function and all it refers to; a spawned process receives it once through `spawned.py`.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fedgraft.core import progress
from fedgraft.core.device import repeatable
from fedgraft.core.errors import FedgraftError
from fedgraft.engines.spawned import forks_beside, packed, unpacked, without_main
from fedgraft.local.memory import keep_freed_memory

Parts = list[memoryview]
"""The byte strings of one message, as views that are valid until the next message."""
Work = Callable[[Parts], list[bytes]]
"""The function that workers run on each task."""
_Job = tuple[Work, Callable[[torch.device], None] | None]
"""What a worker runs on each task, and before its first one with the device that it computes on."""
T = TypeVar("T")
R = TypeVar("R")


class SharedBuffer:
    """Bytes in memory that a parent and its fork both see; the file grows with the messages.

    One side writes at a time; the pipe beside it says when.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("fedgraft"), "r+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the buffer
        self._map: mmap.mmap | None = None

    def write(self, parts: Sequence[bytes]) -> list[int]:
        """Write the parts one behind the other, from the beginning of the buffer; return their sizes for the reader."""
        total = sum(map(len, parts))
        if total > os.fstat(self._file.fileno()).st_size:
            self._file.truncate(total)
        view = self._view(total)
        begin = 0
        for part in parts:
            view[begin : begin + len(part)] = part
            begin += len(part)
        return [len(part) for part in parts]

    def read(self, sizes: Sequence[int]) -> Parts:
        """Return views of the parts of these sizes in bytes, valid until either side writes again."""
        view = self._view(sum(sizes))
        begin = 0
        parts = []
        for size in sizes:
            parts.append(view[begin : begin + size])
            begin += size
        return parts

    def _view(self, size: int) -> memoryview:
        """Return a view of the file that covers at least `size` bytes; map it anew if it has grown."""
        if not size:
            return memoryview(b"")
        if self._map is None or len(self._map) < size:  # the other side has grown the file
            self._map = mmap.mmap(self._file.fileno(), os.fstat(self._file.fileno()).st_size)
        return memoryview(self._map)


@dataclass(frozen=True)
class _Channel:
    """One end of the connection between a worker and its parent.

    A message is a JSON header through the pipe, and parts through the shared buffer or, without one, behind the header.
    """

    pipe: Connection
    buffer: SharedBuffer | None

    def send(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        """Send one message: a JSON-able header, and byte strings."""
        if self.buffer is None:
            sizes = [len(part) for part in parts]
            parts_in_pipe = parts
        else:
            sizes = self.buffer.write(parts)
            parts_in_pipe = ()
        head = json.dumps(header | {"sizes": sizes}).encode()
        self.pipe.send_bytes(b"".join([len(head).to_bytes(4, "little"), head, *parts_in_pipe]))

    def receive(self) -> tuple[dict[str, Any], Parts]:
        """Wait for one message and return its header and its byte strings, which are valid until the next message."""
        data = memoryview(self.pipe.recv_bytes())
        begin = 4 + int.from_bytes(data[:4], "little")
        header = json.loads(bytes(data[4:begin]))
        if self.buffer is not None:
            return header, self.buffer.read(header["sizes"])
        boundaries = accumulate(header["sizes"], initial=begin)
        return header, [data[a:b] for a, b in pairwise(boundaries)]


@dataclass(frozen=True)
class _Worker:
    """A worker process with the parent's end of its connection, as `Workers` keeps it."""

    process: BaseProcess
    channel: _Channel
    number: int
    """Its place in the team, from 0; whoever replaces it takes it over."""

    @property
    def pipe(self) -> Connection:
        return self.channel.pipe

    def send_task(self, parts: Sequence[bytes]) -> None:
        """Send the byte strings of a task to the worker; errors of a dead worker surface when its answer is awaited."""
        # A worker that has died is noticed when its answer is awaited, where the task has a name.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send({}, parts)

    def receive_answer(self, task: str, merge_progress: Callable[[progress.News], None]) -> Parts | None:
        """Wait for one message of the worker: return its answer, or None if the message was only about its progress.

        Raises the error that the worker reports, or one that it died. `task` names the task in errors; news of progress
        go to `merge_progress`.
        """
        try:
            header, parts = self.channel.receive()
        except (EOFError, ConnectionResetError):
            self.process.join(1)
            raise FedgraftError(
                "E-ENGINES-WORKER-DIED",
                f"the worker process of {task} died (exit code {self.process.exitcode}), probably for lack of memory",
                "run again with fewer workers",
                task=task,
            ) from None
        if "progress" in header:
            merge_progress(header["progress"])
            return None
        if "error" in header:
            error = header["error"]
            raise FedgraftError(error["code"], error["message"], error["hint"])
        if "crash" in header:
            cause = RuntimeError(header["traceback"])
            raise FedgraftError(
                "E-ENGINES-WORKER-FAILED",
                f"the worker process of {task} failed: {header['crash']}",
                task=task,
            ) from cause
        return parts


class Workers:
    """A team of worker processes of one thread each, which run `work` on byte strings that this process sends.

    They see this process as it was when the team was made. `workers` is their number.
    """

    def __init__(
        self,
        work: Work,
        workers: int,
        devices: Sequence[torch.device] = (),
        begin: Callable[[torch.device], None] | None = None,
    ) -> None:
        if torch.get_num_threads() != 1:
            raise FedgraftError(
                "E-ENGINES-THREADS",
                f"worker processes compute on one thread, and this process on {torch.get_num_threads()}, "
                "which gives other bits",
                "call torch.set_num_threads(1) before",
                threads=torch.get_num_threads(),
            )
        self._devices = devices or (torch.device("cpu"),)
        self._forks = forks_beside(self._devices, workers)
        self._work: _Job | bytes = (work, begin)
        if not self._forks:
            self._work = packed((work, begin))
        self._workers: list[_Worker] = []
        # The pid keeps a fork that inherits this object from ending its siblings.
        self._end = weakref.finalize(self, _end, self._workers, os.getpid())
        for number in range(workers):
            self._start_worker(number)

    def _start_worker(self, number: int) -> _Worker:
        """Start the worker of this number and return it."""
        if self._forks:
            context: Any = get_context("fork")
        else:
            context = get_context("spawn")
        parent_pipe, child_pipe = context.Pipe()
        buffer: SharedBuffer | None = None
        inherited: list[Connection] = []
        if self._forks:
            buffer = SharedBuffer()
            inherited = [parent_pipe, *(worker.pipe for worker in self._workers)]
        child_channel = _Channel(child_pipe, buffer)
        device = str(self._devices[number % len(self._devices)])
        process = context.Process(target=_serve, args=(self._work, child_channel, inherited, device), daemon=True)
        with self._starting():
            process.start()
        child_pipe.close()
        worker = _Worker(process, _Channel(parent_pipe, buffer), number)
        self._workers.append(worker)
        return worker

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Suppress Python's warning about forks, or hide the user's script from a spawned child, during a start."""
        if not self._forks:
            with without_main():
                yield
            return
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; a worker takes no lock that a thread here may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield

    def _replace(self, worker: _Worker) -> _Worker:
        """Kill a worker that hangs and return a new one in its place."""
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        return self._start_worker(worker.number)

    def map(
        self,
        tasks: Sequence[T],
        send: Callable[[T], Sequence[bytes]],
        receive: Callable[[T, Parts], R],
        name: Callable[[T], str],
        deadline: float | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> list[R | None]:
        """Carry out the tasks, each by the next free worker, and return the results in the order of the tasks.

        Args:
            send: makes a task's byte strings when its turn comes.
            receive: turns a task and the byte strings of its answer, as soon as they are there, into the result.
            name: names a task in errors.
            deadline: seconds for one task; a longer one gives None, and its worker is killed and replaced. None: no
                limit.
            done: called after each task.

        Any error, Ctrl-C included, ends the team: unfinished work is of no use then. The progress of workers is merged
        into the phases of this process.
        """
        waiting = deque(range(len(tasks)))
        busy: dict[object, tuple[int, _Worker]] = {}
        deadlines: dict[object, float] = {}
        results: dict[int, R] = {}

        def send_next_task(worker: _Worker) -> None:
            """Give the next waiting task, if there is one, to this free worker, and start its deadline."""
            if not waiting:
                return
            index = waiting.popleft()
            busy[worker.pipe] = (index, worker)
            worker.send_task(send(tasks[index]))
            if deadline is None:
                deadlines[worker.pipe] = math.inf
            else:
                deadlines[worker.pipe] = time.monotonic() + deadline

        def seconds_to_first_deadline() -> float | None:
            """Return how long to wait for answers; None: without limit."""
            if deadline is None:
                return None
            first = min(deadlines[pipe] for pipe in busy)
            return max(0.0, first - time.monotonic())

        try:
            with progress.merging() as merge_progress:
                for worker in list(self._workers):
                    send_next_task(worker)
                while busy:
                    pipes = [worker.pipe for _, worker in busy.values()]
                    for pipe in wait(pipes, seconds_to_first_deadline()):
                        index, worker = busy[pipe]
                        parts = worker.receive_answer(name(tasks[index]), merge_progress)
                        if parts is None:
                            continue
                        del busy[pipe]
                        results[index] = receive(tasks[index], parts)
                        done()
                        send_next_task(worker)
                    now = time.monotonic()
                    late = [pipe for pipe in busy if deadlines[pipe] <= now]
                    for late_pipe in late:
                        _, worker = busy.pop(late_pipe)
                        send_next_task(self._replace(worker))
        except BaseException:
            self.close()
            raise
        return [results.get(index) for index in range(len(tasks))]

    def close(self) -> None:
        """End the workers. This also happens when the team is garbage-collected, and at exit."""
        self._end()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _end(workers: list[_Worker], owner: int) -> None:
    """Terminate the workers and empty the list, unless this process is a fork of the process `owner` that made them."""
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


def _serve(job: _Job | bytes, channel: _Channel, inherited: list[Connection], device: str) -> None:
    """Run in a worker: carry out one task after another until the parent closes the pipe or ends.

    `job` is the pair of functions, or its pickled bytes in a spawned process. `inherited` are pipe ends that a fork
    must close: a copy of a parent's end would keep that pipe open after the parent's death. `device` is where this
    worker computes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole process group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for pipe in inherited:
        pipe.close()
    torch.set_num_threads(1)
    keep_freed_memory()
    relay = progress.relay_to(lambda news: channel.send({"progress": news}))
    if isinstance(job, bytes):
        carry_out, begin = unpacked(job)
    else:
        carry_out, begin = job
    if begin is not None:
        begin(torch.device(device))
    with repeatable(), suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            _, parts = channel.receive()
            header: dict[str, Any] = {}
            answer: Sequence[bytes] = ()
            try:
                answer = carry_out(parts)
            except FedgraftError as error:
                header = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
            except Exception as error:
                header = {"crash": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            relay.finish_task()
            channel.send(header, answer)
