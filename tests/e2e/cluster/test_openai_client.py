"""The suite of the real ``openai`` client for files and batches, on the embedded model: before two replicas behind one
address, that of ``neaptide cluster`` or Ray's, it passes as before one server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.cluster.machine import RunningCluster, flags_of
from tests.e2e.cluster.ray_machine import RayCluster, needs_ray
from tests.e2e.conftest import KEYS
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
    test_async_client,
    test_flex_says_that_it_was_flex,
    test_stream_carries_the_same_text_and_usage,
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
