"""The chat page in a real browser: headless Chromium, driven by selenium.

Would catch: a page that streams nothing, a stop button that only hides the answer, an image that is dropped on its way,
a conversation that a reload forgets, a control that no key reaches, a theme that does not change.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="the page is driven by selenium: pip install '.[extended]'"
)
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("no chromium and chromedriver here (Debian: chromium, chromium-driver)", allow_module_level=True)

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

QUIET = [
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=900,800",
]  # fmt: skip


@pytest.fixture(scope="module")
def backend(kit: Any) -> Any:
    return kit.FakeBackend()


@pytest.fixture(scope="module")
def http(kit: Any, backend: Any) -> Iterator[httpx.Client]:
    with kit.running(backend) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*QUIET, f"user-data-dir={folder}"):
            options.add_argument(f"--{flag}")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


class Page:
    """What a person sees and does. Waiting ends with an error after some seconds."""

    def __init__(self, browser: Any, address: str):
        self.browser, self.address = browser, address
        browser.get(f"{address}/version")  # the page itself keeps what it shows when it is left
        browser.execute_script("sessionStorage.clear()")
        browser.get(address)

    def __getitem__(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [found.get_attribute("textContent") for found in self.all(selector)]

    def wait(self, condition: Any) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, self.browser.find_element(By.TAG_NAME, "body").text
            time.sleep(0.02)

    def ended(self) -> bool:
        return self["send"].is_enabled() and self["status"].get_attribute("textContent") != "Answering"

    def say(self, text: str, *, wait: bool = True) -> None:
        self["input"].send_keys(text, Keys.ENTER)
        if wait:
            self.wait(lambda: bool(self.all("article.assistant")) and self.ended())


@pytest.fixture
def page(browser: Any, http: httpx.Client, backend: Any, kit: Any) -> Page:
    backend.tokens, backend.pause, backend.asked = kit.FakeBackend.spelled("hm, so</think>Hello <b>you</b>."), 0.0, []
    return Page(browser, str(http.base_url))


def test_a_message_is_answered(page: Page, backend: Any):
    """Reasoning folded and apart, markup of the answer shown as text, the speed, and nothing asked of other hosts."""
    page.say("hi")
    assert page.texts("article.assistant .said") == ["Hello <b>you</b>."]
    thoughts = page.all("article.assistant details")[0]
    assert thoughts.get_attribute("open") is None and page.texts(".thoughts") == ["hm, so"]
    assert page["speed"].text.startswith(f"{len(backend.tokens)} tokens") and page["status"].get_attribute("role")
    assert page["model"].text == "fake"
    sent = [json.loads(entry["message"])["message"] for entry in page.browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    asked = [url for url in urls if url.startswith(("http", "ws"))]
    assert asked and all(url.startswith(page.address) for url in asked)
    problems = [e for e in page.browser.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]]
    assert problems == []


def test_the_answer_streams_and_stops(page: Page, backend: Any, kit: Any):
    """Text appears before the end; Escape stops the engine's work, not only the display; what was said stays."""
    backend.tokens, backend.pause = kit.FakeBackend.spelled("</think>" + "word " * 900), 0.01
    page.say("go on", wait=False)
    page.wait(lambda: "word word" in "".join(page.texts("article.assistant .said")))
    assert backend.open == 1 and not page["send"].is_enabled() and page["stop"].is_displayed()
    page["input"].send_keys(Keys.ESCAPE)
    page.wait(page.ended)
    assert kit.wait(lambda: backend.open == 0)
    assert page.texts("article.assistant .error") == ["stopped"]
    assert page.texts("article.assistant .said")[0].startswith("word word")


def test_a_reload_keeps_the_conversation(page: Page, backend: Any, kit: Any):
    """Also one in the middle of an answer. The next message goes on from there."""
    page.say("first")
    backend.tokens, backend.pause = kit.FakeBackend.spelled("</think>" + "word " * 900), 0.01
    page.say("second", wait=False)
    page.wait(lambda: "word" in "".join(page.texts("article.assistant:last-child .said")))
    page.browser.refresh()
    assert kit.wait(lambda: backend.open == 0)
    assert page.texts("article.user .said") == ["first", "second"]
    assert page.texts("article.assistant .said")[1].startswith("word")
    backend.tokens, backend.pause = kit.FakeBackend.spelled("</think>Again."), 0.0
    page.say("third", wait=False)
    page.wait(lambda: len(page.all("article")) == 6 and page.ended())
    prompt = kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"])
    assert "<｜User｜>first" in prompt and "<｜User｜>third" in prompt


