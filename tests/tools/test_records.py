"""What is recorded has the form that schema.json gives, and comes from where it says."""

import ast
import copy
import functools
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import aot_compile
from fp8lens.matmul.kernels import fp8_calls
from fp8lens.matmul.rows import gemm_config
from helpers.models.ladder import recorded as recorded_ladder
from helpers.numerics.formats import assert_matches_reference, matmul_reference, tolerance
from helpers.numerics.recipes import scaled_dot, to_e4m3
from helpers.records import stacks as stacked
from helpers.records.results import digest, goals, load_tensors
from tests.weekly import NIGHTLY, weekly
from tools.environments import NotMadeError
from tools.records import form, ladder, published, sources, stacks, sums, tensors, train
from tools.records import goals as reasons

RECORDS = {name: json.loads((form.RESULTS / f"{name}.json").read_text()) for name in form.RECORDS}
nightly = pytest.mark.skipif(not NIGHTLY, reason="trains for a minute: NIGHTLY=1 does")

# Forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", form.RECORDS)
def test_a_record_has_its_form(name):
    assert form.problems(RECORDS[name], name) == []
    assert {path.stem for path in form.RESULTS.glob("*.json")} == {*form.RECORDS, "schema"}


def changed(data: dict, path: str, value) -> dict:
    """A copy with another value at "a/0/b", or without one where that is None."""
    data = copy.deepcopy(data)
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    inner = functools.reduce(lambda held, key: held[key], way, data)
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return data


FIGURE = "figures/0"
ROW = "figures/2/rows/2"  # quantized, with a scale for each row
NOT_OF_THE_FORM = [
    ("goals", "goals/0/most", {"H100": 1.0, "H200": 1.0}, "goals[0]"),  # beside least
    ("goals", "goals/0/least/B200", 1.0, "goals[0]"),
    ("goals", "goals/0/reason", None, "reason"),
    ("goals", "goals/0/clock", "mine", "clock"),
    ("published", f"{FIGURE}/url", "ftp://example.org", "url"),
    ("published", f"{FIGURE}/url", "https://github.com/a/b/blob/main/README.md", "url"),
    ("published", f"{FIGURE}/date", "yesterday", "date"),
    ("published", f"{FIGURE}/hardware", " ", "hardware"),
    ("published", f"{FIGURE}/counts", "", "counts"),
    ("published", f"{FIGURE}/baseline", 1, "baseline"),
    ("published", f"{FIGURE}/chip", "B300", "chip"),
    ("published", f"{FIGURE}/quotes", [], "quotes"),
    ("published", f"{FIGURE}/rows", [], "rows"),
    ("published", f"{FIGURE}/rows/0/unit", "GFLOP/s", "unit"),
    ("published", f"{FIGURE}/rows/0/value", 0, "value"),
    ("published", f"{FIGURE}/rows/0/value", None, "value"),
    ("published", f"{FIGURE}/rows/0/shape", [64, 64], "shape"),
    ("published", f"{ROW}/per", None, "per"),
    ("published", f"{ROW}/quantized", None, "quantized"),
    ("published", f"{ROW}/quantized", "B", "quantized"),
    ("tensors", "losses/0", 0, "losses[0]"),
    ("tensors", "amaxes/g", None, "amaxes"),
    ("tensors", "tensors/x/shape", [128, 100], "shape"),
    ("tensors", "host", "mine", "host"),
    ("trained", "ways/bf16/0/unseen", None, "unseen"),
    ("trained", "ways/delayed", [], "delayed"),
    ("trained", "ways/delayed/0/saturated/0.qkv", [1, 2], "0.qkv"),
    ("trained", "harmed/bf16, outlier/lost/0", 1.5, "lost[0]"),
    ("sums", "commit", "main", "commit"),
    ("sums", "licence", "mine", "licence"),
    ("sums", "formats/float8_e5m2", None, "formats"),
    ("releases", "releases/0.9.2/rows/relu/kernels", None, "relu"),
    ("releases", "releases/0.9.2/packages", {}, "packages"),
    ("rules", "releases/0.10.2/rows/late-relu/chips/H100/loses", None, "loses"),
    ("rules", "releases/0.10.2/rows/late-relu/chips/H100/keeps/types", None, "keeps"),
    ("stacks", "layouts/cpu/tensor/said", "no", "tensor"),  # of what runs
    ("stacks", "layouts/cpu/row: [64], [128]/said", None, "said"),
    ("stacks", "results/torch, row, whole/digest", "0", "digest"),
    ("stacks", "ptx/tensor/wgmma/0", "mma.sync", "wgmma[0]"),
    ("stacks", "host", "mine", "host"),
    ("census", "ways/qwix, QT/url", "docs", "url"),
    ("census", "releases/0.12.0.1/rows/a | b", {"error": "c"}, "a | b"),
    ("census", "releases/0.12.0.1/date", "today", "date"),
]


