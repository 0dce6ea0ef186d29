"""The playground page against servers that say what no real one can be made to say: events cut anywhere, markup in
answers, reasoning, a full queue, broken streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from blockdraft.serve.playground import add_page
from page_kit import Browser, Visit, chromium, served

INFO = {
    "model": "scripted",
    "draft": "a script",
    "max_width": 8,
    "width_policy": "adaptive",
    "dtype": "float32",
    "device": "cpu",
}
DONE = "data: [DONE]\n\n"
MARKUP = "<img src=x onerror=\"document.title='broken'\"><b>bold</b> &amp; <script>document.title='broken'</script>"
Script = Callable[[int], Response]


def chunk(
    tokens: Sequence[tuple[str, str, int, int | None]] = (),
    *,
    content: str | None = None,
    reasoning: str | None = None,
    end: str | None = None,
) -> str:
    """One event: tokens are (text, kind, step, width); without a text of its own the content is theirs."""
    if content is None and reasoning is None:
        content = "".join(token[0] for token in tokens)
    told = [{"id": 7, "text": text, "kind": kind, "step": step, "width": width} for text, kind, step, width in tokens]
    delta = {"content": content, "reasoning_content": reasoning}
    delta = {name: text for name, text in delta.items() if text is not None}
    choice = {"index": 0, "delta": delta, "tokens": told, "finish_reason": end}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def stream(*events: str) -> Response:
    return StreamingResponse(iter(events), media_type="text/event-stream")


class ScriptedServer:
    """Answers the n-th chat request with `script(n)`."""

    def __init__(self) -> None:
        self.script: Script = lambda number: stream(DONE)
        self.info: Callable[[int], Response] = lambda number: JSONResponse(INFO)
        self._num_asked = {"chat": 0, "info": 0}
        self.app = FastAPI()
        add_page(self.app)
        self.app.add_api_route("/info", self._info)
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])

    def begin(self, script: Script, info: Callable[[int], Response] | None = None) -> None:
        self.script, self.info = script, info or (lambda number: JSONResponse(INFO))
        self._num_asked = {"chat": 0, "info": 0}

    async def _info(self) -> Response:
        self._num_asked["info"] += 1
        return self.info(self._num_asked["info"])

    async def _chat(self, request: Request) -> Response:
        await request.body()
        self._num_asked["chat"] += 1
        return self.script(self._num_asked["chat"])


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
def server(program: Any) -> Iterator[tuple[ScriptedServer, str]]:
    scripted = ScriptedServer()
    with served(scripted.app) as base:
        yield scripted, base


@pytest.fixture
def play(server: tuple[ScriptedServer, str], browser: Browser) -> Callable[..., Visit]:
    """Opens the page on a server with this script and sends one message."""

    def begin(script: Script, *, way: str = "speculative", info: Callable[[int], Response] | None = None) -> Visit:
        scripted, base = server
        scripted.begin(script, info)
        visit = browser.open(base)
        visit.send("Hello", way=way)
        return visit

    return begin


# -------------------------------------------------------------------------------------------------------- the modules


def test_events_may_be_cut_anywhere(server: tuple[ScriptedServer, str], browser: Browser) -> None:
    """At every byte, in characters of several bytes and between the halves of line ends too."""
    text = (
        "\ufeffdata: one\n\n: a comment\nevent: x\nid: 3\r\ndata:two\r\ndata:  lines\r\n\r\n"
        'data\rdata: é日🦊\r\rretry: 5\n\ndata: {"a": 1}\n\ndata: incomplete\n'
    )
    expected = ["one", "two\n lines", "\né日🦊", '{"a": 1}']
    visit = browser.open(server[1])
    wrong = visit.page.evaluate(
        """async ([text, expected]) => {
            const { SseParser } = await import(document.querySelector("script[type=module]").src.replace("app", "sse"));
            const bytes = new TextEncoder().encode(text);
            const wrong = [];
            for (let one = 0; one <= bytes.length; one++) {
                for (let other = one; other <= Math.min(one + 4, bytes.length); other++) {
                    const parser = new SseParser();
                    const parts = [bytes.slice(0, one), bytes.slice(one, other), bytes.slice(other)];
                    const events = [...parts.flatMap((part) => parser.feed(part)), ...parser.end()];
                    if (JSON.stringify(events) !== JSON.stringify(expected)) wrong.push([one, other, events]);
                }
            }
            return wrong;
        }""",
        [text, expected],
    )
    assert wrong == []


def test_tokens_find_their_text_between_the_markers_of_sections(play: Callable[..., Visit]) -> None:
    events = [
        chunk([("<think>", "first", 0, None)], content=""),
        chunk([("\n", "accepted", 1, 8), ("Let", "accepted", 1, 8), (" me", "bonus", 1, 8)], reasoning="Let me"),
        chunk([(" see", "bonus", 2, 8)], reasoning=""),  # held back: it could have been a marker
        chunk([("</think>", "accepted", 3, 8), ("\n\n", "accepted", 3, 8), ("It", "bonus", 3, 8)], reasoning=" see"),
        chunk([], content="It"),
        chunk([("", "accepted", 4, 8), (" é", "bonus", 4, 8)]),
        chunk([(" is.", "accepted", 5, 8), ("", "bonus", 5, 8)]),
        chunk([], content="", end="stop"),
        DONE,
    ]
    visit = play(lambda number: stream(*events))
    visit.wait()
    assert visit.page.text_content(".reasoning .text") == "Let me see"
    assert visit.page.text_content(".answer") == "It é is."
    assert not visit.page.locator(".reasoning").get_attribute("open"), "reasoning is folded"
    shown = [(token["text"], token["kind"], token["step"]) for token in visit.tokens()]
    assert shown == [
        ("", "first", 0),
        ("", "accepted", 1),
        ("Let", "accepted", 1),
        (" me", "bonus", 1),
        (" see", "bonus", 2),
        ("", "accepted", 3),
        ("", "accepted", 3),
        ("It", "bonus", 3),
        ("", "accepted", 4),
        (" é", "bonus", 4),
        (" is.", "accepted", 5),
        ("", "bonus", 5),
    ]
    assert visit.page.locator(".strip g").count() == 5


# --------------------------------------------------------------------------------------------------------- the answers


def test_markup_in_an_answer_and_in_an_error_stays_text(play: Callable[..., Visit]) -> None:
    refused = JSONResponse({"error": {"message": MARKUP}}, 400)
    answer = stream(chunk([(MARKUP, "first", 0, None)]), chunk([], content="", reasoning=MARKUP, end="stop"), DONE)
    visit = play(lambda number: refused if number == 1 else answer)
    assert MARKUP in visit.page.inner_text(".problem [role=alert]")
    visit.page.click(".problem button")
    visit.wait()
    assert visit.page.text_content(".answer") == MARKUP
    visit.page.hover(".answer .tok")
    assert "document.title" in visit.page.inner_text("#tip")
    assert visit.page.locator("#turns :is(img, script, b)").count() == 0
    assert visit.page.locator("#spoken :is(img, script, b)").count() == 0
    assert visit.page.title() == "blockdraft playground"


def test_a_full_queue_is_waited_for(play: Callable[..., Visit]) -> None:
    full = JSONResponse({"error": {"message": "the queue is full"}}, 429, headers={"Retry-After": "1"})
    answer = stream(chunk([("Now", "first", 0, None)], end="stop"), DONE)
    visit = play(lambda number: full if number == 1 else answer)
    assert visit.page.inner_text(".problem [role=alert]") == "429: the queue is full"
    button = visit.page.locator(".problem button")
    assert button.inner_text() == "Retry in 1 s" and button.is_disabled()
    button.click()  # waits until it can be pressed
    visit.wait()
    assert visit.page.text_content(".answer") == "Now"


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([chunk([("Half", "first", 0, None)])], "The connection ended before the answer did."),
        (
            [chunk([("Half", "first", 0, None)]), 'data: {"error": {"message": "the server stops"}}\n\n'],
            "the server stops",
        ),
        ([chunk([("Half", "first", 0, None)]), "data: {half\n\n"], "The server sent an event that is not JSON: {half"),
    ],
)
def test_a_stream_that_breaks_is_said_and_what_came_stays(
    play: Callable[..., Visit], events: list[str], said: str
) -> None:
    visit = play(lambda number: stream(*events))
    visit.wait()
    assert said in visit.page.inner_text(".problem [role=alert]")
    assert visit.page.inner_text(".lane-state") == "failed"
    assert visit.page.text_content(".answer") == "Half"


def test_a_first_way_that_fails_does_not_start_the_second(play: Callable[..., Visit]) -> None:
    visit = play(lambda number: JSONResponse({"error": {"message": "no"}}, 400), way="both")
    visit.wait()
    assert visit.page.locator(".lane-state").all_inner_texts() == ["failed", "not run"]
    assert len(visit.bodies()) == 1 and visit.page.locator(".verdict").count() == 0


# ---------------------------------------------------------------------------------------------------------- the server


def test_a_server_without_a_draft_offers_plain_decoding_only(
    server: tuple[ScriptedServer, str], browser: Browser
) -> None:
    scripted, base = server
    facts = {**INFO, "draft": None, "max_width": 1, "draft_off_reason": "It was started with --no-draft."}
    scripted.begin(lambda number: stream(DONE), lambda number: JSONResponse(facts))
    visit = browser.open(base)
    visit.wait_for_server()
    assert visit.page.is_checked("input[value=plain]")
    assert visit.page.is_disabled("input[value=speculative]") and visit.page.is_disabled("input[value=both]")
    assert "It was started with --no-draft." in visit.page.inner_text("#width-hint")


def test_a_server_that_loads_is_asked_again(server: tuple[ScriptedServer, str], browser: Browser) -> None:
    scripted, base = server
    loading = JSONResponse({"error": {"message": "the pair is being loaded"}}, 503)
    scripted.begin(
        lambda number: stream(DONE), lambda number: loading if number == 1 else JSONResponse({**INFO, "device": "cpu"})
    )
    visit = browser.open(base)
    visit.page.locator("#pair", has_text="the pair is being loaded").wait_for()
    visit.wait_for_server()
    assert "takes what is fastest" in visit.page.inner_text("#width-hint")
