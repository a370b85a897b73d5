"""Whatever text it is given, the inspector answers or refuses it with line and column; and the attack can fail."""

import itertools
import re

import pytest

from tools.attack import fuzz

BAITS = fuzz.baits()
KNOWN = (fuzz.ROOT / "tests" / "fp8lens" / "hlo" / "jax_0_4_31_plain.txt").read_text()
MORE = (fuzz.ROOT / "tests" / "fp8lens" / "hlo" / "jax_0_4_32_bf16_scaled.txt").read_text()


@pytest.fixture(autouse=True)
def at_work(monkeypatch):
    """A busy processor takes several times as long as one at rest, on which `tools/attack/fuzz.py` allows a second."""
    monkeypatch.setattr(fuzz, "SECONDS", 6.0)


def finds(text):
    fuzz.seen.cache_clear()
    return [said for _, said, _ in fuzz.attacks(text, KNOWN) if said not in ("answer", "refused")]


@pytest.mark.parametrize("bait", BAITS)
def test_a_bait_is_answered_or_refused(bait):
    assert len(BAITS[bait]) < 100_000
    assert finds(BAITS[bait]) == []


def test_a_long_word_is_answered_or_refused_in_any_place():
    words = dict(itertools.islice(fuzz.long_words(), 7, None, 60))
    assert len(words) > 30 and len({word.partition(" as ")[2] for word in words}) > 20
    assert {word: found for word, text in words.items() if (found := finds(text))} == {}


def test_what_is_not_whole_is_refused():
    refused = {
        name for name, text in BAITS.items() if fuzz.attack("parse", text, KNOWN) == "refused"
    }
    assert {
        "reads itself",
        "read each other",
        "read before it is there",
        "elements of elements",
    } <= refused
    assert fuzz.attack("report", BAITS["calls itself"], KNOWN) == "refused"
    assert fuzz.attack("parse", KNOWN, KNOWN) == "answer"


@pytest.mark.parametrize(
    "bait", ["escapes in a file's name", "escapes everywhere", "escapes in a call"]
)
def test_no_control_character_reaches_a_terminal(bait, tmp_path):
    from fp8lens import diff_hlo, print_hlo_module, report_gemms
    from fp8lens.cost import print_kernels

    path = tmp_path / "a_gpu_after_optimizations.txt"
    path.write_text(BAITS[bait])
    told = [
        fuzz._told(fuzz.main_of_cli, [str(path), *options])
        for options in ([], ["--ledger"], ["--json"])
    ]
    told += [
        fuzz._told(print_hlo_module, path.read_text(), True, True),
        fuzz._told(print_kernels, BAITS[bait]),
        fuzz._told(print, report_gemms(path)),
        fuzz._told(print, diff_hlo(BAITS[bait], KNOWN)),
    ]
    assert all(told) and {c for text in told for c in text if not c.isprintable()} <= {"\n", "\t"}


def test_an_attack_finds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "baits", dict)  # which have their own test
    found = fuzz.run(15, 1, tmp_path)
    assert found.finds == {} and found.counted["finds"] == 0
    assert (
        found.counted["texts"] > 20 and min(found.counted["answer"], found.counted["refused"]) > 10
    )
    assert 0 < found.slowest[0] < fuzz.SECONDS and found.largest[0] < fuzz.MEMORY


def test_each_change_changes_a_text():
    changed = {
        name
        for done, text, whole in itertools.islice(fuzz.texts(3, [KNOWN, MORE]), 700)
        for name in done.split(", ")
        if text != whole
    }
    assert changed == set(fuzz.CHANGES)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda text, known: {}[text], "KeyError"),
        (lambda text, known: [0] * (1 << 40), "MemoryError"),
        (lambda text, known: [None for _ in iter(lambda: re.match("x", "y"), 1)], "Slow"),
        (lambda text, known: fuzz._shown("a\x1b[31m"), "Wrong"),
        (lambda text, known: fuzz._shown("a\u202e"), "Wrong"),
        (lambda text, known: fuzz._page(f"<p>{fuzz._MARK}</p>"), "Wrong"),
        (lambda text, known: fuzz._page("<p><code></p></code>"), "Wrong"),
        (lambda text, known: fuzz._page("<p>"), "Wrong"),
        (lambda text, known: fuzz._page('<p style="a" onclick="b">a</p>'), "Wrong"),
        (lambda text, known: fuzz._strict('{"alpha": NaN}'), "Wrong"),
        (lambda text, known: fuzz._strict('{"alpha": -Infinity}'), "Wrong"),
    ],
)
def test_an_attack_would_find(tmp_path, monkeypatch, capsys, fault, said):
    monkeypatch.setattr(fuzz, "ENTRIES", {"faulty": fault})
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "whole", lambda: [KNOWN])
    monkeypatch.setattr(fuzz, "baits", dict)
    assert fuzz.main(["--seconds", "0.1", "--keep", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"faulty: {said} in outside of fp8lens" in printed and len(list(tmp_path.iterdir())) == 1
    assert "slowest: 0." in printed and "most memory: " in printed
