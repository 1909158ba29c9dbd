"""The workflow's report in a real browser: claims first, and every figure and table to be seen.

Looks at results/report.html, which `make report` writes after `make all`; skips where there is none, or no Chromium.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pandas as pd
import pytest
from toy_project import FIGURES, REPOSITORY, TABLES

REPORT = REPOSITORY / "results" / "report.html"
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
WAIT_S = 20

pytestmark = [
    pytest.mark.skipif(not REPORT.is_file(), reason="results/report.html is missing: make all report"),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="not installed: chromium, chromedriver"),
]
selenium = pytest.importorskip("selenium.webdriver")

PIXELS = """
const [image, tell] = arguments, canvas = document.createElement("canvas");
image.decode().then(() => {
    [canvas.width, canvas.height] = [400, 300];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, 400, 300);
    tell([image.naturalWidth, new Set(new Uint32Array(context.getImageData(0, 0, 400, 300).data.buffer)).size]);
}, () => tell([0, 0]));
"""
"""Width of an image, and how many colours it shows."""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(argument)
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    driver.implicitly_wait(WAIT_S)
    driver.set_script_timeout(WAIT_S)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser):
    browser.get(REPORT.as_uri())
    return browser


def shown(page, category: str) -> Iterator[str]:
    """The items of a category in the menu, each when it has been clicked."""
    page.find_element("link text", category).click()
    for row in page.find_elements("xpath", "//tr[td//a[@iconname='eye']]"):
        row.find_element("css selector", "a[iconname=eye]").click()
        yield row.text


def test_claims_stand_on_the_first_page(page) -> None:
    found = pd.read_csv(REPORT.with_name("claims.csv"))
    whole = page.find_element("css selector", ".snapmla")
    verdicts = [cell.text for cell in whole.find_element("tag name", "table").find_elements("css selector", "tbody td:last-child")]
    assert verdicts == found["status"].tolist()
    claim = whole.find_element("tag name", "summary")
    assert claim.text == found["claim"][0] and found["tolerance"][0] not in whole.text
    page.execute_script("arguments[0].click()", claim)
    assert found["tolerance"][0] in whole.text and "Environment of this run" in whole.text


def test_every_figure_is_drawn(page) -> None:
    seen = 0
    for item in shown(page, "Figures"):
        *_, image = page.find_elements("tag name", "img")  # behind the logo
        width, colors = page.execute_async_script(PIXELS, image)
        assert width > 100 and colors > 20, f"{item}: {width} pixels wide, {colors} colours"
        seen += 1
    assert seen == len(FIGURES)


def test_every_table_has_its_rows_and_source(page) -> None:
    seen = 0
    for item in shown(page, "Tables"):
        page.switch_to.frame(page.find_element("tag name", "iframe"))
        table = page.find_element("css selector", ".snapmla")
        assert table.find_elements("css selector", "tbody td") and "Source" in table.text, item
        page.switch_to.default_content()
        seen += 1
    assert seen == len(TABLES)
