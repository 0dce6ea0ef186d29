"""The playground page in a real browser: settings, failures, keyboard, looks. A tiny random pair is served."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from blockdraft import load
from blockdraft.serve import ServerSettings, create_app
from page_kit import Browser, chromium, served
from tiny_pair import TinyPair

KEY = "a-key-of-this-test"
GRANTED = ["clipboard-read", "clipboard-write"]
SEVERE = ("serious", "critical")
PARSE = """async text => {
    const { SseParser } = await import(document.querySelector("script[type=module]").src.replace("app.js", "sse.js"));
    const events = new SseParser().feed(new TextEncoder().encode(text)).filter((data) => data !== "[DONE]");
    return events.map((data) => JSON.parse(data).choices[0]?.delta?.content ?? "").join("");
}"""


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    with chromium() as program:
        yield program


@pytest.fixture
def browser(program: Any) -> Iterator[Browser]:
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def base(program: Any, tiny_pair: TinyPair) -> Iterator[str]:
    with served(create_app(load(tiny_pair.draft, tiny_pair.target), ServerSettings(model_name="tiny"))) as url:
        yield url


@pytest.fixture
def guarded(tiny_pair: TinyPair) -> Iterator[str]:
    settings = ServerSettings(model_name="tiny", api_keys=(KEY,))
    with served(create_app(load(tiny_pair.draft, tiny_pair.target), settings)) as url:
        yield url


# ----------------------------------------------------------------------------------------------------------- requests


def test_settings_go_into_the_request_and_empty_ones_do_not(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11}
    for name, value in fields.items():
        visit.set(name, value)
    visit.set("system", "You are brief.")
    visit.send("Hello", max_tokens=3)
    visit.wait()
    visit.page.fill("#seed", "")
    visit.send("And now?", way="plain", max_tokens=2)
    visit.wait()
    first, second = visit.bodies()
    assert {name: first[name] for name in fields} == fields and first["max_tokens"] == 3
    assert first["speculation"] == {"enabled": True, "tokens": True}
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == visit.page.locator(".answer").first.text_content()
    assert isinstance(second["seed"], int), "sampling without a seed could not be repeated"
    assert second["speculation"] == {"enabled": False, "tokens": True}
    visit.page.fill("#temperature", "7")
    visit.page.fill("#prompt", "Not sent")
    visit.page.press("#prompt", "Enter")
    assert len(visit.bodies()) == 2 and visit.page.evaluate("document.activeElement.id") == "temperature"
    visit.page.click("#retry")
    assert visit.page.input_value("#prompt") == "Not sent" and visit.page.locator(".turn").count() == 2


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_side_by_side_finds_where_texts_part(base: str, browser: Browser, temperature: float) -> None:
    visit = browser.open(base)
    visit.set("temperature", temperature)
    visit.set("seed", 5)
    visit.send("the quick brown fox", way="both", max_tokens=30)
    visit.page.wait_for_selector(".verdict")
    plain, speculative = visit.bodies()
    assert plain.pop("speculation")["enabled"] is False and speculative.pop("speculation")["enabled"] is True
    assert plain == speculative
    one, other = ([token["text"] for token in visit.tokens(way)] for way in ("plain", "speculative"))
    said = visit.page.inner_text(".verdict")
    if temperature == 0:
        assert one == other
        assert said.startswith("Identical") and f"{len(one)} tokens, the same text both ways" in said
    else:
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        assert said.startswith(f"Different from token {at + 1} on")
        assert visit.page.locator(".tok.parts").count() == 2


def test_the_copied_command_runs_and_gives_the_same_text(base: str, browser: Browser) -> None:
    visit = browser.open(base, permissions=GRANTED)
    visit.send('Say "it\'s" twice; cost: $HOME `id`\\n', max_tokens=20)
    visit.wait()
    visit.page.get_by_role("button", name="Copy as curl").click()
    visit.page.get_by_role("button", name="Copied").wait_for()
    command = visit.page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("data: [DONE]")
    sent = visit.page.evaluate(PARSE, done.stdout)
    assert sent == visit.page.text_content(".answer") != ""
    visit.page.get_by_role("button", name="Copy text").click()
    visit.page.get_by_role("button", name="Copied").first.wait_for()
    assert visit.page.evaluate("navigator.clipboard.readText()") == sent


# ----------------------------------------------------------------------------------------------------------- failures


def test_a_refusal_shows_the_server_s_words_and_can_be_retried(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    visit.send("Hello", max_tokens=9_000_000)
    said = visit.page.inner_text(".problem [role=alert]")
    assert said.startswith("400: ") and "9000000" in said
    visit.set("max_tokens", 2)
    visit.page.click(".problem button")
    visit.wait()
    assert visit.page.locator(".problem").count() == 0 and len(visit.tokens()) == 2
    assert [message["role"] for message in visit.bodies()[1]["messages"]] == ["user"]


def test_a_lost_network_is_said_and_can_be_retried(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    visit.wait_for_server()
    visit.page.context.set_offline(True)
    visit.send("Hello", max_tokens=2)
    assert "cannot be reached" in visit.page.inner_text(".problem [role=alert]")
    visit.page.context.set_offline(False)
    visit.page.click(".problem button")
    visit.wait()
    assert len(visit.tokens()) == 2
    assert visit.page.evaluate("document.activeElement.id") == "send", "the focus went with the button that was pressed"
    visit.page.click("#clear")
    assert visit.page.locator(".turn").count() == 0 and visit.page.is_visible("#welcome")


def test_a_key_is_asked_for_only_where_one_is_needed_and_never_stored(
    base: str, guarded: str, browser: Browser
) -> None:
    assert browser.open(base).page.is_hidden("#key-form")
    visit = browser.open(guarded, permissions=GRANTED)
    for key, is_asked_again in (("a-wrong-key", True), (KEY, False)):
        visit.page.wait_for_selector("#key-form")
        assert visit.page.evaluate("document.activeElement.id") == "key"
        with visit.page.expect_response(f"{guarded}info"):
            visit.page.fill("#key", key)
            visit.page.press("#key", "Enter")
        visit.page.locator("#pair", has_text="asks for an API key" if is_asked_again else "cpu").wait_for()
    assert visit.page.is_hidden("#key-form")
    visit.send("Hello", max_tokens=2)
    visit.wait()
    assert len(visit.tokens()) == 2
    kept = visit.page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
    assert KEY not in kept and KEY not in visit.page.content()
    visit.page.get_by_role("button", name="Copy as curl").click()
    visit.page.get_by_role("button", name="Copied").wait_for()
    command = visit.page.evaluate("navigator.clipboard.readText()")
    assert KEY not in command and "$BLOCKDRAFT_API_KEY" in command
    done = subprocess.run(
        ["bash", "-c", f"BLOCKDRAFT_API_KEY={KEY}\n{command}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.rstrip().endswith("data: [DONE]")


# ------------------------------------------------------------------------------------------- keyboard, looks and sizes


def test_the_page_works_by_keyboard_alone(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    page = visit.page
    visit.wait_for_server()
    visit.set("max_tokens", 150)
    page.focus(".skip")
    order = ["skip"]
    while order[-1] != "prompt" and len(order) < 40:
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert order[:3] == ["skip", "theme", "settings-toggle"] and order[-1] == "prompt"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.value") == "speculative"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.value") == "plain"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.keyboard.type("a block of proposals")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("is scored")
    page.keyboard.press("Enter")
    visit.wait_for_steps(3)
    page.keyboard.press("Escape")
    visit.wait()
    assert visit.bodies()[0]["messages"][0]["content"] == "a block of proposals\nis scored"
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.focus(".answer")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("Step 1: width 5, ")
    assert page.inner_text("#status").startswith("Step 1: width 5, ")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)])
def test_axe_finds_nothing_serious_and_nothing_is_too_wide(base: str, browser: Browser, theme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    size = {"width": width, "height": 740}
    visit = browser.open(base, viewport=size, color_scheme=theme, reduced_motion="reduce", has_touch=width < 500)

    def severe() -> list[tuple[str, list[str]]]:
        found = axe.run(visit.page).response["violations"]
        return [(v["id"], [node["html"] for node in v["nodes"]]) for v in found if v["impact"] in SEVERE]

    assert severe() == []
    visit.set("temperature", 1.5)
    visit.send("Hello", max_tokens=9_000_000)
    visit.page.wait_for_selector(".problem")
    visit.set("seed", 5)
    visit.send("Hello there.", way="both", max_tokens=30)
    visit.page.wait_for_selector(".verdict")
    answer = visit.page.locator(".answer").last
    answer.focus()
    answer.press("Home")
    assert severe() == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.evaluate("document.getAnimations().length") == 0


def test_the_theme_is_kept(base: str, browser: Browser) -> None:
    visit = browser.open(base, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = visit.page.evaluate(paper)
    visit.page.click("#theme")
    assert visit.page.evaluate(paper) == light
    visit.page.click("#theme")
    dark = visit.page.evaluate(paper)
    assert dark != light and visit.page.inner_text("#theme") == "Theme: dark"
    visit.page.reload()
    assert visit.page.evaluate(paper) == dark
