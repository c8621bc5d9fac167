"""Mooncake Store in bad days: a master that dies, hangs or begins anew, wrong content, two processes, no room."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import MooncakeServer, wait_until
from services_kit import find_server
from typer.testing import CliRunner

from kvstrata.cli.app import build_app
from kvstrata.core.breakers import BreakerState
from kvstrata.core.settings import CoreConfig
from kvstrata.errors import ConfigError
from kvstrata.runtime.executor import Signal, ThreadExecutor, Worker
from kvstrata.testing.node import Node, one_group
from kvstrata.testing.node_process import NodeProcess
from kvstrata.testing.tier_harness import LAYOUT_TAG, NAMESPACE, OTHER_NAMESPACE
from kvstrata.tiers.common.record import HEADER_BYTES, Identity, make_header
from kvstrata.tiers.mooncake import MooncakeTier
from kvstrata.tiers.mooncake.client import NO_ROOM
from kvstrata.tiers.server.core import State
from kvstrata.types import FailCause

CHUNK = 4096
ROOMY_CHUNK = 16384
"""So large that primary can afford tail room."""
TOKENS = 16
LAYOUT = one_group(CHUNK, TOKENS)
SEGMENT = 64 << 20


def tier_of(server: MooncakeServer, part: str = "one", **how: object) -> MooncakeTier:
    settings = {"segment": SEGMENT, "admin": server.admin, **how}
    return MooncakeTier(server.master, server.metadata, part=part, **settings)  # type: ignore[arg-type]


def config(**how: object) -> CoreConfig:
    return CoreConfig(capacity_bytes=2048 * CHUNK, cascade_queue=1 << 16, **how)  # type: ignore[arg-type]


WRONG: dict[str, tuple[Callable[[bytes, bytes], bytes], set[FailCause]]] = {
    "altered": (lambda good, _: bytes([good[0] ^ 1]) + good[1:], {FailCause.CORRUPT}),
    "with an altered header": (lambda good, _: good[:-1] + bytes([good[-1] ^ 1]), {FailCause.CORRUPT}),
    "empty": (lambda good, _: b"", {FailCause.WRONG_SIZE, FailCause.GONE}),
    "short": (lambda good, _: good[:100], {FailCause.WRONG_SIZE}),
    "long": (lambda good, _: good + b"x", {FailCause.WRONG_SIZE}),
    "of another key": (lambda _, other: other, {FailCause.FOREIGN}),
    "with the header of another key": (
        lambda good, other: good[:-HEADER_BYTES] + other[-HEADER_BYTES:],
        {FailCause.FOREIGN},
    ),
    "header first": (lambda good, _: good[-HEADER_BYTES:] + good[:-HEADER_BYTES], {FailCause.CORRUPT}),
    "payload alone": (lambda good, _: good[:-HEADER_BYTES], {FailCause.WRONG_SIZE}),
    "of another namespace": (lambda good, _: of_another_namespace(good), {FailCause.FOREIGN}),
}


def of_another_namespace(record: bytes) -> bytes:
    """The same payload and key, as another model's engine would write them."""
    payload, header = record[:-HEADER_BYTES], record[-HEADER_BYTES:]
    return payload + make_header(Identity(OTHER_NAMESPACE, LAYOUT_TAG), header[40:76], len(payload), header[88:104])


