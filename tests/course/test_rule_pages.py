"""The site's pages of rules say what was recorded, and what they say stays text."""

import re

import pytest

from fp8lens.rules.find import every_name
from fp8lens.rules.rule import RULES
from helpers.rule_index import LOSSES, index
from tools.recorders import rule_programs as record
from tools.site import rule_pages

RECORDED = record.RECORD.read()


def test_every_rule_stands_once_in_the_index():
    assert sorted(name for name, *_ in index(RECORDED, *LOSSES)) == sorted(every_name())


@pytest.mark.parametrize("name", every_name())
def test_a_page_has_the_sentences_of_its_first_program(name):
    text = rule_pages.rule_page(RULES[name], RECORDED)
    is_shown = "Reason and fix are those of the first program below." in text
    assert is_shown == bool(RULES[name].page.loses) == ("## Kernels and bytes" in text)
    # Braces of its own are in code, as those of compiler options are.
    facts = re.sub(r"`[^`]*`", "", text[: text.index("**Source**")])
    assert not is_shown or not re.search(r"\{[a-z_]+\}", facts)


def made(kernels: int, *broken: str, types: tuple[str, ...] = ("FP8",)) -> dict:
    return {"types": types, "kernels": kernels, "bytes": 1000 * kernels, "rules": broken}


GOOD = {"loses": made(3, "late-relu", types=("f32",)), "keeps": made(1)}
OTHER = {"loses": made(2, "no-clamp"), "keeps": made(1)}
FAILED = {"loses": {"error": "ValueError"}, "keeps": made(1)}


def test_a_page_has_a_row_for_what_differs_and_marks_the_lines_that_do():
    pairs = [GOOD, GOOD, OTHER, FAILED]
    recorded = {
        f"{number}.0": {"rows": {"late-relu": {"chips": {"H100": pair}}}}
        for number, pair in enumerate(pairs, 1)
    }
    text = rule_pages.rule_page(RULES["late-relu"], recorded).replace("\N{NO-BREAK SPACE}", " ")
    for row in (
        "| H100, JAX 1.0 to 2.0 | f32 → FP8 | 3 → 1 | 3 kB → 1 kB | yes |",
        "| H100, JAX 3.0 | FP8 | 2 → 1 | 2 kB → 1 kB | no |",
        "| H100, JAX 4.0 | does not compile → FP8 | 1 | 1 kB | no |",
    ):
        assert row in text
    assert text.count(":emphasize-lines: 2\n") == 2


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (
            "[x](y) <b> $z$ {a}`b` *c* | d ~e~ #f",
            r"\[x\](y) \<b\> \$z\$ \{a\}`b` \*c\* \| d \~e\~ \#f",
        ),
        ("scale, as relu(x * s) does, then (so) on", "scale, as `relu(x * s)` does, then (so) on"),
        (
            "jnp.clip(jax.nn.relu(d), -{best}).astype({to}), or f(",
            "`jnp.clip(jax.nn.relu(d), -{best}).astype({to})`, or f(",
        ),
        ("gemm_rewriter.cc: a_b, unroll=1.", "`gemm_rewriter.cc`: `a_b`, `unroll=1`."),
        ("such as target='H100' from 8.9 on", "such as `target='H100'` from 8.9 on"),
        ("docs.nvidia.com/cuda/#cublas, doc/A.md", r"docs.nvidia.com/cuda/\#cublas, doc/A.md"),
        ("as no-clamp says, not-a-rule", "as `no-clamp` says, not-a-rule"),
    ],
)
def test_what_looks_like_code_is_code_and_nothing_else_is_markup(text, written):
    assert rule_pages.words(text) == written
