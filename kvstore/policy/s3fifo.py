"""S3-FIFO (Yang et al., FIFO queues are all you need for cache eviction, SOSP'23)."""

from collections.abc import Hashable, Mapping

from kvstore.policy.base import Chunk, Entry, EvictionPolicy, Lane, Rank

_SMALL, _MAIN = 0, 1

#: Share of the chunks that the probationary queue may hold.
_SMALL_SHARE = 0.1

#: Uses that count at most.
_MAX_FREQUENCY = 3

#: Keys remembered beside the chunks that are there; a key takes about 100 bytes.
_MIN_MEMORY = 4096


class S3Fifo(EvictionPolicy):
    """A small queue for new chunks, a main queue for those used again, and the keys of what the small one let go.

    New chunks that are never used leave through the small queue, so a scan does not flush the cache. In the main
    queue each use buys one more round. Which queue a chunk is in is not kept over a restart.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        self._main: dict[Hashable, tuple[float, int]] = {}  # place in the main queue, accesses when it got there
        self._ghosts: dict[Hashable, None] = {}
        self._turn = 0.0  # places in the main queue handed out
        self._resident = _MIN_MEMORY

    def rank(self, chunk: Chunk) -> Rank:
        known = self._main.get(chunk.key)
        if known is not None:
            return Rank(_MAIN, known[0])
        if chunk.key in self._ghosts:
            del self._ghosts[chunk.key]
            return self._enter_main(chunk, chunk.stats.accesses)
        return Rank(_SMALL, chunk.stats.created)

    def pick(self, lanes: Mapping[int, Lane], changed: set[int]) -> Entry | None:
        small, main = lanes.get(_SMALL), lanes.get(_MAIN)
        n_small, n_main = small.size if small else 0, main.size if main else 0
        self._resident = n_small + n_main
        order = (small, main) if n_small > _SMALL_SHARE * self._resident else (main, small)
        return next((entry for lane in order if lane and (entry := lane.first())), None)

    def spare(self, entry: Entry) -> Rank | None:
        chunk, accesses = entry.chunk, entry.chunk.stats.accesses
        if entry.rank.lane == _SMALL:
            return self._enter_main(chunk, accesses) if accesses > 1 else None
        known = self._main.get(chunk.key)
        uses = min(accesses - known[1], _MAX_FREQUENCY) if known is not None else 0
        return self._enter_main(chunk, accesses - uses + 1) if uses > 0 else None

    def on_evict(self, entry: Entry) -> None:
        key = entry.chunk.key
        self._main.pop(key, None)
        if entry.rank.lane == _SMALL:
            self._ghosts[key] = None
        self._shrink()

    def _enter_main(self, chunk: Chunk, accesses: int) -> Rank:
        self._turn += 1.0
        self._main.pop(chunk.key, None)  # the newest are last, for ``_shrink``
        self._main[chunk.key] = (self._turn, accesses)
        return Rank(_MAIN, self._turn)

    def _shrink(self) -> None:
        """Bound the memory: chunks that were dropped without an eviction would stay in it for good."""
        limit = max(_MIN_MEMORY, 2 * self._resident)
        while len(self._main) > limit:
            del self._main[next(iter(self._main))]
        while len(self._ghosts) > limit:
            del self._ghosts[next(iter(self._ghosts))]
