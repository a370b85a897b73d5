"""Whatever text it is given, the inspector answers or refuses it with line and column; and the attack can fail."""
import itertools
import re

import fuzz
import pytest

BAITS = fuzz.baits()
KNOWN = (fuzz.ROOT / "tests" / "hlo" / "jax_0_4_31_plain.txt").read_text()
MORE = (fuzz.ROOT / "tests" / "hlo" / "jax_0_4_32_bf16_scaled.txt").read_text()


@pytest.mark.parametrize("entry", fuzz.ENTRIES)
@pytest.mark.parametrize("bait", BAITS)
def test_a_bait_is_answered_or_refused(bait, entry):
    assert len(BAITS[bait]) < 100_000
    assert fuzz.attack(entry, BAITS[bait], KNOWN) in ("answer", "refused")


def test_what_is_not_whole_is_refused():
    refused = {name for name, text in BAITS.items() if fuzz.attack("parse", text, KNOWN) == "refused"}
    assert {"reads itself", "read each other", "read before it is there"} <= refused
    assert fuzz.attack("report", BAITS["calls itself"], KNOWN) == "refused"
    assert fuzz.attack("parse", KNOWN, KNOWN) == "answer"


def test_an_attack_finds_nothing(tmp_path):
    counted, finds = fuzz.run(15, 1, tmp_path)
    assert finds == {} and counted["finds"] == 0
    assert counted["texts"] > len(BAITS) + 50 and min(counted["answer"], counted["refused"]) > 50


def test_each_change_changes_a_text():
    changed = {name for done, text, whole in itertools.islice(fuzz.texts(3, [KNOWN, MORE]), 600)
               for name in done.split(", ") if text != whole}
    assert changed == set(fuzz.CHANGES)


@pytest.mark.parametrize(("fault", "said"), [
    (lambda text, known: {}[text], "KeyError"), (lambda text, known: [0] * (1 << 40), "MemoryError"),
    (lambda text, known: [None for _ in iter(lambda: re.match("x", "y"), 1)], "Slow"),
])
def test_an_attack_would_find(tmp_path, monkeypatch, capsys, fault, said):
    monkeypatch.setattr(fuzz, "ENTRIES", {"faulty": fault})
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "whole", lambda: [KNOWN])
    monkeypatch.setattr(fuzz, "baits", dict)
    assert fuzz.main(["--seconds", "0.1", "--keep", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"faulty: {said} in outside of fp8lens" in printed and len(list(tmp_path.iterdir())) == 1
