"""Random histories of a whole store (requests side by side, pins, faults, restarts, crashes) against a simple model.

The model knows which token sequences were published in which namespace, and what is pinned. It never says what must be
cached, apart from pins and what lies on disk at a restart: it says what may hit, and with which bytes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvstore import DeviceArena, DiskTier, HostTier, Lease, PrefixStore
from kvstore.steering import PinLimitExceeded
from kvstore.tiers.base import TierName

from .test_store import CHUNK, CHUNK_BYTES, IDENTITY, LAYOUT, invariants, kv_of

PAGES, HOST_CHUNKS, DISK_BYTES = 12, 5, 220_000
NAMESPACES = ("", "tenant")

#: Few trunks and branches, so that histories meet: 0 to 75 tokens of one of three trunks, then one of three ends.
prompts = st.builds(
    lambda trunk, shared, end, length: [
        *((trunk * 1000 + i) % 50_000 for i in range(shared)),
        *((40_000 + end * 100 + i) % 50_000 for i in range(length)),
    ],
    st.integers(0, 2),
    st.sampled_from([0, 1, 15, 16, 17, 31, 32, 40, 64, 75]),
    st.integers(0, 2),
    st.sampled_from([2, 5, 16, 20]),
)
SOAK = 1000 if os.environ.get("KVGATE_SOAK") else 0

namespaces = st.sampled_from(NAMESPACES)


def kv_at(namespace: str, prefix: list[int]) -> torch.Tensor:
    return kv_of([NAMESPACES.index(namespace), *prefix])


@dataclass(eq=False)
class Request:
    lease: Lease
    tokens: list[int]
    namespace: str
    computed: int


class StoreMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(policy=st.sampled_from(["importance_score", "impress", "lru", "gdsf"]), host=st.booleans())
    def start(self, policy: str, host: bool) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.policy, self.host = policy, host
        self.now = 1e9
        self.generation = 0
        self.published: set[tuple[str, tuple[int, ...]]] = set()
        self.pinned: dict[tuple[str, tuple[int, ...]], float] = {}
        self.damaged = False
        self.open: list[Request] = []
        self.store = self.opened(self.root / "0")

    def opened(self, folder: Path) -> PrefixStore:
        return PrefixStore(
            LAYOUT,
            IDENTITY,
            DeviceArena(LAYOUT, PAGES, torch.device("cpu")),
            host=HostTier(LAYOUT, HOST_CHUNKS * 4096 * -(-CHUNK_BYTES // 4096)) if self.host else None,
            disk=DiskTier(LAYOUT, folder, DISK_BYTES, identity=IDENTITY, min_free_bytes=0),
            policy=self.policy,
            clock=lambda: self.now,
        )

    # Requests -------------------------------------------------------------------------------------------------

    @rule(namespace=namespaces, tokens=prompts)
    def serve(self, namespace: str, tokens: list[int]) -> None:
        """A whole request; most of what happens to a store."""
        request = self.begin(namespace, tokens)
        self.compute(request, 1.0)
        self.release(request)

    @rule(namespace=namespaces, left=prompts, right=prompts)
    def serve_two_at_once(self, namespace: str, left: list[int], right: list[int]) -> None:
        requests = [self.begin(namespace, tokens) for tokens in (left, right)]
        for share in (0.5, 1.0):
            for request in requests:
                self.compute(request, share)
        for request in requests:
            self.release(request)

    @rule(target=requests, namespace=namespaces, tokens=prompts)
    def begin(self, namespace: str, tokens: list[int]) -> Request:
        lease = self.store.begin(tokens, namespace)
        self.store.load(lease)
        known = [t for n, t in self.published if n == namespace]
        longest = max((shared(t, tokens) for t in known), default=0)
        assert lease.hit_tokens <= min(longest, len(tokens) - 1), "a hit on what was never published here"
        request = Request(lease, tokens, namespace, lease.hit_tokens)
        self.open.append(request)
        self.right_bytes(request)
        return request

    @rule(request=requests, share=st.sampled_from([0.3, 0.7, 1.0]))
    def compute(self, request: Request, share: float) -> None:
        """Compute some more of it and publish that; at the end of the prompt the tail too."""
        if not request.lease.open:
            return
        upto = request.computed + round(share * (len(request.tokens) - request.computed))
        if not self.store.reserve(request.lease, upto):
            return
        for position in range(request.computed, upto):
            page, slot = divmod(position, CHUNK)
            view = self.store._arena.page_view(request.lease.pages[page], CHUNK)
            view[:, :, :, slot] = kv_at(request.namespace, request.tokens[: position + 1])
        request.computed = upto
        self.store.record_importance(request.lease, torch.rand(upto))
        self.store.publish(request.lease, request.tokens, upto, final=upto == len(request.tokens))
        self.published.add((request.namespace, tuple(request.tokens[:upto])))

    @rule(request=consumes(requests))
    def release(self, request: Request) -> None:
        if request in self.open:
            self.right_bytes(request)  # nobody wrote into its pages meanwhile
            self.store.release(request.lease)
            self.open.remove(request)
        self.store.release(request.lease)  # a second time does nothing

    def right_bytes(self, request: Request) -> None:
        for position in range(request.computed):
            page, slot = divmod(position, CHUNK)
            got = self.store._arena.page_view(request.lease.pages[page], CHUNK)[:, :, :, slot]
            assert torch.equal(got, kv_at(request.namespace, request.tokens[: position + 1])), f"position {position}"

    def some_published(self, which: int) -> tuple[str, tuple[int, ...]]:
        return sorted(self.published)[which % len(self.published)]

    # Steering -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.published)
    @rule(which=st.integers(0, 1000), ttl=st.sampled_from([None, 50.0, 5000.0]))
    def pin(self, which: int, ttl: float | None) -> None:
        namespace, tokens = self.some_published(which)
        try:
            n_tokens = self.store.pin(tokens, namespace, ttl=ttl)
        except PinLimitExceeded:
            return
        if n_tokens:
            self.pinned[namespace, tokens[:n_tokens]] = float("inf") if ttl is None else self.now + ttl

    @rule(namespace=namespaces, tokens=prompts)
    def unpin(self, namespace: str, tokens: list[int]) -> None:
        if self.store.unpin(tokens, namespace):
            # It ends the pin of this very prefix or of tails that begin it: forget every pin it can have meant.
            self.pinned = {
                (n, t): expiry
                for (n, t), expiry in self.pinned.items()
                if n != namespace or shared(t, tokens) < min(len(t), len(tokens))
            }

    @rule(namespace=namespaces, tokens=prompts)
    def forget(self, namespace: str, tokens: list[int]) -> None:
        self.store.forget(tokens, namespace)

    @rule(seconds=st.sampled_from([1.0, 60.0, 6000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # Faults ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.host and self.published)
    @rule(which=st.integers(0, 1000), offset=st.integers(0, CHUNK_BYTES - 1))
    def flip_a_bit_in_host_memory(self, which: int, offset: int) -> None:
        """What was damaged is computed anew. What hangs below it may go as well, pins or not."""
        assert self.store.flush(20)
        namespace, tokens = self.some_published(which)
        lease = self.store.begin(tokens, namespace, counted=False)
        nodes = [node for node in lease.nodes if TierName.CPU in node.tiers and TierName.GPU not in node.tiers]
        self.store.release(lease)
        for node in nodes[:1]:
            entry = self.store._host._entries[node.key]  # type: ignore[union-attr]
            entry.memory[offset % LAYOUT.payload_bytes(node.n_tokens)] ^= 4
            self.damaged = True
            self.pinned.clear()
            self.serve(namespace, list(tokens))

    @rule()
    def restart(self) -> None:
        self.end_requests()
        kept = self.on_disk()
        self.store.close()
        self.store = self.opened(self.root / str(self.generation))
        self.came_back(kept)

    @rule()
    def crash(self) -> None:
        """A copy of the folder as it is between two transactions is what ``kill -9`` leaves."""
        self.end_requests()
        kept = self.on_disk()
        old, self.generation = self.root / str(self.generation), self.generation + 1
        new = self.root / str(self.generation)
        shutil.copytree(old, new)
        self.store.close()
        self.store = self.opened(new)
        self.came_back(kept)

    def end_requests(self) -> None:
        for request in self.open:
            self.store.release(request.lease)
        self.open.clear()
        assert self.store.flush(20)

    def on_disk(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """For every published sequence: its leading tokens whose chunks are on disk, all of them."""
        found = {}
        for namespace, tokens in self.published:
            lease = self.store.begin(tokens, namespace, limit=len(tokens), counted=False)
            n_tokens = 0
            for node in lease.nodes:
                if TierName.DISK not in node.tiers:
                    break
                n_tokens += node.n_tokens
            self.store.release(lease)
            found[namespace, tokens] = n_tokens
        return found

    def came_back(self, kept: dict[tuple[str, tuple[int, ...]], int]) -> None:
        for (namespace, tokens), n_tokens in kept.items():
            assert self.store.match(tokens, namespace).n_tokens >= n_tokens, "stored on disk, but not back"
        self.pinned = {
            pin: expiry
            for pin, expiry in self.pinned.items()
            if self.store.match(pin[1], pin[0]).n_tokens >= len(pin[1])
        }

    # Always ---------------------------------------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        assert self.store.flush(20)
        invariants(self.store)
        assert self.store.stats().leases == len(self.open)
        failures = self.store.stats().integrity_failures
        assert self.damaged or not failures, failures

    @invariant()
    def pins_hold(self) -> None:
        self.pinned = {pin: expiry for pin, expiry in self.pinned.items() if expiry > self.now}
        for namespace, tokens in self.pinned:
            assert self.store.match(tokens, namespace).n_tokens == len(tokens), "a pinned prefix is gone"

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.end_requests()
            invariants(self.store)
            self.store.close()
            shutil.rmtree(self.root)


def shared(left: tuple[int, ...] | list[int], right: tuple[int, ...] | list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


StoreMachine.TestCase.settings = settings(
    max_examples=SOAK or 60,
    stateful_step_count=50,
    deadline=None,
    derandomize=not SOAK,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestStoreMachine = StoreMachine.TestCase
