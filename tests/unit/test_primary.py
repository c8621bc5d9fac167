"""The host region: backed before use, refused with the numbers, given back without a trace."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstrata.errors import CapacityError, ConfigError, StateError
from kvstrata.primary.limits import MemoryRoom, read_memory_rooms, tightest
from kvstrata.primary.region import AnonymousRegion, SharedRegion

PLENTY = 1 << 40
KINDS = pytest.mark.parametrize("kind", [AnonymousRegion, SharedRegion])


def rooms(available: int) -> Callable[[], list[MemoryRoom]]:
    return lambda: [MemoryRoom("memory of the test", available, 1000, 900)]


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Mapped pages of this process, whatever they are."""
    return int(Path("/proc/self/statm").read_text().split()[0])


@KINDS
def test_a_region_is_writable_zeroed_and_of_whole_pages(kind: type[AnonymousRegion]) -> None:
    with kind(mmap.PAGESIZE + 1, rooms=rooms(PLENTY)) as region:
        assert region.size == 2 * mmap.PAGESIZE
        assert region.requested == mmap.PAGESIZE + 1
        view = region.view
        assert (view.format, view.nbytes, view.readonly, view.ndim) == ("B", region.size, False, 1)
        assert bytes(view) == bytes(region.size)
        view[-1] = 7
        assert region.view[-1] == 7


@KINDS
def test_all_of_a_region_is_resident_before_it_is_used(kind: type[AnonymousRegion]) -> None:
    size = 32 * 2**20
    before = resident_pages()
    with kind(size, rooms=rooms(PLENTY)):
        assert resident_pages() - before >= size // mmap.PAGESIZE * 9 // 10
    assert resident_pages() - before < size // mmap.PAGESIZE // 4


@KINDS
def test_no_room_is_an_error_with_the_numbers(kind: type[AnonymousRegion]) -> None:
    size = 1 << 20
    files = open_files()
    region = kind(size, rooms=rooms(size - 1))
    with pytest.raises(CapacityError, match=rf"primary of {size} bytes .* memory of the test: {size - 1} bytes"):
        region.open()
    with pytest.raises(StateError, match="not open"):
        _ = region.view
    assert open_files() == files
    with kind(size, rooms=rooms(size)) as exact:
        assert exact.size == size


@KINDS
def test_room_that_goes_while_the_region_is_backed_is_noticed(kind: type[AnonymousRegion]) -> None:
    answers = [PLENTY, PLENTY, 0]
    files = open_files()
    region = kind(160 * 2**20, rooms=lambda: [MemoryRoom("shrinking memory", answers.pop(0))])
    with pytest.raises(CapacityError, match=r"100663296 still needed, shrinking memory: 0 bytes available"):
        region.open()
    assert answers == []
    assert open_files() == files


@KINDS
def test_open_and_close_are_idempotent_and_leak_nothing(kind: type[AnonymousRegion]) -> None:
    region = kind(8 * 2**20, rooms=rooms(PLENTY))
    region.open().close()
    files, pages = open_files(), mappings()
    for _ in range(20):
        assert region.open() is region.open()
        region.close()
        region.close()
    assert open_files() == files
    assert mappings() - pages < region.size // mmap.PAGESIZE


@KINDS
def test_a_view_that_is_still_held_stays_valid_after_close(kind: type[AnonymousRegion]) -> None:
    region = kind(1 << 20, rooms=rooms(PLENTY)).open()
    held = region.view[10:20]
    held[0] = 9
    region.close()
    held[1] = 8
    assert bytes(held[:2]) == b"\x09\x08"


@KINDS
def test_an_array_over_the_region_stays_valid_after_close(kind: type[AnonymousRegion]) -> None:
    files, pages = open_files(), mappings()
    region = kind(1 << 24, rooms=rooms(PLENTY)).open()
    array = np.frombuffer(region.view, dtype=np.uint8)
    region.close()
    array[3] = 5
    assert array[3] == 5
    del array
    assert open_files() == files
    assert mappings() - pages < region.size // mmap.PAGESIZE


def test_a_shared_region_is_seen_through_its_descriptor_and_has_no_name() -> None:
    with SharedRegion(1 << 20, rooms=rooms(PLENTY)) as region:
        region.view[5:8] = b"abc"
        with mmap.mmap(region.fileno(), region.size) as other:
            assert other[5:8] == b"abc"
            other[0:1] = b"z"
        assert region.view[0] == ord("z")
        assert os.fstat(region.fileno()).st_nlink == 0
        assert os.fstat(region.fileno()).st_blocks * 512 >= region.size
    with pytest.raises(StateError, match="not open"):
        region.fileno()


@KINDS
def test_what_the_system_refuses_is_a_capacity_error(
    kind: type[AnonymousRegion], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kind, "_acquire", refuse)
    with pytest.raises(CapacityError, match=r"the system refused it \(Cannot allocate memory\)"):
        kind(1 << 20, rooms=rooms(PLENTY)).open()
    assert open_files() == files


@pytest.mark.parametrize("size", [0, -1])
def test_a_region_needs_a_size(size: int) -> None:
    with pytest.raises(ConfigError, match="primary size"):
        AnonymousRegion(size)


# limits


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       2000 kB\nMemFree:        100 kB\nMemAvailable:   1000 kB\n"


def test_the_machine_tells_what_is_available(tmp_path: Path) -> None:
    found = read_memory_rooms(system(tmp_path, {"proc/meminfo": MEMINFO}))
    assert found == [MemoryRoom("memory of the machine", 1_024_000)]


def test_nothing_readable_is_no_limit(tmp_path: Path) -> None:
    assert read_memory_rooms(tmp_path) == []
    assert tightest([]) is None
    assert read_memory_rooms(system(tmp_path, {"proc/meminfo": "MemAvailable:\nrest\n"})) == []


def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": "100\n",
            "sys/fs/cgroup/pod/memory.max": "5000\n",
            "sys/fs/cgroup/pod/memory.current": "4000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 10\ninactive_file 500\n",
        },
    )
    least = tightest(read_memory_rooms(root))
    assert least == MemoryRoom("memory limit of the container (memory.max)", 1500, 5000, 3500)
    assert least.describe().endswith("1500 bytes available (3500 of 5000 used)")


def test_inside_a_container_the_limit_is_at_the_mount_itself(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "3500\n",
        },
    )
    least = tightest(read_memory_rooms(root))
    assert least is not None
    assert (least.available, least.limit) == (0, 3000)


def test_the_first_version_of_groups_writes_no_limit_as_a_huge_number(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        {
            "proc/self/cgroup": "bad line\n4:cpu,memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert read_memory_rooms(root) == []


def test_the_real_machine_has_room_for_a_small_region() -> None:
    with AnonymousRegion(1 << 20) as region:
        assert region.view.nbytes == 1 << 20
