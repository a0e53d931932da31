"""The report: one file, nothing loaded, what is unknown is said."""

import re
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.report.page import report
from neaptide.loadgen.report.summary import summary
from neaptide.loadgen.report.svg import ROW_HEIGHT, Line, Plot, cumulative, figure, ticks
from neaptide.loadgen.run.samples import Watch
from tests.loadgen.test_run import EASY, HARD, answered, given


class Tags(HTMLParser):
    """Every start tag with its attributes, and whether all that opens is closed."""

    VOID = {"meta", "path", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def exposition(online: float, offline: float, seconds: float) -> str:
    return (
        f'neaptide_step_tokens_total{{class="online"}} {online}\n'
        f'neaptide_step_tokens_total{{class="offline"}} {offline}\n'
        f'neaptide_step_seconds_sum{{phase="total"}} {seconds}\nneaptide_step_seconds_count{{phase="total"}} {online}\n'
        f"neaptide_steps_predicted_seconds_total {2 * seconds}\nneaptide_steps_total {online}\n"
        'neaptide_kv_blocks{state="online"} 7\nneaptide_kv_blocks{state="free"} 3\n'
    )


def sample_page() -> str:
    """The report of a run with figures of the engine and of one of which nothing is known."""
    progress = given((EASY, answered(0.3)), (HARD, answered(0.5, arrival_s=1.5)))
    watch: Any = Watch(None)  # type: ignore[arg-type]
    for at_s, figures in enumerate([(0, 0, 0), (10, 100, 0.5), (40, 150, 1.5)]):
        watch._take(float(at_s), Samples(exposition(*figures)))
    watch.batch_progress = [(1.0, 3, 9)]
    progress.watch = watch
    runs = {"a<b": (progress, summary(progress)), "other": (given(), summary(given()))}
    return report(runs, {"rate": "<b>1</b>"}, "A run & more")


@pytest.fixture
def page() -> str:
    return sample_page()


def test_the_page_is_whole_and_escapes_what_it_is_given(page: str) -> None:
    tags = Tags(page)
    assert tags.open == []
    assert "a&lt;b" in page
    assert "&lt;b&gt;1&lt;/b&gt;" in page
    assert "<title>A run &amp; more</title>" in page


def test_nothing_is_loaded_and_nothing_runs(page: str) -> None:
    names = {tag for tag, _ in Tags(page).seen}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "image", "use"})
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=", page)
    assert "default-src 'none'" in page
    assert not any(name.startswith("on") for _, attrs in Tags(page).seen for name in attrs)


def test_the_page_follows_light_and_dark_and_narrow_screens(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    assert "min(350px, 100%)" in page


def test_every_plot_tells_what_it_shows(page: str) -> None:
    labels = [attrs["aria-label"] for tag, attrs in Tags(page).seen if tag == "svg"]
    assert all(labels)
    captions = re.findall(r"<figcaption>([^<]+) ", page)
    assert set(captions) >= {"TTFT", "TPOT", "Tokens computed, by tier", "KV blocks, by class", "Mean time of a step"}


def test_what_a_server_does_not_say_is_not_drawn_as_zero(page: str) -> None:
    other = page.split("<h2>other</h2>")[1]
    assert other.count("no data from this server") == 4


def test_samples_are_rates_between_scrapes() -> None:
    watch: Any = Watch(None)  # type: ignore[arg-type]
    watch._take(0.0, Samples(exposition(0, 0, 0)))
    watch._take(2.0, Samples(exposition(10, 100, 0.5)))
    (sample,) = watch.samples
    assert sample.tokens_per_s == {"online": 5.0, "offline": 50.0}
    assert sample.kv_blocks == {"online": 7.0, "offline": 0.0, "cached": 0.0, "free": 3.0}
    assert (sample.predicted_step_s, sample.measured_step_s) == (0.1, 0.05)


def test_another_servers_metrics_are_no_samples() -> None:
    watch: Any = Watch(None)  # type: ignore[arg-type]
    for at_s in (0.0, 1.0):
        watch._take(at_s, Samples("vllm:num_requests_running 3\n"))
    assert watch.samples == []


# ---- plots ----


def test_a_distribution_ends_at_all_of_them() -> None:
    line = cumulative("x", [3.0, 1.0, 2.0, 4.0])
    assert (list(line.xs), list(line.ys)) == ([1.0, 2.0, 3.0, 4.0], [25.0, 50.0, 75.0, 100.0])
    many = cumulative("x", [float(k) for k in range(10_000)])
    assert len(many.xs) <= 400
    assert (many.xs[-1], many.ys[-1]) == (9999.0, 100.0)


def test_a_point_alone_is_drawn() -> None:
    drawn = figure(Plot("p", "s", "%", [Line("a", [0, 1, 2, 3], [5.0, None, 7.0, None])]))
    assert drawn.count("h0") == 2


@pytest.mark.parametrize(
    ("targets", "rows"),
    [((500, 3500), [0, 0]), ((500, 900), [0, 1]), ((3900, 500, 600, 700, 3600), [0, 1, 2, 0, 1])],
    ids=["apart", "close", "many"],
)
def test_names_of_targets_do_not_meet(targets: tuple[float, ...], rows: list[int]) -> None:
    marks = [(f"target {target}", target) for target in targets]
    drawn = figure(Plot("p", "ms", "%", [Line("a", [0, 4000], [0.0, 100.0])], x_marks=marks, y_max=100.0))
    heights = [float(y) for y in re.findall(r"y='([\d.]+)'>target", drawn)]
    assert [(max(heights) - y) / ROW_HEIGHT for y in heights] == rows


def test_areas_stand_on_each_other() -> None:
    plot = Plot("p", "s", "n", [Line("a", [0, 1], [1.0, 1.0]), Line("b", [0, 1], [1.0, 3.0])], stacked=True)
    first, second = re.findall(r"class='area s\d' d='M([\d. L]+)Z'", figure(plot))
    lower, upper = first.split("L")[:2], second.split("L")[:2]
    assert [point.split()[0] for point in lower] == [point.split()[0] for point in upper]
    assert second.split("L")[2:] == [*reversed(lower)]
    assert all(float(u.split()[1]) < float(lo.split()[1]) for u, lo in zip(upper, lower, strict=True))


@hypothesis_given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e9))
def test_ticks_are_few_and_hold_the_range(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-6 * max(1.0, span, abs(low))
    assert found[-1] >= low + span - 1e-6 * max(1.0, span, abs(low))


async def test_only_the_series_that_are_looked_at_are_parsed() -> None:
    exposition_ = exposition(1, 2, 3.0) + "neaptide_broken{ 5\n"

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=exposition_)

    async with httpx.AsyncClient(base_url="http://fake", transport=httpx.MockTransport(handle)) as http:
        watch = Watch(http)
        await watch.look()
    assert watch.failures == 0
    assert watch._last is not None


def test_samples_of_a_moment_are_no_rates() -> None:
    watch: Any = Watch(None)  # type: ignore[arg-type]
    for at_s, tokens in ((0.0, 0), (0.01, 900), (1.0, 1000), (4.0, 1600)):
        watch._take(at_s, Samples(exposition(tokens, 0, 1.0)))
    assert [(s.seconds, s.tokens_per_s["online"]) for s in watch.samples] == [(1.0, 1000.0), (3.0, 200.0)]
    progress = given((EASY, answered(0.3)))
    progress.watch = watch
    assert summary(progress)["online_tokens_per_s"] == 400.0