@pytest.mark.parametrize("chunk", [CHUNK, ROOMY_CHUNK], ids=["two pieces", "one piece"])
@pytest.mark.parametrize("how", WRONG)
def test_mooncake_wrong_content_is_a_miss_and_is_counted(mooncake_server: MooncakeServer, how: str, chunk: int) -> None:
    tier = tier_of(mooncake_server)
    with Node(one_group(chunk, TOKENS), [tier], chunks=64) as node:
        assert tier._mooncake.tail_room == (HEADER_BYTES if chunk == ROOMY_CHUNK else 0)
        node.store("a", 8 * TOKENS)
        node.forget()
        scope = NAMESPACE.hex() + LAYOUT_TAG.to_bytes(8, "big").hex()
        store = tier._mooncake.store
        names = [f"kvstrata/record/one/{scope}/{key.hex()}" for key in node.keys("a", 8 * TOKENS)[0]]
        good, other = (bytes(store.get(name)) for name in names[2:4])
        make, causes = WRONG[how]
        store.remove(names[2], True)
        laid = store.put(names[2], make(good, other)) == 0
        assert laid or how == "empty", "Mooncake keeps no empty value"
        assert node.load("a", 8 * TOKENS, within_s=10) == 2 * TOKENS
        node.settle()
        failed = set(node.statistics().tiers["mooncake"].failed)
        assert failed <= causes
        assert failed or not laid
        node.check_idle()


def test_mooncake_values_of_another_namespace_are_not_seen(mooncake_server: MooncakeServer) -> None:
    with Node(LAYOUT, [tier_of(mooncake_server)]) as node:
        node.store("a", 8 * TOKENS)
    with Node(LAYOUT, [tier_of(mooncake_server)], namespace=b"another engine!!") as node:
        assert node.load("a", 8 * TOKENS) == 0


@pytest.mark.slow
def test_mooncake_master_that_hangs_costs_recomputation_within_the_bound_and_comes_back(
    mooncake_server: MooncakeServer,
) -> None:
    with Node(LAYOUT, [tier_of(mooncake_server, timeout_s=0.5)], config=config(stall_s=1.0)) as node:
        node.store("a", 64 * TOKENS)
        node.forget()
        mooncake_server.freeze()
        started = time.monotonic()
        assert node.load("a", 64 * TOKENS) == 0
        assert time.monotonic() - started < 3.5
        assert node.load("b", 64 * TOKENS) == 0
        reads = node.driver.call(lambda manager: manager._core.tiers[0].reads.state)
        mooncake_server.thaw()
        node.wait_for(lambda: node.load("a", 64 * TOKENS) == 64 * TOKENS, 60)
        node.settle(60)
        node.check_idle()
        assert reads is not None


@pytest.mark.slow
def test_mooncake_master_frozen_between_probe_and_read_leaves_no_slot_in_use(mooncake_server: MooncakeServer) -> None:
    tier = tier_of(mooncake_server, timeout_s=30.0)
    bounds = config(stall_s=1.0, job_idle_s=2.0, job_total_s=4.0)
    with Node(LAYOUT, [tier], config=bounds) as node:
        node.store("a", 64 * TOKENS)
        node.forget()
        read = tier._mooncake.read

        thawed = Signal()

        def freeze_and_read(items: object) -> None:
            """A call that hangs longer than every bound: the library's own is another matter."""
            mooncake_server.freeze()
            thawed.wait(60)
            read(items)  # type: ignore[arg-type]

        tier._mooncake.read = freeze_and_read  # type: ignore[method-assign]
        started = time.monotonic()
        assert node.load("a", 64 * TOKENS) == 0
        assert time.monotonic() - started < 3.5
        residency = node.driver.call(lambda manager: manager.residency)
        node.wait_for(lambda: residency.quarantined_bytes > 0, 5)  # the call still may write there
        tier._mooncake.read = read  # type: ignore[method-assign]
        mooncake_server.thaw()
        thawed.set()
        node.settle(60)
        node.check_idle()
        node.wait_for(lambda: node.load("a", 64 * TOKENS) == 64 * TOKENS, 60)


