"""A slow link: a proxy on loopback that passes bytes on at a rate and with a delay, and can cut its connections."""

from __future__ import annotations

import queue
import socket
import threading
import time


class SlowLink:
    """Passes TCP connections on to a port, `rate` bytes a second in each direction, each byte `delay` seconds later."""

    def __init__(self, target: int, rate: float, delay: float) -> None:
        self.target, self.rate, self.delay = target, rate, delay
        self.passed = {"up": 0, "down": 0}
        self.open: list[socket.socket] = []
        self.free = {"up": 0.0, "down": 0.0}
        """When each direction, which all connections share, is free again."""
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # a real line holds little
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                far.connect(("127.0.0.1", self.target))
            except OSError:
                return
            self.open += [near, far]
            for source, target, way in ((near, far, "up"), (far, near, "down")):
                line: queue.Queue[tuple[float, bytes]] = queue.Queue(64)
                threading.Thread(target=self._take, args=(source, line, way), daemon=True).start()
                threading.Thread(target=self._give, args=(target, line, way), daemon=True).start()

    def _take(self, source: socket.socket, line: queue.Queue[tuple[float, bytes]], way: str) -> None:
        """Read at the rate of the link, and note when each piece is due."""
        while True:
            try:
                data = source.recv(4096)
            except OSError:
                data = b""
            with self.lock:
                begin = max(time.monotonic(), self.free[way])
                self.free[way] = begin + len(data) / self.rate
                due = self.free[way]
            time.sleep(max(0.0, due - time.monotonic()))
            line.put((due + self.delay, data))
            if not data:
                return

    def _give(self, target: socket.socket, line: queue.Queue[tuple[float, bytes]], way: str) -> None:
        while True:
            due, data = line.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
                self.passed[way] += len(data)
            except OSError:
                return

    def cut(self) -> None:
        """Break all connections that are open now."""
        for end in self.open:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            end.close()
        self.open.clear()

    def close(self) -> None:
        """End the link."""
        self.listener.close()
        self.cut()
