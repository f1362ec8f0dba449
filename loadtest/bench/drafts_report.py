"""What is asked of drafts, beside the figures of `drafts`: the rows of docs/drafts.md, which report.py writes."""

from seeds import Claim


def _claim(goal: str, what: str, arguments: str, *names: str) -> Claim:
    return Claim(goal, what, f'make bench NAME=drafts ARGS="{arguments}"', tuple(f"drafts.{name}" for name in names))


EXACT = "exact --places rooms"
GOALS: dict[str, tuple[Claim, ...]] = {
    "No answer changes": (
        _claim("0", "answers that are not, token for token, those without drafts", EXACT, "differences.*"),
        _claim("above 0.01", "how likely samples of one distribution differ as much, over the fields of the schema",
               EXACT, "chi_square_p*"),
    ),
    "Answers by a JSON schema": (
        _claim("2, and 3 over bf03052", "answers a second, 10 in flight; `ceiling`: with answers of one token",
               "json", "json.c10.ratio*", "json.c10.ceiling"),
        _claim("1.3, and 2 over bf03052", "the same, 64 in flight", "json", "json.c64.ratio*", "json.c64.ceiling"),
    ),
    "Pages": (
        _claim("", "characters of the default model's answers between two that a page's text layer has not at their "
               "place", "acceptance", "acceptance.*.characters"),
        _claim("2", "pages a second of MinerU2.5's shape, 10 in flight, recorded answers; with one kind of crops",
               "replay --loads c10 --kinds '' table equation", "pages.c10.ratio", "pages.*.c10.ratio",
               "pages.c10.ceiling"),
        _claim("1.15", "the same, 96 pages in flight", "replay --loads saturated", "pages.saturated.ratio",
               "pages.*.saturated.ratio", "pages.saturated.ceiling"),
        _claim("2", "`tessera parse` by the default model on a CPU", "parse --gpus ''", "cpu.pages.ratio"),
        _claim("", "the same were crops' tokens but the first at no cost; were crops' drafts their answers",
               "ceiling --gpus ''", "cpu.pages.ceiling", "cpu.pages.perfect"),
    ),
    "What they cost": (
        _claim("at most 1 %", "where no draft is right", "off_cost", "off_cost.W4a", "off_cost.W4b"),
    ),
}  # fmt: skip
"""Claims whose statement is what the figure should be."""
