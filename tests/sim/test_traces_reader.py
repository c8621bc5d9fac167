"""The reader of Mooncake traces: what it accepts, and that every refusal names file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata.sim.traces import MOONCAKE_TOKENS_PER_ID, read_mooncake

GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}'
TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def write(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    trace = read_mooncake(write(tmp_path, GOOD, "", GOOD))
    assert trace.tokens_per_id == MOONCAKE_TOKENS_PER_ID
    assert [request.index for request in trace.requests] == [0, 1]
    first = trace.requests[0]
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens, first.ids.tolist()) == (1.5, 600, 7, [4, 9])
    assert trace.prompt_tokens == 1200
    assert len(trace.first(1).requests) == 1
    assert trace.first(None).requests == trace.requests


def test_fields_that_the_format_does_not_have_are_ignored(tmp_path: Path) -> None:
    assert len(read_mooncake(write(tmp_path, GOOD.replace("{", '{"type": "chat", '))).requests) == 1


def test_only_as_many_lines_are_read_as_are_asked_for(tmp_path: Path) -> None:
    assert len(read_mooncake(write(tmp_path, GOOD, "broken"), limit=1).requests) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{broken", "not a JSON object"),
        ("[1, 2]", "Expected `object`"),
        (b"\xff\xfe", "not a JSON object"),
        (GOOD.replace('"input_length": 600, ', ""), "lacks the field `input_length`"),
        (GOOD.replace('"hash_ids": [4, 9]', '"other": 1'), "lacks the field `hash_ids`"),
        (GOOD.replace("600", '"600"'), "input_length"),
        (GOOD.replace("600", "600.5"), "input_length"),
        (GOOD.replace("600", "0"), "input_length: 0"),
        (GOOD.replace("600", "99999999999"), "input_length: 99999999999"),
        (GOOD.replace(": 7", ": -1"), "output_length: -1"),
        (GOOD.replace("1500", "-1"), "timestamp: -1"),
        (GOOD.replace("1500", "null"), "timestamp"),
        (GOOD.replace("[4, 9]", "[4]"), "hash_ids: 1 ids, but input_length 600 has 2 runs"),
        (GOOD.replace("[4, 9]", "[4, 9, 11]"), "hash_ids: 3 ids"),
        (GOOD.replace("[4, 9]", "[4, -9]"), "hash_ids[1]: -9"),
        (GOOD.replace("[4, 9]", "[4, 1e3]"), "hash_ids"),
        (GOOD.replace("[4, 9]", "[5, 9]"), "hash_ids[1]: id 9 stood for another prefix"),
        (GOOD.replace("[4, 9]", "[9, 4]"), "hash_ids[0]: id 9 stood for another prefix"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_field(tmp_path: Path, line: str | bytes, says: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError) as refused:
        read_mooncake(path)
    message = str(refused.value)
    assert message.startswith(f"{path}:2: ")
    assert says in message
    assert "\n" not in message


def test_a_file_that_is_missing_empty_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", write(tmp_path, ""), tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_mooncake(path)


@pytest.mark.parametrize(
    ("name", "requests", "ids", "distinct"),
    [("conversation", 12_031, 288_500, 182_790), ("synthetic", 3_993, 121_877, 43_924)],
)
def test_the_published_traces_read_whole(name: str, requests: int, ids: int, distinct: int) -> None:
    path = TRACES / f"mooncake_{name}.jsonl"
    if not path.exists():
        pytest.skip(f"the trace {path.name} is not at ../shared/traces")
    trace = read_mooncake(path)
    assert len(trace.requests) == requests
    assert sum(len(request.ids) for request in trace.requests) == ids
    assert len({int(run) for request in trace.requests for run in request.ids}) == distinct
