"""Of the files that XLA dumps, the compiled program is read; a file's text, gzipped or not."""

import gzip

import pytest

from fp8lens.dumps import (
    Kind,
    NoText,
    chip_of,
    choose,
    files_beside,
    kind_of,
    ptx_of,
    stages_of,
    text_of,
)

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
    assert choice.kind is Kind.GPU and choice.alike == 2
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
    plain, packed = b"HloModule m", gzip.compress(b"HloModule m")
    assert text_of(b"\xef\xbb\xbf" + plain) == text_of(packed) == text_of(gzip.compress(packed))
    members = gzip.compress(plain[:5]) + gzip.compress(plain[5:])
    assert text_of(members, len(plain)) == "HloModule m"
    for data in (plain, packed, members):
        with pytest.raises(NoText, match="more than 1e-05 MB of text"):
            text_of(data, 10)
    for data, what in (
        (b" \n", "empty"),
        (gzip.compress(b""), "empty"),
        (b"a\0b", "no text"),
        (gzip.compress(b"HloModule m")[:-3], "gzipped, and damaged"),
    ):
        with pytest.raises(NoText, match=what):
            text_of(data)


GIVEN = "module_0001.jit_step.0002.simplify.after_dce.before_cublas-gemm-rewriter.txt"
MADE = "module_0001.jit_step.0003.simplify.after_cublas-gemm-rewriter.before_dce.txt"


def test_what_xlas_rewriter_was_given_is_found_beside_a_program():
    written, ptx = (
        "module_0001.jit_step.before_optimizations.txt",
        "module_0001.jit_step.sm_9.0a.ptx",
    )
    other = GIVEN.replace("0001", "0002")
    names = [*BESIDE, GIVEN, MADE, other, f"{NAME}.txt"]
    assert files_beside(f"{NAME}.txt", names) == [written, GIVEN, ptx]
    in_folder = [f"dumps/{name}" for name in names]
    assert files_beside(f"dumps/{NAME}.txt.gz", in_folder) == [
        f"dumps/{name}" for name in (written, GIVEN, ptx)
    ]
    # Without the option, of another folder, of an unknown chip, of no name of XLA's.
    assert files_beside(f"{NAME}.txt", [*BESIDE, MADE]) == []
    assert files_beside(f"dumps/{NAME}.txt", names) == []
    assert files_beside(f"{NAME.replace('9.0a', '7.5')}.txt", names) == []
    assert files_beside("step.txt", names) == []


def test_files_become_stages_and_ptx():
    ptx = ".version 8\n.visible .entry fusion_1(\n)\n"
    texts = {MADE: "made", GIVEN: "given", "module_0001.jit_step.before_optimizations.txt": "first"}
    stages = stages_of(texts | {"module_0003.jit_step.before_optimizations.txt": "later"})
    assert [stage.text for stage in stages] == ["first", "given", "made"]
    assert (stages[1].pipeline, stages[1].before) == ("simplify", "cublas-gemm-rewriter")
    assert ptx_of({"module_0001.jit_step.sm_9.0a.ptx": ptx}) == {"fusion_1": ptx}


def test_a_programs_name_tells_its_chip():
    assert chip_of(f"{NAME}.txt").name == "H100"
    assert chip_of(f"a/{NAME.replace('9.0a', '8.9')}.txt.gz").name == "L40S"
    assert chip_of("module_0001.jit_step.before_optimizations.txt") is None
