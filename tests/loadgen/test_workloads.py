import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.loadgen.workloads.blend_sets import DENSITY_TOKENS, TRACE_TARGETS, Mix, blend_counts
from neaptide.loadgen.workloads.lengths import lognormal_lengths, shares_of
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline, offline_names
from neaptide.loadgen.workloads.online_sets import (
    echo_day_curve,
    online_requests,
    servegen_day_curve,
)
from neaptide.loadgen.workloads.sharing import prefix_sharing
from neaptide.loadgen.workloads.traces import TraceRequest, content_base, load_online, salted

# requests; input mean, max; output mean, max (tokens); highest hit ratio: the statistics of the trace collection.
# An output of less than one token counts as one here: bbh (0 there), the translations (no outputs there).
PUBLISHED = {
    "arxiv_summarization_lengths": (14129, 2581, 4054, 293, 4056, 0.0),
    "bbh": (4261, 886, 1963, 1, 1, 0.920),
    "gsm8k": (7465, 983, 1171, 72, 307, 0.928),
    "loogle_wiki_qa": (80, 21323, 31695, 22, 114, 0.935),
    "mmlu": (9765, 874, 3606, 1, 1, 0.856),
    "servegen_generation_excerpt": (161, 91, 1322, 1682, 5551, 0.0),
    "servegen_translation_excerpt": (93, 333, 901, 1, 1, 0.475),
    "sharegpt_lengths": (15366, 2343, 8141, 439, 1024, 0.0),
}
GENERATED = [name for name in offline_names() if name not in PUBLISHED]

whole_set = functools.cache(lambda name: load_offline(name, seed=1, keep_order=True))


def lengths(requests: list[TraceRequest]) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.array([request.input_tokens for request in requests], float)
    return inputs, np.array([request.output_tokens for request in requests], float)


def density(requests: list[TraceRequest]) -> tuple[float, float]:
    """BlendServe's density of a set, and the share of its compute that common prefixes save."""
    inputs, outputs = lengths(requests)
    prompts = prefix_sharing(request.segments for request in requests)
    compute = (inputs + outputs).sum()
    saved = (prompts.tokens - prompts.unique_tokens) / compute
    return DENSITY_TOKENS * (1 - saved) * compute / (inputs * outputs + outputs**2 / 2).sum(), saved


@pytest.mark.parametrize("name", PUBLISHED)
def test_bundled_sets_match_the_published_statistics(name: str) -> None:
    offline = whole_set(name)
    inputs, outputs = lengths(offline.requests)
    count, input_mean, input_max, output_mean, output_max, hit_ratio = PUBLISHED[name]
    assert (len(inputs), round(inputs.mean()), inputs.max()) == (count, input_mean, input_max)
    assert (round(outputs.mean()), outputs.max()) == (output_mean, output_max)
    assert offline.sharing().ratio == pytest.approx(hit_ratio, abs=0.0005)
    assert not offline.synthetic


@pytest.mark.parametrize("name", GENERATED)
def test_generated_sets_are_labelled_synthetic(name: str) -> None:
    assert load_offline(name, seed=1, limit=2000).synthetic


@pytest.mark.parametrize(("kind", "output_mean"), [("short", 20), ("long", 200)])
def test_loogle_qa_has_echos_documents_and_moments(kind: str, output_mean: int) -> None:
    offline = whole_set(f"loogle-qa-{kind}")
    inputs, outputs = lengths(offline.requests)
    documents = {request.segments[0] for request in offline.requests}
    assert (len(documents), len(inputs)) == (105, 1951)
    assert inputs.mean() == pytest.approx(9865, rel=0.001)
    assert outputs.mean() == pytest.approx(output_mean, rel=0.01)
    assert offline.sharing(16).ratio > 0.80  # Echo, section 1: "more than 80%"
    assert offline.sharing().ratio == pytest.approx(0.944, abs=0.005)  # about 1 - 105/1951


