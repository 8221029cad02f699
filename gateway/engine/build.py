"""From settings to a running engine: model, identity, tiers, store."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

from gateway.config import ConfigError, Settings, validate_against_model
from gateway.engine.engine import Engine, EngineConfig
from gateway.engine.linears import compile_kernels, pack_linears
from gateway.engine.loader import LoadedModel, load_model
from gateway.engine.memory import arena_pages, tune_allocator
from gateway.engine.runner import padded_rows, self_check
from gateway.engine.sources import DEMO_MODEL_ID, ModelError
from gateway.engine.types import EngineObserver
from kvstore import DeviceArena, DiskTier, DiskUnavailable, HostTier, KVLayout, PrefixStore
from kvstore.identity import Identity, model_identity, weights_fingerprint
from kvstore.replay.record import TraceRecorder
from kvstore.tiers.base import TierName

log = logging.getLogger(__name__)


def build_engine(settings: Settings, observer: EngineObserver) -> Engine:
    """Load the model and its cache.

    Raises:
        ModelError: the model can't be found or served.
        ConfigError: a setting doesn't fit the model.
        StoreInUse: another process has the disk tier's folder.
    """
    tune_allocator()
    recorder = _recorder(settings)  # first: a file that can't be made is said before the model is loaded
    started = time.perf_counter()
    model = settings.model
    loaded = load_configured(settings)
    # The fingerprint is of the weights as loaded; packing would hide them.
    identity = identity_of(loaded, settings)
    packed = pack_linears(loaded.model)
    self_check(loaded)
    compile_kernels(loaded.model, sorted({padded_rows(n) for n in range(1, 65)}))
    layout = layout_of(loaded, settings)
    arena = DeviceArena(layout, _arena_pages(settings, loaded, layout), loaded.device)
    store = _build_store(settings, layout, identity, arena)
    log.info(
        "model %s ready in %.1f s: %s on %s, %d linears packed, %d tokens of KV in the arena",
        model.name,
        time.perf_counter() - started,
        str(loaded.dtype).removeprefix("torch."),
        loaded.device,
        packed,
        arena.n_pages * layout.chunk_size,
    )
    return Engine(_engine_config(settings), loaded, arena, store, observer, recorder=recorder)


def layout_of(loaded: LoadedModel, settings: Settings) -> KVLayout:
    geometry = loaded.geometry
    return KVLayout(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=loaded.dtype,
        chunk_size=settings.prefix_cache.chunk_size,
    )


def identity_of(loaded: LoadedModel, settings: Settings) -> Identity:
    """Everything that changes KV bytes (tenant namespaces come on top, in the root of the chunk keys)."""
    return model_identity(
        model_config=loaded.config_dict,
        weights=weights_fingerprint(loaded.model.named_parameters()),
        quantisation="none",
        layout=layout_of(loaded, settings),
        tokenizer=hashlib.blake2b(loaded.tokenizer_json, digest_size=32).digest(),
    )


def load_configured(settings: Settings) -> LoadedModel:
    """The configured model, checked against the settings. Raises ModelError or ConfigError."""
    loaded = load_model(settings.model.name, dtype=settings.model.dtype, max_model_len=settings.model.max_model_len)
    validate_against_model(settings, model_max_len=loaded.position_limit, num_attention_heads=loaded.geometry.heads)
    return loaded


def _arena_pages(settings: Settings, loaded: LoadedModel, layout: KVLayout) -> int:
    pages = arena_pages(
        loaded.device,
        chunk_bytes=layout.chunk_bytes,
        device_cache_gb=settings.prefix_cache.device_cache_gb,
        gpu_memory_utilization=settings.model.gpu_memory_utilization,
    )
    needed = -(-loaded.max_model_len // layout.chunk_size) + 1
    if pages < needed:
        knob = "[model].gpu_memory_utilization" if loaded.device.type == "cuda" else "[prefix_cache].device_cache_gb"
        raise ModelError(
            f"the KV arena holds {pages * layout.chunk_size} tokens, but one request of {loaded.max_model_len} tokens "
            f"([model].max_model_len) needs {needed * layout.chunk_bytes / 2**30:.2f} GiB; raise {knob} or set a "
            "smaller [model].max_model_len"
        )
    return pages


def _build_store(settings: Settings, layout: KVLayout, identity: Identity, arena: DeviceArena) -> PrefixStore:
    cache = settings.prefix_cache
    tiers = cache.tiering if cache.enable else [TierName.GPU]
    host = None
    if TierName.CPU in tiers:
        host = HostTier(layout, int(cache.cpu_cache_gb * 1024**3))
        host.prefault()
    disk = None
    if TierName.DISK in tiers:
        try:
            disk = DiskTier(
                layout,
                Path(cache.disk_cache_dir).expanduser(),
                int(cache.disk_cache_gb * 1024**3),
                identity=identity.digest,
                identity_parts=identity.parts,
                durable=cache.durable,
            )
        except DiskUnavailable as error:
            log.warning("running without the disk tier: %s", error)
    return PrefixStore(layout, identity.digest, arena, host=host, disk=disk, policy=cache.eviction_policy)


def _recorder(settings: Settings) -> TraceRecorder | None:
    if not settings.trace.record:
        return None
    path = Path(settings.trace.record).expanduser()
    try:
        return TraceRecorder(path, settings.prefix_cache.chunk_size, int(settings.trace.max_mb * 2**20))
    except OSError as error:
        raise ConfigError(
            f"[trace] record = {settings.trace.record!r}: can't be written ({error.strerror or error}); "
            "choose another path"
        ) from error


def _engine_config(settings: Settings) -> EngineConfig:
    return EngineConfig(
        model_id=settings.model.name,
        aliases=(DEMO_MODEL_ID,) if settings.model.name == "demo" else (),
        max_batch_size=settings.engine.max_batch_size,
        max_waiting=settings.limits.max_waiting,
        prefill_tokens_per_step=settings.engine.prefill_tokens_per_step,
        probe_heads=settings.prefix_cache.probe_heads,
        cache_enabled=settings.prefix_cache.enable,
        deterministic=settings.engine.deterministic,
        shadow_verify=settings.engine.shadow_verify,
        speculation=settings.engine.speculation,
    )
