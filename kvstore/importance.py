"""From attention mass to the share of important tokens in each chunk (IMPRESS, FAST'25)."""

from __future__ import annotations

import torch

#: A token is important when it is among this share of the prompt's tokens that receive most attention.
IMPORTANT_FRACTION = 0.25

#: Weight of a new measurement in the moving average.
_WEIGHT = 0.3


def important_shares(mass: torch.Tensor, chunk_size: int) -> list[float]:
    """Share of important tokens in each chunk of a prompt.

    Args:
        mass: attention received by each prompt token, ``[n]``, any float dtype.
        chunk_size: tokens a chunk; the last one may hold fewer.

    Returns:
        One number in 0..1 for each chunk.
    """
    n = mass.numel()
    keep = max(1, round(n * IMPORTANT_FRACTION))
    important = torch.zeros(n)
    important[mass.float().topk(keep).indices] = 1.0
    return [float(part.mean()) for part in torch.split(important, chunk_size)]


def fold(average: float, measured: float) -> float:
    """Exponential moving average of a chunk's important share."""
    return average + _WEIGHT * (measured - average)
