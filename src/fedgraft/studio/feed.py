"""Server-sent events: the page is told which runs changed, and fetches what it shows of them.

One task looks for changes, however many pages are open, and none without a page. It looks each second while a run is
under way, and more rarely otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

BUSY_SECONDS = 1.0
"""Between two looks while a run is under way."""
IDLE_SECONDS = 3.0
HEARTBEAT_SECONDS = 20.0
"""After so long without an event a comment is sent, so that a closed page is noticed."""
_NAMES = 200  # changed runs that an event names; with more the page loads everything anew


class Feed:
    """Tells the open pages what changed.

    Args:
        look: looks for changes; returns the names of the runs that changed.
        is_busy: whether a run is under way.
    """

    def __init__(self, look: Callable[[], set[str]], is_busy: Callable[[], bool]) -> None:
        self._look = look
        self._is_busy = is_busy
        self._pages: set[asyncio.Queue[str | None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def events(self) -> AsyncIterator[str]:
        """Yield the events for one page, as text of the protocol."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(maxsize=64)
        self._pages.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield "retry: 2000\n\n"
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    event = ": still here\n\n"
                if event is None:
                    return
                yield event
        finally:
            self._pages.discard(queue)

    async def _watch(self) -> None:
        """Look for changes until no page is open."""
        while self._pages:
            changed = await asyncio.to_thread(self._look)
            if changed:
                self.tell("runs", {"changed": sorted(changed)[:_NAMES], "count": len(changed)})
            await asyncio.sleep(BUSY_SECONDS if self._is_busy() else IDLE_SECONDS)

    def tell(self, kind: str, data: Any) -> None:
        """Send an event to every open page; one that does not read loses it and gets the next."""
        text = f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        for queue in self._pages:
            if not queue.full():
                queue.put_nowait(text)

    def close(self) -> None:
        """End the events of every page: the server ends."""
        for queue in self._pages:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
        self._pages = set()
