"""The system's Chromium for tests of the page, and the pictures they leave behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PICTURES = Path(__file__).parent / "e2e" / "screenshots"  # kept by the run, ignored by git


@contextmanager
def system_browser() -> Iterator[Browser]:
    """The first Chromium on the path; where there is none, the tests that want it are skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on this machine (looked for {', '.join(NAMES)})")
    with sync_playwright() as playwright:
        # Inside containers Chromium's own sandbox has no rights; the page under test is ours.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")