@pytest.mark.parametrize(("name", "path", "value", "where"), NOT_OF_THE_FORM)
def test_what_has_another_form_is_named(name, path, value, where):
    found = form.problems(changed(RECORDS[name], path, value), name)
    assert any(where in problem for problem in found), found


# Goals --------------------------------------------------------------------------------------------

GOALS = [goal for part in ("speed", "train") for goal in goals(part, None, form.RESULTS)]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_a_goal_follows_from_its_reason(goal):
    assert reasons.problems(goal) == []


@pytest.mark.parametrize("number", range(len(GOALS)))
@pytest.mark.parametrize("with_its_share", [False, True])
def test_a_goal_lowered_by_a_hundredth_is_named(number, with_its_share, tmp_path):
    data = copy.deepcopy(RECORDS["goals"])
    one = data["goals"][number]
    factor = 0.99 if "least" in one else 1.01
    one["least" if "least" in one else "most"]["H100"] *= factor
    if with_its_share:
        one["reason"]["share"] *= factor
    (tmp_path / "goals.json").write_text(json.dumps(data))
    lowered = [goal for part in ("speed", "train") for goal in goals(part, None, tmp_path)]
    found = reasons.problems(lowered[number])
    assert found and all(one["name"] in problem for problem in found)


# What others published ----------------------------------------------------------------------------

COMMIT = "0123456789" * 4
PATCH = f"From {COMMIT} Mon Sep 17 00:00:00 2001\nDate: Fri, 2 Jan 2026 23:30:00 -0800\n\n---\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that answers as GitHub does."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    folder = tmp_path / "site"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(sources, "GITHUB", address)
    monkeypatch.setattr(sources, "RAW", f"{address}/raw")
    monkeypatch.setattr(sources, "API", f"{address}/api")
    yield folder, address
    server.shutdown()
    server.server_close()


