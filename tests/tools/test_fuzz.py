"""Whatever text it is given, the inspector answers, or refuses it with line and column, in time
that grows with the text; and the attack can fail. `tools/attack/fuzz.py` tries more."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lens import diff_hlo, print_hlo_module, report_gemms
from fp8lens.matmul.kernels import print_kernels
from tests.programs import hlo_baits
from tests.programs.hlo_grammar import CHANGES, MARK, examples, texts
from tests.weekly import weekly
from tools.attack import fuzz

KNOWN = (hlo_baits.SAVED / "jax_0_4_31_plain.txt").read_text()
# Words for which a search took too long, each with what it met there.
WORDS = {
    "'.1' and 'x' as name": "a kernel's name without its number",
    "')' and 'x' as op_name": "a layer's name without its brackets",
    "'{0} ' and 'x' as groups' list": "lists of devices",
    "'mesh[' and '' as mesh": "a mesh's axes",
    "'\\\\\"' and '' as value": "a string's end",
    "'/*' and '' as operand": "a comment's end",
    "'wgmma.mma_async.sync.aligned.' and '' as matrix instruction": "the types multiplied",
}
SAMPLE = 37  # of the words, every so many-th: no divisor of the units or the tails


@pytest.fixture(autouse=True)
def at_work(monkeypatch):
    """A busy machine takes longer than one at rest, on which fuzz.py allows a second."""
    monkeypatch.setattr(fuzz, "SECONDS", 6.0)


@pytest.fixture(scope="module")
def known():
    return fuzz.programs()


@examples(200)
@given(st.data())
def test_any_text_is_answered_or_refused(known, data):
    assert fuzz.finds(*data.draw(texts(known))) == []


@pytest.mark.parametrize("name", hlo_baits.SMALL)
def test_a_bait_is_answered_or_refused(name):
    assert fuzz.finds(hlo_baits.SMALL[name], KNOWN) == []


@pytest.mark.parametrize("kind", hlo_baits.CALLS)
def test_calls_nest_deeper_than_python(kind):
    assert fuzz.finds(hlo_baits.called(hlo_baits.CALLS[kind], 1020), KNOWN) == []


@weekly  # times: of a busy machine, one in thousands is wrong
@pytest.mark.parametrize("name", hlo_baits.GROWING)
def test_the_time_grows_with_the_program(name):
    text_of = hlo_baits.GROWING[name]
    if name in hlo_baits.FROM_HUNDREDS_ON:
        assert fuzz.finds(text_of(100), KNOWN) == []
    else:
        assert fuzz.grows(text_of, 60) == []


@weekly
def test_the_time_grows_with_a_long_word():
    words = dict(hlo_baits.words())
    sample = {*WORDS, *itertools.islice(words, 0, None, SAMPLE)}
    assert {name.partition(" as ")[2] for name in sample} == {*hlo_baits.PLACES}
    slow = {name: found for name in sorted(sample) if (found := fuzz.grows(words[name]))}
    assert slow == {}


def test_what_is_not_whole_is_refused():
    refused = {
        name
        for name, text in hlo_baits.SMALL.items()
        if fuzz.attack("parse", text, KNOWN) != "answer"
    }
    broken = {"reads itself", "read each other", "read before it is there", "elements of elements"}
    assert broken <= refused
    assert fuzz.attack("report", hlo_baits.SMALL["calls itself"], KNOWN) == "refused"
    assert fuzz.attack("parse", KNOWN, KNOWN) == "answer"


@pytest.mark.parametrize(
    "bait", ["escapes in a file's name", "escapes everywhere", "escapes in a call"]
)
def test_no_control_character_reaches_a_terminal(bait, tmp_path):
    text = hlo_baits.SMALL[bait]
    path = tmp_path / "a_gpu_after_optimizations.txt"
    path.write_text(text)
    told = [
        fuzz.told(fuzz.main_of_cli, [str(path), *options])
        for options in ([], ["--ledger"], ["--json"])
    ]
    told += [
        fuzz.told(print_hlo_module, text, True, True),
        fuzz.told(print_kernels, text),
        fuzz.told(print, report_gemms(path)),
        fuzz.told(print, diff_hlo(text, KNOWN)),
    ]
    assert all(told) and {c for text in told for c in text if not c.isprintable()} <= {"\n", "\t"}


def test_each_change_changes_a_text():
    changed = set()

    @examples(150)
    @given(st.data(), st.sampled_from(CHANGES))
    def change(data, how):
        if how(data.draw, KNOWN, hlo_baits.GEMM) != KNOWN:
            changed.add(how)

    change()
    assert changed == {*CHANGES}


# Whether it can fail --------------------------------------------------------------------------


@pytest.fixture
def one_program(monkeypatch):
    """An attack that begins at once, from one program."""
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "SMALLER", 20)
    monkeypatch.setattr(fuzz, "programs", lambda: [(KNOWN, KNOWN)])
    monkeypatch.setattr(hlo_baits, "SMALL", {})


def test_an_attack_says_what_it_tried(one_program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "SECONDS", 6.0)
    monkeypatch.setattr(hlo_baits, "SMALL", {"one": hlo_baits.GEMM})
    assert fuzz.main(["--seconds", "1", "--keep", str(tmp_path), "--seed", "1"]) == 0
    tried = re.match(
        rf"(\d+) texts through {len(fuzz.ENTRIES)} entries: (\d+) answers, "
        r"(\d+) times refused with line and column, "
        r"0 times something else, in 0 places\nslowest: \d\.\d\d s, .*\nmost memory: \d+ MB, ",
        capsys.readouterr().out,
    )
    assert int(tried[1]) > 3 and int(tried[2]) > 12
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (fuzz.shown, "a\x1b[31m"),
        (fuzz.shown, "a\u202e"),
        (fuzz.page, f"<p>{MARK}</p>"),
        (fuzz.page, "<p><code></p></code>"),
        (fuzz.page, "<p>"),
        (fuzz.page, '<p style="a" onclick="b">a</p>'),
        (fuzz.strict, '{"alpha": NaN}'),
        (fuzz.strict, '{"alpha": -Infinity}'),
    ],
)
def test_an_answer_that_is_none_is_told(check, wrong):
    with pytest.raises(fuzz.Wrong):
        check(wrong)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda text, other: {}[text], "KeyError"),
        (lambda text, other: [0] * (1 << 40), "MemoryError"),
        (lambda text, other: [None for _ in iter(lambda: re.match("x", "y"), 1)], "Slow"),
        (lambda text, other: re.fullmatch("(a*)*b", "a" * 40), "Slow"),
        (lambda text, other: fuzz.shown("a\x1b[31m"), "Wrong"),
    ],
)
def test_an_attack_would_find(one_program, tmp_path, monkeypatch, capsys, fault, said):
    monkeypatch.setattr(fuzz, "ENTRIES", {"faulty": fault})
    assert fuzz.main(["--seconds", "0.5", "--keep", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"faulty: {said} in outside of fp8lens" in printed
    assert "in 1 places\nslowest: 0." in printed and "most memory: " in printed
    assert len(list(tmp_path.iterdir())) == 1


@weekly
def test_the_smallest_text_of_a_find_is_kept(one_program, tmp_path, monkeypatch):
    met = []

    def fault(text, other):
        if " dot(" in text and "made_up" in text:  # of a whole module
            met.append(text)
            raise KeyError("dot")

    monkeypatch.setattr(fuzz, "ENTRIES", {"faulty": fault})
    smaller = []
    for number in range(4):  # the first text of a round may be the smallest by chance
        met.clear()
        found = fuzz.Found(0, tmp_path / str(number))
        fuzz.by_hypothesis(found, [(KNOWN, KNOWN)], number, float("inf"))
        (path,) = found.finds.values()
        kept = path.read_text()
        assert kept in met and len(kept) == min(map(len, met))
        smaller.append(len(kept) < len(met[0]))
    assert any(smaller)


@pytest.mark.parametrize("power", [1, 2])
def test_what_grows_faster_is_told_from_what_does_not(monkeypatch, power):
    clock = [0.0]  # the processor's own would depend on what else the machine does

    def work(text, other):
        clock[0] += 1e-3 * len(text) ** power

    monkeypatch.setattr(fuzz, "ENTRIES", {"work": work})
    monkeypatch.setattr(fuzz.time, "process_time", lambda: clock[0])
    found = fuzz.grows("a".__mul__, 1000)
    assert len(found) == power - 1
