"""One policy over one trace."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvstore.policy import make_policy
from kvstore.replay.cache import TieredCache
from kvstore.replay.trace import Trace
from kvstore.tiers.base import TierName

#: At this position attention to the prefix costs as much as the rest of the layer, for models of about 8B.
_EQUAL_WORK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the tiers in blocks; 0 leaves a lower tier out."""

    device: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Distinct blocks that may be there at most: a chunk can be on several tiers, so often fewer are."""
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy reached. Work is in units of one token's prefill without any prefix.
    ``seconds`` is CPU time."""

    policy: str
    prompt_tokens: int
    hit_tokens: dict[TierName, int] = field(default_factory=dict)
    work: float = 0.0
    saved_work: float = 0.0
    seconds: float = 0.0
    block_uses: int = 0

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / self.prompt_tokens

    @property
    def saved_share(self) -> float:
        """Share of all prefill work that the hits spared."""
        return self.saved_work / self.work

    @property
    def microseconds_a_chunk(self) -> float:
        """CPU time of the whole replay over all chunk uses: the policy's own decisions cost less than this."""
        return 1e6 * self.seconds / self.block_uses

    def tier_rate(self, tier: TierName) -> float:
        return self.hit_tokens.get(tier, 0) / self.prompt_tokens


def replay(trace: Trace, policy: str, sizes: TierSizes) -> Outcome:
    """Run a policy over a trace. Raises ValueError for an unknown policy or a device without room."""
    if sizes.device < 1:
        raise ValueError("the device tier needs room for at least one block")
    capacities = {TierName.GPU: sizes.device, TierName.CPU: sizes.host, TierName.DISK: sizes.disk}
    cache = TieredCache(capacities, make_policy(policy))
    size, work, saved = trace.block_tokens, 0.0, 0.0
    totals: dict[TierName, int] = {}
    started = time.process_time()
    for at, n_tokens, blocks in trace:
        hit = 0
        for tier, n_blocks in cache.request(blocks, n_tokens, size, at).items():
            tokens = min(n_blocks * size, n_tokens - hit)
            totals[tier] = totals.get(tier, 0) + tokens
            hit += tokens
        work += prefill_work(n_tokens)
        saved += prefill_work(hit)
    seconds = time.process_time() - started
    return Outcome(policy, trace.prompt_tokens, totals, work, saved, seconds, trace.block_uses)


def prefill_work(n_tokens: int) -> float:
    """Work of the first ``n_tokens`` of a prompt: a part for each token, and one for what it attends to."""
    return n_tokens * (1.0 + n_tokens / (2 * _EQUAL_WORK_TOKENS))
