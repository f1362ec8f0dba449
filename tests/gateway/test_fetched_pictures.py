"""Pictures behind URLs: from named hosts at public addresses, within limits; nothing else is ever asked."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from gateway_doubles import gateway, stoppable
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tessera_gateway import pictures_from
from tessera_gateway.errors import ApiError
from tessera_gateway.pictures_from import Fetcher, is_public

PICTURE = b"jpeg" * (1 << 18)


@contextmanager
def serving(**tls: Any) -> Iterator[SimpleNamespace]:
    """A web server on this machine; ``port`` and what it was ``asked``."""
    asked: list[tuple[str, str]] = []

    async def picture(request: Request) -> Response:
        path = request.url.path
        asked.append((request.headers["host"], path + "?" * bool(request.url.query) + request.url.query))
        if path == "/to":
            return RedirectResponse(request.url.query)
        if path == "/slow":
            await asyncio.sleep(0.5)
        return Response(PICTURE, 404 if path == "/missing" else 200)

    with stoppable(Starlette(routes=[Route("/{path:path}", picture)]), **tls) as (_, address):
        yield SimpleNamespace(port=int(address.rpartition(":")[2]), asked=asked)


@pytest.fixture
def host() -> Iterator[Any]:
    with serving() as server:
        yield server


async def here(_: str, __: int) -> list[str]:
    return ["127.0.0.1"]


def fetch(hosts: list[str], *urls: str, limit: int = 1 << 20, seconds: float = 15.0, **known: Any) -> dict[str, bytes]:
    """With a name service that knows this machine alone, which counts as public."""
    known = {"resolve": here, "is_public": lambda _: True, **known}
    with mock.patch.multiple(pictures_from, **known):
        fetcher = Fetcher(hosts, limit, seconds)
        return asyncio.run(fetcher.fetch([(url, f"messages[{i}]") for i, url in enumerate(urls)]))


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ApiError) as raised:
        fetch(*arguments, **options)
    assert raised.value.status == 400
    return raised.value.message


def test_a_named_host_is_asked_by_its_name_at_the_address_that_was_checked(host: Any) -> None:
    name = f"pictures.example:{host.port}"
    url = f"http://{name}/a.jpg?size=2"
    assert fetch([name], url, url) == {url: PICTURE}
    assert host.asked == [(name, "/a.jpg?size=2")]  # once


def test_a_host_that_is_not_named_is_not_even_looked_up() -> None:
    async def never(_: str, __: int) -> list[str]:
        raise AssertionError

    for url in ("http://other.example/a.jpg", "http://pictures.example:8080/a", "https://pictures.example.evil/a"):
        assert "pictures are not fetched from" in refusal(["pictures.example"], url, resolve=never)
    user = "http://me:secret@pictures.example/a"
    for url in ("ftp://pictures.example/a", "file:///etc/passwd", "room.jpg", "http://", "gopher://x", user):
        assert "a picture is a data: URL" in refusal(["pictures.example"], url, resolve=never)
    assert "cannot fetch" in refusal(["pictures.example"], "http://[::1", resolve=never)

    async def unknown(_: str, __: int) -> list[str]:
        raise OSError("no such name")

    assert "no such name" in refusal(["pictures.example"], "http://pictures.example/a", resolve=unknown)


def test_a_name_that_leads_inside_is_refused(host: Any) -> None:
    async def both(_: str, __: int) -> list[str]:
        return ["93.184.216.34", "10.0.0.1"]

    name = f"pictures.example:{host.port}"
    for resolve in (here, both):
        assert "not public" in refusal([name], f"http://{name}/a.jpg", resolve=resolve, is_public=is_public)
    assert host.asked == []


INSIDE = """
127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255
::1 :: fe80::1%eth0 fd00::1 ff02::1 ::ffff:10.0.0.1 2002:a00:1:: 64:ff9b::a00:1 2001:0:4136::1
::7f00:1 fec0::1 64:ff9b:1::a00:1 5f00::1
"""


def test_addresses_inside() -> None:
    assert [address for address in INSIDE.split() if is_public(address)] == []
    assert is_public("93.184.216.34") and is_public("8.8.8.8") and is_public("2606:2800:220:1::1")


def test_redirects_stay_on_named_hosts_and_end(host: Any) -> None:
    name = f"pictures.example:{host.port}"
    assert fetch([name], f"http://{name}/to?/a.jpg") == {f"http://{name}/to?/a.jpg": PICTURE}
    elsewhere = f"http://{name}/to?http://169.254.169.254/latest"
    assert "not fetched from 169.254.169.254:80" in refusal([name], elsewhere)
    assert "more than 3 redirects" in refusal([name], f"http://{name}/to?" + "/to?" * 9)


def test_sizes_times_and_other_statuses(host: Any) -> None:
    name = f"pictures.example:{host.port}"
    one, two = f"http://{name}/1", f"http://{name}/2"
    exactly = 2 * len(PICTURE)
    assert len(fetch([name], one, two, limit=exactly)) == 2
    refused = refusal([name], one, two, limit=exactly - 1)
    assert refused == "messages[1]: the request's pictures are larger than 1 MiB together"
    assert "within 0.1 s" in refusal([name], f"http://{name}/slow", seconds=0.1)
    assert "answers 404" in refusal([name], f"http://{name}/missing")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_certificate_must_be_good_for_the_name_though_the_connection_goes_to_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=pictures.example", "-addext", "subjectAltName=DNS:pictures.example"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *kind, *name, *files], check=True, capture_output=True)
    with serving(ssl_certfile=certificate, ssl_keyfile=key) as host:
        names = [f"pictures.example:{host.port}", f"other.example:{host.port}"]
        urls = [f"https://{name}/a.jpg" for name in names]
        assert "certificate verify failed" in refusal(names, urls[0])  # nobody vouches for it
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch(names, urls[0]) == {urls[0]: PICTURE}
        assert "not valid for 'other.example'" in refusal(names, urls[1])
        assert host.asked == [(names[0], "/a.jpg")]


def test_a_request_brings_the_picture_along(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    door = gateway(fetch_from=(f"pictures.example:{host.port}",))
    monkeypatch.setattr(pictures_from, "resolve", here)
    monkeypatch.setattr(pictures_from, "is_public", lambda _: True)
    part = {"type": "image_url", "image_url": {"url": f"http://pictures.example:{host.port}/a.jpg"}}
    asked = [{"role": "user", "content": [part]}]
    assert door.ask(asked).status_code == 200
    assert door.fake.requests[0][0].images == (PICTURE,)
    default = gateway()
    response = default.ask(asked)
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "picture_refused" and not default.fake.requests
    assert error["param"] == "messages[0].content[0].image_url.url" and "--fetch-from" in error["message"]
