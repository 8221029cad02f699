"""Packed and joined linears give what plain ones give, row by row, in whatever order a model calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gateway.engine.linears import JoinedLinear, PackedLinear, can_pack, pack_linears

IN, OUT, KV = 64, 96, 32


class Layer(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.q_proj = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
        self.k_proj = nn.Linear(IN, KV, bias=bias, dtype=dtype)
        self.v_proj = nn.Linear(IN, KV, bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(OUT, IN, bias=bias, dtype=dtype)


#: The dtypes that this machine can pack: a processor without AVX-512 has float32 only.
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_joined_linears_are_equal_to_packed_ones(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(bias, dtype)
    alone = {name: PackedLinear(child) for name, child in layer.named_children()}
    assert pack_linears(layer) == 4
    assert isinstance(layer.q_proj, JoinedLinear) and isinstance(layer.o_proj, PackedLinear)
    for rows in (1, 5, 300):
        x, y = (torch.randn(1, rows, IN, dtype=dtype) for _ in range(2))
        for order in (("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj"), ("q_proj", "q_proj", "k_proj")):
            for name in order:
                assert torch.equal(getattr(layer, name)(x), alone[name](x)), f"{name} of {rows} rows"
        for name in ("q_proj", "k_proj", "v_proj"):  # an input that was not used up must not answer for another
            assert torch.equal(getattr(layer, name)(y), alone[name](y))
        assert torch.equal(layer.q_proj(x)[:, :1], layer.q_proj(x[:, :1].clone())), "a row depends on its company"


@pytest.mark.parametrize("dtype", PACKED)
@torch.inference_mode()
def test_what_does_not_fit_stays_as_it_is(dtype: torch.dtype) -> None:
    layer = Layer(False, torch.float16)
    assert pack_linears(layer) == 0 and type(layer.q_proj) is nn.Linear
    mixed = Layer(False, dtype)
    mixed.k_proj = nn.Linear(IN, KV, bias=True, dtype=dtype)
    assert pack_linears(mixed) == 4
    assert isinstance(mixed.q_proj, PackedLinear), "linears with and without a bias can't be one"


@torch.inference_mode()
def test_a_dtype_that_the_processor_cannot_pack_is_served_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    can_pack.cache_clear()
    try:
        layer = Layer(False)
        assert pack_linears(layer) == 0
        assert layer.q_proj(torch.ones(1, IN, dtype=torch.bfloat16)).shape == (1, OUT)
    finally:
        can_pack.cache_clear()
