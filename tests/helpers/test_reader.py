"""What the page that reads dumps asks of one: what fp8lens says, or a sentence; and whatever stands
in a dump, it stays text."""

import gzip
import html
import io
import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lens import inspect, parse_hlo_module, report_gemms
from fp8lens.hlo.text import size
from helpers import show_hlo
from helpers.explorers import dump, example
from helpers.explorers import reader as reader_module
from helpers.explorers.reader import Reader, address, listing_html, pieces

TEXT = dump.example()
HLO = Path(__file__).parent.parent / "fp8lens" / "hlo"
SAVED = {path.name: path.read_text() for path in sorted(HLO.glob("*.txt"))}
MARKUP = "<img src=x onerror=attack()>'&</script>"


def ask(reader: Reader, what: str, **arguments: object) -> dict:
    return json.loads(reader.ask(what, json.dumps(arguments)))


def asked(text: str) -> str:
    """Ask everything of a text. Returns the error's sentence, or ""."""
    reader = Reader()
    summary = json.loads(reader.read(f"{MARKUP}.txt", text.encode(errors="replace")))
    if "error" in summary:
        return summary["error"]
    for one in summary["computations"][:5]:
        for line in ask(reader, "listing", name=one["name"])["rows"][:20]:
            assert ask(reader, "about", at=line["at"])["facts"]
    assert ask(reader, "find", words="F32")["count"] >= 0
    json.loads(ask(reader, "json"))
    names_of_tags = re.findall(r"<(\w+)", listing_html(reader.program.module))
    assert {*names_of_tags} <= {"details", "summary", "code", "pre", "span", "a", "b", "p"}
    return ""


def test_the_example_is_what_its_program_compiles_to():
    def rows(text: str) -> list[tuple]:
        rows = report_gemms(text).rows
        return [(r.m, r.n, r.k, r.math_dtype, r.epilogue, r.path, r.source) for r in rows]

    made = dict(example.dumped())
    assert rows(next(text for name, text in made.items() if "after_optim" in name)) == rows(TEXT)


@pytest.mark.parametrize("name", [*SAVED])
def test_of_each_saved_program_it_says_what_fp8lens_says(name):
    reader = Reader()
    summary = json.loads(reader.read(name, SAVED[name].encode()))
    if "error" in summary:
        assert "give the text that XLA dumps" in summary["error"]
        return
    seen = inspect(SAVED[name])
    alike = seen.report.alike()
    assert [tuple(row["cells"]) for row in summary["report"]["rows"]] == [
        one.cells for one in alike
    ]
    assert [row["isFp8"] for row in summary["report"]["rows"]] == [one.row.is_fp8 for one in alike]
    moved = [line.nbytes for line in seen.ledger]
    assert [kernel["bytes"] for kernel in summary["kernels"]["rows"]] == moved
    assert len(summary["sent"]["rows"]) == len(seen.collectives.rows())
    assert json.loads(ask(reader, "json")) == json.loads(seen.json())
    assert asked(SAVED[name]) == ""


def test_it_says_what_is_not_in_fp8_and_which_kernels_work_for_a_matmul():
    summary, report = dump.data()["example"], report_gemms(TEXT)
    assert summary["answer"] == (
        f"FP8: {len(report.fp8_rows)} of {len(report.rows)} matmuls, "
        f"{report.fp8_flops_share:.1%} of the FLOPs. To make and undo FP8: "
        f"{size(report.bytes_for_fp8)} of {size(report.bytes_moved)} moved."
    )
    down, qkv, gate, _ = summary["lost"]  # what is not FP8 first, by FLOPs
    assert not down["isFp8"] and not qkv["isFp8"] and gate["isFp8"]
    assert down["why"].startswith("Its operands are bf16 and bf16: nothing that reaches it is FP8.")
    assert " and 2 more make or widen FP8 for it" in qkv["why"]
    assert [one["rule"] for one in summary["reasons"]] == ["not-quantized", "array-of-scales"]


