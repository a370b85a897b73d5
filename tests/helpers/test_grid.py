import re

import pytest

from helpers.figures import plots
from helpers.figures.grid import BEST, BROKEN, POOR, Cell, counted, grid, table
from tools.site import sanitize

KINDS = {"fused": BEST, "lost": POOR, "refused": BROKEN, "none": None}
ROWS = [
    ("f32", None),
    ("to_E4M3", [Cell("fused", "✓"), Cell("lost", "tf32", bold=True)]),
    ("FastAccum", [Cell("none", "-"), Cell("lost", "<1>\nkernel")]),
]
COLUMNS = [("no bias", "relu"), ("no bias", "gelu")]


def shown():
    return grid(ROWS, COLUMNS, KINDS, "Four programs.", "cuBLASLt")


def test_a_page_may_hold_a_grid_and_without_html_it_is_its_sentence():
    data = shown()._repr_mimebundle_()
    assert not sanitize.html(data["text/html"])[1]
    assert data["text/plain"] == "Four programs."


def test_each_cell_stands_in_its_row_and_has_the_colour_of_its_kind():
    rows = re.findall(r"<tr>(.*?)</tr>", shown().html)
    texts = [re.sub(r"<wbr>", "", row) for row in rows]
    texts = [re.findall(r">([^<]+)<", row.replace("<br>", " ")) for row in texts]
    assert texts[0] == ["cuBLASLt"]
    assert texts[2:] == [
        ["no bias"],
        ["relu", "gelu"],
        ["f32"],
        ["to_E4M3", "✓", "tf32"],
        ["FastAccum", "-", "&lt;1&gt; kernel"],
    ]
    fused, lost = re.findall("<td.*?</td>", rows[5])
    assert BEST in fused and POOR in lost and "bold" in lost and "bold" not in fused


def test_the_kinds_that_occur_and_have_a_colour_are_explained():
    legend = shown().html.split("</tr>")[1]
    assert "fused" in legend and "lost" in legend
    assert "refused" not in legend and "none" not in legend


@pytest.mark.parametrize("colour", [BEST, POOR, BROKEN])
def test_everybody_can_read_a_cell(colour):
    assert plots.contrast(plots.ink_on(colour), colour) >= 4.5


def test_cells_are_counted_by_kind():
    assert counted([Cell("fused", ""), Cell("lost", ""), Cell("lost", "")], KINDS) == (
        "3 programs: 1 fused, 2 lost"
    )


def test_a_table_is_columns_of_text_where_there_is_no_html():
    shown = table(["name", "in FP8"], [["a layer", Cell("fused", "2/2")], ["b", "-"]], KINDS)
    assert shown.alt.splitlines() == ["name     in FP8", "a layer  2/2", "b        -"]
    assert BEST in shown.html and not sanitize.html(shown.html)[1]
