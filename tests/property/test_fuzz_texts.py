"""Texts and messages from outside, damaged in every way: one clear error or a right answer, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
import vllm_kit as kit
from fuzz_kit import EXTREMES, little_memory, mutate, mutations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.cli.resolve import answer_case
from kvstrata.config import Config, config_from_dict, load_config
from kvstrata.errors import ConfigError
from kvstrata.integrations.vllm.metadata import JobReport, RankGreeting, StepReport
from kvstrata.integrations.vllm.options import read_wishes
from kvstrata.integrations.vllm.settings import read_settings
from kvstrata.sim.traces import Trace, read_mooncake
from kvstrata.tiers.disk.process import MOST_MESSAGE_BYTES, BadStreamError, Frames, frame
from kvstrata.tiers.disk.tasks import Answers, Batch, Done, Forget, ReadUnit

HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

TRACE = b"".join(
    json.dumps({"timestamp": 10 * i, "input_length": 1000, "output_length": 5, "hash_ids": [0, i + 1]}).encode() + b"\n"
    for i in range(4)
)
CASE = json.dumps(
    {
        "layout": {
            "groups": [
                {"kind": "full", "tokens_per_block": 16},
                {"kind": "sliding_window", "tokens_per_block": 16, "window": 32},
            ]
        },
        "prompt_tokens": 160,
        "computed_tokens": 16,
        "present": {"0": list(range(8)), "1": [6, 7]},
        "unknown": {"1": [5]},
    }
).encode()
JSON = (
    b'{"primary": {"size": "256MB"}, "core": {"stall_s": 2.5, "policy": "lru"},'
    b' "tiers": [{"type": "memory", "limit": 5}]}'
)
TOML = b'[primary]\nsize = "256MB"\n[core]\nstall_s = 2.5\npolicy = "lru"\n[[tiers]]\ntype = "memory"\nlimit = 5\n'
YAML = b"primary:\n  size: 256MB\ncore:\n  stall_s: 2.5\n  policy: lru\ntiers:\n  - type: memory\n    limit: 5\n"
DIGITS = b"9" * 5000
"""More than Python turns into a number."""
DEEP = b"[" * 100_000


def one_line(error: ConfigError, naming: str = "") -> None:
    """The error is one line, which names the place."""
    assert str(error)
    assert "\n" not in str(error)
    assert naming in str(error)


def insert(valid: bytes, at: bytes, what: bytes) -> bytes:
    assert at in valid
    return valid.replace(at, what, 1)


# traces


def read(path: Path, data: bytes) -> Trace | None:
    path.write_bytes(data)
    try:
        with little_memory(16 << 20):
            return read_mooncake(path)
    except ConfigError as error:
        one_line(error, naming=str(path))
        return None


@HERE
@given(mutations(TRACE))
def test_a_trace_is_read_or_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    trace = read(tmp_path / "trace.jsonl", data)
    if trace is not None:
        for request in trace.requests:
            assert len(request.ids) == -(-request.prompt_tokens // trace.tokens_per_id)


LINES = {
    "deep inside": b'{"x": ' + DEEP,
    "digits": insert(TRACE, b"1000", DIGITS),
    "deep": DEEP,
    "no text": b"\xff\xfe",
    "two": b"{}" * 9,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_trace_line_at_the_extremes_is_refused(tmp_path: Path, line: bytes) -> None:
    assert read(tmp_path / "trace.jsonl", line) is None


# configurations


def load(path: Path, data: bytes) -> Config | None:
    path.write_bytes(data)
    try:
        with little_memory(16 << 20):
            return load_config(path)
    except ConfigError as error:
        one_line(error)
        return None


def is_sound(config: Config | None) -> bool:
    return config is None or (config.primary.size >= 1 and 0.0 <= config.core.promotion_share <= 1.0)


@HERE
@given(mutations(JSON), mutations(TOML))
def test_a_configuration_is_read_or_refused_in_one_line(tmp_path: Path, in_json: bytes, in_toml: bytes) -> None:
    assert is_sound(load(tmp_path / "c.json", in_json))
    assert is_sound(load(tmp_path / "c.toml", in_toml))


needs_yaml = pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="PyYAML is not installed")


@needs_yaml
@HERE
@given(mutations(YAML))
def test_a_configuration_in_yaml_is_read_or_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    assert is_sound(load(tmp_path / "c.yaml", data))


LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b", ".join([b"*%c" % (name - 1)] * 9)) for name in range(ord("b"), ord("j"))
)
YAMLS = {
    "laughs": LAUGHS + b"tiers: *i\n",
    "date": b"primary: 2001-99-99\n",
    "digits": b"core: {stall_s: " + DIGITS + b"}\n",
}


@needs_yaml
@pytest.mark.parametrize("text", YAMLS.values(), ids=YAMLS)
def test_yaml_at_the_extremes_is_refused(tmp_path: Path, text: bytes) -> None:
    assert load(tmp_path / "c.yaml", text) is None


@needs_yaml
def test_yaml_that_multiplies_itself_inside_of_a_tier_takes_no_time(tmp_path: Path) -> None:
    lines = [b"  - type: memory"] + [
        b"    %c: &%c [%s]" % (name, name, b"x" if name == ord("a") else b", ".join([b"*%c" % (name - 1)] * 9))
        for name in range(ord("a"), ord("k"))
    ]
    load(tmp_path / "c.yaml", b"tiers:\n" + b"\n".join(lines) + b"\n")


@pytest.mark.parametrize(("name", "valid"), [("c.json", JSON), ("c.toml", TOML)])
@pytest.mark.parametrize("number", [DIGITS, b"1e999", b"-1", b"NaN"], ids=["digits", "infinite", "negative", "nan"])
def test_a_number_at_the_extremes_is_refused(tmp_path: Path, name: str, valid: bytes, number: bytes) -> None:
    assert load(tmp_path / name, insert(valid, b"2.5", number)) is None


@pytest.mark.parametrize("name", ["c.json", "c.toml"])
def test_a_configuration_that_is_nested_without_end_is_refused(tmp_path: Path, name: str) -> None:
    assert load(tmp_path / name, b"a = " + DEEP if name.endswith("toml") else DEEP) is None


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
OPTIONS = ("primary", "core", "tiers", "size", "type", "name", "limit", "stall_s", "dir", "store", "blocks_per_chunk")


@st.composite
def tables(draw: st.DrawFn) -> dict[str, object]:
    """Tables in which known options hold anything."""
    names = draw(st.lists(st.sampled_from(OPTIONS), max_size=4, unique=True))
    return {
        name: draw(st.one_of(plain, st.dictionaries(st.sampled_from(OPTIONS), plain, max_size=3))) for name in names
    }


@given(tables())
def test_any_table_is_a_configuration_or_a_clear_error(table: dict[str, object]) -> None:
    for reader in (config_from_dict, read_settings):
        try:
            reader(table)
        except ConfigError as error:
            one_line(error)


# cases of `kvstrata resolve`


@given(mutations(CASE))
def test_a_case_is_answered_or_refused(data: bytes) -> None:
    try:
        with little_memory(32 << 20):
            answer = answer_case(data)
    except ConfigError as error:
        one_line(error)
        return
    assert answer.boundary >= 0


@pytest.mark.parametrize("number", [*map(str, EXTREMES), "-1", "1e30", pytest.param(DIGITS.decode(), id="digits")])
@pytest.mark.parametrize("field", ["160", '"window": 32', '"tokens_per_block": 16', "[6, 7]"])
def test_a_case_with_numbers_at_the_extremes_takes_no_memory(field: str, number: str) -> None:
    name, colon, _ = field.rpartition(": ")
    what = f"[{number}]" if field.startswith("[") else f"{name}{colon}{number}"
    try:
        with little_memory(64 << 20):
            answer_case(insert(CASE, field.encode(), what.encode()))
    except ConfigError as error:
        one_line(error)


# what clients of the engine write, and what its ranks report


wishes = st.dictionaries(
    st.sampled_from(["load_tiers", "store", "max_load_tokens", "wait_s", "x" * 300]), plain, max_size=4
)


@given(st.one_of(plain, st.fixed_dictionaries({"kvstrata": st.one_of(plain, wishes)})))
def test_what_a_client_writes_never_raises_and_only_narrows(parameters: object) -> None:
    found = read_wishes(parameters, "prompt", may_load=True, wait_s=2.0, known=["disk"])  # type: ignore[arg-type]
    assert found.store in ("prompt", "none")
    assert found.options.total_s is None or 0 < found.options.total_s <= 2.0
    assert len(found.complaint) < 1500, "it goes into a log"


reports = st.builds(JobReport, st.one_of(st.integers(-3, 12), st.sampled_from(EXTREMES)), st.booleans())


@settings(max_examples=30)
@given(st.lists(st.builds(StepReport, st.lists(reports, max_size=4), st.lists(reports, max_size=4)), max_size=6))
def test_reports_of_ranks_that_make_no_sense_change_nothing_that_is_right(told: list[StepReport]) -> None:
    side = kit.side(kit.shape_of(kit.group(kit.full())))
    request = kit.FakeRequest("r", list(range(70)))
    side.new_request(request)
    side.matched(request, 0)
    side.allocated(request, [[]], 0)
    work = side.build_work(kit.output({"r": 70}, {"r": ([1, 2, 3, 4, 5],)}))
    real = {job.job_id for job in work.stores}
    for report in told:
        report.stores = [one for one in report.stores if one.job_id not in real]
        side.update(report)
        side.update("not a report")
    again = kit.FakeRequest("again", list(range(70)))
    side.new_request(again)
    assert side.matched(again, 0)[0] is None, "the store has not been reported by its rank"
    side.update(StepReport(stores=[JobReport(job, True) for job in real]))
    assert side.matched(again, 0) == (64, True)
    side.greet([RankGreeting(0, "", (512,))])
    side.close()


# messages between the engine and the I/O process


BATCH = msgspec.msgpack.encode(
    Batch(
        [
            ReadUnit(1, 2, [4096], [512], [0], b"d" * 16, True, True),
            Forget([1, 2]),
            ReadUnit(3, 0, [], [], [], b"", False, False),
        ]
    )
)
ANSWERS = msgspec.msgpack.encode(Answers([Done(1), Done(2, "io_error", "x", [(0, "corrupt")])]))


@given(mutations(BATCH), mutations(ANSWERS))
def test_a_message_of_the_pipes_decodes_or_is_an_error_of_its_kind(batch: bytes, answers: bytes) -> None:
    for kind, data in ((Batch, batch), (Answers, answers)):
        try:
            with little_memory():
                found = msgspec.msgpack.decode(data, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            continue
        assert isinstance(found, kind)


@given(st.data())
def test_frames_cut_anyhow_are_the_same_messages(data: st.DataObject) -> None:
    messages = data.draw(st.lists(st.binary(max_size=200), max_size=5))
    stream = b"".join(map(frame, messages))
    frames, found = Frames(), []
    while stream:
        piece, stream = stream[: (size := data.draw(st.integers(1, 64)))], stream[size:]
        found += frames.feed(piece)
    assert found == messages


@given(st.data())
def test_a_damaged_stream_never_takes_more_than_one_message(data: st.DataObject) -> None:
    stream = b"".join(frame(b"m" * 50) for _ in range(4))
    for _ in range(3):
        stream = mutate(stream, data.draw)
    frames = Frames()
    try:
        with little_memory():
            found = frames.feed(stream)
    except BadStreamError:
        return
    assert sum(map(len, found)) <= len(stream)


@pytest.mark.parametrize("size", [MOST_MESSAGE_BYTES + 1, 0x7FFF_FFFF, 0xFFFF_FFFF])
def test_a_length_beyond_every_message_is_refused_at_once(size: int) -> None:
    with little_memory(), pytest.raises(BadStreamError):
        Frames().feed(size.to_bytes(4, "little") + b"x" * 100)
