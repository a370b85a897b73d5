"""The site's pages of rules say what was recorded, and what they say stays text."""

import dataclasses
import re

import pytest

from fp8lens.rules.page import Page, explain
from helpers.pages import LOSSES, index
from tools.recorders import rule_programs as record
from tools.site import rules

RECORDED = record.RECORD.read()


def test_every_rule_stands_once_in_the_index():
    found = [name for name, *_ in index(RECORDED, *LOSSES)]
    assert sorted(found) == sorted(record.every_name())
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", record.every_name())
def test_a_page_has_the_sentences_of_its_first_program(name):
    page = explain(name)
    text = rules.rule_page(page, RECORDED)
    facts = text[: text.index("**Source**")]
    is_shown = "Reason and fix are those of the first program below." in text
    assert is_shown == bool(page.loses)
    # Braces of its own are in code, as those of compiler options are.
    assert not is_shown or not re.search(r"\{[a-z_]+\}", re.sub(r"`[^`]*`", "", facts))


def made(kernels: int, *broken: str, types: tuple[str, ...] = ("FP8",)) -> dict:
    return {
        "types": list(types),
        "matmuls": 1,
        "kernels": kernels,
        "bytes": 1000 * kernels,
        "rules": list(broken),
    }


GOOD = {"loses": made(3, "late-relu", types=("f32",)), "keeps": made(1)}
OTHER = {"loses": made(2, "no-clamp"), "keeps": made(1)}
BOTH = {"loses": made(2, "late-relu"), "keeps": made(1, "late-relu")}
FAILED = {"loses": {"error": "ValueError: x * y"}, "keeps": made(1)}


def said(**chips: list[dict]) -> str:
    """The page of a rule of which these pairs were recorded, by chip, for releases 1.0 on."""
    count = max(map(len, chips.values()))
    recorded = {
        f"{number + 1}.0": {
            "rows": {"late-relu": {"chips": {chip: pairs[number] for chip, pairs in chips.items()}}}
        }
        for number in range(count)
    }
    return rules.rule_page(explain("late-relu"), recorded)


def test_a_page_has_a_row_for_what_differs():
    text = said(H100=[GOOD, GOOD, OTHER], B200=[GOOD, GOOD, GOOD])
    assert "| H100, JAX 1.0 to 2.0 | f32 → FP8 | 3 → 1 | 3\N{NO-BREAK SPACE}kB → " in text
    assert "| H100, JAX 3.0 | FP8 | 2 → 1 |" in text and "| B200, JAX 1.0 to 3.0 |" in text
    assert "The rule holds on H100 with JAX 1.0 and 2.0." in text
    assert "The rule holds on B200 with JAX 1.0, 2.0 and 3.0." in text
    assert (
        "not hold on H100 with JAX 3.0: the first program does not break it, but `no-clamp`" in text
    )


def test_a_page_names_the_other_rules_that_its_programs_break():
    more = {"loses": made(3, "late-relu", "no-clamp"), "keeps": made(2, "no-clamp")}
    text = said(H100=[OTHER, more])
    assert "The first program also breaks `no-clamp`. The fixed one breaks `no-clamp`." in text
    assert "also breaks" not in said(H100=[more, OTHER])


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        (BOTH, "the fixed program breaks it too."),
        (FAILED, "the first program does not compile (ValueError: x \\* y)."),
    ],
)
def test_a_page_says_where_its_rule_does_not_hold(pair, why):
    text = said(H100=[GOOD], B200=[pair])
    assert f"It does not hold on B200 with JAX 1.0: {why}" in text
    assert "The rule holds on H100 with JAX 1.0." in text


def reason_of(text: str) -> str:
    """What a page says of a rule's reason."""
    page = explain("late-relu")
    page = Page(dataclasses.replace(page.rule, reason=text), "", None, None)
    (line,) = [
        line for line in rules.rule_page(page, RECORDED).splitlines() if "**Reason**" in line
    ]
    return line.removeprefix("| **Reason** | ").removesuffix(" |")


def test_nothing_in_a_rules_texts_is_markup():
    text = reason_of("[x](y) <b> $z$ {a}`b` *c* | d ~e~ #f")
    assert text == r"\[x\](y) \<b\> \$z\$ \{a\}`b` \*c\* \| d \~e\~ \#f"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("scale, as relu(x * s) does, then (so) on", "scale, as `relu(x * s)` does, then (so) on"),
        (
            "jnp.clip(jax.nn.relu(d), -{best}).astype({to}), or f(",
            "`jnp.clip(jax.nn.relu(d), -{best}).astype({to})`, or f(",
        ),
        ("gemm_rewriter.cc: a_b.", "`gemm_rewriter.cc`: `a_b`."),
        ("{jax_to}, unroll=1. A_B=--c_d=no or", r"\{jax\_to\}, `unroll=1`. `A_B=--c_d=no` or"),
        ("with options={'a_b': (0)}, or not", "with `options={'a_b': (0)}`, or not"),
        ("such as target='H100' from 8.9 on", "such as `target='H100'` from 8.9 on"),
        (
            "docs.nvidia.com/cuda/#cublas, doc/PERFORMANCE.md",
            r"docs.nvidia.com/cuda/\#cublas, doc/PERFORMANCE.md",
        ),
        ("as no-clamp says, not-a-rule", "as `no-clamp` says, not-a-rule"),
    ],
)
def test_what_looks_like_code_is_code(text, written):
    assert reason_of(text) == written


def test_a_page_without_programs_has_no_figures():
    page = explain("late-relu")
    text = rules.rule_page(Page(page.rule, "", None, None), RECORDED)
    assert "Loses it" not in text and "Kernels and bytes" not in text


def test_lines_that_differ_are_told_apart():
    page = explain("late-relu")
    text = rules.rule_page(page, RECORDED)
    assert text.count(":emphasize-lines: 2\n") == 2
    same = Page(page.rule, "", page.loses, page.loses)
    assert "emphasize" not in rules.rule_page(same, RECORDED)
