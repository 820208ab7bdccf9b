"""The page in a real browser."""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import time
import urllib.request

import numpy as np
import pytest
import tensorflow as tf

from tests.serve.running import run_server
from tfdist.tasks.segmentation.shapes import make_shapes

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
# A directory for screenshots, for those who want to look at the page.
SCREENSHOTS = os.environ.get("TFDIST_SCREENSHOTS")


class Browser:
    """A tab, by the DevTools protocol."""

    def __init__(self, socket):
        self._socket = socket
        self._number = 0

    def call(self, method, **parameters):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv())).get("id") != self._number:
            pass
        assert "error" not in message, message
        return message["result"]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True)
        return result["result"].get("value")

    def wait(self, expression, timeout_s=30):
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, self.evaluate("document.body.innerText")
            time.sleep(0.1)


@contextlib.contextmanager
def open_browser(directory, url):
    websocket = pytest.importorskip("websocket")
    process = subprocess.Popen(
        [BROWSER, *FLAGS, f"--user-data-dir={directory}", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        file = pathlib.Path(directory) / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        port = file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        socket = websocket.create_connection(
            pages[0]["webSocketDebuggerUrl"], timeout=60, suppress_origin=True
        )
        with contextlib.closing(socket):
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.cluster
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_dropped_image_gets_its_overlay_and_legend(run_dir, tmp_path):
    image, _ = make_shapes("val", (96, 160), 1, 3).load(tf.constant(0, tf.int64))
    path = tmp_path / "an image.png"
    path.write_bytes(tf.io.encode_png(np.round(image).astype(np.uint8)).numpy())
    with (
        run_server(f"--run_dir={run_dir}", "--name=shapes") as server,
        open_browser(tmp_path / "profile", f"http://127.0.0.1:{server.port}/") as browser,
    ):
        browser.wait("document.readyState == 'complete' && !document.querySelector('#drop').hidden")
        document = browser.call("DOM.getDocument")["root"]["nodeId"]
        node = browser.call("DOM.querySelector", nodeId=document, selector="input[type=file]")
        browser.call("DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(path)])
        browser.wait("!document.querySelector('#result').hidden")
        assert browser.evaluate("document.querySelector('#status').textContent") == ""
        assert browser.evaluate("document.querySelectorAll('#legend li').length") == 4
        assert browser.evaluate("canvas.width + 'x' + canvas.height") == "160x96"
        assert "/v1/models/shapes:predict" in browser.evaluate("curl.textContent")
        for name, width, scheme in (("wide", 1000, "light"), ("phone", 390, "dark")):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=800,
                deviceScaleFactor=1,
                mobile=name == "phone",
            )
            browser.call(
                "Emulation.setEmulatedMedia",
                features=[{"name": "prefers-color-scheme", "value": scheme}],
            )
            # Nothing is wider than the screen.
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            if SCREENSHOTS:
                data = browser.call("Page.captureScreenshot")["data"]
                pathlib.Path(SCREENSHOTS, f"{name}.png").write_bytes(base64.b64decode(data))
