"""The page in headless Chromium, before a stand-in of the gateway."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from browser import Browser
from stand_in import SHARES, TIMINGS, WORDS, Client, StandIn

from tessera_client import PicturePlan, PictureView

ANSWER = "".join(WORDS)


def texts(page: Browser, selector: str) -> list[str]:
    return [each.get_attribute("textContent") for each in page.all(selector)]


def lines(page: Browser) -> str:
    """The grid's, as one path; empty before it is drawn, which may be at any time."""
    return page.run("return document.querySelector('#grid path')?.getAttribute('d') ?? ''")


def test_an_answer_streams_and_is_spoken_by_sentences(page: Browser, gateway: StandIn, picture: Path) -> None:
    page.choose(picture)
    page.ask("Describe the room, slowly.")
    page.until(lambda: page("answer").get_attribute("textContent") == "".join(WORDS[:2]))
    assert page("answer").get_attribute("aria-busy") == "true"
    assert page.shows("stop") and not page("ask").is_enabled()
    assert texts(page, "#spoken p") == [WORDS[0].strip(), WORDS[1].strip()]
    assert page("spoken").get_attribute("aria-live") == "polite"
    gateway.go_on.set()
    assert page.until_answered() == ANSWER
    assert " ".join(texts(page, "#spoken p")) == ANSWER
    (body,) = gateway.requests
    image, text = body["messages"][0]["content"]
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == picture.read_bytes()
    assert text == {"type": "text", "text": "Describe the room, slowly."}
    assert body["model"] == "tessera-small" and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 256 and "tessera" not in body


def test_label_scores_are_bars_and_stages_a_strip(page: Browser, gateway: StandIn, picture: Path) -> None:
    page.choose(picture)
    page.ask("Which room is it?", " living room, kitchen,bathroom ,")
    assert page.until_answered() == "living room"
    assert gateway.requests[0]["tessera"] == {"choices": ["living room", "kitchen", "bathroom"]}
    assert texts(page, "#scores tbody th") == ["living room", "kitchen", "bathroom"]
    assert texts(page, "#scores tbody td:nth-child(3)") == ["86 %", "11 %", "3.0 %"]
    assert texts(page, "#scores tbody td:nth-child(4)") == ["p 0.77", "p 0.099", "p 0.027"]
    track = page.all("#scores .track")[0].size["width"]
    assert [bar.size["width"] / track for bar in page.all("#scores .bar")] == pytest.approx(SHARES, abs=0.02)
    assert page("times-total").text == "120 ms"
    assert texts(page, "#times th") == ["Prepare", "Vision queue", "Vision", "Queue", "First token", "Decode"]
    assert texts(page, "#times td") == ["6.2", "0.4", "42", "0.7", "13", "58"]
    least, widths = 2, [part.size["width"] for part in page.all("#strip div")]
    room = sum(widths) - least * len(widths)
    shares = [time / sum(TIMINGS.values()) for time in TIMINGS.values()]
    assert [width - least for width in widths] == pytest.approx([room * share for share in shares], abs=1)
    assert "1812 prompt tokens (1792 of the picture) · 27 written" in page("usage").text


def test_the_grid_lies_over_the_picture_as_the_server_cuts_it(page: Browser, gateway: StandIn, picture: Path) -> None:
    page.choose(picture)
    assert page("cut").text == (
        "1280 × 960 pixels, resized to 1792 × 1344: 4 × 3 tiles and a thumbnail of the whole, 3328 tokens in all"
    )
    assert lines(page) == "M0 0H4M0 1H4M0 2H4M0 3H4M0 0V3M1 0V3M2 0V3M3 0V3M4 0V3"
    (path,), shown = page.all("#grid path"), page("shown").rect
    for side in ("x", "y", "width", "height"):
        assert path.rect[side] == pytest.approx(shown[side], abs=4)
    known = [each.get_attribute("value") for each in page.all("#policy option:not([hidden])")]
    assert known == ["", "reference", "two-tile"]
    page("policy").send_keys("two")
    page.until(lambda: lines(page) == "M0 0H2M0 1H2M0 0V1M1 0V1M2 0V1")
    assert page("cut").text == "1280 × 960 pixels, resized to 896 × 448: 2 × 1 tiles, 512 tokens in all"
    page("show-grid").click()
    assert not page.shows("grid")
    page.ask("What is here?")
    page.until_answered()
    assert gateway.requests[0]["tessera"] == {"tile_policy": {"name": "two-tile"}}  # the policy shown


