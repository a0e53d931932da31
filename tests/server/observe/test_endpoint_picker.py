"""The protocol between model servers and the endpoint picker of the Gateway API Inference Extension: the series that a
picker reads, under the names that it looks for by default, with the types and labels that it needs."""

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL_ID, Server

QUEUED, RUNNING, KV_USAGE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
ADAPTERS, CACHE = "vllm:lora_requests_info", "vllm:cache_config_info"


async def page(server: Server) -> dict[str, Metric]:
    text = (await server.http.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


async def test_a_picker_reads_queue_load_and_memory(server: Server) -> None:
    server.engine.emit_stats(
        running_online=5, waiting_online=2, waiting_offline=9_000, blocks_online=16, blocks_offline=32, blocks_free=16
    )
    found = await page(server)
    assert {found[name].type for name in (QUEUED, RUNNING, KV_USAGE)} == {"gauge"}
    values = {name: [sample.value for sample in found[name].samples] for name in (QUEUED, RUNNING, KV_USAGE)}
    # Online work alone counts: batch lines that wait are no reason to send a chat elsewhere.
    assert values == {QUEUED: [2.0], RUNNING: [5.0], KV_USAGE: [0.25]}
    assert found[QUEUED].samples[0].labels["model_name"] == MODEL_ID


async def test_a_picker_learns_that_no_adapter_can_be_loaded(server: Server) -> None:
    found = (await page(server))[ADAPTERS]
    (sample,) = found.samples
    assert found.type == "gauge"
    assert sample.labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}


async def test_a_picker_reads_the_size_of_the_cache_from_labels(server: Server) -> None:
    server.engine.emit_stats()
    (sample,) = (await page(server))[CACHE].samples
    info = server.context.client.info
    assert (int(sample.labels["block_size"]), int(sample.labels["num_gpu_blocks"])) == (
        info.block_size, info.num_blocks
    )  # fmt: skip
