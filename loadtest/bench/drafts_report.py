"""What is asked of drafts, beside the figures of `drafts`: the rows of docs/drafts.md, which report.py writes."""

from __future__ import annotations

from seeds import Claim

COMMAND = 'make bench NAME=drafts ARGS="{}"'.format
GOALS: dict[str, tuple[Claim, ...]] = {
    "No answer changes": (
        Claim(
            "0",
            "answers that are not, token for token, those without drafts",
            COMMAND("exact --places rooms"),
            ("drafts.differences.*",),
        ),
        Claim(
            "above 0.01",
            "how likely samples of one distribution differ as much, over the fields of the schema",
            COMMAND("exact --places rooms"),
            ("drafts.chi_square_p*",),
        ),
    ),
    "Answers by a JSON schema": (
        Claim(
            "2, and 3 over bf03052",
            "answers a second, 10 in flight; `ceiling`: with answers of one token",
            COMMAND("json"),
            ("drafts.json.c10.ratio*", "drafts.json.c10.ceiling"),
        ),
        Claim(
            "1.3, and 2 over bf03052",
            "the same, 64 in flight",
            COMMAND("json"),
            ("drafts.json.c64.ratio*", "drafts.json.c64.ceiling"),
        ),
    ),
    "Pages": (
        Claim(
            "",
            "characters of the default model's answers between two that a page's text layer has not at their place",
            COMMAND("acceptance"),
            ("drafts.acceptance.*.characters",),
        ),
        Claim(
            "2",
            "pages a second of MinerU2.5's shape, 10 in flight, drafts accepted as measured; with one kind of crops",
            COMMAND("replay --loads c10"),
            ("drafts.pages.c10.ratio", "drafts.pages.*.c10.ratio"),
        ),
        Claim(
            "1.15",
            "the same, 96 pages in flight",
            COMMAND("replay --loads saturated"),
            ("drafts.pages.saturated.ratio",),
        ),
        Claim(
            "2",
            "`tessera parse` by the default model on a CPU",
            COMMAND("parse --gpus ''"),
            ("drafts.cpu.pages.ratio",),
        ),
    ),
    "What they cost": (
        Claim(
            "at most 1 %",
            "where no draft is right",
            COMMAND("off_cost"),
            ("drafts.off_cost.W4a", "drafts.off_cost.W4b"),
        ),
    ),
}
"""Claims whose statement is what the figure should be."""
