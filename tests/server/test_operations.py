"""Keys, probes, metrics, logs, ids, models, the admin switch, the OpenAPI document."""

import asyncio
import json
import logging
import re
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from neaptide.engine.messages import RequestOutput, SetOffline, SetShareWeights
from neaptide.engine.params import Tier
from neaptide.server.http.auth import OPEN_PATHS, KeyRing
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import until
from tests.server.conftest import MODEL_ID, USER, Server, make_server

CHAT = "/v1/chat/completions"
KEYS = ("alpha", "beta:flex", "ga-mma")


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        (None, 401, None),
        ("", 401, None),
        ("Bearer", 401, None),
        ("Bearer ", 401, None),
        ("Basic alpha", 401, None),
        ("alpha", 401, None),
        ("Bearer alph", 401, "invalid_api_key"),
        ("Bearer alpha2", 401, "invalid_api_key"),
        ("Bearer beta:flex", 401, "invalid_api_key"),
        ("Bearer alpha", 200, None),
        ("bearer alpha", 200, None),
        ("BEARER   alpha ", 200, None),
        ("Bearer beta", 200, None),
        ("Bearer ga-mma", 200, None),
    ],
)
@pytest.mark.acceptance("A27", "keys that are missing, wrong or oddly written")
async def test_key_matrix(tokenizer: Tokenizer, header: str | None, status: int, code: str | None) -> None:
    server = make_server(tokenizer, KEYS)
    reply = await server.http.get("/v1/models", headers={} if header is None else {"Authorization": header})
    assert reply.status_code == status
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == code
        assert reply.headers["x-request-id"]


@pytest.mark.acceptance("A27", "every route x method without a known key", count=80)
async def test_every_route_but_the_open_ones_needs_a_key(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer, KEYS)
    schema = (await server.http.get("/openapi.json", headers=_bearer("alpha"))).json()
    paths = {path.replace("{model_id}", "x") for path in schema["paths"]} | {
        route.path for route in server.app.routes if isinstance(route, Route)
    }
    paths |= {"/nothing", "//v1/models", "/v1/../v1/models", "/v1/models/", "/health/", "/metrics/x"}
    assert {CHAT, "/tokenize", "/detokenize", "/tokenizer_info", "/admin/offline", "/openapi.json"} <= paths
    for path in paths - OPEN_PATHS:
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            reply = await server.http.request(method, httpx2.URL(f"http://test{path}"))
            assert reply.status_code == 401, (method, path)
    for path in OPEN_PATHS:
        assert (await server.http.get(path)).status_code == 200


async def test_keys_choose_tier_and_cache_salt(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer, KEYS)
    for key, more in (("alpha", {}), ("beta", {}), ("beta", {"service_tier": "flex"}), ("alpha", {})):
        body = {"messages": USER, "max_tokens": 1, **more}
        reply = await server.http.post(CHAT, json=body, headers=_bearer(key))
        assert reply.status_code == 200
    first, second, third, fourth = server.engine.requests
    assert [r.tier for r in (first, second, third)] == [Tier.DEFAULT, Tier.FLEX, Tier.FLEX]
    assert len(first.salt) == 16
    assert first.salt == fourth.salt != second.salt == third.salt


async def test_a_cache_salt_divides_what_a_key_sees_and_joins_no_keys(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer, KEYS)
    for key, salt in (("alpha", "s"), ("alpha", "s"), ("alpha", "t"), ("beta", "s"), ("alpha", None)):
        body = {"messages": USER, "max_tokens": 1, "cache_salt": salt}
        assert (await server.http.post(CHAT, json=body, headers=_bearer(key))).status_code == 200
    first, again, other, foreign, plain = (request.salt for request in server.engine.requests)
    assert first == again
    assert len({first, other, foreign, plain}) == 4
    assert {len(first), len(other), len(foreign)} == {16}


async def test_without_keys_all_share_one_group(server: Server) -> None:
    await server.http.post(CHAT, json={"messages": USER, "max_tokens": 1})
    assert server.engine.requests[0].salt == b""


