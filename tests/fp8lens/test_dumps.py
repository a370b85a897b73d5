"""Of the files that XLA dumps, the compiled program is read; a file's text, gzipped or not."""

import gzip

import pytest

from fp8lens.dumps import Kind, NoText, choose, kind_of, text_of

NAME = "module_0001.jit_step.sm_9.0a_gpu_after_optimizations"
BESIDE = {
    f"{NAME}-buffer-assignment.txt": 900,
    f"{NAME}-memory-usage-report.txt": 900,
    "module_0001.jit_step.thunk_sequence.txt": 900,
    "module_0001.jit_step.sm_9.0a.ptx": 900,
    "module_0001.jit_step.before_optimizations.txt": 500,
    "module_0001.jit_step.debug_options": 10,
}


def test_the_largest_compiled_program_is_chosen_and_named():
    sizes = BESIDE | {f"{NAME}.txt": 50, NAME.replace("0001", "0002") + ".txt.gz": 70}
    choice = choose(sizes)
    assert choice.kind is Kind.GPU and choice.others == (f"{NAME}.txt",)
    assert str(choice) == (
        f"{NAME.replace('0001', '0002')}.txt.gz, "
        "the largest of 2 programs that XLA compiled for a GPU, of 8 files."
    )
    only = choose(BESIDE | {f"{NAME}.txt": 50})
    assert str(only) == (f"{NAME}.txt, the one program that XLA compiled for a GPU among 7 files.")


def test_what_is_not_compiled_is_chosen_where_there_is_nothing_else():
    written = choose(BESIDE)
    assert written.kind is Kind.WRITTEN and written.name.endswith("before_optimizations.txt")
    assert choose({"notes.txt": 3}).kind is Kind.OTHER
    assert str(choose({"a/step.hlo": 3})) == "a/step.hlo."
    assert choose({}) is choose({"kernel.ptx": 5}) is None
    assert kind_of("x.cpu_after_optimizations.txt") is Kind.OPTIMIZED


def test_a_files_text_is_read_gzipped_or_not():
    assert text_of(b"\xef\xbb\xbfHloModule m") == text_of(gzip.compress(b"HloModule m"))
    for data, what in (
        (b" \n", "empty"),
        (gzip.compress(b""), "empty"),
        (b"a\0b", "no text"),
        (gzip.compress(b"HloModule m")[:-3], "gzipped, and damaged"),
    ):
        with pytest.raises(NoText, match=what):
            text_of(data)
