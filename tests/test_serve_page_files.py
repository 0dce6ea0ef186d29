"""The files of the playground page: types, policy, caching, no outside address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import blockdraft
from blockdraft.serve.playground import CONTENT_SECURITY_POLICY, MEDIA_TYPES, add_page

PAGE = Path(blockdraft.__file__).parent / "serve" / "page"
NAMES = sorted(path.name for path in PAGE.iterdir())


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_page(app)
    return TestClient(app)


@pytest.fixture(scope="module")
def links(client: TestClient) -> list[str]:
    """Addresses in the page, in the order of their appearance."""
    return re.findall(r'(?:src|href)="(page/[^"]+)"', client.get("/").text)


def test_the_page_comes_with_its_policy_and_is_asked_for_again(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert client.get("/", headers={"If-None-Match": '"another"'}).status_code == 200


@pytest.mark.parametrize("name", [name for name in NAMES if name != "index.html"])
def test_a_file_lies_under_the_hash_of_all_and_may_be_kept_for_ever(
    client: TestClient, links: list[str], name: str
) -> None:
    folder = links[0].rsplit("/", 1)[0]
    answer = client.get(f"/{folder}/{name}")
    assert answer.status_code == 200 and answer.content == (PAGE / name).read_bytes()
    assert answer.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "immutable" in answer.headers["cache-control"]
    assert client.head(f"/{folder}/{name}").headers["etag"] == answer.headers["etag"]
    assert client.get(f"/page/0123456789abcdef/{name}").status_code == 404


def test_nothing_else_is_served(client: TestClient, links: list[str]) -> None:
    folder = links[0].rsplit("/", 1)[0]
    for path in ("index.html", "..%2Fplayground.py", "none.js", ""):
        assert client.get(f"/{folder}/{path}").status_code == 404
    assert client.post("/").status_code == 405


def test_every_link_of_the_page_leads_somewhere(client: TestClient, links: list[str]) -> None:
    assert len(links) >= 4
    assert {client.get(f"/{link}").status_code for link in links} == {200}


def test_a_change_of_any_file_moves_all_of_them(
    client: TestClient, links: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes((PAGE / name).read_bytes())
    (tmp_path / "run.js").write_text("// another\n")
    monkeypatch.setattr("blockdraft.serve.playground._FOLDER", tmp_path)
    app = FastAPI()
    add_page(app)
    moved = TestClient(app).get("/").text
    assert links[0] not in moved and re.search(r'src="page/[0-9a-f]{16}/app.js"', moved)


def test_the_page_is_no_part_of_the_api_s_schema(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host_or_turns_text_into_markup(name: str) -> None:
    text = (PAGE / name).read_text("utf-8")
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
        assert forbidden not in text
    assert len(text.splitlines()) <= 500 and max(map(len, text.splitlines())) <= 320


def test_every_kind_of_file_has_a_type() -> None:
    assert {Path(name).suffix for name in NAMES} <= set(MEDIA_TYPES)
