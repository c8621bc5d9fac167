"""The attention kinds, one class each behind the protocol of `base`. `base` says how to add one."""

from kvstrata.layout.kinds.base import Kind
from kvstrata.layout.kinds.chunked import ChunkedLocal
from kvstrata.layout.kinds.full import FullAttention
from kvstrata.layout.kinds.recurrent import RecurrentState
from kvstrata.layout.kinds.sliding import SlidingWindow

__all__ = ["ChunkedLocal", "FullAttention", "Kind", "RecurrentState", "SlidingWindow"]
