"""The pages in a real browser: what they show, load and do."""

import json
import shutil

import pytest

from tests.browser import needs_browser, open_browser
from tfdist.records.recorded_run import read_recorded_run
from tfdist.report.comparison import make_comparison
from tfdist.runs.reporting import write_page, write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="comes with the [dev] extra")
pytestmark = needs_browser
PHONE = 400


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    profile = tmp_path_factory.mktemp("a browser")
    with open_browser(profile, logs=("browser", "performance")) as driver:
        yield driver


@pytest.fixture(scope="module")
def pages(run_dir, tmp_path_factory):
    """The report of a run, and its comparison with a copy whose results are others."""
    directory = tmp_path_factory.mktemp("some pages")
    shutil.copytree(run_dir, directory / "other")
    for file, change in {
        "summary.json": {"val_mean_iou": 0.00123},
        "options.json": {"strategy": {"strategy": "mirrored"}},
    }.items():
        path = directory / "other" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    one, other = (read_recorded_run(path) for path in (run_dir, str(directory / "other")))
    write_report(one, f"{directory}/one.html")
    write_page(f"{directory}/both.html", make_comparison([one, other]))
    return directory


@pytest.fixture
def show(browser, pages):
    """Opens a page; checks at the end that it loaded nothing else and reported no error."""
    browser.get_log("browser")
    browser.get_log("performance")

    def open_page(name, *, width=1400, scheme="light"):
        set_media(browser, "", scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get((pages / name).as_uri())
        return browser

    yield open_page
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [
        message["params"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    urls = [found["request"]["url"] for found in sent if found["documentURL"].startswith("file:")]
    assert any(url.startswith("file:") for url in urls)
    assert all(url.startswith(("file:", "data:")) for url in urls), urls


def set_media(browser, media, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def read_legend(browser, number):
    """Returns name -> value as shown under a picture."""
    rows = browser.find_elements("css selector", ".charts figure")[number].find_elements(
        "css selector", ".u-series"
    )
    return {
        row.find_element("css selector", ".u-label").text: row.find_element(
            "css selector", ".u-value"
        ).text
        for row in rows
    }


def test_the_curves_show_the_values_of_the_log_where_the_pointer_is(show, run_dir):
    browser = show("one.html")
    titles = [e.text for e in browser.find_elements("css selector", ".charts figcaption")]
    number = titles.index("loss")
    lines = read_recorded_run(run_dir).lines
    over = browser.find_elements("css selector", ".u-over")[number]
    script = (
        "const u = all[arguments[0]]; return u.valToPos(arguments[1], 'x') - u.over.clientWidth / 2"
    )
    for line in [*lines, lines[0]]:
        across = browser.execute_script(script, number, line["step"])
        pointer = webdriver.ActionChains(browser, duration=0)
        # The outermost points are on the edge of the picture.
        pointer.move_to_element_with_offset(over, round(across * 0.99), 0).perform()
        shown = read_legend(browser, number)
        assert int(shown["step"]) == line["step"]
        assert float(shown["training"]) == pytest.approx(line["loss"], rel=1e-4)
        assert float(shown["validation"]) == pytest.approx(line["val_loss"], rel=1e-4)
    heading = browser.find_element("css selector", "h1")
    webdriver.ActionChains(browser, duration=0).move_to_element(heading).perform()
    assert int(read_legend(browser, number)["step"]) == lines[-1]["step"]


def test_a_click_sorts_the_table(show):
    browser = show("both.html")
    table = browser.find_element("css selector", "table.sortable")
    heads = [head.text.split()[0] for head in table.find_elements("css selector", "th")]
    assert {"run", "strategy"} <= set(heads)

    def sort_by(text):
        head = next(h for h in table.find_elements("css selector", "th") if h.text.startswith(text))
        browser.execute_script("arguments[0].scrollIntoView({inline: 'center'})", head)
        head.find_element("css selector", "button").click()
        cells = table.find_elements("css selector", "tbody td:first-child")
        return [cell.text.rpartition("/")[2] for cell in cells], head.get_attribute("aria-sort")

    assert sort_by("val mean iou") == (["other", "run"], "ascending")
    assert sort_by("val mean iou") == (["run", "other"], "descending")
    assert sort_by("strategy") == (["other", "run"], "ascending")


@pytest.mark.parametrize("width", [1400, PHONE])
def test_the_first_column_stays_where_the_table_is_scrolled(show, width):
    browser = show("both.html", width=width)
    script = (
        "const box = document.querySelector('.sortable').parentNode; box.scrollLeft = 1e6;"
        "const cell = box.querySelector('tbody td').getBoundingClientRect();"
        "return [box.scrollLeft, cell.left - box.getBoundingClientRect().left, cell.width]"
    )
    scrolled, left, cell_width = browser.execute_script(script)
    assert scrolled > 0 or width > PHONE
    assert abs(left) < 1
    assert 50 < cell_width <= 0.4 * width + 1


def test_axes_begin_at_zero_and_epochs_are_marked(show, run_dir):
    browser = show("one.html")
    scales = browser.execute_script(
        "return all.map((u) => [u.scales.x.min, u.scales.y.min, u.scales.y.max])"
    )
    assert all((left, bottom) == (0, 0) and top > 0 for left, bottom, top in scales)
    script = "return JSON.parse(document.querySelector('.charts script').textContent).marks"
    lines = read_recorded_run(run_dir).lines
    assert browser.execute_script(script) == [[str(x["epoch"]), x["step"]] for x in lines]


@pytest.mark.parametrize("name", ["one.html", "both.html"])
def test_nothing_is_wider_than_a_phone(show, name):
    browser = show(name, width=PHONE)
    width = "return document.documentElement.scrollWidth"
    assert browser.execute_script(width) <= PHONE
    boxes = (
        "return [...document.querySelectorAll('.uplot, img')]"
        ".map(element => element.getBoundingClientRect().right)"
    )
    assert max(browser.execute_script(boxes)) <= PHONE
    for details in browser.find_elements("css selector", "details"):
        details.click()
    assert browser.execute_script(width) <= PHONE


def test_it_is_dark_where_the_browser_is_and_light_on_paper(show):
    browser = show("one.html", scheme="dark")
    color = (
        "const style = getComputedStyle(document.body);"
        "return [style.backgroundColor, all[0].axes[0].stroke()]"
    )
    assert browser.execute_script(color) == ["rgb(21, 23, 26)", "#e4e6ea"]
    set_media(browser, "print", "dark")
    assert browser.execute_script(color) == ["rgb(255, 255, 255)", "#1c1e21"]
    pages = browser.execute_cdp_cmd("Page.printToPDF", {})
    assert len(pages["data"]) > 10_000
