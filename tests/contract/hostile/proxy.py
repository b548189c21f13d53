"""A TCP proxy in this process that does what networks and load balancers do.

proxy = Proxy(address)
proxy.cut()       # nothing comes through, nothing is refused; what was sent arrives later
proxy.close_all() # who connects is accepted and closed: no backend, or one that restarts
proxy.forget()    # half-open: old connections swallow everything, new ones work
proxy.mend()
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards connections to an address, until another mode is set."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._through = threading.Event()
        self._through.set()
        self._closed = self._refusing = False
        self._generation = 0
        self._open: set[socket.socket] = set()
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where to connect."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Let nothing through any more; nobody is informed."""
        self._through.clear()

    def close_all(self) -> None:
        """Close every connection, and accept and close every new one."""
        self._refusing = True
        for one in list(self._open):
            _shut(one)

    def forget(self) -> None:
        """Swallow what comes on the connections there are, and keep them open."""
        self._generation += 1

    def mend(self) -> None:
        """Let everything through again; what was held back arrives late."""
        self._refusing = False
        self._through.set()

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._through.set()
        self._listener.close()
        for one in list(self._open):
            _shut(one)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self._refusing:
                near.close()
                continue
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._through.wait()
        try:
            far = socket.create_connection(self._target, timeout=10)
            far.settimeout(None)
        except OSError:
            near.close()
            return
        self._open |= {near, far}
        for one, other in ((near, far), (far, near)):
            own = (one, other, self._generation)
            threading.Thread(target=self._pump, args=own, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, generation: int) -> None:
        with suppress(OSError):
            while True:
                data = source.recv(65536)
                if not data:
                    break
                self._through.wait()
                if generation == self._generation:
                    sink.sendall(data)
        for end in (source, sink):
            self._open.discard(end)
            _shut(end)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
