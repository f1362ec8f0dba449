"""The page in headless Chromium, before a stand-in of the gateway: answers, pictures, conversations, errors."""

import ast
import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from stand_in import SHARES, TIMINGS, WORDS, Client, StandIn, refusal

from tessera_client import PicturePlan, PictureView
from tessera_command.sample import SAMPLES

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
    assert "1812 prompt tokens (1792 of the picture) · 27 written (12 of 15 drafted were right)" in page("usage").text


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
        "Tokens drafted": "5,000",
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


ROOMS = [SAMPLES / "rooms" / f"room-{number:02}.jpg" for number in (4, 8, 10)]
# Drops or pastes files given as [name, type, base64]; whether the page took any.
TAKE = """
const data = new DataTransfer();
for (const [name, type, text] of arguments[1]) {
  data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, {type}));
}
const about = {bubbles: true, cancelable: true};
const event = arguments[0] === "paste"
  ? new ClipboardEvent("paste", {clipboardData: data, ...about})
  : new DragEvent("drop", {dataTransfer: data, ...about});
document.body.dispatchEvent(event);
return event.defaultPrevented;
"""


def given(file: Path, media_type: str = "image/jpeg") -> list[str]:
    return [file.name, media_type, base64.b64encode(file.read_bytes()).decode()]


def add(page: Browser, *files: Path) -> None:
    for file in files:
        page("file").send_keys(str(file))
        page.until(lambda file=file: file.name in page("shown").get_attribute("alt") and page.all("#grid path"))


