"""Run, trace and compile one scaled FP8 matmul in PyTorch, torchao and Triton, without a GPU.

    TRITON_INTERPRET=1 python -m tools.recorders.measure_stacks operands.npz found.json
    python -m tools.recorders.measure_stacks ptx found.json

Triton compiles nothing where it interprets, so PTX is made in a process of its own. This runs in
the environment of tools.recorders.other_stacks. Operands come as codes and results leave as bits:
both sides need agree on nothing but E4M3 and float32.
"""

import base64
import collections
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchao.float8
from torch.nn import functional

KERNEL = Path(__file__).resolve().parent.parent.parent / "helpers/numerics/triton_kernel.py"
KEPT = 8  # rows of each result, whose bits are kept; of the whole a digest is
TILE_M, TILE_N = 64, 128

# Triton -------------------------------------------------------------------------------------------


def kernel() -> Any:
    """The kernel in its file: its package imports JAX, which this environment has not."""
    spec = importlib.util.spec_from_file_location("triton_kernel", KERNEL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scaled_matmul


# By name: how it scales, the depth of a tile, and PROMOTE.
KERNELS = {
    "tensor": ("tensor", 64, None),
    "row": ("row", 64, None),
    "block": ("block", 128, None),
    "tensor, PROMOTE=128": ("tensor", 128, 128),
    "tensor, PROMOTE=0": ("tensor", 64, 0),
}


def compiled(scales: str, depth: int, promote: int | None) -> dict[str, Any]:
    """What Triton makes of the kernel for compute capability 9.0: its PTX's instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"a": "*fp8e4nv", "b": "*fp8e4nv", "a_scale": "*fp32", "b_scale": "*fp32"}
    constants = {"K": 256, "SCALES": scales, "TILE_M": TILE_M, "TILE_N": TILE_N}
    constants |= {"TILE_K": depth, "PROMOTE": promote}
    signature = pointers | {"d": "*bf16", "M": "i32", "N": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    # Arrays begin at multiples of 16 bytes, and so do their rows.
    aligned = {(number,): [["tt.divisibility", 16]] for number in range(7)}
    source = ASTSource(kernel(), signature, constants, aligned)
    options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    lines = [line.strip() for line in made.asm["ptx"].splitlines()]
    found = (re.match(r"(?:@!?%\w+ )?([a-z]\w*(?:[.:]+\w+)+)", line) for line in lines)
    instructions = collections.Counter(match[1] for match in found if match)
    wgmma = [line for line in lines if line.startswith("wgmma.mma_async")]
    return {
        "instructions": dict(sorted(instructions.items())),
        # Of the instruction the end: after its registers the descriptors and five numbers.
        "wgmma": [re.sub(r"\{.*\}", "{...}", line) for line in wgmma],
        "shared_bytes": made.metadata.shared,
    }


def interpreted(operands: dict[str, np.ndarray], scales: str, depth: int) -> np.ndarray:
    """The kernel's result, f32[M, N], from Triton's interpreter."""
    a, b = (_codes(operands[name]) for name in "ab")
    factors = [torch.from_numpy(operands[f"{scales} {name}"].copy()) for name in "ab"]
    (m, k), n = a.shape, b.shape[0]
    d = torch.empty(m, n)
    sizes = {"TILE_M": TILE_M, "TILE_N": TILE_N, "TILE_K": depth, "PROMOTE": None}
    grid = m // TILE_M, n // TILE_N
    kernel()[grid](a, b, *factors, d, m, n, k, scales, **sizes)
    return d.numpy()


# PyTorch ------------------------------------------------------------------------------------------


def _codes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(torch.float8_e4m3fn)


def _outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Whether a call returns, and what it says if not: its type and its text."""
    try:
        call()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if not line.startswith("Exception rais")]
        return {"runs": False, "error": type(error).__name__, "said": "\n".join(lines).strip()}
    return {"runs": True}


def _layouts(device: str) -> dict[str, Callable[[], Any]]:
    """Calls of `torch._scaled_mm` by what is given: a [64, 256], b [128, 256]."""

    def empty(*shape: int, dtype: Any = torch.float8_e4m3fn) -> torch.Tensor:
        return torch.zeros(*shape, device=device, dtype=torch.float32).to(dtype)

    f32, e5m2 = torch.float32, torch.float8_e5m2
    a, b = empty(64, 256), empty(128, 256)
    one = empty(1, dtype=f32)
    rows = empty(64, 1, dtype=f32), empty(1, 128, dtype=f32)
    pieces = empty(2, 64, dtype=f32).t(), empty(2, 128, dtype=f32)
    square = empty(2, 1, dtype=f32)

    def mm(*scales: Any, a: Any = a, b: Any = b, **options: Any) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, **options)

    return {
        "tensor": mm(one, one),
        "row: [64, 1], [1, 128]": mm(*rows),
        "row: [64], [128]": mm(rows[0][:, 0], rows[1][0]),
        "1 x 128, and 1 x 128": mm(*pieces),
        "1 x 128, and 128 x 128": mm(pieces[0], square),
        "tensor, b stored [256, 128]": mm(one, one, b=empty(256, 128).t()),
        "tensor, E5M2 and E5M2": mm(one, one, a=empty(64, 256, dtype=e5m2), b=b.to(e5m2)),
        "tensor, K = 100": mm(one, one, a=empty(64, 100), b=empty(128, 100)),
        "tensor, fast accumulation": mm(one, one, use_fast_accum=True),
    }