@pytest.mark.slow
def test_mooncake_master_that_answers_slowly_opens_the_breaker(mooncake_server: MooncakeServer) -> None:
    """It is given a moment now and then: every answer comes, much too late. (One that refuses is one that has died.)"""
    with Node(LAYOUT, [tier_of(mooncake_server, timeout_s=0.5)], config=config(stall_s=1.0)) as node:
        node.store("a", 64 * TOKENS)
        node.forget()
        node.wait_for(lambda: node.load("a", 64 * TOKENS) == 64 * TOKENS, 60)
        node.forget()
        well = Signal()

        def be_slow() -> None:
            while not well.is_set:
                mooncake_server.freeze()
                # Longer than as many late requests take as open the breaker: one in time would begin the row anew.
                well.wait(10.0)
                mooncake_server.thaw()
                time.sleep(0.02)

        slow = Worker("slow-master", be_slow)
        slow.start()

        def opened() -> bool:
            """One more request is answered in time; whether the breaker is open by now."""
            started = time.monotonic()
            assert node.load("a", 64 * TOKENS) in (0, 64 * TOKENS)
            assert time.monotonic() - started < 3.5
            node.forget()
            return node.driver.call(lambda manager: manager._core.tiers[0].reads.state) is not BreakerState.CLOSED

        try:
            node.wait_for(opened, 60)
        finally:
            well.set()
            assert slow.join(10)
        node.wait_for(lambda: node.load("a", 64 * TOKENS) == 64 * TOKENS, 90)
        node.settle(60)
        node.check_idle()


@pytest.mark.slow
def test_mooncake_engine_that_starts_and_ends_while_the_master_hangs(mooncake_server: MooncakeServer) -> None:
    mooncake_server.freeze()
    options = {"master": mooncake_server.master, "metadata": mooncake_server.metadata, "segment": SEGMENT}
    started = time.monotonic()
    with NodeProcess({"type": "mooncake", "part": "two", "timeout_s": 1.0, **options}) as other:
        assert other.ask("load a 4") == "loaded 0"
        assert time.monotonic() - started < 15
        mooncake_server.thaw()

        def in_use() -> bool:
            other.ask("store a 4")
            other.ask("forget")
            return other.ask("load a 4") == "loaded 4"

        wait_until(in_use, "use of the store", 60)
        mooncake_server.freeze()
        assert other.ask("load b 4") == "loaded 0"
        started = time.monotonic()
        # Three time-outs to give the part back, and no good-bye of the library, which would take ten more or abort.
        assert other.end(60) == 0
        assert time.monotonic() - started < 10


@pytest.mark.slow
def test_mooncake_master_that_dies_and_begins_anew_is_used_again(mooncake_server: MooncakeServer) -> None:
    with Node(LAYOUT, [tier_of(mooncake_server, timeout_s=1.0)], config=config(stall_s=1.0)) as node:
        node.store("a", 64 * TOKENS)
        node.forget()
        mooncake_server.kill()
        started = time.monotonic()
        assert node.load("a", 64 * TOKENS) == 0
        assert time.monotonic() - started < 3.5
        mooncake_server.start()

        def stored_again() -> bool:
            node.forget()
            node.store("a", 64 * TOKENS, settle_s=60)
            node.forget()
            return node.load("a", 64 * TOKENS) == 64 * TOKENS

        node.wait_for(stored_again, 90)
        node.settle(60)
        node.check_idle()


