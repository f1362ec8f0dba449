"""The page for people who use it without a mouse, without seeing it, in the dark or on a phone."""

from pathlib import Path

import pytest
from browser import Browser
from stand_in import WORDS, StandIn

# Gives an element the focus; the style of the outline then seen. A hidden input shows it on what stands for it.
OUTLINE = """
const [element] = arguments;
element.focus({focusVisible: true});
const shown = element.matches(".segmented input, #file") ? element.nextElementSibling : element;
return getComputedStyle(shown).outlineStyle;
"""
INTERACTIVE = {"button", "checkbox", "combobox", "radio", "spinbutton", "tab", "textbox"}


def test_the_whole_way_by_keyboard(page: Browser, gateway: StandIn, picture: Path) -> None:
    """Tabs through the page in its order, asks, stops, asks again, looks at the status and at a recent question."""
    from selenium.webdriver import Keys

    def steps(count: int) -> list[str]:
        seen = []
        for _ in range(count):
            page.keys(Keys.TAB)
            seen.append(page.focused())
        return seen

    page("file").send_keys(str(picture))  # the system's own dialog is not the page's
    page.run("document.activeElement.blur()")
    order = ["tab-ask", "auto", "file", "remove", "policy", "show-grid", "question", "labels", "ask", "max-tokens"]
    assert steps(len(order)) == order
    page.keys(*[Keys.TAB] * 3, shift=True)
    assert page.focused() == "question"
    page.keys("Describe the room, slowly.")
    page.keys(Keys.ENTER, shift=True)
    page.keys("Please.", Keys.ENTER)
    page.until(lambda: "Beside" in page("answer").text)
    assert gateway.requests[0]["messages"][0]["content"][1]["text"] == "Describe the room, slowly.\nPlease."
    assert page.focused() == "question", "an answer must not take the focus away"
    assert steps(3) == ["labels", "stop", "max-tokens"]
    page.keys(Keys.TAB, shift=True)
    page.keys(Keys.ENTER)
    page.until(lambda: page.shows("problem"))
    assert page.focused() == "ask", "the focus must not vanish with the button that had it"
    gateway.go_on.set()
    page.keys(Keys.SPACE)
    page.until(lambda: page("answer").text == "".join(WORDS))
    page.until(lambda: page.shows("ask") and page("ask").is_enabled())
    assert page.focused() == "ask"
    assert steps(5) == ["follow", "max-tokens", "code-title", "clear", ""]

    page.keys(Keys.ENTER)  # the recent question
    assert page.focused() == "question"
    page.keys(*[Keys.TAB] * 6, shift=True)
    assert page.focused() == "tab-ask"
    page.keys(Keys.ARROW_RIGHT)
    assert page.focused() == "tab-status" and page.shows("view-status") and not page.shows("view-ask")
    page.keys(Keys.TAB, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.focused() == "dark" and page.run("return document.documentElement.dataset.theme") == "dark"
    page.keys(Keys.TAB)
    assert page.focused() == "view-status"


def test_every_control_has_a_name_and_focus_shows(page: Browser, gateway: StandIn, picture: Path) -> None:
    page.choose(picture)
    page.choose(picture)
    page.ask("Which room is it?", "living room, kitchen")
    page.until_answered()
    page("follow").click()
    page.ask("Why?", "this, that")
    page.until_answered()
    page.run("document.getElementById('code').open = true")
    page.run("document.getElementById('key-row').hidden = document.getElementById('stop').hidden = false")
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in INTERACTIVE]
    assert {node["role"]["value"] for node in controls} >= INTERACTIVE - {"combobox"}
    assert [node for node in controls if not node.get("name", {}).get("value")] == []
    tables = [node["name"]["value"] for node in nodes if not node["ignored"] and node["role"]["value"] == "table"]
    assert tables == ["How likely each label is", "Milliseconds per stage"]
    for element in page.all("button, input, select, textarea"):
        if element.is_displayed() and element.is_enabled():
            assert page.run(OUTLINE, element) == "solid", element.get_attribute("outerHTML")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page: Browser, gateway: StandIn, picture: Path, theme: str) -> None:
    page.system_theme(theme)
    page.choose(picture)
    page.ask("Which room is it?", "living room, kitchen, bathroom")
    page.until_answered()
    page("follow").click()
    page.ask("refuse")
    page.until(lambda: page.shows("problem"))
    page.run("document.getElementById('dropped').textContent = 'notes.txt is no picture.'")
    asked = page.contrast()
    page.ask("Describe the room.")
    page.until_answered()
    page.run("document.getElementById('code').open = true")
    answered = page.contrast()
    page("tab-status").click()
    page.until(lambda: page.all(".server"))
    status = page.contrast()
    assert asked["poor"] + answered["poor"] + status["poor"] == []
    assert asked["seen"] > 30 and answered["seen"] > 40 and status["seen"] > 30


def test_the_contrast_check_sees_what_is_poor(page: Browser) -> None:
    page.run("document.getElementById('placeholder').style.color = '#999'")
    assert len(page.contrast()["poor"]) == 1


def test_colours_follow_the_system_until_one_is_chosen(page: Browser) -> None:
    def is_dark() -> bool:
        return page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 26)"

    assert not is_dark()
    page.system_theme("dark")
    assert is_dark()
    page.all("#theme span")[1].click()
    assert not is_dark()
    page.all("#theme span")[2].click()
    page.open(forget=False)  # where the system is light again
    assert is_dark() and page.run("return document.querySelector('#theme :checked').value") == "dark"
    page.all("#theme span")[0].click()
    assert not is_dark() and page.run("return localStorage.length") == 0
