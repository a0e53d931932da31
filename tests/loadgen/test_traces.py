import functools
import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.loadgen.workloads.sharing import prefix_sharing
from neaptide.loadgen.workloads.trace_rows import content_name
from neaptide.loadgen.workloads.traces import (
    FIRST_TOKEN_ID,
    TraceRequest,
    block_segments,
    content_base,
    data_file,
    load_online,
    online_names,
    token_ids,
)

# requests; input mean, max; output mean, max (tokens); duration (s); CV of gaps: the statistics of the trace collection
PUBLISHED = {
    "azure_conv_2023": (9655, 1235, 14050, 222, 1000, 1740, 1.07),
    "azure_code_2023": (4989, 2054, 7437, 27, 1899, 1602, 13.85),
    "mooncake_conversation": (6758, 12592, 124847, 347, 2000, 2097, None),  # its CV is mostly ticks: spread here
    "mooncake_synthetic": (2254, 12564, 191374, 190, 842, 600, 1.01),
    "agent_miniswe": (206, 5918, 34675, 108, 323, None, None),  # sessions start as the replay says
    "servegen_r1_resampled": (9904, 945, 41667, 609, 9530, 3600, 1.51),
}
HIT_RATIO = {"mooncake_conversation": 0.352, "mooncake_synthetic": 0.370, "agent_miniswe": 0.935}

whole_trace = functools.cache(load_online)
"""Read once for all tests."""

segments_st = st.lists(st.tuples(st.integers(0, (1 << 63) - 1), st.integers(1, 40)), max_size=6).map(tuple)


