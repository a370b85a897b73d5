"""The fusion lab in a notebook: what its kernel answers is what is recorded of the same program."""

import json
import re
import threading
from html import unescape

import jax
import pytest

from helpers.explorers import compiled, widgets
from helpers.explorers import fusion_lab as lab
from helpers.figures import source_lines
from tests.weekly import one_in

SIZES = lab.SIZES["4096"]
BY_CUBLASLT = [
    choice
    for choice in lab.choices()
    if (choice["library"], choice["release"]) == ("cublaslt", jax.__version__)
]


def layer(choice: lab.Choice) -> lab.Choice:
    """What a notebook has of a choice."""
    return {name: choice[name] for name in lab.FIRST}


def answered(explorer: widgets.FusionLab, monkeypatch, *questions) -> list[dict]:
    """What the view of an explorer is told when it asks these questions."""
    told: list[dict] = []
    monkeypatch.setattr(explorer, "send", told.append)
    for question in questions:
        explorer._handle_custom_msg(question, [])
        explorer._latest.finish()
    return json.loads(json.dumps(told))


def question(sizes=SIZES, **change):
    return {"choice": {**lab.FIRST, **change}, "sizes": [*sizes]}


@pytest.mark.parametrize("choice", one_in(400, BY_CUBLASLT), ids=lambda one: "-".join(one.values()))
def test_what_is_compiled_while_a_reader_waits_is_what_is_recorded(choice):
    """The record's tests compile to the end."""
    sizes = lab.SIZES[choice["sizes"]]
    made = json.loads(json.dumps(compiled.answer(layer(choice), sizes)))
    assert made.pop("code") == lab.program(choice).code.splitlines()
    assert made == lab.outcome(choice)


def test_sizes_and_chips_that_are_not_recorded_are_answered(monkeypatch):
    cut = question((100, 64, 32), chip="L40S", amax="no", bias="none", activation="none")
    triton = question((64, 64, 64), chip="H200", library="triton")
    first, other = answered(widgets.FusionLab(), monkeypatch, cut, triton)
    assert "padded-operands" in [reason["rule"] for reason in first["found"]["reasons"]]
    assert not other["found"]["fp8"]  # it dequantizes before it multiplies
    assert "Triton" in other["found"]["kernels"][0]["title"]


def test_what_goes_wrong_is_told_and_the_next_question_answered(monkeypatch):
    questions = question((0, 64, 64)), question(chip="H101"), {"choice": {}}, question()
    *wrong, right = answered(widgets.FusionLab(), monkeypatch, *questions)
    size, chip, nothing = (told["wrong"] for told in wrong)
    assert size == "M is 0: give a whole number from 1 to 131072."
    assert chip == "chip is 'H101': choose one of A100, L40S, H100, H200, B200."
    assert nothing and right["found"]["fp8"]


def test_what_does_not_compile_is_an_answer(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("XLA\nsays why")

    monkeypatch.setattr(compiled, "inspected", fails)
    (told,) = answered(widgets.FusionLab(), monkeypatch, question((16, 16, 48)))
    assert told["found"]["error"] == "XLA"


def test_of_the_questions_that_wait_only_the_last_is_answered():
    began, go_on, done = threading.Event(), threading.Event(), []

    def do(asked):
        began.set()
        assert go_on.wait(60)
        done.append(asked)

    latest = compiled.Latest(do)
    latest.ask("first")
    assert began.wait(60)
    for asked in ("second", "third", "last"):
        latest.ask(asked)
    go_on.set()
    latest.finish()
    assert done == ["first", "last"]


def test_without_a_kernel_what_is_recorded_stands():
    """Each kernel is in the text, with what it moves, and each reason."""
    shown = widgets.FusionLab(bias="f32")._repr_mimebundle_()[0]
    assert "application/vnd.jupyter.widget-view+json" in shown
    found = lab.outcome({**lab.STATE, "bias": "f32"})
    said = ": ".join(source_lines.verdict(found))
    assert said in shown["text/plain"] and "JupyterLab" in shown["text/plain"]
    text = unescape(re.sub("<[^>]*>", "", shown["text/html"]))
    for kernel in found["kernels"]:
        assert kernel["title"] in text
    for reason in found["reasons"]:
        assert f"{reason['reason']}. Fix: {reason['fix']}." in text
    other = widgets.FusionLab(64, 64, 64)._repr_mimebundle_()[0]["text/html"]
    assert "def layer" in other and "is not recorded" in other


def test_what_cannot_be_chosen_is_said():
    with pytest.raises(ValueError, match=r"bias is 'f64': choose one of none, bf16, f32, f16\."):
        widgets.FusionLab(bias="f64")
    with pytest.raises(ValueError, match="colour cannot be chosen: choose operands, stored"):
        widgets.FusionLab(colour="red")
