"""The page in a real browser."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.browser import needs_browser, open_browser
from tests.serve.running import run_server
from tfdist.tasks.segmentation.shapes import make_shapes

waiting = pytest.importorskip(
    "selenium.webdriver.support.wait", reason="comes with the [dev] extra"
)

# A directory for screenshots, for those who want to look at the page.
SCREENSHOTS = os.environ.get("TFDIST_SCREENSHOTS")


@pytest.fixture
def browser(tmp_path):
    with open_browser(tmp_path / "a profile") as driver:
        yield driver


@pytest.mark.cluster
@needs_browser
def test_an_image_gets_its_overlay_and_legend(run_dir, tmp_path, browser):
    image, _ = make_shapes("val", (96, 160), 1, 3).load(tf.constant(0, tf.int64))
    path = tmp_path / "an image.png"
    path.write_bytes(tf.io.encode_png(np.round(image).astype(np.uint8)).numpy())
    wait = waiting.WebDriverWait(browser, 30)

    def find(selector):
        return browser.find_element("css selector", selector)

    with run_server(f"--run_dir={run_dir}", "--name=shapes") as server:
        browser.get(f"http://127.0.0.1:{server.port}/")
        wait.until(lambda _: find("#drop").is_displayed())
        find("input[type=file]").send_keys(str(path))
        wait.until(lambda _: find("#result").is_displayed())
        assert find("#status").text == ""
        assert len(browser.find_elements("css selector", "#legend li")) == 4
        assert browser.execute_script("return [canvas.width, canvas.height]") == [160, 96]
        assert "/v1/models/shapes:predict" in find("#curl").text
        assert find("h1").text == "Model shapes"
        assert find("#canvas").rect["width"] == find("#drop").rect["width"]  # the page's
        # Half of the overlay's color is in the picture, unless the overlay is turned off.
        script = "return Array.from(canvas.getContext('2d').getImageData(0, 0, 160, 96).data)"
        mixed = browser.execute_script(script)
        browser.execute_script("opacity.value = 0; opacity.dispatchEvent(new Event('input'))")
        plain = np.reshape(browser.execute_script(script), (96, 160, 4))
        np.testing.assert_array_equal(plain[..., :3], np.round(image))
        assert mixed != plain.ravel().tolist()
        browser.execute_script("opacity.value = 50; opacity.dispatchEvent(new Event('input'))")
        for name, width, scheme in (("wide", 1000, "light"), ("phone", 400, "dark")):
            metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            script = "return document.documentElement.scrollWidth"
            assert browser.execute_script(script) <= width
            if SCREENSHOTS:
                browser.save_screenshot(f"{SCREENSHOTS}/{name}.png")
