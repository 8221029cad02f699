"""Loading a Hugging Face causal LM for paged serving, and refusing by name what can't be served exactly."""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gateway.engine import attention
from gateway.engine.sources import ModelError, resolve_source

log = logging.getLogger(__name__)

_PROBE_NAME = "kvgate_geometry_probe"

#: RoPE whose frequencies depend on the length of the request: a prefix's KV would differ by what follows it.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a model's KV and attention, as seen in a real forward pass."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]  # sliding window of each layer, 0 = full attention


@dataclass(slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: Any  # a fast tokenizer of transformers
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    max_model_len: int  # what is served: [model].max_model_len, or the model's own limit
    position_limit: int  # the model's own limit
    vocab_size: int
    eos_token_ids: frozenset[int]
    source: str

    @property
    def config_dict(self) -> dict[str, Any]:
        """The model config without keys that say where it lies or which library wrote it."""
        volatile = ("_name_or_path", "transformers_version", "_attn_implementation", "_from_model_config")
        plain = json.loads(self.model.config.to_json_string(use_diff=False))
        return {k: v for k, v in plain.items() if k not in volatile}

    @property
    def tokenizer_json(self) -> bytes:
        return str(self.tokenizer.backend_tokenizer.to_str()).encode()


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the hardware multiplies it natively, else float32 (float16 on older CUDA)."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    if platform.system() != "Linux":
        return False
    flags = Path("/proc/cpuinfo").read_text(errors="replace")
    return any(f" {flag}" in flags for flag in ("avx512_bf16", "amx_bf16", "bf16 ", "svebf16"))


def load_model(name: str, *, dtype: str = "auto", max_model_len: int = 0, cache_dir: Path | None = None) -> LoadedModel:
    """Load ``name`` (``demo``, folder, GGUF file or hub id) and check that its KV can be paged and reused exactly.

    Raises:
        ModelError: not found, or can't be served; the message holds the reason and a remedy.
    """
    device = pick_device()
    torch_dtype = pick_dtype(dtype, device)
    source = resolve_source(name, torch_dtype, cache_dir)
    config = _load_config(source, name)
    limit = _position_limit(config)
    wanted = max_model_len or limit
    _refuse_by_config(config, name, wanted)
    attention.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch_dtype, attn_implementation=attention.ATTENTION_NAME
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(_unservable(name, f"transformers can't load it ({_first_line(error)})")) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(_unservable(name, "it has no fast tokenizer (tokenizer.json)"))
    torch.nn.Module.to(model, device)
    model.train(False).requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        geometry=probe_geometry(model, name),
        dtype=torch_dtype,
        device=device,
        max_model_len=wanted,
        position_limit=limit,
        vocab_size=int(config.get_text_config().vocab_size),
        eos_token_ids=_eos_ids(model, tokenizer),
        source=source,
    )


def _load_config(source: str, name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"[model].name = {name!r} can't be found or read ({_first_line(error)}); use 'demo', a local model "
            "folder, a .gguf file, or a hub id that this machine can download or has in its cache"
        ) from error


def _position_limit(config: Any) -> int:
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        if value := getattr(text, key, None):
            return int(value)
    return 4096


def _refuse_by_config(config: Any, name: str, max_model_len: int) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(_unservable(name, "it is an encoder-decoder model; only decoder-only models are served"))
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Models with several attention kinds hold one set of RoPE parameters for each.
    sets = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for parameters in sets:
        kind = parameters.get("rope_type", "default")
        original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        if kind in _LENGTH_DEPENDENT_ROPE and max_model_len > original:
            raise ModelError(
                _unservable(
                    name,
                    f"its RoPE ({kind}) changes with the length of a request beyond {original} tokens, so the KV of a "
                    f"prefix can't be reused there; set [model].max_model_len to {original} or less",
                )
            )


def probe_geometry(model: PreTrainedModel, name: str) -> Geometry:
    """Run three tokens with a recording attention function; refuse models whose state isn't plain per-layer KV.

    Raises:
        ModelError: some layer doesn't go through AttentionInterface, or KV shapes differ between layers.
    """
    seen: dict[int, tuple[int, int, int, int, int]] = {}

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        seen[layer] = (query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], sliding_window or 0)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(_PROBE_NAME, record)
    served = model.config._attn_implementation
    try:
        model.set_attn_implementation(_PROBE_NAME)
        ids = torch.zeros(1, 3, dtype=torch.long, device=model.device)
        with torch.inference_mode():
            model(ids, position_ids=torch.arange(3, device=model.device)[None], use_cache=False)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ModelError(_unservable(name, f"a trial pass failed ({_first_line(error)})")) from error
    finally:
        model.set_attn_implementation(served)
    layers = int(model.config.get_text_config().num_hidden_layers)
    if not seen:
        raise ModelError(_unservable(name, "its attention doesn't go through transformers' AttentionInterface"))
    if sorted(seen) != list(range(layers)):
        raise ModelError(
            _unservable(
                name,
                f"only {len(seen)} of its {layers} layers use attention; recurrent or linear-attention layers keep a "
                "state that isn't a KV cache",
            )
        )
    shapes = {(h, kv, kd, vd) for h, kv, kd, vd, _ in seen.values()}
    if len(shapes) > 1:
        raise ModelError(_unservable(name, "the shape of its KV differs between layers"))
    heads, kv_heads, k_dim, v_dim = shapes.pop()
    if k_dim != v_dim or heads % kv_heads:
        raise ModelError(_unservable(name, f"its keys and values differ in width ({k_dim} and {v_dim})"))
    windows = tuple(seen[i][4] for i in range(layers))
    return Geometry(layers, heads, kv_heads, k_dim, windows)


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, (list, tuple)):
            ids.update(int(v) for v in value)
    return frozenset(ids)


def _unservable(name: str, reason: str) -> str:
    return (
        f"model {name!r} can't be served: {reason}. Choose a decoder-only model with full or sliding-window attention "
        "(Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2 and their kin), or forward it with [server].api_base."
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
