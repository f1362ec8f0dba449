"""The pages of the site that are made from the code."""

import re

import reference_pages

from tessera.launcher.settings import STAGES
from tessera.settings.gpu import ServerSettings
from tessera.settings.schema import settings_of

PAGES = reference_pages.pages()


def test_every_setting_has_a_row_and_a_meaning():
    rows = re.findall(r"^\| `([\w-]+)(?: \*)?` \|.*\| *(.*?) \|$", PAGES["reference/settings.md"], re.MULTILINE)
    kinds = (ServerSettings, *STAGES.values())
    assert sorted(name for name, _ in rows) == sorted(each.name for kind in kinds for each in settings_of(kind))
    assert [name for name, meaning in rows if not meaning] == []


def test_every_page_has_rows():
    rows = {path: text.count("\n| `") for path, text in PAGES.items() if path.startswith("reference/")}
    assert {path for path, count in rows.items() if count < 10} == set()
    assert "## tessera serve" in PAGES["reference/command.md"]
