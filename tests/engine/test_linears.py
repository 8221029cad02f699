"""Packed and joined linears give what plain ones give, row by row, in whatever order a model calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gateway.engine.linears import JoinedLinear, PackedLinear, pack_linears

IN, OUT, KV = 64, 96, 32


class Layer(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.q_proj = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
        self.k_proj = nn.Linear(IN, KV, bias=bias, dtype=dtype)
        self.v_proj = nn.Linear(IN, KV, bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(OUT, IN, bias=bias, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_joined_linears_are_equal_to_packed_ones(bias: bool) -> None:
    torch.manual_seed(0)
    layer = Layer(bias)
    alone = {name: PackedLinear(child) for name, child in layer.named_children()}
    assert pack_linears(layer) == 4
    assert isinstance(layer.q_proj, JoinedLinear) and isinstance(layer.o_proj, PackedLinear)
    for rows in (1, 5, 300):
        x, y = (torch.randn(1, rows, IN, dtype=torch.bfloat16) for _ in range(2))
        for order in (("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj"), ("q_proj", "q_proj", "k_proj")):
            for name in order:
                assert torch.equal(getattr(layer, name)(x), alone[name](x)), f"{name} of {rows} rows"
        for name in ("q_proj", "k_proj", "v_proj"):  # an input that was not used up must not answer for another
            assert torch.equal(getattr(layer, name)(y), alone[name](y))
        assert torch.equal(layer.q_proj(x)[:, :1], layer.q_proj(x[:, :1].clone())), "a row depends on its company"


@torch.inference_mode()
def test_what_does_not_fit_stays_as_it_is() -> None:
    layer = Layer(False, torch.float32)
    assert pack_linears(layer) == 0 and type(layer.q_proj) is nn.Linear
    mixed = Layer(False)
    mixed.k_proj = nn.Linear(IN, KV, bias=True, dtype=torch.bfloat16)
    assert pack_linears(mixed) == 4
    assert isinstance(mixed.q_proj, PackedLinear), "linears with and without a bias can't be one"