def test_a_model_without_tiles_shows_the_grid_of_its_tokens_and_no_policies(
    page: Browser, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a Qwen2-VL server says of this picture."""
    monkeypatch.setattr(Client, "own", PicturePlan(1564, "image tokens", (), (PictureView(1288, 952, 34, 46),)))
    page.choose(picture)
    assert "1288 × 952: 46 × 34 image tokens, 1564 tokens in all" in page("cut").text
    assert (lines(page).count("H46"), lines(page).count("V34")) == (35, 47)
    assert not page.shows("policy")


def test_the_grid_of_a_picture_taken_away_meanwhile_are_not_drawn(page: Browser, picture: Path) -> None:
    page.run(
        "const ask = window.fetch; window.told = 0; window.fetch = (path, options) =>"
        " new Promise((answer) => { window.goOn = answer; }).then(() => ask(path, options))"
        ".finally(() => setTimeout(() => { window.told = 1; }, 50))"
    )
    page("file").send_keys(str(picture))
    page("remove").click()
    page.run("window.goOn()")
    page.until(lambda: page.run("return window.told"))
    assert page("cut").get_attribute("textContent") == "" and not page.all("#grid path")


def test_stop_breaks_the_answer_off_at_the_gateway(page: Browser, gateway: StandIn) -> None:
    page.ask("Describe the room, slowly.")
    page.until(lambda: "Beside" in page("answer").text)
    page("stop").click()
    assert page.until_answered().strip() == "".join(WORDS[:2]).strip()
    assert page("problem").text == "Stopped."
    page.until(lambda: gateway.left == ["Describe the room, slowly."])


def test_recent_questions_stay_without_their_pictures(page: Browser, gateway: StandIn, picture: Path) -> None:
    page.choose(picture)
    page.ask("Which room is it?", "living room, kitchen")
    page.until_answered()
    page.ask("Describe the room.")
    page.until_answered()
    page.open(forget=False)
    assert texts(page, "#recent-list strong") == ["Describe the room.", "Which room is it?"]
    assert page.all("#recent-list img")[0].get_attribute("naturalWidth") == "96"
    assert page.run("return JSON.stringify(localStorage).length") < 20_000
    page.all("#recent-list button")[1].click()
    assert page("question").get_attribute("value") == "Which room is it?"
    assert page("labels").get_attribute("value") == "living room, kitchen" and page.focused() == "question"
    page("clear").click()
    assert not page.shows("recent")
    page.open(forget=False)
    assert not page.shows("recent")


def test_status_shows_each_servers_numbers(page: Browser) -> None:
    page("tab-status").click()
    page.until(lambda: page.all(".server"))
    assert page("status-note").text == "1 of 2 servers do not answer."
    up, down = page.servers()
    assert down == {"title": "127.0.0.1:9does not answer"}
    assert up.pop("title").endswith("answers") and up == {
        "Requests under way": "5",
        "Queue": "5",
        "KV blocks": "512 of 2,048",
        "Prefix cache hits": "25 %",
        "Device busy": "42 %",
        "Requests ended": "1,234",
        "First token": "31 ms",
        "Tokens written": "65,536",
    }


def test_the_status_tab_asks_again_only_while_it_is_seen(page: Browser) -> None:
    page.run(
        "window.asked = 0; const [ask, wait] = [window.fetch, window.setTimeout];"
        "window.fetch = (...all) => { window.asked += 1; return ask(...all); };"
        "window.setTimeout = (work, ms) => wait(work, ms / 100)"
    )
    page("tab-status").click()
    page.until(lambda: page.run("return window.asked") >= 3)
    page("tab-ask").click()
    # The answer under way may still come; after it no timer is left that would ask.
    settled = (
        "const [before, then] = [window.asked, arguments[0]]; setTimeout(() => then(window.asked === before), 20000)"
    )
    page.until(lambda: page.driver.execute_async_script(settled))