def test_loogle_documents_keep_the_spread_of_the_bundled_articles() -> None:
    documents = {request.segments[0] for request in whole_set("loogle-qa-short").requests}
    tokens = np.array([tokens for _, tokens in documents], float)
    articles = {request.segments[0] for request in whole_set("loogle_wiki_qa").requests}
    article_tokens = np.array([tokens for _, tokens in articles if tokens > 1000], float)
    assert len(article_tokens) == 5
    assert tokens.min() / tokens.max() == pytest.approx(article_tokens.min() / article_tokens.max(), abs=0.01)
    assert np.median(tokens) / tokens.max() == pytest.approx(np.median(article_tokens) / article_tokens.max(), abs=0.01)


def test_bros_best_effort_is_uniform_and_comes_in_batches() -> None:
    offline = whole_set("bros-be")
    inputs, outputs = lengths(offline.requests)
    assert offline.batch_size == 256
    assert (inputs.min(), inputs.max(), outputs.min(), outputs.max()) == (512, 1024, 32, 128)
    assert (inputs.mean(), outputs.mean()) == pytest.approx((768, 80), rel=0.01)
    assert (inputs.std(), outputs.std()) == pytest.approx((148.1, 28.0), rel=0.01)
    assert offline.sharing().ratio == 0
    assert load_offline("bros-be-64", seed=1).batch_size == 64


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("bros-rt-sharegpt", (222.76, 256.36), (234.51, 268.50)),
        ("bros-rt-lmsys", (90.50, 148.52), (237.04, 228.21)),
    ],
)
def test_bros_real_time_load_has_the_moments_of_table_2(name: str, inputs: tuple, outputs: tuple) -> None:
    requests = online_requests(f"{name}@5", seed=3)
    drawn_inputs, drawn_outputs = lengths(requests)
    assert (drawn_inputs.mean(), drawn_inputs.std()) == pytest.approx(inputs, rel=0.02)
    assert (drawn_outputs.mean(), drawn_outputs.std()) == pytest.approx(outputs, rel=0.02)
    arrivals = np.array([request.arrival_s for request in requests])
    gaps = np.diff(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] < 600
    assert len(requests) == pytest.approx(3000, abs=4 * 3000**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)  # Poisson
    assert (gaps >= 0).all()


@pytest.mark.parametrize(
    ("name", "saving"),
    [
        ("batchllm-2000-200-s2", 0.4545),
        ("batchllm-2000-200-s4", 0.6818),
        ("batchllm-2000-200-s16", 0.8523),
        ("batchllm-2000-1000-s4", 0.5000),
        ("batchllm-1000-1000-s16", 0.4688),
        ("batchllm-16000-200-s16", 0.9259),
        ("batchllm-1570-30-s3", 0.6542),
    ],
)
def test_batchllm_groups_save_the_closed_form(name: str, saving: float) -> None:
    offline = load_offline(name, seed=1, limit=480)
    assert offline.sharing().ratio == pytest.approx(saving, abs=0.00005)
    assert {request.output_tokens for request in offline.requests} == {100}


def test_batchllm_saving_in_whole_blocks_loses_the_cut_block() -> None:
    # 1,570 = 98 blocks of 16 + 2: of 3 x 1,600 tokens, 2 x 98 x 16 are saved
    assert load_offline("batchllm-1570-30-s3", seed=1, limit=300).sharing(16).ratio == pytest.approx(3136 / 4800)


def test_batchllm_industry_has_the_moments_of_figure_7() -> None:
    offline = whole_set("batchllm-industry")
    instruction, documents, own = zip(*(request.segments for request in offline.requests), strict=True)
    _, degrees = np.unique([content for content, _ in documents], return_counts=True)
    assert len(offline.requests) == 8000
    assert len(set(instruction)) == 1
    assert degrees[degrees > 1].mean() == pytest.approx(3, rel=0.01)
    prefix = instruction[0][1] + np.mean([tokens for _, tokens in documents])
    assert prefix == pytest.approx(1570, rel=0.01)
    assert np.mean([tokens for _, tokens in own]) == pytest.approx(30, rel=0.01)
    assert offline.sharing().ratio == pytest.approx(0.581, abs=0.005)


