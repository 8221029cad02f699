"""What the engine and the store know, read when ``/metrics`` is scraped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.engine.protocol import EngineProtocol
from kvstore.stats import StoreStats
from kvstore.tiers.base import TierName


class EngineCollector(Collector):
    """Reads one snapshot a scrape, so that its numbers fit each other: hits + misses = lookups, in tokens."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine
        self._process = psutil.Process()

    def collect(self) -> Iterable[Metric]:
        rss = self._process.memory_info().rss
        yield _gauge("kvgate_process_resident_memory_bytes", "Resident memory of the server process", rss)
        yield _labelled_gauge(
            "kvgate_device_memory_bytes", "Device memory by kind", ["kind"], _by_name(self._engine.memory())
        )
        stats = self._engine.stats()
        yield _gauge("kvgate_requests_running", "Sequences that are computed", stats.running)
        yield _gauge("kvgate_requests_waiting", "Sequences in the queue", stats.waiting)
        yield _gauge("kvgate_requests_loading", "Sequences whose prefix is being loaded", stats.loading)
        checks = {"match": 0, "mismatch": 0, "skipped": 0} | dict(stats.shadow_checks)
        yield _labelled("kvgate_shadow_verify", "Hits computed again and compared", ["outcome"], _by_name(checks))
        yield _counter("kvgate_speculation_drafted_tokens", "Tokens tried by speculation", stats.drafted_tokens)
        yield _counter("kvgate_speculation_accepted_tokens", "Tried tokens the model took", stats.accepted_tokens)
        yield _gauge("kvgate_degraded", "Reasons why service is reduced", len(self._engine.degraded()))
        store = self._engine.store_stats()
        if store is not None:
            yield from _lookups(store)
            yield from _tiers(store)
            yield from _movements(store)


def _lookups(store: StoreStats) -> Iterable[Metric]:
    yield _counter("kvgate_prefix_lookups", "Prefix lookups", store.lookups)
    yield _counter("kvgate_prefix_lookup_tokens", "Prompt tokens looked up", store.lookup_tokens)
    tokens: dict[tuple[str, ...], float] = {("hit", tier.value): store.hit_tokens.get(tier, 0) for tier in TierName}
    tokens[("miss", "none")] = store.miss_tokens
    yield _labelled("kvgate_prefix_tokens", "Looked-up tokens by outcome and tier", ["outcome", "tier"], tokens)


def _tiers(store: StoreStats) -> Iterable[Metric]:
    usage = {(tier.value,): used for tier, used in store.usage.items()}
    for name, text, values in (
        ("bytes", "Bytes used", {key: used.used_bytes for key, used in usage.items()}),
        ("capacity_bytes", "Bytes allowed", {key: used.capacity_bytes for key, used in usage.items()}),
        ("chunks", "Chunks held", {key: used.chunks for key, used in usage.items()}),
        ("read_only", "1 while the tier can't be written", {key: int(used.read_only) for key, used in usage.items()}),
    ):
        yield _labelled_gauge(f"kvgate_tier_{name}", f"{text}, by tier", ["tier"], values)
    yield _gauge("kvgate_leases", "Prefixes held by running sequences", store.leases)
    pages: dict[tuple[str, ...], float] = {("total",): store.pages_total, ("free",): store.pages_free}
    yield _labelled_gauge("kvgate_arena_pages", "Pages of the KV arena", ["state"], pages)


def _movements(store: StoreStats) -> Iterable[Metric]:
    yield _labelled("kvgate_tier_evictions", "Chunks evicted", ["tier", "reason"], _by_names(store.evictions))
    yield _labelled("kvgate_tier_promotions", "Chunks promoted from a tier", ["tier"], _by_tier(store.promotions))
    yield _labelled("kvgate_tier_demotions", "Chunks demoted to a tier", ["tier"], _by_tier(store.demotions))
    yield _labelled("kvgate_dropped_stores", "Chunks not written behind", ["reason"], _by_name(store.dropped_stores))
    decisions = {"load": 0, "split": 0, "recompute": 0} | store.planner_decisions
    yield _labelled("kvgate_planner_decisions", "Hits below the device, by plan", ["decision"], _by_name(decisions))
    yield _labelled(
        "kvgate_integrity_failures", "Stored chunks that failed verification", ["tier", "cause"],
        _by_names(store.integrity_failures),
    )  # fmt: skip
    yield _counter("kvgate_disk_read_bytes", "Bytes read from the disk tier", store.disk_read_bytes)
    yield _counter("kvgate_disk_write_bytes", "Bytes written to the disk tier", store.disk_write_bytes)
    yield _counter("kvgate_disk_read_seconds", "Time spent reading the disk tier", store.disk_read_seconds)
    yield _counter("kvgate_disk_write_seconds", "Time spent writing the disk tier", store.disk_write_seconds)


def _by_name(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(str(name),): value for name, value in values.items()}


def _by_tier(values: Mapping[TierName, int]) -> dict[tuple[str, ...], float]:
    """Every tier, also those at zero: a rate needs the zero before the first event."""
    return {(tier.value,): values.get(tier, 0) for tier in TierName}


def _by_names(values: Mapping[tuple[TierName, str], int]) -> dict[tuple[str, ...], float]:
    return {(tier.value, name): value for (tier, name), value in values.items()}


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _labelled_gauge(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
