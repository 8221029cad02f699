"""The forward pass: packed token batches through the model, with KV in the arena."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from gateway.engine.attention import AttentionBatch, ProbeSink, Scratch, Segment, page_runs
from gateway.engine.attention_parts import flash_pays
from gateway.engine.loader import LoadedModel
from gateway.engine.sources import ModelError
from kvstore.layout import KVLayout
from kvstore.tiers.device import DeviceArena

#: Self-check: largest difference of logits allowed against transformers' own attention, per dtype.
_SELF_CHECK_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.25, torch.bfloat16: 1.0}


def padded_rows(n: int) -> int:
    """The row count at which a step of ``n`` tokens runs: one row or less than a quarter more.

    oneDNN compiles a kernel for each linear and row count it meets (measured: 5 to 8 ms and half a MiB), so with
    counts as they come every new length of question would wait for a few of them, and fill the kernel cache.
    """
    if n <= 2:
        return n
    step = max(2, min(16, (1 << (n - 1).bit_length()) // 8))
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Work:
    """New tokens of one sequence to run in a step; must not cross a page boundary."""

    token_ids: Seq[int]
    start: int  # position of the first of them
    pages: Seq[int]  # page table covering start + len(token_ids) tokens
    wants_logits: bool
    probe: ProbeSink | None = None


class ModelRunner:
    """Runs steps of a loaded model over an arena. Not thread-safe: the engine thread owns it.

    With ``deterministic`` each sequence runs by itself: matrix products may round a row differently with another
    number of rows beside it.
    """

    def __init__(self, loaded: LoadedModel, arena: DeviceArena, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._model = loaded.model
        self._device = loaded.device
        self._arena = arena
        self._scratch = Scratch()
        self._use_flash = flash_pays(loaded.device, loaded.dtype)
        self._heads_per_kv = loaded.geometry.heads // loaded.geometry.kv_heads
        parameters = inspect.signature(loaded.model.forward).parameters
        self._takes_rows = "logits_to_keep" in parameters

    @torch.inference_mode()
    def forward(self, batch: Seq[Work]) -> torch.Tensor:
        """Compute and store the KV of all work; logits of the last token of each item that wants them.

        Returns:
            ``[n, vocab]`` in the model's dtype, rows in the order of ``batch``; ``n`` may be 0.
        """
        if self._deterministic and len(batch) > 1:
            return torch.cat([self._forward([work]) for work in batch])
        return self._forward(batch)

    def _forward(self, batch: Seq[Work]) -> torch.Tensor:
        token_ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for work in batch:
            segments.append(Segment(len(token_ids), len(work.token_ids), work.start, work.pages, work.probe))
            token_ids.extend(work.token_ids)
            positions.extend(range(work.start, work.start + len(work.token_ids)))
            if work.wants_logits:
                rows.append(len(token_ids) - 1)
        kv_batch = AttentionBatch(
            self._arena.kv,
            self._arena.layout.chunk_size,
            segments,
            self._scratch,
            deterministic=self._deterministic,
            use_flash=self._use_flash,
        )
        keep = torch.tensor(rows or [len(token_ids) - 1], device=self._device)
        padding = padded_rows(len(token_ids)) - len(token_ids)
        token_ids.extend(token_ids[-1:] * padding)
        positions.extend(positions[-1:] * padding)
        extra = {"logits_to_keep": keep} if self._takes_rows else {}
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            kv_batch=kv_batch,
            **extra,
        )
        logits: torch.Tensor = output.logits[0] if self._takes_rows else output.logits[0, keep]
        return logits[: len(rows)]

    @torch.inference_mode()
    def probe_scores(self, probe: ProbeSink, pages: Seq[int], n_tokens: int) -> torch.Tensor:
        """Attention mass that each of the first ``n_tokens`` receives from the probe heads' kept queries.

        Summed over layers, probe heads and queries of the observation window (SnapKV, H2O; IMPRESS's probe heads).
        The queries are the last ``probe.rows`` of the ``n_tokens`` positions.

        Returns:
            fp32 ``[n_tokens]`` on CPU.
        """
        layout = self._arena.layout
        total = torch.zeros(n_tokens, device=self._device)
        runs = page_runs(pages, layout.chunk_size, n_tokens)
        hidden = torch.ones(probe.rows, probe.rows, dtype=torch.bool, device=self._device).triu_(1)
        kv_of = [head // self._heads_per_kv for head in probe.heads]
        for layer, queries in probe.queries.items():
            scores = torch.empty(len(kv_of), probe.rows, n_tokens, dtype=queries.dtype, device=self._device)
            column = 0
            for run in runs:
                for i, kv_head in enumerate(kv_of):
                    keys = self._arena.kv[layer, 0, kv_head, run.slot : run.slot + run.length]
                    scores[i, :, column : column + run.length] = queries[i] @ keys.T
                column += run.length
            scores.mul_(probe.scaling)
            scores[:, :, n_tokens - probe.rows :].masked_fill_(hidden, float("-inf"))
            total += torch.softmax(scores, -1).sum((0, 1), dtype=torch.float32)
        return total.cpu()


def self_check(loaded: LoadedModel) -> None:
    """Compare our paged attention with transformers' own on a short text, in two pieces over two pages.

    A model may take part in AttentionInterface and still want something our function doesn't know (a position
    bias, chunked attention): then its logits differ here, and it is refused instead of answering wrongly.

    Raises:
        ModelError: the logits differ by more than rounding explains.
    """
    geometry = loaded.geometry
    layout = KVLayout(geometry.layers, geometry.kv_heads, geometry.head_dim, loaded.dtype, chunk_size=16)
    arena = DeviceArena(layout, n_pages=2, device=loaded.device)
    ids = [(7 * i + 3) % loaded.vocab_size for i in range(24)]
    runner = ModelRunner(loaded, arena)
    runner.forward([Work(ids[:10], 0, [1, 0], wants_logits=False)])
    runner.forward([Work(ids[10:16], 10, [1, 0], wants_logits=False)])
    runner.forward([Work(ids[16:23], 16, [1, 0], wants_logits=False)])
    ours = runner.forward([Work(ids[23:], 23, [1, 0], wants_logits=True)])[0].float()
    served = loaded.model.config._attn_implementation
    try:
        loaded.model.set_attn_implementation("eager")
        with torch.inference_mode():
            theirs = loaded.model(torch.tensor([ids], device=loaded.device), use_cache=False).logits[0, -1].float()
    finally:
        loaded.model.set_attn_implementation(served)
    spread = float(theirs.std()) or 1.0
    difference = float((ours - theirs).abs().max()) / max(1.0, spread)
    if not difference <= _SELF_CHECK_TOLERANCE[loaded.dtype]:
        raise ModelError(
            f"model {loaded.source!r} can't be served: with paged attention its logits differ from transformers' own "
            f"by {difference:.3g}, so cached answers would be wrong. Forward it with [server].api_base, and please "
            "report the model's name."
        )