def test_density_constant_gives_the_papers_density_of_one_request() -> None:
    p, d = 512, 256
    assert DENSITY_TOKENS * (p + d) / (p * d + d * d / 2) == pytest.approx(3.754, abs=0.0005)  # paper: 3.73


def test_a_mix_is_measured_by_definition() -> None:
    requests = load_offline("blend-trace-1", seed=1, limit=2000).requests
    found = Mix.of(requests)
    assert (found.density, found.sharing) == pytest.approx(density(requests))


def test_a_mix_that_misses_its_target_is_refused() -> None:
    mix = Mix(1.40, 0.35)
    mix.check(1.40 / 1.029, 0.364)
    with pytest.raises(ValueError, match=r"a density of 1.400 and a sharing of 0.350, not 1.35 and 0.35"):
        mix.check(1.35, 0.35)
    with pytest.raises(ValueError, match="use more requests"):
        mix.check(1.40, 0.366)


def test_the_generator_checks_what_it_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.loadgen.workloads.blend_sets.DENSITY_TOLERANCE", 1e-6)
    with pytest.raises(ValueError, match="the mix has a density of"):
        load_offline("blend-trace-1", seed=1, limit=1200)


@pytest.mark.parametrize("number", TRACE_TARGETS)
def test_blend_traces_hit_density_and_sharing_of_table_2(number: int) -> None:
    offline = whole_set(f"blend-trace-{number}")
    assert len(offline.requests) == 40_000
    assert density(offline.requests) == pytest.approx(TRACE_TARGETS[number], rel=0.01)


def test_blend_parts_have_the_densities_and_sharing_of_table_4() -> None:
    requests = whole_set("blend-trace-2").requests
    burstgpt, mmlu, openvid = blend_counts(*TRACE_TARGETS[2], 40_000)
    assert burstgpt + mmlu + openvid == 40_000
    part_density, part_sharing = density(requests[:burstgpt])
    assert (part_density, part_sharing) == pytest.approx((17.78, 0.02), rel=0.03)
    part_density, part_sharing = density(requests[burstgpt : burstgpt + mmlu])
    assert (part_density, part_sharing) == pytest.approx((54.91, 0.8646), rel=0.03)
    part_density, part_sharing = density(requests[-openvid:])
    assert part_density == pytest.approx(0.05, rel=0.06)
    assert round(part_sharing, 2) == 0.0
    assert lengths(requests[-openvid:])[1].mean() == pytest.approx(16_384, rel=0.06)  # "16K", normalised


def test_every_cell_of_the_blend_grid_has_a_mix() -> None:
    cells = [(rho, s) for rho in np.arange(0.80, 1.401, 0.05) for s in (0.05, 0.15, 0.25, 0.35, 0.45)]
    assert len(cells) == 65
    for rho, s in cells:
        assert sum(blend_counts(rho, s, 40_000)) == 40_000


@pytest.mark.full
@pytest.mark.parametrize("rho", [f"{0.80 + 0.05 * k:.2f}" for k in range(13)])
@pytest.mark.parametrize("sharing", ["0.05", "0.15", "0.25", "0.35", "0.45"])
def test_grid_cells_hit_their_target(rho: str, sharing: str) -> None:
    requests = load_offline(f"blend-{rho}-{sharing}", seed=1, keep_order=True).requests
    assert density(requests) == pytest.approx((float(rho), float(sharing)), rel=0.01)


def test_a_blend_beyond_its_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="mixed"):
        load_offline("blend-1.00-0.95", seed=1)


def test_another_model_needs_other_counts() -> None:
    assert blend_counts(1.4, 0.35, 40_000, density_tokens=2 * DENSITY_TOKENS)[2] > blend_counts(1.4, 0.35, 40_000)[2]