def test_tenants_differ_and_do_not_reveal_the_key() -> None:
    ring = KeyRing(KEYS)
    alpha, beta = ring.identify("Bearer alpha"), ring.identify("Bearer beta")
    assert alpha.tenant != beta.tenant
    assert "alpha" not in alpha.tenant
    with pytest.raises(ValueError, match="empty"):
        KeyRing(("",))


async def test_sdk_sees_authentication_errors(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer, KEYS)
    with pytest.raises(openai.AuthenticationError) as caught:
        await server.openai.models.list()
    assert caught.value.code == "invalid_api_key"


# ---- probes and models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_answer_get_and_head(server: Server, path: str) -> None:
    assert (await server.http.get(path)).status_code == 200
    head = await server.http.head(path)
    assert head.status_code == 200
    assert head.content == b""


async def test_models_list_and_retrieve(server: Server) -> None:
    server.context.model_aliases = ("alias",)
    listed = [model async for model in server.openai.models.list()]
    assert [model.id for model in listed] == [MODEL_ID, "alias"]
    model = await server.openai.models.retrieve(MODEL_ID)
    assert (model.id, model.object, model.created) == (MODEL_ID, "model", 1_700_000_000)
    assert model.model_dump()["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve("other/model")


# ---- request ids and logs --------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["abc-DEF_1", "x" * 64])
async def test_good_request_ids_are_echoed(server: Server, sent: str) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        assert (await server.http.get(path, headers={"x-request-id": sent})).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 65, "a b", "a\tb", "../x", b"\xc3\xa9", None])
@pytest.mark.acceptance("A28", "request ids that are not echoed")
async def test_other_request_ids_are_replaced(server: Server, sent: str | bytes | None) -> None:
    headers: Any = {} if sent is None else {"x-request-id": sent}
    reply = await server.http.get("/health", headers=headers)
    assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])


