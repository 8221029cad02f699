"""Server-sent events: their bytes, their end, and that nothing runs on for a client that has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from gateway.api.sse import DONE, PING, EventStream, event, with_pings
from gateway.upstream.events import MAX_EVENT_BYTES, EventSplitter, EventTooLarge, UpstreamTally


class Connection:
    """The server's side of one ASGI request."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = asyncio.Event()
        if gone:
            self.gone.set()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


class Work:
    """Content with an end of its own, or none."""

    def __init__(self, *chunks: bytes, endless: bool = False) -> None:
        self.closed = 0
        self.waiting = asyncio.Event()
        self._chunks = chunks
        self._endless = endless

    async def content(self) -> AsyncGenerator[bytes, None]:
        for chunk in self._chunks:
            yield chunk
        if self._endless:
            self.waiting.set()
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed += 1


def test_an_event_is_one_line_of_utf8_json() -> None:
    text = 'line\nbreak \u2028 "quoted" 🫠 龜'
    raw = event({"text": text})
    assert raw.startswith(b"data: {") and raw.endswith(b"}\n\n") and raw.count(b"\n") == 2
    assert json.loads(raw.decode("utf-8")[6:]) == {"text": text}


def test_a_stream_has_its_headers_and_all_its_bytes() -> None:
    async def run() -> tuple[Connection, Work]:
        connection, work = Connection(), Work(b"data: 1\n\n", DONE)
        response = EventStream(work.content(), work.close, {"x-prefix-cache": "miss"})
        await response({"type": "http"}, connection.receive, connection.send)
        return connection, work

    connection, work = asyncio.run(run())
    assert connection.body == b"data: 1\n\ndata: [DONE]\n\n"
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache, no-transform" and headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-prefix-cache"] == b"miss" and b"content-length" not in headers
    assert connection.sent[-1]["more_body"] is False
    assert work.closed == 1


@pytest.mark.parametrize("before", [True, False], ids=["before the first byte", "in the middle"])
def test_a_client_that_goes_ends_the_work(before: bool) -> None:
    async def run() -> Work:
        connection, work = Connection(gone=before), Work(b"data: 1\n\n", endless=True)
        response = EventStream(work.content(), work.close)
        answering = asyncio.create_task(response({"type": "http"}, connection.receive, connection.send))
        if not before:
            await work.waiting.wait()
            connection.gone.set()
        await asyncio.wait_for(answering, 5)
        return work

    assert asyncio.run(run()).closed == 1


def test_a_broken_maker_is_not_taken_for_an_end() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise RuntimeError("broken")

    async def run() -> None:
        connection, work = Connection(), Work()
        with pytest.raises(RuntimeError, match="broken"):
            await EventStream(broken(), work.close)({"type": "http"}, connection.receive, connection.send)
        assert work.closed == 1
        assert connection.sent[-1]["more_body"] is True

    asyncio.run(run())


def test_silence_is_filled_with_comments_and_loses_nothing() -> None:
    async def run() -> list[bytes]:
        turn = asyncio.Event()

        async def content() -> AsyncGenerator[bytes, None]:
            yield b"a"
            await turn.wait()
            yield b"b"

        seen = []
        async for chunk in with_pings(content(), 0.01):
            seen.append(chunk)
            if seen.count(PING) == 2:
                turn.set()
        return seen

    seen = asyncio.run(run())
    assert seen[0] == b"a" and seen[-1] == b"b"
    assert seen.count(PING) >= 2 and set(seen) == {b"a", b"b", PING}


# An upstream's events

ODD_STREAM = (
    b": ping\n\n"
    b'data: {"choices":[{"delta":{"content":"\xf0\x9f\xab\xa0"}}]}\n\n'
    b'data:{"no":"space"}\r\n\r\n'
    b'event: x\nid: 1\ndata: {"two":\ndata: "lines"}\n\n'
    b'data: {"cr":"\xe9\xbe\x9c"}\r\r'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(ODD_STREAM)), max_size=8))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = sorted({0, *cuts, len(ODD_STREAM)})
    splitter = EventSplitter()
    events = [e for a, b in zip(edges, edges[1:], strict=False) for e in splitter.feed(ODD_STREAM[a:b])]
    assert b"".join(e.raw for e in events) == ODD_STREAM
    bodies = [e.json for e in events]
    assert bodies[1] == {"choices": [{"delta": {"content": "🫠"}}]}
    assert bodies[2:5] == [{"no": "space"}, {"two": "lines"}, {"cr": "龜"}]
    assert [e.is_done for e in events] == [False] * 5 + [True]


def test_an_end_without_a_blank_line_is_kept_when_it_is_whole() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b'data: {"a":1}')) == []
    left = splitter.finish()
    assert left is not None and left.raw == b'data: {"a":1}\n\n'
    assert list(splitter.feed(b'data: {"a":')) == []
    assert splitter.finish() is None


def test_an_event_without_an_end_is_given_up() -> None:
    splitter = EventSplitter()
    with pytest.raises(EventTooLarge):
        for _ in range(20):
            list(splitter.feed(b"x" * (MAX_EVENT_BYTES // 16)))


USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
PIECE = {"choices": [{"delta": {"content": "a"}}]}


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([PIECE, PIECE, {"choices": [], "usage": USAGE}], (7, 2, 5)),
        ([PIECE, PIECE, {"usage": USAGE}], (7, 2, 5)),
        ([PIECE, {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE}], (7, 2, 5)),
        ([{**PIECE, "usage": {"prompt_tokens": 7, "completion_tokens": 1}}, {**PIECE, "usage": USAGE}], (7, 2, 5)),
        ([{**PIECE, "usage": None}, {"choices": [{"delta": {"role": "assistant"}}]}, PIECE], (0, 2, 0)),
        ([{"choices": [{"text": "a"}]}, {"choices": None}, {"choices": "odd"}], (0, 1, 0)),
        ([{"usage": {"prompt_tokens": "7", "completion_tokens": -1, "prompt_tokens_details": None}}], (0, 0, 0)),
    ],
)
def test_usage_is_read_in_every_shape(bodies: list[dict[str, Any]], expected: tuple[int, int, int]) -> None:
    tally = UpstreamTally()
    for body in bodies:
        tally.note(body)
    assert (tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens) == expected
