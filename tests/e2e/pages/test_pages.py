"""What people look at, in a real browser: it fits, it can be read, its console is silent, it asks this server alone,
and the keyboard reaches all of it."""

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.pages.browser import EXECUTABLE, Browser, Page
from tests.e2e.server import RunningServer, submit_batch, wait_terminal
from tests.loadgen.test_report import sample_page

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (chromium or google-chrome on the PATH)")

NARROW, WIDE = 390, 1280
AXE = "axe-core@4.10.3"
SERIOUS = """
axe.run().then((found) => found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 100))]))
"""
"""What axe-core finds that keeps people from using the page."""
PAGES = ("/dashboard", "/docs", "report")
LEAST_CONTRAST = 4.5
"""Of text over what is behind it: WCAG 2.2, level AA."""
READY = {
    "/dashboard": "document.querySelectorAll('#plots figure, #batches tr').length > 6",
}
"""When a page has shown what it asks for."""

LATE_CHAT = """
{ at_s: 1, tier: "default", ttft_s: 0.421, ttft_slo_s: 0.3, tpot_s: 0.044, tpot_slo_s: 0.06, request: "195924d5b5c9",
  why: "late by 121 ms; 90 ms of it by batch work, 31 ms steps that took longer than predicted" }
"""
CONTROLS = """
[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
  .filter((one) => one.checkVisibility() && !one.disabled)
"""
NAME = (
    "(one) => [one.tagName, one.id, one.name || '', (one.ariaLabel || one.textContent).trim().slice(0, 40)].join(' ')"
)
NOTE = f"reached.push([({NAME})(target), getComputedStyle(target).outlineStyle !== 'none'])"
"""A control that has the focus, and whether that can be seen."""
TOO_WIDE = """
[...document.querySelectorAll('body *')].filter((one) => !one.closest('.wide *, svg *') && one.checkVisibility()
    && (one.getBoundingClientRect().right > innerWidth + 0.5 || one.getBoundingClientRect().left < -0.5))
  .map((one) => one.outerHTML.slice(0, 100))
"""
PALE = """
(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const canvas = () => matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = parts(getComputedStyle(one).backgroundColor);
      if (color.length === 3 || color[3] > 0.5) return color;
    }
    return canvas();
  };
  const light = (color) => {
    const [r, g, b] = color.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement, words = texts.currentNode.data.trim();
    if (!words || !one.checkVisibility() || one.closest('script, style, noscript, :disabled')) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(parts(one.closest('svg') ? style.fill : style.color)), light(behind(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < LEAST) found.push(`${words.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return found;
})()
""".replace("LEAST", str(LEAST_CONTRAST))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which npm fetches."""
    directory, npm = tmp_path_factory.mktemp("axe"), shutil.which("npm")
    fetched = npm and subprocess.run([npm, "pack", AXE, "--silent"], cwd=directory, capture_output=True)
    if not fetched or fetched.returncode != 0:
        pytest.skip("needs npm, and its registry")
    (archive,) = directory.glob("*.tgz")
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.fixture(scope="module")
def addresses(simulated_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the pages are: of a server that has answered a chat and worked a batch off, and of a run's report."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    simulated_server.be_ready()  # a test of another file may have killed it
    simulated_server.http.post("/v1/chat/completions", json=chat).raise_for_status()
    wait_terminal(simulated_server, submit_batch(simulated_server, [{"model": "neaptide-tiny", **chat}] * 2))
    report: Path = tmp_path_factory.mktemp("report") / "report.html"
    report.write_text(sample_page(), encoding="utf-8")
    root = f"http://127.0.0.1:{simulated_server.port}"
    return {"/dashboard": f"{root}/dashboard", "/docs": f"{root}/docs", "report": report.as_uri()}


def opened(browser: Browser, addresses: dict[str, str], name: str, width: int, *, dark: bool) -> Page:
    page = browser.open(addresses[name], width, dark=dark)
    page.wait_until(READY.get(name, "true"))
    return page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_can_be_read_and_says_no_mistakes(
    browser: Browser, addresses: dict[str, str], name: str, dark: bool
) -> None:
    page = opened(browser, addresses, name, NARROW, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(PALE) == []
    assert page.complaints == []
    here = urlsplit(addresses[name]).netloc
    asked = {urlsplit(url) for url in page.requests}
    assert {url.netloc for url in asked if url.scheme not in ("data", "about")} == {here}


def test_on_a_phone_a_late_chat_is_a_card_with_two_equal_columns(browser: Browser, addresses: dict[str, str]) -> None:
    page = opened(browser, addresses, "/dashboard", NARROW, dark=False)
    page.evaluate(f"showLate([{LATE_CHAT}])")
    widths = page.evaluate("[...document.querySelectorAll('#late td')].map((one) => one.getBoundingClientRect().width)")
    ended, *halves, why = map(round, widths)
    assert len(set(halves)) == 1
    assert ended == why > 2 * halves[0]
    rows = page.evaluate("[...document.querySelectorAll('#late td')].map((one) => one.getBoundingClientRect().top)")
    _, tier, ttft, ttft_slo, tpot, tpot_slo, request, _ = rows
    assert tier == request < ttft == ttft_slo < tpot == tpot_slo


@pytest.mark.parametrize("name", PAGES)
def test_the_keyboard_reaches_every_control_in_the_order_of_the_page(
    browser: Browser, addresses: dict[str, str], name: str
) -> None:
    page = opened(browser, addresses, name, NARROW, dark=False)
    controls = page.evaluate(f"{CONTROLS}.map({NAME})")
    page.evaluate(f"reached = []; document.addEventListener('focusin', ({{ target }}) => {{ {NOTE} }}); 0")
    for _ in controls:
        page.press_tab()
    assert page.evaluate("reached") == [[name, True] for name in controls]
    assert controls


@pytest.mark.full
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_wide_screen(browser: Browser, addresses: dict[str, str], name: str) -> None:
    page = opened(browser, addresses, name, WIDE, dark=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE
    assert page.evaluate(TOO_WIDE) == []
    assert page.complaints == []


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(
    browser: Browser, addresses: dict[str, str], axe: str, name: str, dark: bool
) -> None:
    page = opened(browser, addresses, name, NARROW, dark=dark)
    page.evaluate(f"{axe}; 0")
    assert page.evaluate(SERIOUS) == []