def _recipes() -> dict[str, Callable[[], Any]]:
    """Calls of `torch.nn.functional.scaled_mm`, which names the recipe of each operand."""
    kind, none = functional.ScalingType, functional.SwizzleType.NO_SWIZZLE
    tiled = functional.SwizzleType.SWIZZLE_32_4_4
    a, b = (torch.zeros(n, 256).to(torch.float8_e4m3fn) for n in (64, 128))
    one, e8m0 = torch.ones(1), torch.ones(128 * 8).to(torch.float8_e8m0fnu)
    pieces = torch.ones(2, 64).t(), torch.ones(2, 128).t()
    given = {
        "TensorWise": (one, kind.TensorWise, one, kind.TensorWise, none),
        "RowWise": (
            torch.ones(64, 1),
            kind.RowWise,
            torch.ones(1, 128),
            kind.RowWise,
            none,
        ),
        "BlockWise1x128": (
            pieces[0],
            kind.BlockWise1x128,
            pieces[1],
            kind.BlockWise1x128,
            none,
        ),
        "BlockWise128x128": (
            pieces[0],
            kind.BlockWise1x128,
            torch.ones(1, 2),
            kind.BlockWise128x128,
            none,
        ),
        "BlockWise1x32": (e8m0, kind.BlockWise1x32, e8m0, kind.BlockWise1x32, tiled),
    }

    def mm(a_scale: Any, a_kind: Any, b_scale: Any, b_kind: Any, swizzle: Any) -> Any:
        return functional.scaled_mm(a, b.t(), a_scale, a_kind, b_scale, b_kind, swizzle, swizzle)

    return {name: functools.partial(mm, *one) for name, one in given.items()}


def layouts() -> dict[str, Any]:
    """Which scales and layouts run on the CPU, and which PyTorch's shape rules let pass on CUDA:
    with fake tensors, which have a device and no data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        on_cuda = {name: _outcome(call) for name, call in _layouts("cuda").items()}
    return {
        "cpu": {name: _outcome(call) for name, call in _layouts("cpu").items()},
        "cuda, shapes only": on_cuda,
        "functional, cpu": {name: _outcome(call) for name, call in _recipes().items()},
    }


def multiplied(operands: dict[str, np.ndarray], scales: str) -> np.ndarray:
    """What `torch._scaled_mm` makes of them on the CPU, f32[M, N]."""
    a, b = (_codes(operands[name]) for name in "ab")
    one, other = (torch.from_numpy(operands[f"{scales} {name}"].copy()) for name in "ab")
    if scales == "row":
        one, other = one.reshape(-1, 1), other.reshape(1, -1)
    return torch._scaled_mm(a, b.t(), one, other, out_dtype=torch.float32).numpy()


def result_scale() -> dict[str, list[float]]:
    """The first results of `torch._scaled_mm` in E4M3 by its `scale_result`. The exact ones are 1,
    2, 4 and 8, and the last is beyond E4M3's range.
    """
    a = torch.ones(16, 16).to(torch.float8_e4m3fn)
    b = torch.zeros(16, 16)
    b[0, :5] = torch.tensor([1.0, 2.0, 4.0, 8.0, 448.0])
    b[1, 4] = 448.0
    b = b.t().contiguous().to(torch.float8_e4m3fn)
    one, found = torch.ones(1), {}
    for factor in (1.0, 2.0, 0.5):
        d = torch._scaled_mm(
            a, b.t(), one, one, scale_result=one * factor, out_dtype=torch.float8_e4m3fn
        )
        found[f"{factor:g}"] = d[0, :5].float().tolist()
    return found


# What torch.compile and torchao make --------------------------------------------------------------


def graphs(function: Callable, *args: torch.Tensor) -> list[dict[str, Any]]:
    """The graphs that torch.compile hands its compiler, forward and backward: how often each
    operation is in them, and whether each FP8 matmul accumulates fast.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def keep(module: Any, examples: Any) -> Any:
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        names = collections.Counter(str(node.target).removesuffix(".default") for node in calls)
        fast = [
            bool(node.args[7]) if len(node.args) > 7 else bool(node.kwargs.get("use_fast_accum"))
            for node in calls
            if "_scaled_mm" in str(node.target)
        ]
        seen.append({"operations": dict(sorted(names.items())), "fast": fast})
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    result = torch.compile(function, backend=backend, fullgraph=True)(*args)
    if result.requires_grad:
        result.sum().backward()
    return seen