def put(folder, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.fixture
def quoted(site, tmp_path):
    """Writes published.json of a file and of a pull request, changed as given, and checks it."""
    folder, address = site
    put(folder, f"raw/a/b/{COMMIT}/docs/speed.md", "We   reach\n**1126 TFLOPS** & more, a < b.")
    put(folder, f"a/b/commit/{COMMIT}.patch", PATCH)
    put(folder, "api/repos/a/b/pulls/7", json.dumps({"body": "It took <b>1.25</b>&nbsp;ms"}))
    entry = RECORDS["published"]["figures"][1] | {"date": "2026-01-02"}
    of_file = entry | {
        "name": "a file",
        "url": f"{address}/a/b/blob/{COMMIT}/docs/speed.md",
        "quotes": ["We reach **1126 TFLOPS** & more, a < b."],
        "rows": [{"of": "FP8", "value": 1126, "unit": "TFLOP/s"}],
    }
    of_request = entry | {
        "name": "a request",
        "url": f"{address}/a/b/pull/7",
        "quotes": ["It took 1.25 ms"],
        "rows": [{"of": "FP8", "value": 1.25, "unit": "ms"}],
    }

    def check(**replaced) -> int:
        (tmp_path / "published.json").write_text(
            json.dumps({"figures": [of_file | replaced, of_request]})
        )
        return published.main(["--check", "--results", str(tmp_path)])

    return check


def test_quotations_are_looked_up_at_their_commit(quoted, capsys):
    assert quoted() == 0 and "2 quotations of 2 sources are as recorded" in capsys.readouterr().out
    together = {
        "quotes": ["We reach **1127 TFLOPS** & more, a < b."],
        "rows": [{"of": "FP8", "value": 1127, "unit": "TFLOP/s"}],
    }
    assert quoted(**together) == 1
    assert "a file: http" in (said := capsys.readouterr().out) and "1127 TFLOPS" in said
    assert quoted(date="2026-01-05") == 1
    assert "its commit is of 2026-01-02, and 2026-01-05 is recorded" in capsys.readouterr().out


def test_without_a_network_the_check_says_so(quoted, site, capsys):
    _, address = site
    gone = f"{address}/a/b/blob/{'9' * 40}/gone.md"
    assert quoted(url=gone) == 2
    assert "9/gone.md cannot be read (HTTP Error 404" in (said := capsys.readouterr().err)
    assert "needs a network" in said


# Sums and the training ----------------------------------------------------------------------------


def test_sums_are_compared_with_what_their_authors_have(site, monkeypatch, tmp_path, capsys):
    folder, _ = site
    there = f"raw/{sums.REPOSITORY}/{sums.COMMIT}"
    pattern = "{:08x}".format
    for name in sums.FORMATS.values():
        ones = " ".join([pattern(np.float32(1).view(np.uint32))] * 32)
        for operand in "ab":
            put(folder, f"{there}/model_validation/H100/{name}/{operand}_H100_{name}.txt", ones)
        binary = f"{np.float32(32).view(np.uint32):032b}"
        put(folder, f"{there}/model_validation/H100/{name}/d_H100_fp32.txt", binary)
    put(folder, f"{there}/LICENCE", "Redistributions of source code must retain")
    monkeypatch.setattr(sums, "DATA", tmp_path / "sums.json")
    assert sums.main([]) == 0 and sums.main(["--check"]) == 0
    data = json.loads(sums.DATA.read_text())
    assert form.problems(data, "sums") == []
    data["formats"]["float8_e5m2"]["sums"] = "AAAAQA=="  # 2.0
    sums.DATA.write_text(json.dumps(data | {"digest": digest(data)}, indent=1) + "\n")
    assert sums.main(["--check"]) == 1 and "differs" in capsys.readouterr().out
    (folder / there / "LICENCE").unlink()
    assert sums.main(["--check"]) == 2 and "LICENCE cannot be read" in capsys.readouterr().err


def test_the_sums_come_from_the_commit_they_name():
    assert RECORDED_SUMS == (f"https://github.com/{sums.REPOSITORY}", sums.COMMIT, sums.EACH)


RECORDED_SUMS = tuple(RECORDS["sums"][key] for key in ("repository", "commit", "each"))
STEPS = tensors.STEPS if NIGHTLY else 3


@pytest.fixture(scope="module")
def trained():
    """The training, made again."""
    return tensors.measured(STEPS)


def test_the_training_gives_what_is_recorded(trained):
    """With NIGHTLY=1 all of it, which takes minutes; else its first steps."""
    assert tensors.problems(RECORDS["tensors"], trained) == []


@pytest.mark.parametrize("what", ["losses/2", "amaxes/x/2", "amaxes/w/0", "amaxes/g/1"])
def test_a_changed_step_of_the_training_is_named(trained, what):
    first, *rest = what.split("/")
    kept = RECORDS["tensors"][first]
    value = (kept[rest[0]] if first == "amaxes" else kept)[int(rest[-1])]
    forged = changed(RECORDS["tensors"], what, 1.02 * value)
    forged["digest"] = digest(forged)
    assert len(tensors.problems(forged, trained)) == 1


@pytest.mark.parametrize("name", "xwg")
def test_a_changed_tensor_of_the_last_step_is_named(name):
    whole = RECORDS["tensors"]
    held = tensors.tensor(whole["tensors"][name])
    forged = copy.deepcopy(whole)
    forged["tensors"][name] = tensors.stored(tensors.jnp.asarray(1.03 * held))
    assert tensors.problems(forged, whole) == [f"the last step's {name}"]
    assert tensors.problems(whole, whole) == []


def test_the_kept_weight_is_the_whole_one_of_the_last_amax():
    """Of the input and the gradient a sixteenth is kept: its largest is some part of the amax."""
    kept = load_tensors(form.RESULTS)
    for name, tensor in kept.tensors.items():
        part = np.abs(tensor.astype(np.float64)).max() / kept.amaxes[name][-1]
        assert abs(part - 1) < 2**-8 if name == "w" else 0.01 < part < 1 + 2**-8, name


def test_a_training_is_written_as_it_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tensors, "STEPS", 2)
    monkeypatch.setattr(tensors, "DATA", tmp_path / "tensors.json")
    monkeypatch.setattr(sys, "argv", ["tensors.py"])
    tensors.main()
    assert capsys.readouterr().out.startswith("2 steps, from ")
    made = json.loads(tensors.DATA.read_text())
    assert made.keys() == RECORDS["tensors"].keys() and len(load_tensors(tmp_path).losses) == 2


