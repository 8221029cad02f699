from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvstore.identity import Identity, IdentityPart, differing_parts, model_identity, weights_fingerprint
from tests.kvstore.chunks import SMALL

GIVEN = {
    "model_config": {"rope_theta": 10000.0, "layers": 2, "rope": {"type": "linear", "factor": 2}},
    "weights": b"w",
    "quantisation": "none",
    "layout": SMALL,
    "tokenizer": b"t",
    "adapter": b"",
}


def test_equal_inputs_in_any_key_order_have_one_identity():
    shuffled = {"rope": {"factor": 2, "type": "linear"}, "layers": 2, "rope_theta": 10000.0}
    ours = model_identity(**GIVEN)
    assert ours == model_identity(**{**GIVEN, "model_config": shuffled})
    assert len(ours.digest) == 32


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_config": {**GIVEN["model_config"], "rope_theta": 10000.5}}, "model_config"),
        ({"model_config": {**GIVEN["model_config"], "rope": {"type": "linear", "factor": 4}}}, "model_config"),
        ({"weights": b"v"}, "weights"),
        ({"quantisation": "q8_0"}, "quantisation"),
        ({"layout": replace(SMALL, dtype=torch.float16)}, "kv_dtype"),
        ({"layout": replace(SMALL, chunk_size=64)}, "layout"),
        ({"layout": replace(SMALL, kv_heads=4)}, "layout"),
        ({"tokenizer": b"u"}, "tokenizer"),
        ({"adapter": b"lora"}, "adapter"),
    ],
)
def test_any_change_is_another_identity_and_is_named(change, part):
    ours, theirs = model_identity(**GIVEN), model_identity(**{**GIVEN, **change})
    assert ours.digest != theirs.digest
    assert differing_parts(ours.parts, theirs.parts) == [part]


def test_a_part_that_only_one_side_has_differs():
    assert differing_parts({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ["a", "c"]


def test_parts_are_typed_and_framed():
    digests = {
        Identity([IdentityPart.of_text("a", "bc")]).digest,
        Identity([IdentityPart.of_text("ab", "c")]).digest,
        Identity([IdentityPart.of_bytes("a", b"bc")]).digest,
        Identity([IdentityPart.of_text("a", "b"), IdentityPart.of_text("c", "")]).digest,
        Identity([IdentityPart.of_text("c", ""), IdentityPart.of_text("a", "b")]).digest,
    }
    assert len(digests) == 5


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name"):
        Identity([IdentityPart.of_text("a", "1"), IdentityPart.of_text("a", "2")])


def test_a_config_read_back_from_json_is_the_same_config():
    in_memory = IdentityPart.of_json("c", {"id2label": {2: "b", 10: "a"}, "sizes": (1, 2)})
    from_file = IdentityPart.of_json("c", {"id2label": {"10": "a", "2": "b"}, "sizes": [1, 2]})
    assert in_memory == from_file


def test_config_that_is_not_plain_data_is_refused():
    with pytest.raises(TypeError):
        IdentityPart.of_json("c", {"dtype": torch.bfloat16})


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 6, generator=generator).to(dtype) for name in ("a", "b", "norm")}


def test_one_bit_of_one_weight_is_another_fingerprint():
    changed = tensors()
    changed["b"].view(torch.int16)[7, 5] ^= 1
    assert weights_fingerprint(tensors().items()) != weights_fingerprint(changed.items())


def test_names_shapes_and_dtypes_are_part_of_the_fingerprint():
    plain = tensors()
    variants = [
        plain,
        {**plain, "a": plain["a"].reshape(6, 8)},
        {**plain, "a": plain["a"].view(torch.float16)},
        {"a": plain["b"], "b": plain["a"], "norm": plain["norm"]},
        {"a": plain["a"], "b": plain["b"]},
    ]
    assert len({weights_fingerprint(variant.items()) for variant in variants}) == len(variants)


def test_order_memory_layout_and_tying_make_no_difference():
    plain = tensors()
    transposed = {name: tensor.t().contiguous().t() for name, tensor in plain.items()}
    assert weights_fingerprint(reversed(plain.items())) == weights_fingerprint(plain.items())
    assert weights_fingerprint(transposed.items()) == weights_fingerprint(plain.items())
    tied = {"head": plain["a"], **plain}
    untied = {"head": plain["a"].clone(), **plain}
    assert weights_fingerprint(tied.items()) == weights_fingerprint(untied.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_every_storage_dtype_and_scalars_can_be_fingerprinted(dtype):
    named = {**tensors(dtype), "scale": torch.tensor(2.0), "empty": torch.empty(0, 4)}
    assert len(weights_fingerprint(named.items())) == 16


def test_identity_and_fingerprint_are_the_same_in_every_process():
    script = (
        "from tests.kvstore.test_identity import *;"
        "print(model_identity(**GIVEN).digest.hex(), weights_fingerprint(tensors().items()).hex())"
    )
    expected = [model_identity(**GIVEN).digest.hex(), weights_fingerprint(tensors().items()).hex()]
    for seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert printed.stdout.split() == expected
