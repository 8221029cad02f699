"""Linear layers with weights laid out once for oneDNN, on CPU in bfloat16 or float32.

A plain ``nn.Linear`` reorders its weight inside every call; at one row that is most of the time. Measured on
two AVX-512 cores with SmolLM2-135M: all layers at one row 15.5 ms plain, 7.3 ms packed; the output head 3.1 and
0.9 ms. Packed products also give each row the same bits whatever the number of rows, which keeps a batched answer
equal to a solo one; plain float32 products don't.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Drop-in for ``nn.Linear`` in inference: ``[..., in] -> [..., out]``, bfloat16 or float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # The row count is a hint; the packed layout measured the same for 1, 16 and 256.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)
        self._bias = None if linear.bias is None else linear.bias.detach().clone()

        self.dtype = linear.weight.dtype
        self.biased = self._bias is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A strided input takes a path that is forty times slower.
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self._packed, self._bias, "none", [], "")
        return out


def pack_linears(model: nn.Module) -> int:
    """Replace the model's plain CPU linears by packed ones; returns how many were replaced.

    Subclasses of ``nn.Linear``, other devices and dtypes that this processor or this build of torch can't pack stay
    as they are.
    """
    replaced = 0
    for parent in list(model.modules()):
        replaced += _join(parent)
        for name, child in list(parent.named_children()):
            if _is_plain(child):
                assert isinstance(child, nn.Linear)
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    if replaced:
        _leave_the_file(model)
    return replaced


#: Multiply-adds of a product; on two cores with AVX2 as many take about as long as compiling for them.
_WORTH_COMPILING = 1 << 28


@torch.inference_mode()
def compile_kernels(model: nn.Module, row_counts: Iterable[int]) -> None:
    """Run one packed linear of each shape at each row count, so that no request waits for oneDNN's compiler.

    Left out are products so large that compiling is little beside computing them.
    """
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    packed += [module.packed for module in model.modules() if isinstance(module, JoinedLinear)]
    by_shape = {(linear.in_features, linear.out_features, linear.biased): linear for linear in packed}
    for linear in by_shape.values():
        for rows in (n for n in row_counts if n * linear.in_features * linear.out_features <= _WORTH_COMPILING):
            linear(torch.zeros(1, rows, linear.in_features, dtype=linear.dtype))


def _leave_the_file(model: nn.Module) -> None:
    """Copy what was not packed: any one tensor that is a view of the weights' file keeps all of it in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


class _Shared:
    """One packed product for several linears that a model calls on the same input, one after the other."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        joined = nn.Linear(
            linears[0].in_features, sum(linear.out_features for linear in linears), bias=False, device="meta"
        )
        joined.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
        if linears[0].bias is not None:
            joined.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
        self.packed = PackedLinear(joined)
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._left: set[int] = set()
        self._members = range(len(linears))

    def part(self, member: int, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Columns ``[start, stop)`` of the joined product; computed once for each new input tensor."""
        if self._input is not x or member not in self._left:
            self._input, self._output = x, self.packed(x)
            self._left = set(self._members)
        assert self._output is not None
        part = self._output[..., start:stop]
        self._left.discard(member)
        if not self._left:
            self._input = self._output = None  # hold no activations between steps
        return part


class JoinedLinear(nn.Module):
    """One of several linears that share a product (q, k and v; gate and up). ``[..., in] -> [..., out]``, strided."""

    def __init__(self, shared: _Shared, member: int, start: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._shared = shared
        self._member = member
        self._start = start

    @property
    def packed(self) -> PackedLinear:
        return self._shared.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.part(self._member, x, self._start, self._start + self.out_features)


#: Names under which transformers' models keep linears that all take the layer's (normalised) input.
_JOINABLE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _join(parent: nn.Module) -> int:
    """Join what can be joined among a module's children; returns how many linears were replaced."""
    replaced = 0
    for names in _JOINABLE:
        found = [getattr(parent, name, None) for name in names]
        linears = [child for child in found if isinstance(child, nn.Linear) and _is_plain(child)]
        alike = {(child.in_features, child.bias is None) for child in linears}
        if len(linears) != len(names) or len(alike) != 1:
            continue
        shared, start = _Shared(linears), 0
        for member, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(parent, name, JoinedLinear(shared, member, start, linear))
            start += linear.out_features
            replaced += 1
    return replaced


def _is_plain(child: nn.Module) -> bool:
    return type(child) is nn.Linear and child.weight.device.type == "cpu" and can_pack(child.weight.dtype)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed products of ``dtype`` work here; tried out, as oneDNN refuses bfloat16 without AVX-512."""
    if dtype not in (torch.bfloat16, torch.float32) or not torch.backends.mkldnn.enabled:
        return False
    linear = nn.Linear(32, 32, bias=False, dtype=dtype)
    row = torch.ones(1, 32, dtype=dtype)
    try:
        return bool(torch.isfinite(PackedLinear(linear)(row)).all())
    except (RuntimeError, AttributeError):  # AttributeError: a build of torch without these operators
        return False
