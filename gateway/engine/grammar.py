"""Grammars at work: compiled by llguidance within limits, one matcher a sequence, masks computed beside the model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gateway.engine.grammar_spec import GrammarSpec, render
from gateway.engine.types import EngineError

#: Longest grammar text taken, in bytes; 64 KiB of the widest schema compile in about a second.
MAX_GRAMMAR_BYTES = 64 * 1024

#: CPU seconds that compiling with the first mask, or any later mask, may take.
_MAX_COMPILE_S = 2.0
_MAX_MASK_S = 0.5

#: llguidance's defaults let a short regex take seconds and hundreds of megabytes for one mask; these let it take less
#: than 0.1 s and 12 MB, and are far above what schemas of real tools need.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)

_CACHED_GRAMMARS = 32
_MASK_THREADS = 2


class GrammarError(EngineError):
    """The grammar can't be compiled, or took too much to follow. The message says which part and what to do."""

    status = 400
    code = "invalid_grammar"


class Matcher:
    """The state of one sequence in its grammar. The mask for the next token is computed while the model runs.

    ``done``: the grammar has ended, nothing but an end token could follow.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._threads = threads
        self.done = False
        self._next: Future[torch.Tensor] = threads.submit(self._compute)

    def forbidden(self) -> torch.Tensor:
        """Tokens that can't come next: bool ``[vocab]`` on CPU; end tokens are free where the grammar may end.

        Raises:
            GrammarError: following the grammar takes too much.
        """
        return self._next.result()

    def accepted(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens could come next, one after the other; nothing is stepped over."""
        self._next.result()
        return int(self._matcher.validate_tokens(list(token_ids)))

    def accept(self, token_id: int) -> None:
        """Step over a token that was free.

        Raises:
            GrammarError: it was not, or following the grammar takes too much.
        """
        # llguidance refuses to be used by two threads at once ("Already borrowed"): a mask nobody asked for ends first.
        self._next.result()
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"the answer left its grammar: {self._matcher.get_error()}; simplify the grammar")
        self.done = bool(self._matcher.is_stopped())
        if not self.done:
            self._next = self._threads.submit(self._compute)

    def _compute(self) -> torch.Tensor:
        started = time.thread_time()
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error() or time.thread_time() - started > _MAX_MASK_S:
            why = self._matcher.get_error() or "a step took too long"
            raise GrammarError(f"the grammar is too complex to follow ({why}); simplify it")
        allowed = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        forbidden = np.ones(self._vocab_size, dtype=bool)
        known = min(self._vocab_size, len(allowed))
        forbidden[:known] = allowed[:known] == 0
        return torch.from_numpy(forbidden)


class Grammar:
    """A compiled grammar; each sequence follows it with a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._threads = threads

    def matcher(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab_size, self._threads)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; compiling leaves the interpreter free for other threads.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: width of the logits.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._threads = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="kvgate-grammar")
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar, or take it from the last few.

        Raises:
            GrammarError: it is malformed, too large or too complex.
        """
        try:
            text = render(spec)
        except ValueError as error:
            raise GrammarError(f"the grammar can't be read: {_short(str(error))}") from None
        if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar has {size} bytes, more than the {MAX_GRAMMAR_BYTES} allowed; simplify it")
        return self._compiled(text)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> Grammar:
        vocabulary = self._get_vocabulary()
        started = time.thread_time()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the lexer: what is too complex mostly shows here
        if matcher.is_error():
            raise GrammarError(f"the grammar can't be used: {_short(matcher.get_error())}")
        if time.thread_time() - started > _MAX_COMPILE_S:
            raise GrammarError(f"the grammar took more than {_MAX_COMPILE_S:.0f} s to compile; simplify it")
        return Grammar(matcher, self._vocab_size, self._threads)

    def _get_vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:  # takes a second or two, so only for those who need it
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.backend_tokenizer.to_str(),
                        n_vocab=max(self._vocab_size, len(self._tokenizer)),
                        eos_token=self._end_ids,
                    )
                except Exception as error:  # foreign code on a foreign tokenizer
                    raise GrammarError(
                        f"answers of this model can't be constrained: llguidance can't read its tokenizer ({error}); "
                        "ask for the format in the prompt"
                    ) from error
            return self._vocabulary


def _short(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines)[:300]
