"""What a client may say about one request, in `kv_transfer_params`: it can only narrow what the operator allows.

{"kvstrata": "off"}                                    kvstrata does nothing for this request
{"kvstrata": {"load_tiers": ["disk"]}}                 tiers to load from, by name; [] for primary only
{"kvstrata": {"store": "none"}}                        "prompt" or "none"; never more than the operator's mode
{"kvstrata": {"max_load_tokens": 4096}}                cap on loaded tokens
{"kvstrata": {"wait_s": 0.5}}                          longest wait for tiers, in seconds
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvstrata.core.messages import ALL_TIERS, RequestOptions, TierFilter
from kvstrata.integrations.vllm.settings import STORE_MODES

PARAMETER = "kvstrata"
_RANK = {mode: rank for rank, mode in enumerate(("none", "prompt", "all"))}


@dataclass(frozen=True, slots=True)
class Wishes:
    """A request's options after narrowing. `complaint` names what was not understood; it is then left out."""

    off: bool
    store: str
    options: RequestOptions
    complaint: str = ""


def read_wishes(
    parameters: Mapping[str, Any] | None,
    store: str,
    *,
    may_load: bool,
    wait_s: float,
    known: Collection[str] | None = None,
) -> Wishes:
    """The wishes in `kv_transfer_params`. Never raises: what a client writes must not stop an engine.

    `store` is the operator's mode, `wait_s` the longest wait that the operator allows, `known` the names of the tiers
    that there are (None: any).
    """
    wish = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    if wish == "off":
        return Wishes(True, "none", RequestOptions(may_load=False, may_store=False))
    if wish is None:
        wish = {}
    if not isinstance(wish, Mapping):
        return Wishes(False, store, RequestOptions(may_load=may_load), f'{PARAMETER}: expected "off" or a table')
    strangers = [name for name in wish if name not in _READERS]
    bad: list[str] = [f"{str(name)[:64]}: unknown" for name in strangers[:8]]
    tiers, cap, wait = ALL_TIERS, None, None
    if "load_tiers" in wish:
        names = wish["load_tiers"]
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            tiers = TierFilter(names=frozenset(names))
            strange = [] if known is None else sorted(set(names).difference(known))
            bad += [f"load_tiers: no tier is called {name[:64]!r}" for name in strange[:3]]
        else:
            bad.append("load_tiers: expected a list of names")
    if "store" in wish:
        mode = wish["store"]
        if mode in STORE_MODES:
            store = min(store, mode, key=_RANK.__getitem__)
        else:
            bad.append(f"store: expected one of {', '.join(STORE_MODES)}")
    if "max_load_tokens" in wish:
        cap = wish["max_load_tokens"]
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 0:
            bad.append("max_load_tokens: expected a number of tokens")
            cap = None
    if "wait_s" in wish:
        wait = wish["wait_s"]
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not math.isfinite(wait) or wait <= 0:
            bad.append("wait_s: expected seconds above 0")
            wait = None
    options = RequestOptions(
        load_tiers=tiers,
        may_load=may_load,
        may_store=store != "none",
        max_hit_tokens=cap,
        total_s=None if wait is None or (wait_s and wait > wait_s) else float(wait),
    )
    return Wishes(False, store, options, "; ".join(bad))


_READERS = frozenset({"load_tiers", "store", "max_load_tokens", "wait_s"})