async def test_sdk_shows_the_request_id(server: Server) -> None:
    reply = await server.openai.chat.completions.create(
        model=MODEL_ID, messages=USER, max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert reply._request_id == "mine"
    assert "mine" not in server.engine.requests[0].request_id


async def test_the_line_of_a_request_names_key_and_engine_id(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = make_server(tokenizer, KEYS)
    for key, more in (("alpha", {}), ("beta", {}), ("alpha", {"temperature": 9})):
        body = {"messages": USER, "max_tokens": 1, **more}
        reply = await server.http.post(CHAT, json=body, headers=_bearer(key) | {"x-request-id": "mine"})
        if reply.status_code == 200:
            given = reply.json()["id"]
    alpha, beta, refused = (json.loads(r.getMessage()) for r in caplog.records if r.name == "neaptide.requests")
    ring = KeyRing(KEYS)
    assert alpha["key"] == refused["key"] == ring.identify("Bearer alpha").tenant[:8]
    assert beta["key"] == ring.identify("Bearer beta").tenant[:8]
    assert {line["request_id"] for line in (alpha, beta, refused)} == {"mine"}
    assert [f"{line['engine_id']}-0" for line in (alpha, beta)] == [r.request_id for r in server.engine.requests]
    assert given == f"chatcmpl-{beta['engine_id']}"
    assert refused["engine_id"] is None


async def test_without_keys_a_line_names_none(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await server.http.post(CHAT, json={"messages": USER, "max_tokens": 1})
    (line,) = (json.loads(r.getMessage()) for r in caplog.records if r.name == "neaptide.requests")
    assert line["key"] is None


@pytest.mark.acceptance("A28", "prompts in log lines", count=2)
async def test_one_log_line_per_request_without_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    canary = "canary text"
    messages = [{"role": "user", "content": canary}]
    await server.http.post(
        CHAT, json={"messages": messages, "max_tokens": 3, "service_tier": "flex"}, headers={"x-request-id": "r1"}
    )
    await server.http.post(CHAT, json={"messages": messages, "temperature": 9}, headers={"x-request-id": "r2"})
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "neaptide.requests"]
    assert [(line["request_id"], line["outcome"], line["tier"]) for line in lines] == [
        ("r1", "ok", "flex"),
        ("r2", "client_error", "default"),
    ]
    assert lines[0]["completion_tokens"] == 3
    assert lines[0]["ttft_ms"] > 0
    assert lines[0]["finish_reasons"] == ["length"]
    assert canary not in caplog.text


async def test_the_log_line_joins_the_callers_id_with_the_engines(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = {"messages": USER, "max_tokens": 1, "n": 2}
    reply = (await server.http.post(CHAT, json=body, headers={"x-request-id": "r1"})).json()
    (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "neaptide.requests"]
    assert line["request_id"] == "r1"
    assert [request.request_id for request in server.engine.requests] == [f"{line['engine_id']}-{k}" for k in (0, 1)]
    assert reply["id"] == f"chatcmpl-{line['engine_id']}"


# ---- metrics ---------------------------------------------------------------------------------------------

NAMES = {
    "neaptide_requests",
    "neaptide_requests_in_flight",
    "neaptide_requests_running",
    "neaptide_requests_waiting",
    "neaptide_request_ttft_seconds",
    "neaptide_request_itl_seconds",
    "neaptide_request_tpot_seconds",
    "neaptide_request_e2e_seconds",
    "neaptide_request_queue_seconds",
    "neaptide_tokens",
    "neaptide_slo_attained",
    "neaptide_slo_violated",
    "neaptide_admission_rejected",
    "neaptide_preemptions",
    "neaptide_dropped_tokens",
    "neaptide_recomputed_tokens",
    "neaptide_memory_ran_out",
    "neaptide_grammar_bytes",
    "neaptide_mask_wait_seconds",
    "neaptide_late_masks",
    "neaptide_kv_blocks",
    "neaptide_step_seconds",
    "neaptide_step_tokens",
    "neaptide_step_budget_seconds",
    "neaptide_step_predicted_seconds",
    "neaptide_step_prediction_error_ratio",
    "neaptide_steps",
    "neaptide_steps_within_margin",
    "neaptide_steps_given_up",
    "neaptide_steps_given_up_seconds",
    "neaptide_besteffort_paused",
    "neaptide_http_requests",
    "neaptide_http_request_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_success",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "process_start_time_seconds",
}


async def _samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    reply = await server.http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(reply.text))
    assert {family.name for family in families} >= NAMES
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


async def test_coverage_counts_steps_that_ended_within_their_margin(server: Server) -> None:
    for duration_s in (0.010, 0.0115, 0.012, 0.013):
        server.engine.emit_stats(duration_s=duration_s, predicted_s=0.011, margin_s=0.001)
    server.engine.emit_stats(duration_s=0.01, predicted_s=0.0)  # not predicted
    found = await _samples(server)
    assert found["neaptide_steps_total", frozenset()] == 4
    assert found["neaptide_steps_within_margin_total", frozenset()] == 3


async def test_a_step_that_was_given_up_says_nothing_of_predictions(server: Server) -> None:
    server.engine.emit_stats(duration_s=0.01, predicted_s=0.011, margin_s=0.001)
    server.engine.emit_stats(duration_s=0.25, predicted_s=0.3, is_aborted=True)
    server.engine.emit_stats(duration_s=0.5, predicted_s=0.6, is_aborted=True)
    found = await _samples(server)
    assert found["neaptide_steps_given_up_total", frozenset()] == 2
    assert found["neaptide_steps_given_up_seconds_total", frozenset()] == pytest.approx(0.75)
    assert found["neaptide_steps_total", frozenset()] == 1


async def test_metrics_count_what_happened(server: Server) -> None:
    async def call(**more: Any) -> None:
        await server.http.post(CHAT, json={"messages": USER, "max_tokens": 4, **more})

    await call()
    await call(service_tier="flex", stream=True)
    await call(ttft_slo_ms=1e-3)
    await call(temperature=9)
    server.engine.emit_stats(running_online=3, running_offline=7, waiting_offline=9, blocks_cached=5, memory_ran_out=2)
    server.engine.emit_stats(running_offline=7, waiting_offline=9, blocks_cached=5, late_masks=3, grammar_bytes=4096)
    found = await _samples(server)

    def value(name: str, **labels: str) -> float:
        return found[(name, frozenset(labels.items()))]

    assert value("neaptide_requests_total", tier="default", endpoint=CHAT, outcome="ok") == 2
    assert value("neaptide_requests_total", tier="flex", endpoint=CHAT, outcome="ok") == 1
    assert value("neaptide_requests_total", tier="default", endpoint=CHAT, outcome="client_error") == 1
    assert value("neaptide_tokens_total", tier="default", kind="generated") == 8
    assert value("neaptide_request_itl_seconds_count", tier="flex") == 3
    assert value("neaptide_request_ttft_seconds_count", tier="default") == 2
    assert value("neaptide_slo_attained_total", tier="default", slo="ttft") == 1
    assert value("neaptide_slo_violated_total", tier="default", slo="ttft") == 1
    assert value("neaptide_slo_attained_total", tier="default", slo="tpot") == 2
    assert value("neaptide_requests_running", **{"class": "offline"}) == 7
    assert value("neaptide_requests_waiting", **{"class": "offline"}) == 9
    assert value("neaptide_kv_blocks", state="cached") == 5
    assert value("neaptide_memory_ran_out_total") == 2
    assert (value("neaptide_late_masks_total"), value("neaptide_grammar_bytes")) == (3, 4096)
    assert value("neaptide_http_requests_total", method="POST", route=CHAT, code="200") == 3
    assert value("neaptide_http_requests_total", method="POST", route=CHAT, code="400") == 1
    # The compatible series know online work only.
    assert value("vllm:num_requests_waiting", model_name=MODEL_ID, engine="0") == 0
    assert value("vllm:generation_tokens_total", model_name=MODEL_ID, engine="0") == 8
    tiers = {dict(labels)["tier"] for _, labels in found if "tier" in dict(labels)}
    assert tiers <= {tier.value for tier in Tier}


async def test_tokens_count_while_an_answer_is_written(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, emit = server.engine, server.engine._emit

    def emit_and_wait(output: RequestOutput) -> None:
        emit(output)
        engine.delay_s = 1e6

    monkeypatch.setattr(engine, "_emit", emit_and_wait)
    asking = asyncio.ensure_future(server.http.post(CHAT, json={"messages": USER, "max_tokens": 9}))
    await until(lambda: engine.delay_s)
    found = await _samples(server)
    labels = frozenset({"model_name": MODEL_ID, "engine": "0"}.items())
    assert found["vllm:generation_tokens_total", labels] == 1
    assert found["vllm:prompt_tokens_total", labels] > 1
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_labels_take_no_value_from_callers(server: Server) -> None:
    for i in range(5):
        await server.http.request(f"M{i}", f"/nothing/{i}")
        await server.http.get(f"/v1/models/m{i}")
    text = (await server.http.get("/metrics")).text
    assert "nothing" not in text
    assert "M1" not in text
    assert "m1" not in text
    assert 'neaptide_http_requests_total{code="404",method="OTHER",route="unmatched"} 5.0' in text


async def test_openmetrics_on_request(server: Server) -> None:
    reply = await server.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert reply.text.endswith("# EOF\n")


# ---- admin and schema ------------------------------------------------------------------------------------


async def test_offline_switch(server: Server) -> None:
    for state, paused in (("paused", True), ("running", False)):
        reply = await server.http.post("/admin/offline", json={"state": state})
        assert reply.json() == {"state": state}
        assert server.engine.received[-1] == SetOffline(paused)
        assert server.context.client.offline_paused is paused
    reply = await server.http.post("/admin/offline", json={"state": "off"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "state")


async def test_the_weights_of_keys_reach_this_engine_and_later_ones(server: Server) -> None:
    client, told = server.context.client, SetShareWeights({"0123abcd": 3.0})
    client.set_share_weights(told.weights)
    assert server.engine.received[-1] == told
    info = client.info
    client.detach()
    client.attach(server.engine, info)
    assert server.engine.received[-1] == told
    assert server.engine.received.count(told) == 2


async def test_openapi_document_has_bodies_and_one_error_shape(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    text = json.dumps(document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in document["components"]["schemas"]
    chat = document["paths"][CHAT]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    assert all("422" not in op["responses"] for ops in document["paths"].values() for op in ops.values())