# The ladder of chapter 13 ------------------------------------------------------------------------


@weekly
@pytest.mark.parametrize("name", ladder.STEPS)
def test_a_step_costs_what_is_recorded(name):
    """Chapter 13 holds the last step, and its bf16 one, to the record in each run."""
    assert ladder.problems(RECORDS["ladder"], name) == []


def test_another_cost_would_be_noticed(monkeypatch):
    name = [*ladder.STEPS][0]
    monkeypatch.setattr(ladder, "costs", lambda name: RECORDS["ladder"]["steps"][name])
    assert ladder.problems(RECORDS["ladder"], name) == []
    other = changed(RECORDS["ladder"], f"steps/{name}/H100/kernels", 1)
    assert len(ladder.problems(other, name)) == 1


def test_a_ladder_that_was_altered_is_not_read(tmp_path):
    text = (form.RESULTS / "ladder.json").read_text()
    (tmp_path / "ladder.json").write_text(text.replace('"small": 20', '"small": 21'))
    with pytest.raises(ValueError, match="not as it was recorded: `make ladder`"):
        recorded_ladder(tmp_path)
    assert recorded_ladder(form.RESULTS).steps.keys() == ladder.STEPS.keys()


# Other stacks, of chapter 16 ----------------------------------------------------------------------