def sent(body: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Of each message who says it, and what: texts, and pictures as their bytes."""

    def part(each: dict[str, Any]) -> Any:
        return each["text"] if each["type"] == "text" else base64.b64decode(each["image_url"]["url"].partition(",")[2])

    return [
        (each["role"], [each["content"]] if isinstance(each["content"], str) else list(map(part, each["content"])))
        for each in body["messages"]
    ]


def test_several_pictures_go_along_in_their_order(page: Browser, gateway: StandIn) -> None:
    add(page, *ROOMS)
    assert page("cut").text.startswith("room-10.jpg: ")
    buttons = page.all("#pictures button")
    assert [each.get_attribute("aria-pressed") for each in buttons] == ["false", "false", "true"]
    buttons[1].click()
    assert "room-08.jpg" in page("shown").get_attribute("alt")
    assert page("remove").get_attribute("aria-label") == "Remove room-08.jpg"
    page("remove").click()
    assert len(page.all("#pictures button")) == 2 and "room-10.jpg" in page("shown").get_attribute("alt")
    page.ask("Which room is larger?")
    page.until_answered()
    pictures = [ROOMS[0].read_bytes(), ROOMS[2].read_bytes()]
    assert sent(gateway.requests[0]) == [("user", [*pictures, "Which room is larger?"])]


def test_a_follow_up_takes_the_conversation_along_and_pictures_once(page: Browser, gateway: StandIn) -> None:
    assert not page.shows("follow-row")
    add(page, ROOMS[0])
    page.ask("What is here?")
    page.until_answered()
    page("follow").click()
    assert page("question").get_attribute("value") == "", "what was asked is not asked again by mistake"
    add(page, ROOMS[1])
    page.ask("And here?")
    page.until_answered()
    first = ("user", [ROOMS[0].read_bytes(), "What is here?"])
    second = ("user", [ROOMS[1].read_bytes(), "And here?"])
    assert sent(gateway.requests[1]) == [first, ("assistant", [ANSWER]), second]
    assert [each.text for each in page.all("#turns p")] == ["What is here?", ANSWER]
    assert page("asked").text == "And here?" and page("answer").text == ANSWER
    page.ask("refuse")
    page.until(lambda: page.shows("problem"))
    page.ask("Why?")
    page.until_answered()
    assert [words[-1] for _, words in sent(gateway.requests[3])] == [
        "What is here?", ANSWER, "And here?", ANSWER, "Why?",
    ]  # fmt: skip
    page("follow").click()
    page.ask("Something else")
    page.until_answered()
    assert len(sent(gateway.requests[4])) == 1 and not page.shows("turns") and not page.shows("asked")
    page("follow").click()
    page("remove").click()  # a picture that is taken away ends the conversation
    assert not page.shows("follow-row")
    page.ask("And now?")
    page.until_answered()
    ((_, said),) = sent(gateway.requests[5])
    assert said == [ROOMS[0].read_bytes(), "And now?"]


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_a_picture_is_pasted_or_dropped_and_what_is_none_is_said(page: Browser, way: str) -> None:
    notes, table = ["notes.txt", "text/plain", ""], ["a.xlsx", "", ""]
    page.run(TAKE, way, [notes, table])
    assert not page.shows("figure")
    assert page.run(TAKE, way, [notes, given(ROOMS[0]), table])
    page.until(lambda: page.all("#grid path"))
    assert page("dropped").text == "notes.txt and a.xlsx are no pictures; room-04.jpg was taken."
    assert page("dropped").get_attribute("role") == "status"
    assert int(page("shown").get_attribute("naturalWidth")) > 0
    page.run(TAKE, way, [given(ROOMS[1])])
    assert page("dropped").text == ""
    page("remove").click()
    page("remove").click()
    assert not page.shows("figure") and page.shows("empty") and page("cut").text == ""
    if way == "drop":
        page.run(TAKE, way, [notes])
        assert page("dropped").text == "notes.txt is no picture. The server reads JPEG, PNG and WebP."
        page.run(TAKE, way, [])
        assert page("dropped").text.startswith("That was no file.")
        page.run(TAKE, way, [["x.heic", "image/heic", "AAAA"]])
        page.until(
            lambda: page("dropped").text == "This browser cannot show x.heic; the server may read it all the same."
        )


ERRORS = [
    (429, "overloaded", "queue is full", "The server has more to do than it can take. Try again in a few seconds"),
    (503, "too_many_connections", "64 of this address", "The server has more to do than it can take."),
    (503, "server_unavailable", "nobody answers", "The model's server does not answer: it is starting, restarting"),
    (400, None, "max_tokens 256 exceeds the context", "This does not fit the model's memory for one question. Allow"),
    (502, None, "bad gateway", "The server failed at this question. That is not your fault."),
    (504, "deadline_exceeded", "deadline exceeded", "The answer was not ready within the time allowed."),
    (413, "body_too_large", "70 MiB", "The pictures are too large for one question. Send fewer, or smaller ones."),
    (400, "invalid_request", "image 1 is a truncated JPEG", "says: picture 2 (room-08.jpg) is a truncated JPEG"),
    (400, "invalid_request", "image 0 is an animated WebP", "A picture cannot be read. The server reads JPEG, PNG"),
    (400, "invalid_request", "the request has 9 images; the limit is 8", "Ask with fewer or smaller pictures."),
    (400, "invalid_request", "seed must be a whole number", "Change what it names, and ask again."),
    (500, "server_error", "internal", "That is not your fault."),
]


def test_errors_say_what_to_do(page: Browser, gateway: StandIn) -> None:
    add(page, *ROOMS[:2])
    page.ask("  ")
    page.until(lambda: page("problem").text == "Write a question first.")
    for number, (status, code, message, words) in enumerate(ERRORS, 1):
        gateway.refusal = refusal(status, message, code)
        page.ask("What is here?")
        page.until(lambda number=number: len(gateway.requests) == number and page.shows("problem"))
        shown = page("problem").text
        assert words in shown and "{" not in shown and page("problem").get_attribute("role") == "alert"
    gateway.refusal = None
    page.ask("break")  # in the middle of the answer
    page.until(lambda: page("problem").text.endswith("why.\nThe server says: a stage died"))
    page.ask("Hello")
    assert page.until_answered() == ANSWER and not page.shows("problem")
    page.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.ask("Hello")
    page.until(lambda: page("problem").text.startswith("The gateway does not answer. See whether tessera serve still"))


def program(page: Browser, language: str) -> str:
    page.run("document.getElementById('code').open = true")
    page.all("#language span")[["curl", "python"].index(language)].click()
    return page("program").text


@pytest.mark.parametrize("language", ["curl", "python"])
def test_the_request_as_a_program_asks_the_same_again(
    page: Browser, gateway: StandIn, tmp_path: Path, language: str
) -> None:
    odd = tmp_path / "it's $HOME `x`.jpg"
    odd.write_bytes(ROOMS[0].read_bytes())
    (tmp_path / ROOMS[1].name).write_bytes(ROOMS[1].read_bytes())
    add(page, odd, ROOMS[1])
    question = 'Is “it” "damp" \\ $HOME `here`?\nSay <END>'
    page.run("document.getElementById('question').value = arguments[0]", question)
    page("labels").send_keys("yes, no")
    page("ask").click()
    page.until_answered()
    page("follow").click()
    page.ask("Why?")
    page.until_answered()
    shown = program(page, language)
    assert len(shown) < 2000 and "Authorization" not in shown
    command = ["bash", "-euc", shown] if language == "curl" else [sys.executable, "-c", shown]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    _, asked, again = gateway.requests
    assert {**again, "stream": True, "stream_options": asked["stream_options"]} == asked


def test_a_gateway_with_keys_is_given_one_which_programs_name_and_never_hold(page: Browser, gateway: StandIn) -> None:
    assert not page.shows("key-row")
    gateway.key = "s3cret"
    page.ask("Hello")
    page.until(lambda: page.shows("key-row"))
    assert page.focused() == "key"
    page.keys("s3cret")
    page("ask").click()
    page.until(lambda: page("answer").text == ANSWER)
    assert page.run("return JSON.stringify(localStorage)").count("s3cret") == 0
    for language, placeholder in (("curl", "Bearer $TESSERA_KEY"), ("python", 'os.environ["TESSERA_KEY"]')):
        shown = program(page, language)
        assert placeholder in shown and "s3cret" not in shown
    ast.parse(shown)
    page("copy").click()
    page.until(lambda: page("copied").text)


def test_on_a_phone_the_answer_is_in_sight(page: Browser, gateway: StandIn) -> None:
    phone = {"width": 360, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        add(page, ROOMS[0])
        page.run("scrollTo(0, 0)")
        page.run("document.getElementById('question').value = 'Describe the room.'")
        page.run("document.getElementById('form').requestSubmit()")  # by the keyboard's own key, without a scroll
        page.until_answered()
        top, bottom = page.run(
            "const {top, bottom} = document.getElementById('answer').getBoundingClientRect(); return [top, bottom]"
        )
        assert 0 < top < bottom < 844, "the whole answer"
        assert page.run("return document.getElementById('question').getBoundingClientRect().top") >= 0
        page.ask("Which room is it?", "living room, kitchen, bathroom")
        page.until_answered()
        assert page.run("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
        page("tab-status").click()
        page.until(lambda: page.all(".server"))
        assert page.run("return document.documentElement.scrollWidth") == 360
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
