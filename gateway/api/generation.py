"""Running the answers of one request: in parallel, merged, cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

from gateway.answer.pieces import Piece
from gateway.answer.reader import AnswerReader
from gateway.api.drain import shutting_down
from gateway.api.errors import ApiError
from gateway.api.sse import disconnected
from gateway.engine.protocol import EngineProtocol
from gateway.engine.types import CacheReport, Delta, EngineOverloaded, FinishReason, GenerationRequest, Started
from gateway.protocol.responses import AnswerFormat, Choice, Usage

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], expired: asyncio.Event | None = None) -> T:
    """Await ``work``, and cancel it when the client goes away.

    Args:
        request: whose client is watched.
        work: makes the answer.
        expired: set when the server can't wait any longer; None = it tells ``work`` in another way.

    Raises:
        ClientGone: it did.
        EngineClosed: ``expired``.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(request.receive))
    end = asyncio.ensure_future((expired or asyncio.Event()).wait())
    try:
        await asyncio.wait({task, watcher, end}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise shutting_down() if end.done() else ClientGone
    finally:
        for each in (task, watcher, end):
            each.cancel()
        await asyncio.gather(task, watcher, end, return_exceptions=True)


class Generation:
    """The engine's answers to one HTTP request.

    Of the answers to one prompt the first leads: the others begin at its first token, so that they find its prompt in
    the cache instead of computing it as well.

    Args:
        engine: runs them.
        requests: one an answer, in the order of choices.
        per_prompt: answers to each prompt; they are neighbours.
        max_wait_seconds: the request is given up when nothing of it has begun after so long.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        requests: Sequence[GenerationRequest],
        per_prompt: int,
        max_wait_seconds: float = 300.0,
    ) -> None:
        self._engine = engine
        self._max_wait_seconds = max_wait_seconds
        self._patience: asyncio.TimerHandle | None = None
        self._requests = requests
        self._per_prompt = per_prompt
        self._leaders = range(0, len(requests), per_prompt)
        self._led = {leader: asyncio.Event() for leader in self._leaders}
        self._started: dict[int, CacheReport] = {}
        self._all_led = asyncio.Event()
        self._failure: Exception | None = None
        self._events: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._completion_tokens = 0
        self.stop_strings: dict[int, str] = {}  # by choice, of those that a stop string ended

    @property
    def choices(self) -> int:
        return len(self._requests)

    @property
    def cache(self) -> CacheReport:
        """Where the prompts' KV came from; a prompt with several answers counts once."""
        reports = [self._started[leader] for leader in self._leaders]
        return CacheReport(
            prompt_tokens=sum(report.prompt_tokens for report in reports),
            gpu=sum(report.gpu for report in reports),
            cpu=sum(report.cpu for report in reports),
            disk=sum(report.disk for report in reports),
        )

    @property
    def usage(self) -> Usage:
        cache = self.cache
        return Usage(cache.prompt_tokens, self._completion_tokens, cache.cached_tokens)

    @property
    def _has_started(self) -> bool:
        return all(leader in self._started for leader in self._leaders)

    async def start(self) -> None:
        """Begin, and wait until the prefix of each prompt was looked up. A second call goes on waiting.

        Raises:
            EngineError: one of them can't run.
        """
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._pump(i, request)) for i, request in enumerate(self._requests)]
            self._patience = asyncio.get_running_loop().call_later(self._max_wait_seconds, self._give_up)
        await self._all_led.wait()
        if self._failure is not None and not self._has_started:
            raise self._failure

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Pieces of all answers with their index, as they come, until each has ended.

        Raises:
            Exception: what ended one of them.
        """
        running = len(self._requests)
        while running:
            index, item = await self._events.get()
            if isinstance(item, Exception):
                raise item
            self._completion_tokens += len(item.token_ids)
            running -= item.finish_reason is not None
            if item.stop_string is not None:
                self.stop_strings[index] = item.stop_string
            yield index, item

    async def close(self) -> None:
        """End what still runs."""
        if self._patience is not None:
            self._patience.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        leader = index - index % self._per_prompt
        led = self._led[leader]
        try:
            if index != leader:
                await led.wait()
            async with aclosing(self._engine.generate(request)) as events:
                async for item in events:
                    if isinstance(item, Started):
                        self._note_start(index, item.cache)
                    else:
                        led.set()
                        self._events.put_nowait((index, item))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the answers with this error, unless they have ended."""
        self._failure = self._failure or error
        self._all_led.set()
        self._events.put_nowait((0, error))

    def _give_up(self) -> None:
        self.fail(
            EngineOverloaded(
                f"the request waited {self._max_wait_seconds:g} s and had not begun; retry later, or raise "
                "[limits].max_wait_seconds"
            )
        )

    def _note_start(self, index: int, cache: CacheReport) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._started[index] = cache
        if self._has_started:
            self._all_led.set()


async def read_answers(
    generation: Generation, reader: Callable[[], AnswerReader]
) -> AsyncIterator[tuple[int, Piece, str | None]]:
    """Index, piece and (with the last one) finish reason of each answer, as they come.

    Args:
        generation: started.
        reader: makes the reader of one answer.

    Raises:
        Exception: what ended one of them.
    """
    readers = [reader() for _ in range(generation.choices)]
    async for index, delta in generation.deltas():
        piece = readers[index].read(delta)
        reason = delta.finish_reason
        yield index, piece, None if reason is None else readers[index].finish_reason(_checked(reason))


async def answer_chunks(
    generation: Generation,
    form: AnswerFormat,
    reader: Callable[[], AnswerReader] = AnswerReader,
    *,
    include_usage: bool,
) -> AsyncIterator[dict[str, Any]]:
    """Bodies of a generation's streamed chunks. Closing the generation is the caller's.

    Raises:
        Exception: what ended it.
    """
    await generation.start()
    for index in range(generation.choices):
        if (opening := form.opening(index)) is not None:
            yield opening
    async for index, piece, reason in read_answers(generation, reader):
        if piece:
            yield form.piece(index, piece)
        if reason is not None:
            yield form.ending(index, reason)
    if include_usage:
        yield form.usage(generation.usage)


async def whole_answer(generation: Generation, reader: Callable[[], AnswerReader] = AnswerReader) -> list[Choice]:
    """All answers of a started generation.

    Raises:
        Exception: what ended one of them.
    """
    pieces: list[list[Piece]] = [[] for _ in range(generation.choices)]
    reasons = [""] * generation.choices
    async for index, piece, reason in read_answers(generation, reader):
        pieces[index].append(piece)
        reasons[index] = reason or reasons[index]
    return [Choice.of(made, reason) for made, reason in zip(pieces, reasons, strict=True)]


def _checked(reason: FinishReason) -> FinishReason:
    """A reason that clients may see.

    Raises:
        ApiError: the engine gave up; a client must not take what it has for a whole answer.
    """
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason
    raise ApiError(500, "the engine ended this answer early; send the request again", code="engine_error")