def test_images_by_file_paste_and_drop(page: Page, backend: Any, kit: Any):
    """All three ways put a picture in front of the message, and it reaches the engine."""
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("RGB", (40, 40), (9, 9, 9)).save(file, "PNG")
    with tempfile.NamedTemporaryFile(suffix=".png") as picture:
        picture.write(file.getvalue())
        picture.flush()
        page["file"].send_keys(picture.name)
        page.wait(lambda: len(page.all("#images img")) == 1)
    script = """
        const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0)), data = new DataTransfer();
        data.items.add(new File([bytes], "x.png", { type: "image/png" }));
        document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
    """
    page.browser.execute_script(script, base64.b64encode(file.getvalue()).decode())
    page.wait(lambda: len(page.all("#images img")) == 3)
    page.all("#images button")[0].click()
    assert len(page.all("#images img")) == 2
    page.say("see")
    assert len(backend.asked[-1][0]["images"]) == 2 and len(page.all("article.user img")) == 2


def test_edit_retry_and_settings(page: Page, backend: Any, kit: Any):
    page.say("one")
    page.all("article.user button")[0].click()
    assert page["input"].get_attribute("value") == "one" and page.all("article") == []
    page.browser.find_element(By.CSS_SELECTOR, "form summary").click()
    for name, value in (("temperature", "0.5"), ("top_k", "7"), ("max_tokens", "9"), ("seed", "3"), ("system", "Be.")):
        page[name].clear()
        page[name].send_keys(value)
    page.browser.execute_script("document.getElementById('effort').value = 'none'")
    page.say(" two")
    prompt, sampling = backend.asked[-1]
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.5, 7, 9, 3)
    text = kit.TOKENIZER.decode(prompt["prompt_token_ids"])
    assert text.endswith("<｜System｜>Be.<｜User｜>one two<｜Assistant｜></think>")
    page.all("article.assistant button")[0].click()
    page.wait(lambda: len(backend.asked) == 3 and page.ended())
    assert kit.TOKENIZER.decode(backend.asked[-1][0]["prompt_token_ids"]) == text and len(page.all("article")) == 2


def test_errors_are_shown(page: Page, backend: Any):
    backend.error = RuntimeError("secret")
    page.say("hi")
    backend.error = None
    assert "failed" in page.texts("article.assistant .error")[0]


def test_every_control_has_a_name_and_a_key(page: Page):
    """Tab reaches what can be used, in order, and a screen reader has a name for it."""
    page.say("hi")
    page.browser.find_element(By.CSS_SELECTOR, "form summary").click()
    seen = set()
    page.browser.execute_script("document.activeElement.blur()")
    for _ in range(40):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        found = page.browser.switch_to.active_element
        seen.add(found.get_attribute("id") or found.accessible_name)
        assert found.tag_name == "body" or found.accessible_name, found.get_attribute("outerHTML")
    assert {"clear", "theme", "log", "input", "send", "attach", "effort", "temperature", "system"} <= seen
    assert {"Edit message 1", "Retry answer 1"} <= seen


def test_light_and_dark(page: Page):
    """What the system asks for, until the button says otherwise; a reload keeps that. Text stays readable in both."""

    def numbers(colour: str) -> list[int]:
        return [int(n) for n in colour[colour.index("(") + 1 : -1].split(",")[:3]]

    def colours() -> tuple[list[int], list[int]]:
        script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        return tuple(
            [int(n) for n in c[c.index("(") + 1 : -1].split(",")[:3]] for c in page.browser.execute_script(script)
        )  # type: ignore[return-value]

    def contrast() -> float:
        def light(colour: list[int]) -> float:
            parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

        low, high = sorted(map(light, colours()))
        return (high + 0.05) / (low + 0.05)

    def system(value: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": value}]
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    system("light")
    assert sum(colours()[1]) > 600 and contrast() > 7
    system("dark")
    assert sum(colours()[1]) < 200 and contrast() > 7
    page["theme"].click()
    assert sum(colours()[1]) > 600
    page.browser.refresh()
    assert sum(colours()[1]) > 600
    system("light")
