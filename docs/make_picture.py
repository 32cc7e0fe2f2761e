"""Take the picture of a report in docs/analysis.md: the top of its page, in the Chromium of the system.

Run `make picture` after `make demo`.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "images" / "report.png"


def main(report: str) -> None:
    """Write the picture of the page `report`."""
    browsers = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    browser = next((path for path in browsers if path), None)
    if browser is None:
        raise SystemExit("The picture needs a Chromium, and none is installed.")
    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page(viewport={"width": 1400, "height": 1180})
        page.goto(Path(report).resolve().as_uri())
        page.select_option("#network", "100mbps")
        page.wait_for_timeout(2000)  # figures are drawn when the page is there
        page.screenshot(path=PICTURE)
        window.close()
    with Image.open(PICTURE) as picture:  # a page has few colours
        picture.convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
