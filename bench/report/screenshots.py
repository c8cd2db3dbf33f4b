#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report: `screenshots.py report.html FOLDER` writes desktop.png and phone.png.

Needs Debian's chromium, chromium-driver and python3-selenium.
"""
import base64
import pathlib
import shutil
import sys

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

SIZES = {"desktop": (1100, 1560, 1), "phone": (375, 1560, 1)}  # width, most of the height, pixels per CSS pixel


def main():
    page, folder = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    options = Options()
    for argument in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"]:
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        for name, (width, most, scale) in SIZES.items():
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
                "width": width, "height": 900, "deviceScaleFactor": scale, "mobile": width < 500})
            browser.get(page.as_uri())
            height = min(most, browser.execute_script("return document.documentElement.scrollHeight"))
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}})
            data = base64.b64decode(shot["data"])
            (folder / f"{name}.png").write_bytes(data)
            print(f"{name}.png: {width} x {height}, {len(data)} bytes")
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
