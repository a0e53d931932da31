"""Pages of metrics, as vLLM and others show them."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.observation.exposition import ExpositionError, read_exposition
from tests.observation.pretended import VllmMetrics


@cache
def page() -> str:
    metrics = VllmMetrics(num_blocks=100, block_size=16)
    metrics["num_requests_running"].set(3)
    metrics["request_prompt_tokens"].observe(120)
    metrics["inter_token_latency_seconds"].observe(0.03)
    return metrics.page()


def test_a_page_of_vllm_gives_gauges_counters_histograms_and_labels() -> None:
    found = read_exposition(page())
    assert found.values["num_requests_running"] == 3
    assert found.values["request_prompt_tokens_sum"] == 120
    assert found.values["request_prompt_tokens_bucket|100.0"] == 0
    assert found.values["request_prompt_tokens_bucket|200.0"] == 1
    assert found.values["request_prompt_tokens_bucket|inf"] == 1
    assert found.labels == {"model_name": "pretended", "block_size": "16", "num_gpu_blocks": "100"}


def test_names_of_older_versions_are_understood() -> None:
    older = page().replace("inter_token_latency_seconds", "time_per_output_token_seconds")
    assert read_exposition(older).values["inter_token_latency_seconds_count"] == 1


def test_series_of_other_programs_are_left_out() -> None:
    found = read_exposition('other_total{x="y"} 7\n' + page() + "vllm:unknown_total 3\n")
    assert not [key for key in found.values if "other" in key or "unknown" in key]


def test_one_of_several_engines_is_chosen_by_its_label() -> None:
    second = page().replace('engine="0"', 'engine="1"').replace("running{", "running{").replace("} 3.0", "} 5.0")
    both = page() + second
    with pytest.raises(ExpositionError, match=r"there are 2 engines \(0, 1\): choose one with --engine"):
        read_exposition(both)
    assert read_exposition(both, "1").values["num_requests_running"] == 5
    with pytest.raises(ExpositionError, match="no series of vLLM for engine 7"):
        read_exposition(both, "7")


def test_a_page_without_series_of_vllm_is_refused() -> None:
    with pytest.raises(ExpositionError, match="there is no series of vLLM"):
        read_exposition("python_info 1.0\n")


def test_a_page_without_a_needed_series_names_it() -> None:
    text = "\n".join(line for line in page().splitlines() if "request_prompt_tokens" not in line)
    with pytest.raises(ExpositionError, match="there is no vllm:request_prompt_tokens_count"):
        read_exposition(text)


def test_values_that_are_no_numbers_are_left_out() -> None:
    text = page().replace('vllm:num_requests_running{engine="0",model_name="pretended"} 3.0', "")
    text += 'vllm:kv_cache_usage_perc{engine="0",model_name="pretended"} NaN\n'
    text += 'vllm:num_requests_running{engine="0",model_name="pretended"} 2\n'
    assert read_exposition(text).values["kv_cache_usage_perc"] == 0


@given(st.text(), st.text(alphabet='vllm:_{}"=,.0123456789 \n', max_size=80))
def test_nothing_that_a_page_says_is_more_than_an_exposition_error(text: str, like: str) -> None:
    for shown in (text, f"vllm:{like}", page() + f"vllm:{like}\n"):
        assert "\n" not in said_of(shown)


def said_of(text: str) -> str:
    try:
        read_exposition(text)
    except ExpositionError as error:
        return str(error)
    return ""