def fill(tier: MooncakeTier, piece: int) -> None:
    """Take all memory of the store by objects that it may not evict."""
    store, held = tier._mooncake.store, tier._mooncake._config(pinned=True)
    for number in range(2 * SEGMENT // piece):
        code = store.put(f"filler/{number}", bytes(piece), held)
        if code != 0:
            assert code == NO_ROOM
            return
    raise AssertionError("the store takes more than it has")


@pytest.mark.slow
def test_mooncake_master_that_refuses_for_want_of_room_is_left_alone_and_used_again(
    mooncake_server: MooncakeServer,
) -> None:
    """It is alive and answers: every store is refused, what is asked for is not there, requests are computed."""
    tier = tier_of(mooncake_server, timeout_s=1.0)
    bounds = config(stall_s=1.0, breaker_open_s=0.2, breaker_open_max_s=0.5)
    with Node(LAYOUT, [tier], config=bounds) as node:
        node.wait_for(lambda: tier._state is State.READY, 30)
        for piece in (1 << 20, 64 << 10, CHUNK):
            fill(tier, piece)
        prompts = iter(range(100))

        def opened() -> bool:
            """One more prompt is refused and then computed; whether stores are kept away from the tier by now."""
            prompt = f"refused-{next(prompts)}"
            failed = node.statistics().tiers["mooncake"].cascade_failed
            node.store(prompt, 8 * TOKENS, settle_s=0)
            node.wait_for(lambda: node.statistics().tiers["mooncake"].cascade_failed > failed or not_closed(), 30)
            node.forget()
            started = time.monotonic()
            assert node.load(prompt, 8 * TOKENS) == 0
            assert time.monotonic() - started < 3.5
            return not_closed()

        def not_closed() -> bool:
            return node.driver.call(lambda manager: manager._core.tiers[0].writes.state) is not BreakerState.CLOSED

        node.wait_for(opened, 60)
        counted = node.statistics().tiers["mooncake"]
        assert counted.cascaded == 0
        assert counted.cascade_failed >= node.config.breaker_errors
        reads = node.driver.call(lambda manager: manager._core.tiers[0].reads.state)
        assert reads is BreakerState.CLOSED, "a store that is full still serves"
        tier._mooncake.store.remove_by_regex("^filler/", True)

        def in_use() -> bool:
            node.store("a", 64 * TOKENS, settle_s=0)
            node.forget()
            return node.load("a", 64 * TOKENS) == 64 * TOKENS

        node.wait_for(in_use, 60)
        node.settle(60)
        node.check_idle()


def other_process(server: MooncakeServer) -> NodeProcess:
    options = {"master": server.master, "metadata": server.metadata, "admin": server.admin, "segment": SEGMENT}
    return NodeProcess({"type": "mooncake", "part": "two", **options})


@pytest.mark.slow
def test_mooncake_two_processes_share_1000_chunks(mooncake_server: MooncakeServer) -> None:
    with Node(LAYOUT, [tier_of(mooncake_server)]) as node, other_process(mooncake_server) as other:
        assert other.ask("store a 1000") == "stored 1000"
        assert node.load("a", 1000 * TOKENS) == 1000 * TOKENS
        assert node.statistics().tiers["mooncake"].probed <= 40
        node.store("b", 1000 * TOKENS)
        assert other.ask("load b 1000") == "loaded 1000"


@pytest.mark.slow
def test_mooncake_killed_in_the_middle_of_writes_leaves_no_half_chunk(mooncake_server: MooncakeServer) -> None:
    with Node(LAYOUT, [tier_of(mooncake_server)]) as node, other_process(mooncake_server) as other:
        assert other.ask("write 64") == "writing"
        other.kill()
        for turn in range(20):  # `load` compares every byte that it is given
            node.load(f"turn-{turn}", 64 * TOKENS, within_s=10)
        node.settle(60)
        node.check_idle()


def test_mooncake_says_what_is_missing(mooncake_server: MooncakeServer) -> None:
    with pytest.raises(ConfigError, match="master"):
        MooncakeTier("", "http://127.0.0.1:1/metadata")
    with pytest.raises(ConfigError, match="protocol"):
        MooncakeTier("127.0.0.1:1", "http://127.0.0.1:1/metadata", protocol="carrier pigeon")
    tier = MooncakeTier("127.0.0.1:1", "http://127.0.0.1:1/metadata", part="one")
    with Node(LAYOUT, [tier]) as node:
        assert node.load("a", 4 * TOKENS) == 0
        assert "127.0.0.1:1" in tier.notices[0]


def test_mooncake_quotas_that_do_not_fit_are_refused_with_the_numbers(mooncake_server: MooncakeServer) -> None:
    first = tier_of(mooncake_server, "one", limit=600_000, shared_limit=1_000_000)
    with Node(LAYOUT, [first]) as node:
        node.wait_for(lambda: first._state is State.READY, 10)
        second = Node(LAYOUT, [tier_of(mooncake_server, "two", limit=600_000, shared_limit=1_000_000)])
        with pytest.raises(ConfigError, match="600000 of 1000000"):
            second.open()


def test_mooncake_is_looked_for() -> None:
    find_server("mooncake")


def test_mooncake_is_measured_beside_its_own_library(mooncake_server: MooncakeServer, tmp_path: Path) -> None:
    server = mooncake_server
    entry = {"type": "mooncake", "master": server.master, "metadata": server.metadata, "segment": 64 << 20}
    config, told = tmp_path / "bench.json", tmp_path / "told.json"
    config.write_text(json.dumps({"tiers": [{**entry, "part": "bench"}]}))
    options = ["--config", str(config), "--sizes", "16KiB", "--volume", "1MiB", "--pairs", "1", "--json", str(told)]
    result = CliRunner().invoke(build_app(), ["bench", "tier", "mooncake", *options])
    assert result.exit_code == 0, result.output
    row = json.loads(told.read_text())["rows"][0]
    assert all(row[op]["tier_gbps"] > 0 and row[op]["bare_gbps"] > 0 for op in ("store", "load"))


def test_mooncake_a_part_that_is_released_gives_back_its_quota(mooncake_server: MooncakeServer, tmp_path: Path) -> None:
    quota = {"limit": 600_000, "shared_limit": 1_000_000}
    # The keeper brings the memory: what an engine brought itself would go with it.
    with Node(LAYOUT, [tier_of(mooncake_server, "keeper", limit=100_000, shared_limit=1_000_000)]):
        with Node(LAYOUT, [tier_of(mooncake_server, "one", segment=0, **quota)]) as node:
            node.store("a", 8 * TOKENS)
        server = mooncake_server
        entry = {"type": "mooncake", "master": server.master, "metadata": server.metadata, "admin": server.admin}
        config = tmp_path / "kv.json"
        config.write_text(json.dumps({"tiers": [{**entry, "part": "two"}]}))
        result = CliRunner().invoke(build_app(), ["fsck", "mooncake", "--config", str(config), "--release", "one"])
        assert result.exit_code == 0, result.output
        assert "8 records" in result.output
        two = tier_of(mooncake_server, "two", segment=0, **quota)
        with Node(LAYOUT, [two]) as node:
            node.wait_for(lambda: two._state is State.READY, 10)
            assert node.load("a", 8 * TOKENS) == 0


def test_mooncake_records_with_their_header_first_are_gone_from_the_own_part(mooncake_server: MooncakeServer) -> None:
    with Node(LAYOUT, [tier_of(mooncake_server, "keeper")]) as keeper:
        store = keeper.tiers[0].tier._mooncake.store  # type: ignore[attr-defined]
        old = [f"kvstrata/chunk/{part}/{NAMESPACE.hex()}/00" for part in ("one", "two")]
        for name in old:
            assert store.put(name, b"a header, then a payload") == 0
        tier = tier_of(mooncake_server, "one", segment=0)
        with Node(LAYOUT, [tier]) as node:
            node.wait_for(lambda: tier._state is State.READY, 10)
            assert store.batch_is_exist(old) == [0, 1], "what another part has is its own affair"
            node.store("a", 8 * TOKENS)
            assert node.load("a", 8 * TOKENS) == 8 * TOKENS
            node.settle()
            node.check_idle()


def test_mooncake_batches_so_large_that_others_go_first(mooncake_server: MooncakeServer) -> None:
    tier = tier_of(mooncake_server)
    with Node(one_group(256 << 10, TOKENS), [tier], chunks=200) as node:
        node.store("a", 32 * TOKENS)
        node.forget()
        assert node.load("a", 32 * TOKENS) == 32 * TOKENS
        yielding = tier._mooncake.yielding
        assert isinstance(yielding, ThreadExecutor)
        done = yielding.statistics()
        assert done.finished >= 2
        assert done.failed == 0
        node.settle()
        node.check_idle()
