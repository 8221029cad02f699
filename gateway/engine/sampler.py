"""Picking the next token: one Sampler a sequence, so a seed gives the same text alone or in a batch."""

from __future__ import annotations

import secrets

import torch

from gateway.engine.types import SamplingParams, TokenLogprobs

#: Candidates looked at before a full sort; nearly always holds all of top_p's mass.
_NUCLEUS_GUESS = 512


def token_logprobs(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probabilities of ``token_id`` and of the ``top`` best tokens in ``logits`` (``[vocab]``, any float dtype)."""
    row = torch.log_softmax(logits.float(), -1)
    best = row.topk(min(top, row.numel()))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(token_id, float(row[token_id]), tuple(pairs))


class Sampler:
    """Applies one request's sampling settings to rows of logits.

    The order is vLLM's: logit_bias, penalties, temperature, min_p, top_k, top_p. Presence and frequency
    penalties count the answer's tokens (OpenAI API); the repetition penalty counts the prompt's too (CTRL paper).

    Args:
        params: validated settings.
        prompt_ids: the prompt's token ids.
        vocab_size: width of the logits.
        device: where logits live.
    """

    def __init__(self, params: SamplingParams, prompt_ids: list[int], vocab_size: int, device: torch.device) -> None:
        self._params = params
        self._generator = torch.Generator(device=device)
        # manual_seed takes 64 bits; OpenAI seeds may be negative.
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        self._generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, device=device)
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt_ids, dtype=torch.long, device=device)] = True
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            self._bias = (ids, values)

    @property
    def is_plain_greedy(self) -> bool:
        """True when argmax of the raw logits is the answer, so that rows can be done in one batched call."""
        return self._params.temperature == 0 and self._bias is None and self._counts is None and self._seen is None

    def sample(self, logits: torch.Tensor, forbidden: torch.Tensor | None = None) -> int:
        """Choose a token from ``logits`` (``[vocab]``, any float dtype; not changed), none of the ``forbidden``.

        Args:
            logits: of the model.
            forbidden: bool ``[vocab]`` on any device, tokens that a grammar rules out.
        """
        row = self._adjust(logits.float())
        if forbidden is not None:
            row = row.masked_fill(forbidden.to(row.device), float("-inf"))
        if self._params.temperature == 0:
            return self._note(int(row.argmax()))
        row = row / self._params.temperature
        ids, probabilities = self._nucleus(row)
        choice = torch.multinomial(probabilities, 1, generator=self._generator)
        return self._note(int(choice if ids is None else ids[choice]))

    def note(self, token_id: int) -> None:
        """Count a token chosen elsewhere (the batched greedy path)."""
        self._note(token_id)

    def _note(self, token_id: int) -> int:
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True
        return token_id

    def _adjust(self, row: torch.Tensor) -> torch.Tensor:
        params = self._params
        if self._bias is not None:
            row = row.index_add(0, *self._bias)
        if self._seen is not None:
            penalised = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row = torch.where(self._seen, penalised, row)
        if self._counts is not None:
            row = row - params.frequency_penalty * self._counts - params.presence_penalty * (self._counts > 0)
        return row

    def _nucleus(self, row: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Candidate ids (None = the whole vocabulary) and their unnormalised probabilities."""
        params = self._params
        probabilities = torch.softmax(row, -1)
        if params.min_p > 0:
            probabilities = torch.where(probabilities < params.min_p * probabilities.max(), 0.0, probabilities)
        top_k = params.top_k if 0 < params.top_k < row.numel() else 0
        if not top_k and params.top_p >= 1.0:
            return None, probabilities
        kept, ids = probabilities.topk(top_k or min(_NUCLEUS_GUESS, row.numel()))
        if params.top_p < 1.0:
            total = kept.sum() if top_k else probabilities.sum()
            if not top_k and kept.sum() < params.top_p * total:
                kept, ids = probabilities.sort(descending=True)
            # Keep a token while the mass before it is below top_p: the first is always kept.
            before = kept.cumsum(-1) - kept
            kept = torch.where(before < params.top_p * total, kept, 0.0)
        return ids, kept