WRITTEN = """HloModule jit_f

ENTRY main {
  x = f8e4m3fn[64,64]{1,0} parameter(0)
  y = f8e4m3fn[64,64]{1,0} parameter(1)
  ROOT dot = f32[64,64]{1,0} dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_what_is_no_dump_of_a_gpus_program_is_refused_in_a_sentence():
    for data, sentence in (
        (b"", "x.txt is empty: give the text"),
        (gzip.compress(TEXT.encode())[:-9], "x.txt is gzipped, and damaged: give the text"),
        (b"def f(): pass", "x.txt is not one whole HLO module (line 1, column 1: expected HLO"),
        (WRITTEN.encode(), "x.txt is a program that XLA has not optimized yet: give the text"),
    ):
        error = json.loads(Reader().read("x.txt", data))["error"]
        assert error.startswith(sentence) and error.endswith('use "Check my model".')
    assert Reader().choose("{}") == "null"


def zipped(**files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(f"{name}.txt", text)
    return data.getvalue()


def test_of_what_is_packed_no_more_is_unpacked_than_of_what_is_not(monkeypatch):
    """Gzipped once or twice, in several members, or zipped: the limit is one of text."""
    text = TEXT.encode()
    members = gzip.compress(text[:5000]) + gzip.compress(text[5000:])
    packed = [(Reader.read, members), (Reader.read, gzip.compress(members))]
    packed += [(Reader.read_zip, zipped(a=data)) for data in (text, members)]
    for read, data in packed:
        assert json.loads(read(Reader(), "x", data))["answer"].startswith("FP8: 2 of 4")
    monkeypatch.setattr(reader_module, "MOST_TEXT", len(text) - 1)
    for read, data in packed:
        assert " is more than " in json.loads(read(Reader(), "x", data))["error"]
    damaged = json.loads(Reader().read_zip("x", zipped(a=text)[:-30]))["error"]
    assert damaged.startswith("x is zipped, and damaged or encrypted: give the text")


def test_what_is_beside_a_dump_has_a_limit_too(monkeypatch):
    monkeypatch.setattr(reader_module, "MOST_BESIDE", 20_000)
    found = json.loads(Reader().read_zip("x.zip", dump.EXAMPLE.read_bytes()))
    assert found["reasons"] is None and "MB of text: it was left out." in found["answer"]


PLACES = ("jit(block)/up", "jit_block", "__cublas$lt$matmul$f8", "DEFAULT", "explorers/example.py")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*PLACES, ""]), st.integers(0, len(TEXT)), st.integers(0, 40), st.text())
def test_any_text_is_answered_or_refused_and_markup_stays_text(place, start, length, other):
    """A dump in which markup stands in the place of a name, and a part is another text."""
    text = TEXT.replace(place, MARKUP) if place else TEXT[:start] + other + TEXT[start + length :]
    asked(text)


def test_names_lead_to_who_makes_them_and_users_are_listed():
    reader = Reader()
    reader.read("example.txt", TEXT.encode())
    module = reader.program.module
    call, called = module["cublas-gemm.4"], module["loop_multiply_fusion"].called[0]
    leads = {text: to for text, _, to in pieces(call) if to}
    assert leads["%w_gate.1"] == "main.5/w_gate.1" and leads["%cublas-gemm.4"] == address(call)
    inside = address(module.computations[called].root)
    callers = ask(reader, "about", at=inside)["callers"]
    assert [caller["at"] for caller in callers] == ["main.5/loop_multiply_fusion"]
    found = ask(reader, "find", words="CUBLAS$LT$MATMUL$F8")
    assert found["count"] == 2 and found["rows"][0]["at"] == "main.5/cublas-gemm.4"


def test_the_listing_needs_no_script_and_each_of_its_names_leads_somewhere():
    found: dict[str, list[str]] = {"id": [], "href": []}

    class Read(HTMLParser):
        def handle_starttag(self, tag, attributes):
            for name, value in attributes:
                found.get(name, []).append(value)

    module = parse_hlo_module(TEXT)
    Read().feed(listing_html(module))
    ids = {*found["id"]}
    assert len(found["id"]) == len(ids) == len(module) + len(module.computations)
    assert found["href"]
    assert {link.removeprefix("#") for link in found["href"]} <= ids
    shown = show_hlo(TEXT)._repr_html_()
    assert "%cublas-gemm.4 =" in html.unescape(re.sub("<[^>]+>", "", shown))
