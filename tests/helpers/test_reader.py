"""What the page that reads dumps asks of one: an answer, or a sentence; and whatever stands in a
dump, it stays text."""

import gzip
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lens import aot_compile, parse_hlo_module, report_gemms
from fp8lens.cli import main
from helpers import show_hlo
from helpers.explorers import compiled, dump, example, fusion_lab
from helpers.explorers.reader import Program, Reader, address, listing_html, pieces
from tests.programs import hlo_baits
from tests.programs.hlo_grammar import examples, texts
from tests.weekly import one_in

TEXT = dump.EXAMPLE.read_text()
SAVED = {path.name: path.read_text() for path in sorted(hlo_baits.SAVED.glob("*.*"))}
DUMP = "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt"
MARKUP = "<img src=x onerror=attack()>\"'&</script><script>attack()</script>"
# What HTML of ours may have, with its attributes.
TAGS = {
    "html": "lang",
    "meta": "charset http-equiv content name",
    "details": "open id",
    "span": "style id",
    "pre": "style tabindex",
    "a": "href style",
    "table": "style",
    "tr": "style",
    "td": "style colspan",
    "th": "style",
    **dict.fromkeys("head title style body h1 h2 p b br ul li code summary".split(), ""),
}


class Checked(HTMLParser):
    """Reads a page, and refuses what is not listed."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            assert name in TAGS[tag].split(), (tag, name, value)
            if name == "href":
                assert value.startswith("#hlo-")

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def asked(text: str) -> str:
    """Ask everything of a text. Returns the error's sentence, or ""."""
    reader = Reader()
    summary = json.loads(reader.read("a", f"{MARKUP}.txt", text.encode(errors="replace")))
    if "error" in summary:
        assert "fp8lens itself failed" not in summary["error"], summary["error"]
        return summary["error"]
    for order in ("bytes", "program"):
        kernels = json.loads(reader.ask("a", "kernels", json.dumps({"order": order})))
        assert len(kernels["rows"]) == min(100, kernels["count"]) == min(100, summary["kernels"])
    computations = json.loads(reader.ask("a", "computations", "{}"))
    for one in computations["rows"][:5]:
        of = json.dumps({"name": one["name"]})
        for line in json.loads(reader.ask("a", "listing", of))["rows"][:20]:
            about = json.loads(reader.ask("a", "about", json.dumps({"at": line["at"]})))
            assert about["at"] == line["at"]
    json.loads(reader.ask("a", "find", json.dumps({"words": "F32"})))
    json.loads(json.loads(reader.ask("a", "json", "{}")))
    Checked().feed(json.loads(reader.ask("a", "page", "{}")))
    reader.read("b", "other.txt", TEXT.encode())
    json.loads(reader.ask("b", "compare", "{}"))
    return ""


def test_the_example_is_what_its_program_compiles_to():
    def rows(text: str) -> list[tuple]:
        rows = report_gemms(text).rows
        return [(r.m, r.n, r.k, r.math_dtype, r.epilogue, r.path, r.source) for r in rows]

    assert rows(example.compiled_text()) == rows(TEXT), "run python -m helpers.explorers.example"
    assert "/" not in TEXT.partition('FileNames\n1 "')[2].partition('"')[0].removeprefix("<")


def test_it_says_what_is_not_in_fp8_and_which_kernels_work_for_a_matmul():
    summary = Program("example.txt", TEXT).summary()
    assert summary["answer"] == (
        "1 of 3 matmuls is not in FP8; 1 in FP8 leaves work to other kernels."
    )
    up, gate, down = summary["lost"]
    assert [kernel["name"] for kernel in up["kernels"]] == ["wrapped_convert"]
    assert "the bias" in gate["kernels"][0]["text"] and "run anyway" in gate["kernels"][0]["text"]
    assert down["reasons"] == [
        "Its operands are bf16 and bf16: nothing that reaches it is FP8. Either the program does "
        "not quantize them, or XLA rounded them inside another kernel."
    ]
    rounded = Program("x.txt", SAVED["jax_0_4_32_bf16_scaled.txt"]).summary()["lost"]
    assert "although loop_convert_fusion makes or widens FP8 for it" in rounded[0]["reasons"][0]


