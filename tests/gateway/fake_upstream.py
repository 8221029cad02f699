"""An upstream on raw sockets that follows a script: cuts, stalls, resets and lies as real ones do."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any


class Act(Enum):
    STALL = "wait until the other side goes"
    RESET = "end with a TCP reset"


Piece = bytes | Act


@dataclass(frozen=True, slots=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Script = Callable[[Received], Sequence[Piece]]


class FakeUpstream:
    """Answers each connection once with the script's pieces, each in a packet of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.received: list[Received] = []
        self.left = threading.Event()  # the other side closed during a stall
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> FakeUpstream:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            request = _read(connection)
            if request is None:
                return
            self.received.append(request)
            try:
                for piece in self.script(request):
                    if piece is Act.STALL:
                        while connection.recv(4096):
                            pass
                        self.left.set()
                    elif piece is Act.RESET:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    else:
                        assert isinstance(piece, bytes)
                        connection.sendall(piece)
                        threading.Event().wait(0.002)  # so that the other side reads it apart
            except OSError:
                self.left.set()


def _read(connection: socket.socket) -> Received | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    method, path, _ = first.split(" ")
    return Received(method, path, headers, body)


def answer(
    body: bytes | dict[str, Any], status: int = 200, kind: str = "application/json", **headers: str
) -> list[Piece]:
    """A whole answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n{extra}\r\n"
    return [head.encode() + content]


def stream(*pieces: Piece, **headers: str) -> list[Piece]:
    """A streamed answer in HTTP chunks; without an Act at its end it ends properly."""
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n{extra}\r\n"
    framed = [b"%x\r\n%s\r\n" % (len(p), p) if isinstance(p, bytes) else p for p in pieces]
    ending: list[Piece] = [] if pieces and isinstance(pieces[-1], Act) else [b"0\r\n\r\n"]
    return [head.encode(), *framed, *ending]


def chunk(text: str | None = None, **fields: Any) -> bytes:
    """An event of a streamed chat."""
    choices = [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None}]
    body = {"id": "up-1", "object": "chat.completion.chunk", "created": 1, "model": "far", "choices": choices, **fields}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