def test_echo_day_has_its_peak_trough_and_burst() -> None:
    curve = echo_day_curve(peak_to_trough=4.0, burst=2.0)
    hours = np.arange(len(curve)) / 60
    assert curve.mean() == pytest.approx(1.0)
    assert 13 <= hours[curve.argmax()] < 13 + 5 / 60
    calm = np.delete(curve, np.arange(13 * 60, 13 * 60 + 5))
    calm_hours = np.delete(hours, np.arange(13 * 60, 13 * 60 + 5))
    peak, trough = calm_hours[calm == calm.max()], calm_hours[calm == calm.min()]
    assert (peak.min(), peak.max()) == pytest.approx((12, 14), abs=0.02)
    assert (trough.min(), trough.max()) == pytest.approx((4, 6), abs=0.02)
    assert calm.max() / calm.min() == pytest.approx(4.0)
    assert curve.max() / calm.max() == pytest.approx(2.0)


def test_day_arrivals_follow_the_curve() -> None:
    requests = online_requests("echo-day@0.2", seed=1)
    per_hour = np.bincount([int(request.arrival_s // 3600) for request in requests], minlength=24)
    expected = 0.2 * 3600 * echo_day_curve().reshape(24, 60).mean(axis=1)
    assert (np.abs(per_hour - expected) < 4.5 * np.sqrt(expected)).all()
    assert lengths(requests)[0].mean() == pytest.approx(2343, rel=0.03)  # of the bundled ShareGPT rounds


@pytest.mark.parametrize(("model", "swing"), [("large", 1.45), ("small", 2.38)])
def test_production_day_curves_have_the_recorded_swing(model: str, swing: float) -> None:
    hourly = servegen_day_curve(model).reshape(24, 6).mean(axis=1)
    assert hourly.mean() == pytest.approx(1.0)
    assert hourly.max() / hourly.min() == pytest.approx(swing, abs=0.01)


def test_online_sets_are_drawn_by_the_seed_and_windowed_like_traces() -> None:
    whole = online_requests("bros-rt-sharegpt@2", seed=1)
    assert online_requests("bros-rt-sharegpt@2", seed=1) == whole
    assert online_requests("bros-rt-sharegpt@2", seed=2) != whole
    cut = online_requests("bros-rt-sharegpt@2", seed=1, window_s=(60, 120), speed=3.0)
    assert [r.arrival_s for r in cut] == pytest.approx(
        [(r.arrival_s - 60) / 3 for r in whole if 60 <= r.arrival_s < 120]
    )


def test_recorded_traces_are_online_sets_too() -> None:
    cut = {"window_s": (0, 60), "speed": 1.2}
    assert online_requests("azure_conv_2023", seed=7, **cut) == load_online("azure_conv_2023", **cut)


def test_another_seed_or_rate_of_a_synthetic_set_has_other_prompts() -> None:
    runs = [
        online_requests(spec, seed)
        for spec, seed in (("bros-rt-lmsys", 1), ("bros-rt-lmsys", 2), ("bros-rt-lmsys@2", 1))
    ]
    contents = [{content for request in run for content, _ in request.segments} for run in runs]
    assert len(set().union(*contents)) == sum(map(len, runs))


def test_a_salt_changes_the_words_and_nothing_else() -> None:
    requests = load_online("agent_miniswe", window_s=(0, 20))
    runs = [requests, salted(requests, "1"), salted(requests, "2")]
    contents = [{content for request in run for content, _ in request.segments} for run in runs]
    assert len(set().union(*contents)) == sum(map(len, contents))
    assert runs[1] == salted(requests, "1")
    for run in runs[1:]:
        assert [[n for _, n in r.segments] for r in run] == [[n for _, n in r.segments] for r in requests]
        assert prefix_sharing(r.segments for r in run) == prefix_sharing(r.segments for r in requests)


def test_a_seed_and_a_salt_that_go_together_do_not_undo_each_other() -> None:
    """Differences of CRCs are those of others: with a salt by CRC these two runs would be in the same words."""
    runs = [salted(online_requests("bros-rt-lmsys", seed), str(seed)) for seed in (1, 2)]
    one, two = ({content for request in run for content, _ in request.segments} for run in runs)
    assert not one & two


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        online_requests("bros-rt-lmsys@0")


@pytest.mark.parametrize("name", ["bbh", "loogle-qa-short", "batchllm-industry", "blend-trace-1"])
def test_another_seed_has_another_order_with_the_same_moments_and_sharing(name: str) -> None:
    one = load_offline(name, seed=1, limit=1000)
    again = load_offline(name, seed=1, limit=1000)
    other = load_offline(name, seed=2, limit=1000)
    assert one == again
    assert [r.input_tokens for r in one.requests] != [r.input_tokens for r in other.requests]
    assert lengths(one.requests)[0].mean() == pytest.approx(lengths(other.requests)[0].mean(), rel=0.005)
    assert one.sharing().ratio == pytest.approx(other.sharing().ratio, abs=0.01)


def test_order_is_kept_on_request() -> None:
    kept = load_offline("batchllm-2000-200-s4", seed=1, keep_order=True, limit=80).requests
    shuffled = load_offline("batchllm-2000-200-s4", seed=1, limit=80).requests
    assert [request.segments[0][0] for request in kept] == sorted(request.segments[0][0] for request in kept)
    assert kept != shuffled
    assert sorted(kept, key=repr) == sorted(shuffled, key=repr)


def test_a_limit_takes_the_first_rows_of_a_file() -> None:
    assert load_offline("bbh", 1, keep_order=True, limit=3).requests[0].input_tokens == (
        whole_set("bbh").requests[0].input_tokens
    )
    assert len(load_offline("servegen_generation_excerpt", 1, limit=100).requests) == 100


@pytest.mark.parametrize("name", ["bbh", "loogle-qa-short", "servegen_translation_excerpt"])
def test_a_refill_is_the_same_set_with_new_content(name: str) -> None:
    first = load_offline(name, seed=1, limit=300)
    second = first.refill(1)
    contents = [{content for r in some.requests for content, _ in r.segments} for some in (first, second)]
    assert contents[0].isdisjoint(contents[1])
    assert all(0 <= content < 1 << 63 for content in contents[1])
    assert [[n for _, n in r.segments] for r in first.requests] == [[n for _, n in r.segments] for r in second.requests]
    assert second.sharing(16) == first.sharing(16)
    assert second.refill(0) == first
    assert second.refill(2) == first.refill(2)


def test_a_set_is_enlarged_by_copies_that_share_nothing() -> None:
    base = content_base("mine#0")
    requests = [TraceRequest(0.0, ((base, 4), (base + k, 2)), k) for k in range(1, 4)]
    small = OfflineSet("mine", requests, synthetic=True)
    large = small.enlarged(7)
    assert small.enlarged(3) is small
    assert [r.output_tokens for r in large.requests] == [1, 2, 3] * 3
    copies = [{content for r in large.requests[k : k + 3] for content, _ in r.segments} for k in (0, 3, 6)]
    assert [len(one) for one in copies] == [4, 4, 4]
    assert len(set.union(*copies)) == 12
    assert large.requests[:3] == requests
    assert large.refill(1).refill(0) == large


@pytest.mark.parametrize("content", [0, content_base("mine#0") - 1, content_base("mine#0") + (1 << 31)])
def test_content_of_another_namespace_is_refused_by_a_refill(content: int) -> None:
    requests = [TraceRequest(0.0, ((content_base("mine#0"), 4), (content, 2)), 1)]
    with pytest.raises(ValueError, match=f"'mine' cannot be refilled: content id {content}"):
        OfflineSet("mine", requests, synthetic=True).refill(1)


def test_an_openai_batch_file_shares_what_its_texts_share(tmp_path) -> None:
    system = {"role": "system", "content": "x" * 200}
    bodies = [
        {"messages": [system, {"role": "user", "content": "one"}], "max_tokens": 7},
        {"messages": [system, {"role": "user", "content": [{"type": "text", "text": "two"}]}]},
        {"prompt": "y" * 40, "max_tokens": 3},
    ]
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(json.dumps({"custom_id": str(k), "body": body}) for k, body in enumerate(bodies)))
    offline = load_offline(path, seed=1, keep_order=True)
    shared_chars = len(f"system: {'x' * 200}\n")
    assert [r.output_tokens for r in offline.requests] == [7, 256, 3]
    assert [r.input_tokens for r in offline.requests] == [(shared_chars + len("user: one\n")) // 4] * 2 + [10]
    assert [r.segments[0][1] for r in offline.requests] == [48, 48, 10]  # three blocks of 64 characters in common
    assert offline.requests[0].segments[0] == offline.requests[1].segments[0]
    assert offline.requests[0].segments[1] != offline.requests[1].segments[1]


def test_an_openai_batch_file_can_be_counted_by_a_tokenizer(tmp_path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(json.dumps({"body": {"prompt": "a" * 32 + end}}) for end in ("b" * 9, "c")))
    requests = load_offline(path, seed=1, keep_order=True, tokenize=lambda text: list(text.encode())).requests
    assert [[tokens for _, tokens in request.segments] for request in requests] == [[32, 9], [32, 1]]
    assert prefix_sharing(request.segments for request in requests).unique_tokens == 42


def test_prompts_of_token_ids_share_what_their_ids_share(tmp_path) -> None:
    """One prompt, the same one and more, and two prompts of one line, which are read one after the other."""
    head = list(range(100, 132))
    prompts: list[object] = [[*head, 7], [*head, 8, 9], [head, [7]], "text"]
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(json.dumps({"body": {"prompt": prompt, "max_tokens": 3}}) for prompt in prompts))
    requests = load_offline(path, seed=1, keep_order=True).requests
    assert [request.input_tokens for request in requests] == [33, 34, 33, 1]
    assert [request.segments[0] for request in requests[:3]] == [requests[0].segments[0]] * 3
    assert requests[0].segments[0][1] == 32
    assert requests[0].segments == requests[2].segments != requests[1].segments


@pytest.mark.parametrize("prompt", ["[1, -1]", "[1, true]", '[1, "a"]', "[[1], [2.5]]"])
def test_a_batch_line_of_wrong_token_ids_is_named(tmp_path, prompt: str) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(f'{{"body": {{"prompt": "fine"}}}}\n{{"body": {{"prompt": {prompt}}}}}')
    with pytest.raises(ValueError, match="line 2: not a request: a field has the wrong type"):
        load_offline(path, seed=1)


@pytest.mark.parametrize("line", ['{"body": {"model": "m"}}', '{"custom_id": "1"}', '{"body": {"messages": [1]}}'])
def test_a_batch_line_without_a_prompt_is_named(tmp_path, line: str) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"body": {"prompt": "fine"}}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        load_offline(path, seed=1)


@pytest.mark.parametrize("name", ["no-such-set", "batchllm-0-1-s2", "bros-be-0"])
def test_an_unknown_set_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no offline set|at least 1"):
        load_offline(name, seed=1)


prompts_st = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=4).map(tuple), min_size=1, max_size=8
)