# A program as it is written, and its TPU-like, CPU-like and unnamed compiled forms.
WRITTEN = """HloModule jit_f

ENTRY main {
  x = f8e4m3fn[64,64]{1,0} parameter(0)
  y = f8e4m3fn[64,64]{1,0} parameter(1)
  ROOT dot = f32[64,64]{1,0} dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
SCHEDULED = WRITTEN.replace("jit_f", "jit_f, is_scheduled=true")
NOT_A_GPUS = [
    ("m.before_optimizations.txt", WRITTEN, "a program that XLA has not optimized yet"),
    ("m.before_optimizations.txt.gz", SCHEDULED, "a program that XLA has not optimized yet"),
    ("pasted.txt", WRITTEN.replace("f8e4m3fn", "bf16"), "a program that XLA has not optimized yet"),
    (DUMP, WRITTEN, "a program that XLA has not optimized yet"),
    ("m.cpu_after_optimizations.txt", SCHEDULED, "a program that XLA compiled for a CPU"),
    (
        "m.tpu_after_optimizations.txt",
        SCHEDULED.replace("{1,0}", "{1,0:T(8,128)(4,1)}"),
        "a program in which nothing says that XLA compiled it for a GPU",
    ),
]


@pytest.mark.parametrize(("name", "text", "what"), NOT_A_GPUS)
def test_of_a_program_that_is_not_a_gpus_nothing_is_judged(name, text, what):
    reader = Reader()
    summary = json.loads(reader.read("a", name, text.encode()))
    assert summary["answer"] == f"Unknown: this is {what}. It does not say what a GPU runs."
    (row,) = summary["report"]["rows"]
    told = dict(zip(summary["report"]["head"], row["cells"], strict=True))
    assert told["multiplied in"] == told["by"] == "unknown" and told["M x N x K"] == "64 x 64 x 64"
    assert row["isFp8"] is None and not summary["isJudged"]
    assert row["below"] == summary["lost"] == summary["classes"] == []
    assert summary["kernels"] == json.loads(reader.ask("a", "kernels", "{}"))["count"] == 0
    assert summary["sent"]["totals"] == summary["answer"]
    page = json.loads(reader.ask("a", "page", "{}"))
    assert f"<title>{name}: {summary['answer']}</title>" in page and "in FP8" not in page
    saved = json.loads(json.loads(reader.ask("a", "json", "{}")))
    assert saved["answer"] == summary["answer"] and "ledger" not in saved
    listing = json.loads(reader.ask("a", "listing", json.dumps({"name": "main"})))
    assert {line["bytes"] for line in listing["rows"]} == {""}
    reader.read("b", "b.txt", TEXT.encode())
    totals = json.loads(reader.ask("a", "compare", "{}"))["totals"]
    assert ["kernels", "unknown", "5"] in totals and ["of them in FP8", "unknown", "2"] in totals
    assert asked(text) == ""


# Somebody took the backend_config out of the other one.
@pytest.mark.parametrize("name", sorted({*SAVED} - {"jax_0_4_31_plain.txt"}))
def test_of_each_saved_program_everything_can_be_asked(name):
    assert asked(SAVED[name]) == ""


@pytest.mark.parametrize("place", hlo_baits.PLACES)
def test_markup_in_any_place_stays_text_or_is_refused(place):
    for word in (MARKUP, MARKUP.replace('"', "").replace(" ", "/"), "x"):
        asked(hlo_baits.PLACES[place](word))


@pytest.mark.parametrize("name", one_in(2, hlo_baits.SMALL))
def test_a_bait_is_answered_or_refused(name):
    asked(hlo_baits.SMALL[name])


@examples(60)
@given(st.data())
def test_any_text_is_answered_or_refused(data):
    text, _ = data.draw(texts([(text, text) for text in [TEXT, *SAVED.values()]]))
    asked(text)


def test_the_markup_that_is_tried_would_be_noticed():
    with pytest.raises((AssertionError, KeyError)):
        Checked().feed(f"<p>{MARKUP}</p>")


def test_names_lead_to_who_makes_them_and_users_are_listed():
    program = Program("example.txt", TEXT)
    call = program.module["cublas-gemm.6"]
    leads = {text: to for text, _, to in pieces(call) if to}
    assert leads["%w_gate.1"] == "main.2/w_gate.1" and leads["%cublas-gemm.6"] == address(call)
    about = program.about(address(call))
    assert [user["at"] for user in about["users"]] == ["main.2/get-tuple-element.1.0"]
    inner = program.about("fused_multiply/mul.17.1")
    assert [caller["at"] for caller in inner["callers"]] == ["main.2/loop_multiply_fusion"]
    found = program.find("CUBLAS$LT$MATMUL$F8")
    assert found["count"] == 2 and found["rows"][0]["at"] == "main.2/cublas-gemm.5"
    assert program.find("FileNames")["count"] == 0, "only computations are searched"
    part = program.listing("main.2", around="custom-call.3", count=4)
    assert part["start"] > 0 and "main.2/custom-call.3" in [row["at"] for row in part["rows"]]


def test_the_listing_needs_no_script_and_each_of_its_names_leads_somewhere():
    text = listing_html(parse_hlo_module(TEXT))
    ids, links = [], []

    class Read(HTMLParser):
        def handle_starttag(self, tag, attributes):
            ids.extend(value for name, value in attributes if name == "id")
            links.extend(value for name, value in attributes if name == "href")

    Read().feed(text)
    assert len(ids) == len({*ids}) == 28 and links
    assert {link.removeprefix("#") for link in links} <= {*ids}
    assert "2 further computations left out" in listing_html(parse_hlo_module(TEXT), most=1)


def test_a_notebook_shows_a_listing_for_each_program():
    shown = [show_hlo(text) for text in (TEXT, SAVED["jax_0_4_32_bf16_scaled.txt"])]
    first, second = (view._repr_html_() for view in shown)
    assert first.count("<details open") == second.count("<details open") == 1
    ids = [{*re.findall(r'id="([^"]*)"', text)} for text in (first, second)]
    assert ids[0] and ids[1] and not ids[0] & ids[1]
    assert "%cublas-gemm.6 = (f32[512,1024]" in str(shown[0])


def test_what_is_no_dump_is_refused_in_a_sentence():
    reader = Reader()
    for data, sentence in (
        (b"", "x.txt is empty: give the text"),
        (gzip.compress(TEXT.encode())[:-9], "x.txt is gzipped, and damaged: give the text"),
        (b"def f(): pass", "x.txt is not one whole HLO module (line 1, column 1: expected HLO"),
    ):
        assert json.loads(reader.read("a", "x.txt", data))["error"].startswith(sentence)
    assert not reader.programs
    with pytest.raises(ValueError, match="nothing is known of 'programs'"):
        reader.ask("a", "programs", "{}")
    assert reader.choose("{}") == "null"


PROGRAMS = ({"bias": "f32"}, {"scales": "row"}, {"operands": "bf16"}, {"library": "triton"}, {})


@pytest.fixture(scope="module", params=PROGRAMS, ids=lambda change: "-".join(change.values()))
def dumped(request, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder in which XLA dumped a program, with what its rewriter was given; and its choice."""
    choice = {**fusion_lab.STATE, **request.param}
    folder = tmp_path_factory.mktemp("dump")
    flags = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "gemm-rewriter"}
    options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "^ptx$"} | flags
    fn, arguments = compiled.function(choice)
    aot_compile(fn, *arguments, gemm=choice["library"], compiler_options=options)
    return folder, choice


