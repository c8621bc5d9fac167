"""What of a segment is worth writing again when its space is reclaimed. Pure functions."""

from __future__ import annotations

import numpy as np

from kvstrata.tiers.disk.format import BLOCK
from kvstrata.tiers.disk.index import Index
from kvstrata.tiers.disk.planning import BatchPlan, plan_batches
from kvstrata.tiers.disk.segment import padded
from kvstrata.types import I64


def split_hot(index: Index, rows: I64, budget: int) -> tuple[I64, I64]:
    """(hot, cold) rows: hot were used since they were written, the latest used first, up to `budget` bytes.

    Hot rows come in the order of their places, so that neighbours stay neighbours.
    """
    stamps = index.stamp[rows]
    order = rows[np.argsort(-stamps.astype(np.int64), kind="stable")]
    used = int((stamps > 0).sum())
    sizes = padded(index.length[order]) + BLOCK // 64
    fitting = int(np.searchsorted(np.cumsum(sizes), budget - BLOCK, side="right"))
    count = min(used, fitting)
    hot = order[:count]
    return hot[np.argsort(index.offset[hot], kind="stable")], order[count:]


def plan_moves(index: Index, hot: I64, largest: int) -> list[BatchPlan]:
    """Batches for hot rows; `picks` are positions in `hot`."""
    lengths = index.length[hot].astype(np.int64)
    return plan_batches(np.arange(len(hot)), np.zeros(len(hot), np.int64), lengths, largest)
