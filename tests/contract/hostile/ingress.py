"""What answers in place of a SuperLink, as nginx does: every call over HTTP/2 with one status."""

from __future__ import annotations

import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, ENDS, ACK = 1, 4, 0x1 | 0x4, 0x1
NAME_OF_STATUS = 8
"""Of the static table of headers; a literal value follows."""


class Ingress:
    """Listens on this machine; a context manager.

    Args:
        status: of every answer. The body of a request is not waited for.
    """

    def __init__(self, status: int) -> None:
        self._said = bytes([NAME_OF_STATUS, 3]) + str(status).encode()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Ingress:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as asked:
            asked.read(len(PREFACE))
            line.sendall(_frame(SETTINGS, 0, 0))
            while head := asked.read(9):
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                asked.read(size)
                if kind == SETTINGS and not flags & ACK:
                    line.sendall(_frame(SETTINGS, ACK, 0))
                elif kind == HEADERS:
                    (stream,) = struct.unpack(">I", head[5:])
                    line.sendall(_frame(HEADERS, ENDS, stream, self._said))


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content