def exact(kind: str, way: str) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and the size that its error is measured by."""
    given = stacked.operands(kind)
    a, b = (codes.astype(np.float64) for codes in (given.a, given.b))
    one, other = (scale.astype(np.float64) for scale in given.scales[way])
    if way == "block":
        a = a * np.repeat(one, stacked.B, axis=0).T
        b = b * np.repeat(np.repeat(other, stacked.B, axis=0), stacked.B, axis=1)
        return matmul_reference(a, b)
    return matmul_reference(a, b, one[:, None] if way == "row" else one, other)


def test_what_other_stacks_compute_is_within_the_bound():
    rows = stacked.load_stacks(form.RESULTS).rows
    assert {name[:2] for name in rows} == {
        ("torch", "tensor"),
        ("torch", "row"),
        *(("triton", way) for way in stacked.SCALES),
    }
    for (stack, way, kind), result in rows.items():
        value, size = (array[: len(result)] for array in exact(kind, way))
        assert_matches_reference(result, value, tolerance(value, size, stacked.K, np.float32))
        assert not np.array_equal(result, np.zeros_like(result)), stack


@pytest.mark.parametrize("way", stacked.SCALES)
def test_triton_scales_sums_as_numpy_does(way):
    """Of whole operands the sums are exact, so two roundings are all that there is."""
    given, found = stacked.operands("whole"), np.float32(0)
    one, other = given.scales[way]
    if way != "block":
        one, other = (one if way == "tensor" else one[:, None])[None], other[None, None]
    depth = stacked.K // len(one)
    for k, scale in enumerate(one):
        piece = slice(k * depth, (k + 1) * depth)
        sums = given.a[:, piece].astype(np.float64) @ given.b[:, piece].astype(np.float64).T
        columns = np.repeat(other[:, k], stacked.B) if way == "block" else other[0, 0]
        factor = (scale[:, None] if way == "block" else scale) * columns
        found = found + sums.astype(np.float32) * factor
    kept = stacked.load_stacks(form.RESULTS).digests
    assert stacked.digest_of(found) == kept["triton", way, "whole"]


def test_whole_operands_are_summed_without_rounding():
    given = stacked.operands("whole")
    a, b = (codes.astype(np.float64) for codes in (given.a, given.b))
    assert np.array_equal(a, np.round(a)) and np.max(np.abs(a) @ np.abs(b).T) < 2**24
    with pytest.raises(ValueError, match="whole, normal, not 'other'"):
        stacked.operands("other")


def test_altered_records_of_other_stacks_are_not_read(tmp_path):
    forged = changed(RECORDS["stacks"], "layouts/cpu/tensor/runs", False)
    (tmp_path / "stacks.json").write_text(json.dumps(forged))
    with pytest.raises(ValueError, match="not as it was recorded: `make stacks`"):
        stacked.load_stacks(tmp_path)
    forged = changed(RECORDS["stacks"], "operands", "0" * 64)
    forged["digest"] = digest(forged)
    (tmp_path / "stacks.json").write_text(json.dumps(forged))
    with pytest.raises(ValueError, match="of other operands: `make stacks`"):
        stacked.load_stacks(tmp_path)


def table_of_attributes() -> list[list[str]]:
    """The rows of chapter 16's table of attributes, a text for each of its columns."""
    text = (form.RESULTS.parent / "16_other_stacks.md").read_text()
    (table,) = re.findall(r"^\| cuBLASLt \|.*\n\|[-|]*\n((?:\|.*\n)+)", text, re.M)
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
    ]


def test_the_table_of_attributes_has_what_the_header_and_the_call_have():
    """Its first column names what cuBLASLt's header names, the second what XLA's call has."""
    known = RECORDS["stacks"]["cublaslt"]
    rows = table_of_attributes()
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named <= {*known["attributes"], *known["scale modes"]}
    # All ways to scale, but the one for FP4 and the experimental one.
    assert {*known["scale modes"]} - named == {"VEC16_UE4M3", "PER_BATCH_SCALAR_32F"}

    def everything(a, b, bias, a_scale, b_scale, d_scale):
        d = jax.nn.relu(scaled_dot(a, b, a_scale, b_scale, jnp.bfloat16) + bias)
        return to_e4m3(d, d_scale), jnp.max(jnp.abs(d)).astype(jnp.float32)

    one = jax.ShapeDtypeStruct((), jnp.float32)
    codes = jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn)
    bias = jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    (call,) = fp8_calls(aot_compile(everything, codes, codes, bias, one, one, one))
    fields = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert fields == {"scale_mode", "damax_output", "precision_config", "epilogue"}
    assert fields <= gemm_config(call).keys()
    without = [row[0] for row in rows if row[1] == "none"]
    assert without == ["`OUTER_VEC_32F`", "`VEC128_32F`, `BLK128x128_32F`"]