@given(prompts=prompts_st, block_size=st.integers(1, 5))
def test_sharing_counts_distinct_block_prefixes(prompts, block_size) -> None:
    rows = [[(content, k) for content, n in prompt for k in range(n)] for prompt in prompts]
    blocks = {tuple(row[:end]) for row in rows for end in range(block_size, len(row) + 1, block_size)}
    sharing = prefix_sharing(prompts, block_size)
    assert sharing.tokens == sum(map(len, rows))
    assert sharing.unique_tokens == block_size * len(blocks) + sum(len(row) % block_size for row in rows)


def test_an_empty_set_shares_nothing() -> None:
    assert OfflineSet("none", [], synthetic=False).sharing().ratio == 0.0


@given(total=st.integers(1, 500), weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_shares_add_up_and_are_never_empty(total: int, weights: list[float]) -> None:
    if len(weights) > total:
        with pytest.raises(ValueError, match="shared"):
            shares_of(total, np.array(weights))
    else:
        shares = shares_of(total, np.array(weights))
        assert shares.sum() == total
        assert shares.min() >= 1


def test_impossible_moments_are_refused() -> None:
    with pytest.raises(ValueError, match="log-normal"):
        lognormal_lengths(np.random.default_rng(0), 100, mean=50, std=500, high=60)
