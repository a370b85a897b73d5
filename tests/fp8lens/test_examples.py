"""The examples in the docstrings of the public names, which the site shows, are run."""

import doctest
import sys

import pytest

import fp8lens


def examples(name: str) -> doctest.DocTest:
    value = getattr(fp8lens, name)
    text = type(value).__doc__ if name == "TARGETS" else value.__doc__
    return doctest.DocTestParser().get_doctest(text or "", {}, name, None, 0)


# What compiles needs XLA's CUDA compiler.
READ = {"HloModule", "HloParseError", "TARGETS", "Target", "diff_hlo", "format_hlo_module"}
READ |= {"gpu_available", "parse_hlo_module", "print_hlo_module", "run"}


@pytest.mark.parametrize("name", fp8lens.__all__)
def test_the_example_of_every_public_name_works(name):
    if sys.platform != "linux" and name not in READ:
        pytest.skip("XLA's CUDA compiler has wheels for Linux only")
    said: list[str] = []
    test = examples(name)
    assert any(name in example.source for example in test.examples) or name[0].isupper()
    assert any(example.want for example in test.examples), "an example shows what comes of it"
    runner = doctest.DocTestRunner()
    runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
