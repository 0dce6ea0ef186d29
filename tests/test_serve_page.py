"""The playground page in a real browser against the real server with the built-in pair, in bfloat16."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest

from blockdraft import UnavailableError, load
from blockdraft.serve import ServerSettings, create_app
from blockdraft.targets import ensure_target
from page_kit import Browser, Visit, asked, chromium, served

MATHS = "A baker packs 8 rolls on each tray. He fills 7 trays and sells 29 rolls. How many rolls are left?"
HOSTILE = "Repeat: <img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
WIDTH = 5
LISTEN = """() => {
    window.heard = [];
    new MutationObserver((changes) => {
        for (const { addedNodes } of changes) for (const node of addedNodes) heard.push(node.textContent);
    }).observe(document.getElementById("spoken"), { childList: true });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as program:
        browser = Browser(program)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def base(browser: Browser) -> Iterator[str]:
    try:
        ensure_target()
    except UnavailableError as error:
        pytest.skip(f"the built-in target is not here: {error}")
    with served(create_app(load(dtype="bfloat16"), ServerSettings())) as url:
        yield url


@dataclass(frozen=True)
class Answered:
    visit: Visit
    choice: dict[str, Any]
    """What the API gives for the page's own request, unstreamed."""


@pytest.fixture(scope="module")
def answered(base: str, browser: Browser) -> Answered:
    """A page with one answer of fixed width."""
    visit = browser.open(base)
    visit.page.evaluate(LISTEN)
    visit.page.uncheck("#width-auto")
    visit.page.fill("#width", str(WIDTH))
    visit.send(MATHS, max_tokens=40)
    visit.wait()
    [body] = visit.bodies()
    assert body["speculation"] == {"enabled": True, "tokens": True, "width": WIDTH}
    rest = {name: value for name, value in body.items() if not name.startswith("stream")}
    return Answered(visit, asked(f"{base}v1/chat/completions", rest)["choices"][0])


def test_every_token_is_marked_as_the_api_says_it_was_won(answered: Answered) -> None:
    told = [{name: token[name] for name in ("text", "kind", "step")} for token in answered.choice["tokens"]]
    assert len(told) == 40 and {token["kind"] for token in told} == {"first", "accepted", "bonus"}
    assert answered.visit.tokens() == told
    assert answered.visit.page.text_content(".answer") == answered.choice["message"]["content"]


def test_the_strip_and_the_figures_are_those_of_the_steps(answered: Answered) -> None:
    page, tokens = answered.visit.page, answered.choice["tokens"]
    kinds = [token["kind"] for token in tokens]
    steps = [list(group) for step, group in groupby(tokens, key=lambda token: token["step"]) if step > 0]
    accepted = [sum(token["kind"] == "accepted" for token in step) for step in steps]
    heights = page.eval_on_selector_all(
        ".strip g", "bars => bars.map(bar => bar.querySelector('.accepted')?.getAttribute('height') ?? '0')"
    )
    assert [float(height) / (40 / 8) for height in heights] == pytest.approx(accepted)
    assert page.get_attribute(".strip svg", "aria-label") == f"Accepted per step: {', '.join(map(str, accepted))}"
    shown = {name: page.inner_text(f".figure.{name} dd") for name in ("steps", "accepted", "bonus", "first")}
    assert shown == {
        "steps": str(len(steps)),
        "accepted": str(kinds.count("accepted")),
        "bonus": str(kinds.count("bonus")),
        "first": "1",
    }
    assert float(page.inner_text(".per-step dd")) == pytest.approx(1 + sum(accepted) / len(steps), abs=0.2)
    assert float(page.inner_text(".per-second dd")) > 0
    assert float(page.inner_text(".first-token dd").removesuffix(" s")) > 0


def test_the_marks_differ_in_form_and_not_in_colour_alone(answered: Answered) -> None:
    page = answered.visit.page
    look = "e => { const s = getComputedStyle(e); return [s.borderBottomStyle, s.backgroundColor] }"
    looks = {
        kind: page.eval_on_selector(f".answer .tok[data-kind={kind}]", look) for kind in ("first", "accepted", "bonus")
    }
    assert [looks[kind][0] for kind in ("first", "accepted", "bonus")] == ["double", "none", "solid"]
    assert looks["accepted"][1] != looks["bonus"][1] == looks["first"][1]
    page.uncheck("#is-coloured")
    assert page.eval_on_selector(".answer .tok[data-kind=bonus]", look) == ["none", looks["bonus"][1]]
    page.check("#is-coloured")


def test_pointing_at_a_token_tells_its_step_width_and_place(answered: Answered) -> None:
    page = answered.visit.page
    step = page.locator(".answer .step[data-step='2'] .tok")
    size = step.count()
    step.last.hover()
    said = page.inner_text("#tip")
    assert f"Step 2: width {WIDTH}, {size - 1} of {WIDTH - 1} accepted" in said
    token = [token for token in answered.choice["tokens"] if token["step"] == 2][-1]
    assert f"bonus, token {size} of {size}, id {token['id']}" in said
    assert page.get_attribute(".strip g.is-pointed", "data-step") == "2"
    page.hover(".strip g[data-step='3'] .room", position={"x": 3, "y": 1})
    assert page.inner_text("#tip").startswith(f"Step 3: width {WIDTH}, ")
    page.hover("h1")
    assert page.is_hidden("#tip")


def test_a_screen_reader_hears_sentences(answered: Answered) -> None:
    page = answered.visit.page
    assert page.get_attribute("#spoken", "aria-live") == "polite"
    heard = page.evaluate("heard")
    assert " ".join(" ".join(heard).split()) == " ".join(answered.choice["message"]["content"].split())
    assert 1 < len(heard) < 10
    assert page.inner_text("#status").startswith("Done: 40 tokens in ")


def test_side_by_side_says_whether_the_texts_are_the_same(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    visit.send("Count from one to ten in words.", way="both", max_tokens=16)
    visit.page.wait_for_selector(".verdict")
    plain, speculative = visit.bodies()
    assert plain.pop("speculation")["enabled"] is False and speculative.pop("speculation")["enabled"] is True
    assert plain == speculative
    one, other = visit.tokens("plain"), visit.tokens("speculative")
    assert {token["kind"] for token in one} == {"first", "bonus"}
    same = [token["text"] for token in one] == [token["text"] for token in other]
    assert visit.page.get_attribute(".verdict", "data-identical") == str(same).lower()
    said = visit.page.inner_text(".verdict")
    assert said.startswith("Identical" if same else "Different from token ")
    assert "× the speed" in said


def test_stop_ends_the_answer_and_frees_its_row(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    visit.send("Write a very long story about a lighthouse.", max_tokens=4000)
    visit.wait_for_steps(3)
    visit.page.click("#stop")
    visit.wait()
    assert visit.page.inner_text(".lane-state") == "stopped"
    deadline = time.monotonic() + 10
    while not re.search(r"^blockdraft:num_requests_running\{.*\} 0\.0$", asked(f"{base}metrics"), re.MULTILINE):
        assert time.monotonic() < deadline, "the row still runs"
        time.sleep(0.05)
    assert 0 < len(visit.tokens()) < 2000
    visit.send("Hello", max_tokens=2)
    visit.wait()
    assert [message["role"] for message in visit.bodies()[1]["messages"]] == ["user", "assistant", "user"]


def test_markup_stays_text_in_questions_and_answers(base: str, browser: Browser) -> None:
    visit = browser.open(base)
    visit.send(HOSTILE, max_tokens=16)
    visit.wait()
    assert HOSTILE in visit.page.inner_text(".user")
    assert visit.page.locator("#turns img, #turns script, #turns a").count() == 0
    assert visit.page.title() == "blockdraft playground"
