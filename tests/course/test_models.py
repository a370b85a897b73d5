"""What a model becomes: a link has the rows that it names, in their order; and a program that a row
leads to is the row's.
"""

import gzip

import pytest
from playwright.sync_api import Browser, Page, expect

from fp8lens import inspect
from helpers.explorers import models
from helpers.records.results import load_census
from tests.course.test_explorers import explorer
from tools.recorders.data import RESULTS

*_, NEWEST = load_census(RESULTS).releases
ROWS = load_census(RESULTS).releases[NEWEST]["rows"]
EXPLORER = "models"
# Sphinx tells the authors of its extensions what will change.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")


def of_kept(model: str) -> dict[str, dict]:
    """The rows of training steps on an H100, by their way."""
    case = (model, "training", "H100", "cublaslt")
    return {way: row for (way, *rest), row in ROWS.items() if tuple(rest) == case}


def names(page: Page) -> list[str]:
    return page.locator(".explorer tbody .way").all_text_contents()


def test_a_link_has_the_rows_that_it_names_in_their_order(site: str, browser: Browser):
    wanted = {way: row["peak"] for way, row in of_kept("decoder").items() if "MaxText" in way}
    state = "#library=MaxText&model=decoder&sort=peak"
    with explorer(browser, site, EXPLORER, state) as page:
        assert names(page) == sorted(wanted, key=wanted.__getitem__)
        page.get_by_role("button", name="Peak memory").click()
        page.wait_for_url("**sort=-peak")
        assert names(page) == sorted(wanted, key=wanted.__getitem__, reverse=True)
        page.locator(".explorer").get_by_label("Search").fill("qwix full")
        expect(page.locator(".explorer tbody .way")).to_have_count(1)
        page.get_by_role("button", name="fp8_full").press("Enter")
        expect(page.locator(".details")).to_contain_text("not in FP8")
        page.wait_for_url("**row=MaxText*")
        page.reload()
        expect(page.locator(".details")).to_contain_text("not in FP8")


def test_a_link_that_nobody_wrote_breaks_nothing(site: str, browser: Browser):
    state = "#library=toString&model=1&release=0&sort=-gone&row=x"
    with explorer(browser, site, EXPLORER, state) as page:
        kept = {**of_kept("decoder"), **of_kept("block"), **of_kept("routed")}
        good = [way for way, row in kept.items() if row.get("fp8")]
        said = f"{len(good)} of {len(kept)} programs have matmuls in FP8."
        expect(page.locator(".explorer .answer")).to_contain_text(said)


def test_the_stored_programs_are_their_rows():
    kept = {}
    for name, row in ROWS.items():
        if name[-2:] == ("H100", "cublaslt"):
            kept.setdefault(models.program_name(" | ".join(name)), []).append(row)
    for file in models.PROGRAMS.iterdir():
        (row,) = kept[file.name.removesuffix(".txt.gz")]
        text = gzip.decompress(file.read_bytes()).decode()
        report, ledger = (seen := inspect(text)).report, seen.ledger
        assert (report.fp8_flops, report.flops) == (row["fp8_flops"], row["flops"]), file
        assert (ledger.kernels, ledger.bytes_moved) == (row["kernels"], row["bytes"]), file
        assert "site-packages" not in text and "source_file" not in text