def linear(recipe: str | None) -> list[dict[str, Any]]:
    """The graphs of a bfloat16 linear layer, 256 to 128, as torchao's recipe converts it."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False)).to(torch.bfloat16)
    if recipe:
        config = torchao.float8.Float8LinearConfig.from_recipe_name(recipe)
        torchao.float8.convert_to_float8_training(model, config=config)
    return graphs(model, torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True))


def by_hand(a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
    """The pattern that XLA rewrites, in PyTorch."""
    wide_a, wide_b = a.to(torch.bfloat16) * a_scale, b.to(torch.bfloat16) * b_scale
    return wide_a @ wide_b.t()


def compilers() -> dict[str, Any]:
    """What a linear layer becomes, by who writes it."""
    recipes = "tensorwise", "rowwise", "rowwise_with_gw_hp"
    found = {f"torchao, {recipe}": linear(recipe) for recipe in recipes}
    a, b = (torch.zeros(n, 256).to(torch.float8_e4m3fn) for n in (64, 128))
    one = torch.ones((), dtype=torch.bfloat16)
    return {
        "nn.Linear": linear(None),
        "dequantize, then matmul": graphs(by_hand, a, b, one, one),
        **found,
    }


def scales_of_an_amax() -> dict[str, float]:
    """What torchao multiplies by before it converts to E4M3, if the amax is 3."""
    scale_of = torchao.float8.float8_utils.amax_to_scale
    given = torch.tensor(3.0), torch.float8_e4m3fn
    rounded = scale_of(*given, round_scales_to_power_of_2=True)
    return {"plain": float(scale_of(*given)), "power of two": float(rounded)}


def settings() -> dict[str, Any]:
    """What torchao's recipes choose."""
    found = {}
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = dataclasses.asdict(torchao.float8.Float8LinearConfig.from_recipe_name(recipe))
        found[recipe] = {
            "power of two": config["round_scales_to_power_of_2"],
            "fast": {
                name: config[f"gemm_config_{name}"]["use_fast_accum"]
                for name in ("output", "grad_input", "grad_weight")
            },
        }
    return found


# cuBLASLt -----------------------------------------------------------------------------------------

ENUMS = {
    "scale modes": "CUBLASLT_MATMUL_MATRIX_SCALE_",
    "attributes": "CUBLASLT_MATMUL_DESC_",
    "epilogues": "CUBLASLT_EPILOGUE_",
}


def cublaslt() -> dict[str, Any]:
    """The names that NVIDIA's header has, from the package that PyTorch installs."""
    package = importlib.metadata.distribution("nvidia-cublas")
    (header,) = (file for file in package.files or () if file.name == "cublasLt.h")
    text = Path(str(header.locate())).read_text()
    found: dict[str, Any] = {"version": package.version}
    for name, start in ENUMS.items():
        found[name] = re.findall(rf"^  {start}(\w+) = ", text, re.M)
    return found


def _kept(result: np.ndarray) -> dict[str, str]:
    """A result: a digest of all of it, and the bits of its first rows."""
    bits = np.ascontiguousarray(result, "<f4").tobytes()
    some = np.ascontiguousarray(result[:KEPT], "<f4").tobytes()
    return {
        "digest": hashlib.sha256(bits).hexdigest(),
        "rows": base64.b64encode(some).decode(),
    }


def measure(path: Path) -> dict[str, Any]:
    """All that is not PTX, from the operands in a file."""
    arrays = dict(np.load(path))
    results = {}
    for kind in ("whole", "normal"):
        operands = {
            name.split(": ")[1]: array for name, array in arrays.items() if name.startswith(kind)
        }
        for scales in ("tensor", "row"):
            results[f"torch, {scales}, {kind}"] = _kept(multiplied(operands, scales))
        for scales in ("tensor", "row", "block"):
            depth = KERNELS[scales][1]
            results[f"triton, {scales}, {kind}"] = _kept(interpreted(operands, scales, depth))
    return {
        "results": results,
        "layouts": layouts(),
        "result_scale": result_scale(),
        "graphs": compilers(),
        "settings": settings(),
        "scale_of_amax_3": scales_of_an_amax(),
        "signature": str(torch.ops.aten._scaled_mm.default._schema),
        "cublaslt": cublaslt(),
    }


def main() -> None:
    """Write what was found to a file, as JSON."""
    warnings.simplefilter("ignore")
    logging.disable()
    if sys.argv[1] == "ptx":
        found: Any = {name: compiled(*how) for name, how in KERNELS.items()}
    else:
        found = measure(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