def test_of_a_folder_the_page_says_the_reasons_that_the_command_says(dumped, capsys):
    """And these are the reasons of the program that was compiled here."""
    folder, choice = dumped
    reader = Reader()
    files = {path.name: path for path in folder.iterdir()}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    chosen = json.loads(reader.choose(json.dumps(sizes)))
    for name in chosen["beside"]:
        reader.lay(name, files[name].read_bytes())
    summary = json.loads(reader.read("a", chosen["name"], files[chosen["name"]].read_bytes()))
    names = ("matmul", "lost", "reason", "fix", "rule")
    said = [[one[name] for name in names] for one in summary["reasons"]]
    assert main([str(folder), "--reasons", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["reasons"]
    assert said == [[one[name] for name in names] for one in printed]
    assert bool(said) == (choice != fusion_lab.STATE)
    seen = compiled.inspected(choice)
    assert [one[1:] for one in said] == [[r.lost, r.reason, r.fix, r.rule] for r in seen.reasons]
    assert json.loads(json.loads(reader.ask("a", "json", "{}")))["reasons"] == printed
    page = json.loads(reader.ask("a", "page", "{}"))
    Checked().feed(page)
    assert all(html.escape(one["fix"]) in page for one in printed)
    # Without the files beside it neither says a reason.
    alone = json.loads(reader.read("b", chosen["name"], files[chosen["name"]].read_bytes()))
    assert alone["reasons"] is None
    for name in chosen["beside"]:
        files[name].rename(files[name].with_suffix(".away"))
    assert main([str(folder), "--reasons"]) == 2
    assert f"a dump that was made with {alone['flags']} too." in capsys.readouterr().err
    assert ("emitter" in alone["flags"]) == (choice["library"] == "triton")
    for name in chosen["beside"]:
        files[name].with_suffix(".away").rename(files[name])


def test_two_dumps_are_compared():
    reader = Reader()
    reader.read("a", "a.txt", TEXT.encode())
    reader.read("b", "b.txt", TEXT.replace("__cublas$lt$matmul$f8", "other").encode())
    compared = json.loads(reader.ask("a", "compare", "{}"))
    assert ["matmuls", "3", "1"] in compared["totals"] and compared["changed"] == 2
    reader.read("b", "b.txt", TEXT.encode())
    assert json.loads(reader.ask("a", "compare", "{}"))["changed"] == 0
