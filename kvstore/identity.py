"""Identity: one digest of everything that changes the bytes of KV.

Two engines may share stored chunks only when their identities are equal. The parts keep their own digests, so
that a mismatch can be explained by name ("tokenizer differs") instead of by two unequal hex strings.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from kvstore.layout import LAYOUT_VERSION, KVLayout

_PART_PERSON = b"kvgate.part"
_IDENTITY_PERSON = b"kvgate.identity"


def _framed(*fields: bytes) -> bytes:
    """Length-prefix every field, so that no two different sequences of fields have the same bytes."""
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


@dataclass(frozen=True, slots=True)
class IdentityPart:
    """One named input of the identity. ``kind`` keeps equal bytes of different types apart."""

    name: str
    kind: str
    value: bytes

    @classmethod
    def of_bytes(cls, name: str, value: bytes) -> IdentityPart:
        return cls(name, "bytes", value)

    @classmethod
    def of_text(cls, name: str, value: str) -> IdentityPart:
        return cls(name, "text", value.encode())

    @classmethod
    def of_json(cls, name: str, value: object) -> IdentityPart:
        """Canonical JSON of plain data: key order, and integer against string keys, make no difference.

        Raises TypeError for anything that is not plain data (dict, list, str, number, bool, None).
        """
        plain = json.loads(json.dumps(value))
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return cls(name, "json", text.encode("utf-8", "surrogatepass"))

    @property
    def frame(self) -> bytes:
        return _framed(self.name.encode(), self.kind.encode(), self.value)

    @property
    def digest(self) -> str:
        """Printable digest of this part alone, 32 hex digits."""
        return hashlib.blake2b(self.frame, digest_size=16, person=_PART_PERSON).hexdigest()


class Identity:
    """Ordered, typed, length-framed parts and their 32-byte BLAKE2b digest (RFC 7693).

    Raises ValueError when two parts have the same name.
    """

    def __init__(self, parts: Iterable[IdentityPart]) -> None:
        ordered = tuple(parts)
        self.parts: dict[str, str] = {part.name: part.digest for part in ordered}
        if len(self.parts) != len(ordered):
            raise ValueError("two parts of an identity have the same name")
        frames = _framed(*(part.frame for part in ordered))
        self.digest: bytes = hashlib.blake2b(frames, digest_size=32, person=_IDENTITY_PERSON).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Identity({self.digest.hex()})"


def differing_parts(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the parts that differ or that only one side has; ours first, in order."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [name for name in names if ours.get(name) != theirs.get(name)]


def model_identity(
    *,
    model_config: Mapping[str, object],
    weights: bytes,
    quantisation: str,
    layout: KVLayout,
    tokenizer: bytes,
    adapter: bytes = b"",
) -> Identity:
    """The identity of one loaded model and the way its KV is stored.

    ``model_config`` is plain data and holds all that shapes attention (RoPE, window, soft-cap); leave out what
    does not change KV, such as the path it was loaded from. ``weights`` comes from ``weights_fingerprint``,
    ``tokenizer`` and ``adapter`` are digests made by the caller. The tenant namespace is no part of it: it goes
    into the root key.
    """
    geometry = {
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "chunk_size": layout.chunk_size,
    }
    return Identity(
        [
            IdentityPart.of_json("model_config", dict(model_config)),
            IdentityPart.of_bytes("weights", weights),
            IdentityPart.of_text("quantisation", quantisation),
            IdentityPart.of_text("kv_dtype", str(layout.dtype)),
            IdentityPart.of_json("layout", {"version": LAYOUT_VERSION, **geometry}),
            IdentityPart.of_bytes("tokenizer", tokenizer),
            IdentityPart.of_bytes("adapter", adapter),
        ]
    )


def weights_fingerprint(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """16-byte fingerprint of names, dtypes, shapes and *every byte* of the tensors, in order of name.

    File sizes and headers are not enough: two fine-tunes of one architecture have equal headers and differ only
    in the numbers. xxh3-128 runs at memory speed and is not cryptographic: it tells models apart, it does not
    defend against weights crafted to collide. Tensors on a device are copied to the host one at a time.
    """
    total = xxhash.xxh3_128()
    seen: dict[tuple[object, ...], bytes] = {}  # tied tensors share their memory: hashed once
    for name, tensor in sorted(named_tensors, key=lambda pair: pair[0]):
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        digest = seen.get(place)
        if digest is None:
            digest = seen[place] = xxhash.xxh3_128_digest(_bytes_of(tensor))
        total.update(_framed(name.encode(), str(tensor.dtype).encode(), repr(tuple(tensor.shape)).encode(), digest))
    return total.digest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes without a copy when it is contiguous on the host; bf16 and fp8 have no numpy type."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view
