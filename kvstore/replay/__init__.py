"""Request traces: recording them, and running eviction policies over them without a model."""

from kvstore.replay.belady import belady
from kvstore.replay.run import Outcome, TierSizes, replay
from kvstore.replay.trace import Request, Trace, TraceError, read_trace

__all__ = ["Outcome", "Request", "TierSizes", "Trace", "TraceError", "belady", "read_trace", "replay"]