def test_the_kernel_needs_triton_alone():
    tree = ast.parse(stacked.KERNEL.read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported == {"triton", "triton.language"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_the_record_is_of_the_versions_that_make_stacks_installs():
    """NumPy's is that of whoever records."""
    versions = RECORDS["stacks"]["packages"]
    asked = {name: v for name, v in stacks.PACKAGES.items() if name != "numpy"}
    assert asked.items() <= versions.items()
    assert {f"{name}=={version}" for name, version in asked.items()} < {*stacks.ENVIRONMENT.install}


@pytest.mark.skipif(not NIGHTLY, reason="installs 5 GB: NIGHTLY=1 does")
def test_other_stacks_do_what_is_recorded():
    """All but the bits of PyTorch's sums, whose order depends on the CPU."""
    try:
        python = stacks.ENVIRONMENT.make()
    except NotMadeError as error:
        if error.unreachable:
            pytest.skip(str(error))
        raise
    again = stacks.found(python)
    for part, value in again.items():
        recorded = RECORDS["stacks"][part]
        if part == "results":
            value, recorded = (
                {name: one for name, one in each.items() if name.startswith("triton")}
                for each in (value, recorded)
            )
            value = {name: one for name, one in value.items() if name.endswith("whole")}
            recorded = {name: recorded[name] for name in value}
        assert value == recorded, part


# The runs of chapter 13 ---------------------------------------------------------------------------


OTHERS = "bf16", "blocks", "delayed, tensor core"


@pytest.mark.parametrize(
    "name", ["delayed", *(pytest.param(name, marks=nightly) for name in OTHERS)]
)
def test_a_run_begins_as_recorded(name):
    """Its first steps. A CPU of another kind adds in another order: a code beside the other moves
    an amax by a twentieth."""
    again = train.result(train.Task(name, 0), count=train.TOGETHER)
    recorded = RECORDS["trained"]["ways"][name][0]
    assert again["losses"] == pytest.approx(recorded["losses"][:1], rel=1e-3)
    if "amaxes" in recorded:
        for layer in train.WATCHED:
            for before, now in zip(recorded["amaxes"][layer], again["amaxes"][layer], strict=True):
                assert now == pytest.approx(before[: train.TOGETHER], rel=0.1)


def test_tasks_have_files_of_their_own():
    every = train.tasks()
    assert len({task.file for task in every}) == len(every) == len(set(every))


def test_jumps_are_steps_above_all_that_the_scale_was_made_of():
    rising = [float(n) for n in range(20)]
    assert train._jumps(rising) == 19 and train._jumps(rising[::-1]) == 0
    assert train._jumps([5.0] + [1.0] * 16 + [2.0]) == 1  # 5 is 17 steps back, and forgotten
    assert train._jumps([5.0] + [1.0] * 15 + [2.0]) == 0


@nightly
def test_a_killed_recording_goes_on_where_it_was(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tools.records import train\n"
        "if __name__ == '__main__':\n"
        "    tasks = [train.Task('bf16', seed) for seed in range(3)]\n"
        "    train.run_missing(Path(sys.argv[1]), tasks)\n"
    )
    script = tmp_path / "record.py"
    script.write_text(code)
    parts = tmp_path / "parts"
    command = [sys.executable, str(script), str(parts)]
    environment = os.environ | {"PYTHONPATH": str(train.ROOT)}
    first = subprocess.Popen(command, env=environment, start_new_session=True)
    while not (parts / "bf16_0.json").exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = (parts / "bf16_0.json").stat().st_mtime_ns
    subprocess.run(command, env=environment, check=True)
    assert (parts / "bf16_0.json").stat().st_mtime_ns == kept
    every = [json.loads((parts / f"bf16_{seed}.json").read_text()) for seed in range(3)]
    recorded = RECORDS["trained"]["ways"]["bf16"][:3]
    for again, before in zip(every, recorded, strict=True):
        assert again["losses"][0] == pytest.approx(before["losses"][0], rel=1e-3)