def test_every_bundled_trace_is_listed() -> None:
    assert set(online_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_and_arrivals_match_the_published_statistics(name: str) -> None:
    requests = whole_trace(name)
    inputs = np.array([request.input_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    count, input_mean, input_max, output_mean, output_max, duration_s, gap_cv = PUBLISHED[name]

    assert len(requests) == count
    assert (round(inputs.mean()), inputs.max()) == (input_mean, input_max)
    assert (round(outputs.mean()), outputs.max()) == (output_mean, output_max)
    arrivals = np.array([request.arrival_s for request in requests])
    gaps = np.diff(arrivals)
    assert gaps.min() >= 0
    if duration_s is not None:
        assert arrivals[-1] == pytest.approx(duration_s, abs=3)
    if gap_cv is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(gap_cv, abs=0.005)


@pytest.mark.parametrize("name", HIT_RATIO)
def test_prefix_reuse_matches_the_published_hit_ratio(name: str) -> None:
    sharing = prefix_sharing(request.segments for request in whole_trace(name))
    assert sharing.ratio == pytest.approx(HIT_RATIO[name], abs=0.001)


@pytest.mark.parametrize("name", ["azure_conv_2023", "azure_code_2023", "servegen_r1_resampled"])
def test_prompts_of_traces_without_block_ids_share_nothing(name: str) -> None:
    requests = whole_trace(name)
    assert len({request.segments[0][0] for request in requests}) == len(requests)
    assert all(len(request.segments) == 1 for request in requests)


def test_a_tick_of_three_seconds_is_spread_evenly() -> None:
    arrivals = np.array([request.arrival_s for request in load_online("mooncake_conversation", window_s=(0, 9))])
    first_tick = arrivals[arrivals < 3]
    assert len(first_tick) == 10
    assert first_tick == pytest.approx(np.arange(10) * 0.3)


def test_the_window_is_cut_before_the_speed_divides() -> None:
    whole = whole_trace("azure_code_2023")
    cut = load_online("azure_code_2023", window_s=(1133, 1470), speed=2.0)
    expected = [request for request in whole if 1133 <= request.arrival_s < 1470]
    assert [request.segments for request in cut] == [request.segments for request in expected]
    assert [request.arrival_s for request in cut] == pytest.approx([(r.arrival_s - 1133) / 2 for r in expected])


def test_long_prompts_are_left_out() -> None:
    kept = load_online("mooncake_conversation", max_input_tokens=32_768)
    assert max(request.input_tokens for request in kept) <= 32_768
    assert len(kept) / 6758 == pytest.approx(0.93, abs=0.005)


def test_a_trace_file_is_read_by_its_columns(tmp_path) -> None:
    path = tmp_path / "mine.jsonl.gz"
    rows = [
        {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [7]},
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    base = content_base(content_name(path))
    assert load_online(path) == [
        TraceRequest(0.0, ((base + 7, 512), (base + 8, 488)), 5),
        TraceRequest(0.5, ((base + 7, 512),), 1),
    ]


def test_azure_stamps_keep_seven_decimals(tmp_path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:59:59.9999999,10,1\n2023-11-16 19:00:00.0000004,20,2\n2023-11-16 19:00:01,30,3\n"
    )
    arrivals = [request.arrival_s for request in load_online(path)]
    assert arrivals == pytest.approx([0.0, 5e-7, 1.0000001], abs=3e-7)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"name_or_path": "no_such_trace"}, "no trace"),
        ({"name_or_path": "azure_conv_2023", "speed": 0}, "speed"),
        ({"name_or_path": "azure_conv_2023", "window_s": (5, 5)}, "window"),
        ({"name_or_path": data_file("offline", "bbh.jsonl.gz")}, "columns"),
    ],
)
def test_what_cannot_be_replayed_is_refused(arguments: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_online(**arguments)


def test_the_last_block_is_cut_to_the_prompt() -> None:
    assert block_segments(100, [3, 4, 5], 16, 40) == ((103, 16), (104, 16), (105, 8))
    assert block_segments(100, [3, 4], 16, 32) == ((103, 16), (104, 16))


@given(segments=segments_st, more=segments_st, cut=st.integers(1, 40))
def test_equal_leading_segments_are_equal_leading_tokens(segments, more, cut) -> None:
    tokens = token_ids(segments, 8192)
    assert tokens.dtype == np.int32
    assert len(tokens) == sum(length for _, length in segments)
    assert np.array_equal(token_ids(segments + more, 8192)[: len(tokens)], tokens)
    if segments:  # a cut segment starts like the whole one
        content, length = segments[-1]
        shorter = (*segments[:-1], (content, min(cut, length)))
        kept = len(tokens) - length + min(cut, length)
        assert np.array_equal(token_ids(shorter, 8192), tokens[:kept])


@given(segments=segments_st, vocab_size=st.integers(FIRST_TOKEN_ID + 1, 200_000))
def test_tokens_are_ordinary_ids_of_the_vocabulary(segments, vocab_size) -> None:
    tokens = token_ids(segments, vocab_size)
    assert ((tokens >= FIRST_TOKEN_ID) & (tokens < vocab_size)).all()


def test_a_vocabulary_of_specials_is_refused() -> None:
    with pytest.raises(ValueError, match="ordinary"):
        token_ids(((1, 1),), FIRST_TOKEN_ID)


def test_different_content_has_different_tokens() -> None:
    blocks = np.array([token_ids(((content, 16),), 8192) for content in range(2000)])
    assert len(np.unique(blocks, axis=0)) == 2000
    counts = np.bincount(token_ids(((1, 500_000),), 1006), minlength=1006)[FIRST_TOKEN_ID:]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)  # as of independent uniform draws


def splitmix64(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def test_tokens_are_the_hash_of_content_and_position() -> None:
    segments = ((5, 4), (1 << 62, 3), (0, 2))
    expected = [
        FIRST_TOKEN_ID + (splitmix64((splitmix64(content) + k * 0x9E3779B97F4A7C15) % 2**64) >> 32) * 8186 // 2**32
        for content, length in segments
        for k in range(length)
    ]
    assert token_ids(segments, 8192).tolist() == expected


def test_content_ids_do_not_depend_on_the_process() -> None:
    code = "from neaptide.loadgen.workloads.traces import content_base; print(content_base('bbh#0'))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert int(done.stdout) == content_base("bbh#0")


def test_traces_have_content_of_their_own() -> None:
    contents = [
        {content for request in whole_trace(name) for content, _ in request.segments} for name in online_names()
    ]
    assert len(set().union(*contents)) == sum(map(len, contents))
