"""The suites of the real ``openai`` client, on the embedded model: before two replicas behind one address, that of
``neaptide cluster`` or Ray's, they pass as before one server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.cluster.e2e.machine import RunningCluster, flags_of
from tests.cluster.e2e.on_ray.machine import RayCluster, needs_ray
from tests.e2e.conftest import KEYS
from tests.e2e.structured.test_formats import (  # noqa: F401
    test_a_batch_holds_every_line_to_its_own_form,
    test_a_schema_that_cannot_be_held_names_the_keyword,
    test_every_choice_is_valid_and_a_stream_says_the_same,
)
from tests.e2e.structured.test_tools import (  # noqa: F401
    test_a_call_that_was_cut_is_partial_and_says_so,
    test_a_named_function_is_called_once,
    test_a_stream_brings_the_same_call,
)
from tests.e2e.test_openai_batches import (  # noqa: F401
    test_a_batch_of_completions,
    test_a_batch_with_a_bad_line_fails_before_anything_runs,
    test_a_deleted_file_is_gone,
    test_a_file_can_be_described_and_read_back,
    test_a_window_that_is_not_offered_is_refused,
    test_an_unknown_batch_is_not_found,
    test_batch_from_upload_to_results,
    test_cancelled_batch_accounts_for_every_line,
    test_cancelling_a_batch_that_has_ended_is_a_conflict,
    test_files_expire_when_that_is_asked,
    test_the_sdk_pages_through_all_files,
)
from tests.e2e.test_openai_client import (  # noqa: F401
    test_a_bad_value_is_a_bad_request_that_names_the_parameter,
    test_a_model_id_with_a_slash_can_be_retrieved,
    test_a_prompt_beyond_the_context_is_told_by_its_code,
    test_a_stream_may_be_left_early,
    test_an_endpoint_that_is_not_offered_is_not_found,
    test_an_unknown_model_is_not_found,
    test_async_client,
    test_chat_answers_what_the_reference_answers,
    test_choices_of_one_seed_differ_and_repeat,
    test_completion_stream_carries_the_same_text_and_usage,
    test_content_may_come_in_parts,
    test_end_of_text_after_an_echoed_prompt_is_scored,
    test_flex_says_that_it_was_flex,
    test_greedy_tokens_are_the_best_of_their_logprobs,
    test_long_answers_end_at_the_limit_with_length,
    test_many_prompts_are_answered_in_order,
    test_models_are_listed,
    test_probes_answer_get_and_head,
    test_replies_carry_the_callers_request_id_and_the_time_taken,
    test_stop_string_ends_the_answer_before_it,
    test_stream_carries_the_same_text_and_usage,
    test_stream_helper_of_the_sdk,
    test_texts_and_token_ids_give_the_same_completion,
    test_token_ids_with_echo_and_logprobs_score_the_prompt,
    test_tokenize_and_detokenize_are_inverse,
    test_tokenize_counts_a_conversation_as_chat_does,
    test_tokenizer_info_names_the_end_of_text,
    test_tools_that_the_model_does_not_call_leave_a_plain_answer,
    test_whole_and_streamed_replies_name_the_same_system,
    test_zero_tokens_score_the_prompt_alone,
)
from tests.postgres import PostgresServer

pytestmark = pytest.mark.full


SETTINGS: dict[str, Any] = {
    "shadow": "off",
    "max_model_len": 2048,
    "served_model_name": "neaptide/tiny",
    "dtype": "float32",
    "profile": "cpu-neaptide-tiny",
}


@pytest.fixture(scope="module", params=["machine", pytest.param("ray", marks=needs_ray)])
def embedded(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """In place of the one server of this name."""
    settings = SETTINGS | {"store": postgres_server.url(postgres_server.new_database())}
    directory = tmp_path_factory.mktemp("embedded-cluster")
    if request.param == "ray":
        cluster: RunningCluster = RayCluster(directory, settings | {"api_key": list(KEYS)}, env={})
    else:
        flags = flags_of([*settings.items(), *(("api_key", key) for key in KEYS)])
        cluster = RunningCluster(directory, *flags, env={})
    cluster.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(embedded: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedded.base_url, api_key=KEYS[0], max_retries=0) as client:
        yield client


def test_every_replica_answers_for_what_any_of_them_took(embedded: RunningCluster, client: openai.OpenAI) -> None:
    content = b'{"a": 1}\n'
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    addresses = {one["url"] for one in embedded.shown()}
    assert len(addresses) == 2
    for address in addresses:
        assert embedded.http.get(f"{address}/v1/files/{made.id}/content").raise_for_status().content == content
