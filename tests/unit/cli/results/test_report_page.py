"""The page of a report in a real browser: its samples can be filtered, and text of the model runs nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rrl.cli.views.report.page import page
from rrl.cli.views.sampled_answers import PageSamples
from rrl.core.sample_texts import DecodedSample, Turn
from rrl.tests.support.browser import REQUIRED_ENV, Browser, chromium, filter_page
from rrl.tests.support.manager.accounted import accounted, begun, trained

pytestmark = pytest.mark.skipif(
    chromium() is None and REQUIRED_ENV not in os.environ,
    reason="Chromium is not installed; as root: apt-get install --yes --no-install-recommends chromium",
)
HOSTILE = """</pre></details><script>window.owned = 1</script>
<img src="http://127.0.0.1:9/x" onerror="window.owned = 2">
<svg onload="window.owned = 3"></svg><iframe srcdoc="<script>parent.owned = 4</script>"></iframe>
<a href="javascript:window.owned = 5" id="trap">x</a><style>body { display: none }</style>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def written(folder: Path, answers: list[str]) -> Path:
    turns = [(Turn(False, False, "a question"), Turn(True, True, answer)) for answer in answers]
    samples = [
        (step, DecodedSample(step, 0, 0, "", 0.5, 0.5, {}, 0.25, False, 1, (0,), one)) for step, one in enumerate(turns)
    ]
    path = folder / "report.html"
    path.write_text(page([accounted(trained(begun(), 1, 5)).report()], [PageSamples(samples, len(samples))]))
    return path


def test_a_thousand_samples_are_filtered_by_text_in_any_case(browser: Browser, tmp_path: Path) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 90
    browser.open(written(tmp_path, [f"{words} Number {index} {index % 10}" for index in range(1000)]))
    assert filter_page(browser, "")["shown"] == 1000
    assert filter_page(browser, "NUMBER 99")["shown"] == 11
    assert browser.evaluate("document.querySelector('.samples output').value") == "11 of 1000"
    assert filter_page(browser, "absent")["shown"] == 0
    assert filter_page(browser, "a question")["shown"] == 1000
    assert browser.errors() == []


def test_text_of_the_model_runs_and_loads_nothing(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path, [HOSTILE, "4"])
    browser.open(path)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.evaluate("window.owned === undefined")
    assert browser.evaluate("document.querySelector('#trap, img, iframe, .samples svg')") is None
    assert HOSTILE in browser.evaluate("document.querySelector('.samples').textContent")
    assert browser.requests() == [path.as_uri()]
    assert browser.errors() == []


def test_a_script_that_were_in_the_page_would_not_run(browser: Browser, tmp_path: Path) -> None:
    path = written(tmp_path, ["4"])
    path.write_text(path.read_text().replace("</body>", "<script>window.owned = 1</script></body>"))
    browser.open(path)
    assert browser.evaluate("window.owned === undefined")
    assert len(browser.errors()) == 1, "the browser does not enforce the page's policy"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_the_page_can_be_read_in_light_and_dark(browser: Browser, tmp_path: Path, scheme: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(written(tmp_path, ["4"]))
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    for selector in ("h1", "p.quiet", ".samples pre", ".samples input", ".samples summary"):
        assert contrast(browser, selector) >= 4.5, selector
    assert (luminance(browser.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) == (scheme == "light")
    assert browser.errors() == []


def contrast(browser: Browser, selector: str) -> float:
    """Return the contrast of an element's text to its background, as WCAG 2 defines it (4.5 is its level AA)."""
    colours = browser.evaluate(
        f"(() => {{ let one = document.querySelector({selector!r}); const text = getComputedStyle(one).color;"
        " while (getComputedStyle(one).backgroundColor === 'rgba(0, 0, 0, 0)') one = one.parentElement;"
        " return [text, getComputedStyle(one).backgroundColor]; })()"
    )
    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
