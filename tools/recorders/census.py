"""How much of a model each FP8 library has a Hopper multiply in FP8: `make census` measures.

A layer, an MLP and a decoder block are written in each library as its documentation says, and
compiled for chips that are not there; in some of the ways also the MLP as one of several experts,
and divided over GPUs; and whole decoders where a library has one. What became of their matmuls goes
into notebooks/results/census.json, with where it comes from. Chapter 11 and "What a model becomes"
read that file. A library that loses FP8 is a changed row, which `make census` prints. The programs
of the largest models are kept beside it, in notebooks/results/programs.

Each way is measured in a process of its own, several at a time: what one library imports or sets is
none of another's business.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import gzip
import importlib.util
import math
import os
import re
import subprocess
import sys
import tomllib
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fp8lens import inspect, mesh
from fp8lens.bill.bill import Bill
from fp8lens.hlo.parse import parse_shape
from fp8lens.hlo.replica_groups import SUMS
from fp8lens.targets import TARGETS
from helpers.explorers.models import program_name
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tools.environments import ROOT, run, variables
from tools.recorders.data import RESULTS, Record, first_line, locked, measured_by, pinned

import fp8_nnx
from fp8_linear import Amaxes, fp8_linear

LIBRARIES = (
    "flax",
    "qwix",
    "aqtp",
    "keras",
    "keras-hub",
    "haliax",
    "equinox",
    "dm-haiku",
    "maxtext",
)
BEFORE = "0.11.2"  # the JAX beside the lock's
WAYS = Path(__file__).with_name("ways.toml")
AT_ONCE = 3  # processes: XLA's compiler takes up to 3 GB in each. On two cores the third uses waits
# They take an amax of rows or tiles, at which XLA was seen to abort, and so does the softmax of a
# forward pass. fp8lens compiles such a program twice, first in another process. With `isolate` it
# compiles there alone.
ISOLATED = ("qwix", "aqtp", "maxtext")

# All models for cuBLASLt on an H100, with both releases of JAX; with the newer the block, which has
# what the others have, for the rest too, and the decoders for two of them.
MODELS, PASSES = ("layer", "MLP", "block"), ("forward", "training")
OTHERS = (("H100", "triton"), ("H100", "auto"), ("B200", "cublaslt"))
LARGEST = ("block", "decoder")
BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 4, 1024, 2048, 8192, 16
LAYERS, VOCABULARY = 4, 32_000  # of a decoder

# With the newer JAX, for cuBLASLt on an H100, and with what they cost in memory, on the wire and
# again: the MLP as one of EXPERTS, each with LENGTH tokens that a router has sent it; the experts'
# matmuls as `ragged_dot`; and the MLP under `jax.checkpoint`, fully sharded over so many GPUs. A
# library's own experts have a router, and three matmuls each.
COSTLY = ("experts", "ragged", "sharded", "routed")
EXPERTS, TOP, GPUS = 8, 2, 4

e4m3, e5m2, f32, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), bf16)
PERMUTED = jax.ShapeDtypeStruct((EXPERTS, 1, LENGTH, WIDTH), bf16)
ROWS = jax.ShapeDtypeStruct((EXPERTS * LENGTH, WIDTH), bf16)
Written = tuple[Callable, Any]  # a function of a state and of x, and the shapes of the state
Made = tuple[
    Callable, tuple, dict[str, Any]
]  # a function, its arguments' shapes, how to compile it


def program(make: Callable[[str, bool], Any], model: str, train: bool) -> Made:
    """The program of a model in a library's layers, forward or with its gradients. A library's own
    decoder has a loss of its own, and `make` returns its whole program.
    """
    if model == "decoder":
        return make(model, train)
    apply, state = make("MLP" if model in ("experts", "sharded") else model, train)
    if model == "experts":
        several = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((EXPERTS, *leaf.shape), leaf.dtype), state
        )
        return both(jax.vmap(apply), several, PERMUTED, train)
    if model == "sharded":
        return divided(*both(jax.checkpoint(apply), state, X, train)[:2])
    return both(apply, state, ROWS if model == "ragged" else X, train)


def both(apply: Callable, state: Any, x: jax.ShapeDtypeStruct, train: bool) -> Made:
    """`apply(state, x)`; in training a loss of it, and its gradients by the state and by x, as a
    layer below asks for them. What an optimizer makes of them is the same with each library, and
    left out.
    """

    def loss(state, x, target):
        return jnp.mean(jnp.square(apply(state, x).astype(f32) - target))

    if not train:
        return apply, (state, x), {}
    y = jax.eval_shape(apply, state, x)
    step = jax.value_and_grad(loss, (0, 1), allow_int=True)
    return step, (state, x, jax.ShapeDtypeStruct(y.shape, f32)), {}


def divided(step: Callable, arguments: tuple) -> Made:
    """A training step, fully sharded: the tokens by the batch, and each weight and its gradient
    over the first dimension that divides. What has one dimension is everywhere: biases, scales,
    histories.
    """

    def part(leaf):
        divides = [size % GPUS == 0 for size in leaf.shape]
        if leaf.ndim < 2 or not any(divides):
            return P()
        return P(*[None] * divides.index(True), "data")

    def kept(leaf):
        return leaf if leaf.ndim < 2 else jax.lax.with_sharding_constraint(leaf, part(leaf))

    def on_all(*arguments):
        loss, gradients = step(*arguments)
        return loss, jax.tree.map(kept, gradients)

    specs = tuple(jax.tree.map(part, argument) for argument in arguments)
    return on_all, arguments, {"mesh_shape": {"data": GPUS}, "in_specs": specs}


# By hand ----------------------------------------------------------------------------------------

WEIGHTS = {
    "layer": {"up": (WIDTH, HIDDEN)},
    "MLP": {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)},
}
WEIGHTS["block"] = {**{name: (WIDTH, WIDTH) for name in "qkvo"}, **WEIGHTS["MLP"]}


def norm(x: jax.Array) -> jax.Array:
    """RMS norm, without a weight."""
    wide = x.astype(f32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)).astype(
        x.dtype
    )


def written_out(
    model: str, dense: Callable[[str, jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """The three models, of whatever `dense(name, x)` multiplies with: causal attention, gelu, RMS
    norms.
    """
    if model == "layer":
        return dense("up", x)
    if model == "MLP":
        return dense("down", jax.nn.gelu(dense("up", x)))
    h = norm(x)
    q, k, v = (dense(name, h).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    x = x + dense("o", jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
    return x + written_out("MLP", dense, norm(x))


def of_weights(
    model: str, dtype: Any, kept: Mapping[str, Any], product: Callable[[dict[str, Any], Any], Any]
) -> Written:
    """A model whose layers keep a weight [N, K] of that type, a bf16 bias and `kept`, and multiply
    rows by `product(what a layer keeps, rows)`.
    """
    state = {
        name: {
            "w": jax.ShapeDtypeStruct((n, k), dtype),
            "b": jax.ShapeDtypeStruct((n,), bf16),
            **kept,
        }
        for name, (k, n) in WEIGHTS[model].items()
    }

    def dense(state, name, x):
        y = product(state[name], x.reshape(-1, x.shape[-1])) + state[name]["b"]
        return y.reshape(*x.shape[:-1], -1)

    return lambda state, x: written_out(model, functools.partial(dense, state), x), state


def by_hand(model: str, train: bool) -> Written:
    """Chapter 09's layer: f32 weights as [N, K], a bf16 bias, and delayed scaling."""
    history: Any = jax.ShapeDtypeStruct((16,), f32)

    def product(its, rows):
        return fp8_linear(rows, its["w"], its["amaxes"])

    return of_weights(model, f32, {"amaxes": Amaxes(history, history, history)}, product)


def ahead(model: str, train: bool) -> Written:
    """Chapter 03's: weights kept in E4M3, constant scales."""
    scale = jax.ShapeDtypeStruct((), f32)

    def product(its, rows):
        q = to_e4m3(rows, 1 / its["x_scale"])
        return scaled_dot(q, its["w"], its["x_scale"], its["w_scale"], bf16)

    return of_weights(model, e4m3, {"x_scale": scale, "w_scale": scale}, product)


def haiku(model: str, train: bool) -> Written:
    """Chapter 09's product in modules of Haiku, which has no FP8."""
    import haiku as hk

    class Fp8Linear(hk.Module):
        def __init__(self, to, name):
            super().__init__(name)
            self.to = to

        def __call__(self, x):
            k = x.shape[-1]
            w = hk.get_parameter("w", (self.to, k), f32, hk.initializers.VarianceScaling())
            b = hk.get_parameter("b", (self.to,), f32, jnp.zeros)
            amaxes = Amaxes(
                *(hk.get_parameter(f"amax_{of}", (16,), f32, jnp.zeros) for of in "xwg")
            )
            return (fp8_linear(x.reshape(-1, k), w, amaxes) + b.astype(bf16)).reshape(
                *x.shape[:-1], -1
            )

    sizes = {name: n for name, (_, n) in WEIGHTS[model].items()}
    made = hk.without_apply_rng(
        hk.transform(
            lambda x: written_out(model, lambda name, x: Fp8Linear(sizes[name], name)(x), x)
        )
    )
    return made.apply, jax.eval_shape(made.init, jax.random.key(0), X)


def equinox(model: str, train: bool) -> Written:
    """Flax's product in modules of Equinox, which has no FP8: a scale and a history of each operand
    beside them.
    """
    import equinox as eqx

    class Fp8Linear(eqx.Module):
        weight: Any
        bias: Any
        kept: dict[str, jax.ShapeDtypeStruct]

        def __call__(self, x):
            y = fp8_ops.fp8_scaled_dot_general(
                x,
                self.weight.astype(bf16),
                (((x.ndim - 1,), (0,)), ((), ())),
                preferred_element_type=bf16,
                quantize_compute_type=bf16,
                **self.kept,
            )
            return y + self.bias.astype(bf16)

    sizes = {"scale": (1,), "amax_history": (1024,)}
    kept = {
        f"{side}_{what}": jax.ShapeDtypeStruct(size, f32)
        for side in ("lhs", "rhs", "grad")
        for what, size in sizes.items()
    }
    state = {
        name: Fp8Linear(jax.ShapeDtypeStruct(size, f32), jax.ShapeDtypeStruct(size[1:], f32), kept)
        for name, size in WEIGHTS[model].items()
    }
    return lambda state, x: written_out(model, lambda name, x: state[name](x), x), state


# Flax, and what works on Flax's modules ---------------------------------------------------------


class Layer(nn.Module):
    """One layer."""

    general: Any = None

    @nn.compact
    def __call__(self, x):  # noqa: D102 - what the class says
        return nn.Dense(HIDDEN, dtype=bf16, dot_general_cls=self.general)(x)


class MLP(nn.Module):
    """Two layers, and gelu between them."""

    general: Any = None

    @nn.compact
    def __call__(self, x):  # noqa: D102 - what the class says
        dense = functools.partial(nn.Dense, dtype=bf16, dot_general_cls=self.general)
        return dense(WIDTH)(nn.gelu(dense(HIDDEN)(x)))


class Block(nn.Module):
    """A decoder block."""

    general: Any = None
    einsum: Any = None

    @nn.compact
    def __call__(self, x):  # noqa: D102 - what the class says
        attention = nn.MultiHeadDotProductAttention(
            HEADS,
            dtype=bf16,
            qkv_dot_general_cls=self.general,
            out_dot_general_cls=self.general,
            qk_attn_weights_einsum_cls=self.einsum,
            attn_weights_value_einsum_cls=self.einsum,
        )
        x = x + attention(nn.RMSNorm(dtype=bf16)(x), mask=nn.make_causal_mask(x[..., 0]))
        return x + MLP(self.general)(nn.RMSNorm(dtype=bf16)(x))


class Ragged(nn.Module):
    """Experts as matmuls of groups of rows; how many each has is data."""

    @nn.compact
    def __call__(self, x):  # noqa: D102 - what the class says
        groups = self.variable("groups", "sizes", jnp.zeros, (EXPERTS,), jnp.int32).value

        def dense(name, x, to):
            size = (EXPERTS, x.shape[-1], to)
            w = self.param(name, nn.initializers.lecun_normal(), size).astype(bf16)
            return jax.lax.ragged_dot(x, w, groups, preferred_element_type=bf16)

        return dense("down", nn.gelu(dense("up", x, HIDDEN)), WIDTH)


def linen(
    model: str,
    train: bool,
    general: Any = None,
    einsum: Any = None,
    rngs: bool = False,
    quantize: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Written:
    """Flax's layers with that class for their `dot_general_cls`, and the whole as `quantize`
    returns it.
    """
    modules = {
        "layer": Layer(general),
        "MLP": MLP(general),
        "block": Block(general, einsum),
        "ragged": Ragged(),
    }
    made = quantize(modules[model])
    x = ROWS if model == "ragged" else X
    state = jax.eval_shape(made.init, {"params": jax.random.key(0)}, x)
    keys = {"params": jax.random.key(1)} if rngs else None

    def apply(state, x):
        y = made.apply(state, x, rngs=keys, mutable=["quant_stats", "aqt"])
        return y[0]

    return apply, state


def flax(model: str, train: bool, general: str, einsum: str | None = None) -> Written:
    """Flax's own classes of FP8, by name: for layers, and for attention's einsums."""
    of_einsums = getattr(fp8_ops, einsum) if einsum else None
    return linen(model, train, getattr(fp8_ops, general), of_einsums)


def of_nnx(model: str, train: bool) -> Written:
    """Flax NNX with `fp8_nnx` of notebooks/recipes: its layers, each with an Fp8Dot of its own."""

    def linear(of, to):
        return nnx.Linear(of, to, dtype=bf16, dot_general=fp8_nnx.Fp8Dot(), rngs=nnx.Rngs(0))

    class Mlp(nnx.Module):
        def __init__(self):
            self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

        def __call__(self, x):
            return self.down(nnx.gelu(self.up(x)))

    class Decoder(nnx.Module):
        def __init__(self):
            self.norm, self.norm2 = (
                nnx.RMSNorm(WIDTH, dtype=bf16, rngs=nnx.Rngs(0)) for _ in range(2)
            )
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, dtype=bf16, decode=False, rngs=nnx.Rngs(0)
            )
            for name in ("query", "key", "value", "out"):
                getattr(self.attention, name).dot_general = nnx.data(fp8_nnx.Fp8Dot())
            self.mlp = Mlp()

        def __call__(self, x):
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.mlp(self.norm2(x))

    make = {"layer": lambda: linear(WIDTH, HIDDEN), "MLP": Mlp, "block": Decoder}[model]
    parts: Any = nnx.split(nnx.eval_shape(make), nnx.RngState, ...)
    graph, rest, state = parts
    return lambda state, x: nnx.merge(graph, rest, state)(x), state


def qwix(model: str, train: bool, ptq: bool = False, **rule: Any) -> Written:
    """A rule, for all modules unless it names some: in training, or of weights quantized ahead."""
    import qwix

    provider, kind = qwix.QtProvider, qwix.QtRule
    if ptq:
        provider, kind = qwix.PtqProvider, qwix.QuantizationRule
    rules = [kind(**{"module_path": ".*", "weight_qtype": e4m3, "act_qtype": e4m3} | rule)]
    return linen(model, train, quantize=lambda module: qwix.quantize_model(module, provider(rules)))


def aqt_config(
    forward: str, backward: str = "", tensor: bool = False, dots: Any = None, bound: float = 0
) -> Any:
    """A configuration of AQT for FP8, without random rounding; `tensor`: one scale for each;
    `dots`: the type of their results; `bound`: a constant one in place of an amax.
    """
    from aqt.jax.v2 import config

    cfg = config.config_fwd_fp8(forward)
    if backward:
        config.set_bits(cfg, forward, forward, backward, forward, backward, forward)
    if dots:
        config.set_accumulator_dtype(cfg, dots, dots, dots)
    if bound:
        config.set_constant_calibration(cfg, bound)
    if tensor:
        for raw in (cfg.fwd, cfg.dlhs, cfg.drhs):
            for side in (raw.dg_quantizer.lhs, raw.dg_quantizer.rhs):
                side.calib_shared_axes = "per_tensor"
    config.set_stochastic_rounding(cfg, False, False, "jax.uniform")
    return cfg


def aqt(
    model: str, train: bool, backward: bool = False, einsum: bool = False, tensor: bool = False
) -> Written:
    """AQT's own configuration of FP8; `backward` too; attention's einsums too; results of dots in
    bf16 and one scale for each `tensor`.
    """
    from aqt.jax.v2.flax import aqt_flax

    cfg = aqt_config("e4m3", "e5m2" if backward else "", tensor, bf16 if tensor else None)
    general, products = (
        functools.partial(made, cfg) for made in (aqt_flax.AqtDotGeneral, aqt_flax.AqtEinsum)
    )
    return linen(model, train, general, products if einsum else None, rngs=True)


def by_rules(module: Any, config: Any, *inputs: Any) -> Any:
    """A module by the rules of qwix that MaxText makes of its configuration, for all layers."""
    import qwix
    from maxtext.layers import quantizations

    rules = [
        dataclasses.replace(rule, module_path=".*")  # ours has not its decoder's names
        for rule in quantizations.get_quantization_rule(config)
    ]
    return qwix.quantize_model(module, qwix.QtProvider(rules), *inputs)


def maxtext(model: str, train: bool, quantization: str, with_qwix: bool = False) -> Written:
    """What MaxText gives its own layers for `quantization=...`, with what its base.yml has for the
    rest: a class for Linen's `dot_general_cls`; or, for `use_qwix_quantization=true`, rules. It
    imports pathwaysutils.
    """
    from maxtext.layers import quantizations

    absmax = dict.fromkeys(
        (f"{of}_quantization_calibration_method" for of in ("weight", "act", "bwd")), "absmax"
    )
    config = types.SimpleNamespace(
        quantization=quantization,
        use_qwix_quantization=with_qwix,
        use_batch_split_schedule=False,
        constant_bound_config=[],
        replicate_quant_scale=False,
        quantize_router_proj=True,
        quantize_logits_proj=False,
        quantize_mtp=False,
        weight_sparsity_n=None,
        weight_sparsity_m=None,
        quantization_local_shard_count=1,
        te_comm_gemm_overlap="disabled",
        **absmax,
    )
    if with_qwix:
        return linen(model, train, quantize=lambda module: by_rules(module, config))
    made = quantizations.configure_quantization(config)
    return linen(model, train, made.dot_general_cls(), rngs=True)


OF_AXIS = {"stage": "ici_pipeline_parallelism"}  # the setting of an axis with another name
OF_MAXTEXT: dict[str, Any] = {
    "base_emb_dim": WIDTH,
    "base_mlp_dim": HIDDEN,
    "per_device_batch_size": BATCH,
    "max_target_length": LENGTH,
}


def config_of_maxtext(file: str | Path = "", overrides: Sequence[str] = (), **settings: Any) -> Any:
    """MaxText's configuration for a GPU: of that file, without one of its own base.yml, with
    overrides as on its command line, and these settings. Raises ValueError where MaxText refuses
    one.
    """
    import maxtext as package
    from maxtext.configs import pyconfig

    return pyconfig.initialize(
        ["", str(file or Path(package.__file__).parent / "configs" / "base.yml"), *overrides],
        run_name="census",
        enable_checkpointing=False,
        skip_jax_distributed_system=True,
        hardware="gpu",
        **settings,
    )


def maxtext_experts(model: str, train: bool, rule: bool = False, **settings: Any) -> Written:
    """MaxText's own layer of experts, its router included, for a GPU: with these settings, and for
    the rest what its base.yml has. Only `megablox`, a kernel for TPUs, is off, as in its
    configurations for GPUs. With `rule` its rules of qwix are applied, to all modules. It imports
    drjax, grain, omegaconf, tokamax and transformers.
    """
    from maxtext.layers import initializers, moe, quantizations

    config = config_of_maxtext(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        base_moe_mlp_dim=HIDDEN,
        base_num_decoder_layers=1,
        megablox=False,
        **OF_MAXTEXT,
        **settings,
    )
    one = mesh("H100", dict.fromkeys(config.mesh_axes, 1))

    def make():
        layer = moe.RoutedMoE(
            config,
            EXPERTS,
            TOP,
            one,
            initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
            ("embed", "mlp"),
            nnx.Rngs(0),
            intermediate_dim=HIDDEN,
            weight_dtype=f32,
            dtype=bf16,
            quant=quantizations.configure_quantization(config),
        )
        if not rule:
            return layer
        return by_rules(layer, config, jnp.zeros(X.shape, X.dtype))

    with one:
        parts: Any = nnx.split(nnx.eval_shape(make), nnx.RngState, ...)
    graph, keys, state = parts

    def apply(state, x):
        # Made inside: a key of another trace cannot be split here.
        drawn = jax.tree.map(fresh, keys)
        with one:
            return nnx.merge(graph, drawn, state)(x)[0]

    return apply, state


def maxtext_decoder(model: str, train: bool, **settings: Any) -> Made:
    """MaxText's own decoder with these settings, LAYERS layers deep, and its own loss."""
    sizes: dict[str, Any] = {
        "base_num_decoder_layers": LAYERS,
        "base_num_query_heads": HEADS,
        "base_num_kv_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "vocab_size": VOCABULARY,
        "attention": "dot_product",
        **OF_MAXTEXT,
    }
    config = config_of_maxtext(**sizes | settings)
    return decoder_of(config, mesh("H100", dict.fromkeys(config.mesh_axes, 1)), train)


def decoder_of(config: Any, over: Mesh, train: bool) -> Made:
    """The decoder of MaxText's configuration on a mesh of chips: a forward pass, or its loss and
    what its training step takes gradients by, the parameters and what FP8 overwrites with a
    gradient. It imports sympy and tiktoken.
    """
    from flax.core.spmd import logical_axis_rules
    from flax.nnx import variablelib
    from maxtext.trainers.pre_train.train import loss_fn
    from maxtext.utils.maxtext_utils import get_input_data_sharding, get_shaped_batch
    from maxtext.utils.model_creation_utils import create_nnx_abstract_model

    overwritten = variablelib.variable_type_from_name(
        "_overwrite_with_gradient", allow_register=True
    )
    with over:
        _, made = create_nnx_abstract_model(config, over)
        data = get_shaped_batch(config, get_input_data_sharding(config, over))
    parts: Any = nnx.split(made, nnx.Param, overwritten, nnx.RngState, ...)
    graph, weights, scales, keys, rest = parts

    def merged(weights, scales, rest):
        return nnx.merge(graph, weights, scales, jax.tree.map(fresh, keys), rest)

    def forward(weights, scales, rest, data):
        with over, logical_axis_rules(config.logical_axis_rules):
            return merged(weights, scales, rest)(
                data["inputs"],
                data["inputs_position"],
                data["inputs_segmentation"],
                enable_dropout=False,
            )

    def loss(weights, scales, rest, data):
        with over, logical_axis_rules(config.logical_axis_rules):
            return loss_fn(merged(weights, scales, rest), config, dict(data), None, None)[0]

    step = jax.value_and_grad(loss, (0, 1)) if train else forward
    return step, (weights, scales, rest, data), {}


def fresh(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A key, or a count of draws that begins."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


# Others -----------------------------------------------------------------------------------------


def of_keras(made: Any) -> tuple[list, list]:
    """The shapes of a Keras model's variables: those that are trained, and the rest."""

    def shapes(variables: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(one.value.shape, one.value.dtype) for one in variables]

    return shapes(made.trainable_variables), shapes(made.non_trainable_variables)


def keras(model: str, train: bool) -> Written:
    """Keras's layers and its `quantize("float8")`."""
    import keras

    with keras.device("cpu"):
        keras.config.set_dtype_policy("mixed_bfloat16")
        layers, gelu = keras.layers, functools.partial(keras.activations.gelu, approximate=True)
        x = inputs = keras.Input((LENGTH, WIDTH))
        if model == "block":
            h = layers.RMSNormalization()(x)
            x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, flash_attention=False)(
                h, h, use_causal_mask=True
            )
            x = x + layers.Dense(WIDTH)(
                layers.Dense(HIDDEN, activation=gelu)(layers.RMSNormalization()(x))
            )
        elif model == "MLP":
            x = layers.Dense(WIDTH)(layers.Dense(HIDDEN, activation=gelu)(x))
        else:
            x = layers.Dense(HIDDEN)(x)
        made = keras.Model(inputs, x)
        made.quantize("float8")
    trainable, rest = of_keras(made)
    fixed = [leaf for leaf in rest if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert not fixed or not train, "only floats have gradients"
    return lambda state, x: made.stateless_call(*state, x, training=train)[0], (trainable, rest)


def gemma(model: str, train: bool, fp8: bool = True) -> Made:
    """KerasHub's Gemma, LAYERS layers deep, with a quarter of its heads' keys; the loss is the
    tokens' cross entropy.
    """
    import keras
    import keras_hub

    with keras.device("cpu"):
        keras.config.set_dtype_policy("mixed_bfloat16")
        keras.config.disable_flash_attention()
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=VOCABULARY,
            num_layers=LAYERS,
            num_query_heads=HEADS,
            num_key_value_heads=HEADS // 4,
            hidden_dim=WIDTH,
            intermediate_dim=2 * HIDDEN,
            head_dim=WIDTH // HEADS,
        )
        made = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
        if fp8:
            made.quantize("float8")
    trainable, rest = of_keras(made)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

    def apply(trainable, rest, tokens):
        inputs = {"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)}
        return made.stateless_call(trainable, rest, inputs, training=train)[0]

    def loss(trainable, rest, tokens, targets):
        logits = apply(trainable, rest, tokens).astype(f32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    if not train:
        return apply, (trainable, rest, tokens), {}
    return jax.value_and_grad(loss), (trainable, rest, tokens, tokens), {}


def haliax(model: str, train: bool, fixed: bool = False) -> Written:
    """haliax's layers and its `fp8_linear_layers`. Weights are converted to bf16 in each step, as
    by a policy of mixed precision; what FP8 keeps is left as it is. `fixed` gives back three names
    that it asks JAX for.
    """
    if fixed:
        internals: Any = jax._src
        internals.tree_util.BuiltInKeyEntry = Any
        jax.core.is_constant_dim = internals.core.is_constant_dim  # type: ignore[attr-defined]
        internals.numpy.lax_numpy._einsum = internals.numpy.einsum._einsum
    import equinox as eqx
    import haliax as hax
    from haliax import nn as hnn
    from haliax.quantization import Fp8Config, OverwriteWithGradient, fp8_linear_layers

    sizes = {"batch": BATCH, "pos": LENGTH, "key_pos": LENGTH}
    sizes |= {"d": WIDTH, "f": HIDDEN, "heads": HEADS, "head": WIDTH // HEADS}
    Batch, Pos, KPos, In, Mlp, Heads, Head = map(hax.Axis, sizes, sizes.values())
    kinds = dict.fromkeys("qkv", (In, (Heads, Head)))
    kinds |= {"o": ((Heads, Head), In), "up": (In, Mlp), "down": (Mlp, In)}

    class Model(eqx.Module):
        layers: dict[str, hnn.Linear]

        def __call__(self, x):
            if model == "block":
                x = x + self.attend(hax.named(norm(x.array), x.axes))
                return x + self.mlp(hax.named(norm(x.array), x.axes))
            return self.mlp(x) if model == "MLP" else self.layers["up"](x)

        def mlp(self, x):
            return self.layers["down"](hnn.gelu(self.layers["up"](x)))

        def attend(self, x):
            q, k, v = (self.layers[name](x) for name in "qkv")
            k, v = (y.rename({"pos": "key_pos"}) for y in (k, v))
            mixed = hnn.attention.dot_product_attention(
                KPos, Head, q, k, v, mask=hnn.attention.causal_mask(Pos, KPos)
            )
            return self.layers["o"](mixed.astype(bf16))

    def make():
        layers = {
            name: hnn.Linear.init(*kinds[name], key=jax.random.key(0)) for name in WEIGHTS[model]
        }
        return fp8_linear_layers(Model(layers), Fp8Config(compute_dtype=bf16))

    state, static = eqx.partition(
        eqx.filter_eval_shape(make), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def is_fp8(leaf):
        return isinstance(leaf, OverwriteWithGradient)

    def in_bf16(leaf):
        return leaf if is_fp8(leaf) else leaf.astype(bf16)

    def apply(state, x):
        state = jax.tree.map(in_bf16, state, is_leaf=is_fp8)
        return eqx.combine(state, static)(hax.named(x, (Batch, Pos, In))).array

    return apply, state


# The census -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to have FP8. `says` is what the documentation at `url` says of it; `forward` whether
    it promises FP8 for the forward pass alone; `fixes` the way that this one is another setting of,
    and `setting` what was set. `models` are those that are compiled of it.
    """

    make: Callable[..., Written | Made]
    package: str
    says: str = ""
    url: str = ""
    forward: bool = False
    fixes: str = ""
    setting: str = ""
    models: tuple[str, ...] = MODELS


MAKERS: dict[str, Callable[..., Written | Made]] = {
    made.__name__: made
    for made in (
        linen,
        flax,
        of_nnx,
        ahead,
        by_hand,
        haiku,
        equinox,
        qwix,
        aqt,
        keras,
        gemma,
        haliax,
        maxtext,
        maxtext_experts,
        maxtext_decoder,
    )
}


@functools.cache
def ways() -> dict[str, Way]:
    """Every way by name. A new one is one entry in ways.toml, then `make census`."""
    return {name: _way(**entry) for name, entry in tomllib.loads(WAYS.read_text()).items()}


def _way(
    make: str,
    settings: Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
    models: Sequence[str] = MODELS,
    **said: Any,
) -> Way:
    made = functools.partial(MAKERS[make], **settings or {})
    return Way(made, models=(*models, *also), **said)


# There is no GPU to time on: it halves the time, and changes nothing.
OPTIONS = {"xla_gpu_autotune_level": 0}


def cases(way: str, version: str) -> list[tuple[str, str, str, str]]:
    """What is compiled of a way with that JAX: model, pass, chip, and who multiplies."""
    passes = PASSES[:1] if way in ("JAX, chapter 03", "qwix, PTQ") else PASSES
    has = ways()[way].models
    both = (*MODELS, "decoder")
    found = [(model, of, "H100", "cublaslt") for model in both if model in has for of in passes]
    if version == BEFORE:
        return found
    if "block" in has:
        found += [("block", of, *other) for other in OTHERS for of in passes]
    if "decoder" in has:  # MaxText's is made for a mesh of H100s
        others = OTHERS[1:2] if ways()[way].package == "maxtext" else OTHERS[1:]
        found += [("decoder", of, *other) for other in others for of in passes]
    for model in COSTLY:
        if model in has:
            of_it = PASSES[1:] if model == "sharded" else passes
            found += [(model, of, "H100", "cublaslt") for of in of_it]
    return found


def row(
    make: Callable[[], Made],
    isolate: bool,
    target: str,
    gemm: str,
    costs: bool = False,
    kept: Path | None = None,
) -> dict[str, Any]:
    """What the installed JAX makes of a program for that chip, as it stands in the data; and what
    it `costs`. The compiled program is written into the file `kept`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fn, args, mesh_of = make()
            how: dict[str, Any] = {"isolate": isolate, "compiler_options": OPTIONS, **mesh_of}
            seen = inspect(fn, *args, target=target, gemm=gemm, **how)
            report, ledger, reasons = seen.report, seen.ledger, seen.reasons
            more = {"peak": seen.memory.peak} | (costs_of(seen.bill) if costs else {})
            if kept:
                keep(kept, seen.compiled.as_text())
    except Exception as error:  # that it does not compile is a finding
        return {"error": first_line(error)[:300]}
    lost: collections.Counter[tuple[str, str]] = collections.Counter()
    outside: collections.Counter[str] = collections.Counter()
    runs = {line.name: line.count for line in report.rows}  # of one in a loop, several
    for one in reasons:
        if one.lost == "fp8":
            lost[one.reason, one.fix] += runs.get(one.instruction, 1)
        else:
            outside[one.lost] += runs.get(one.instruction, 1)
    return {
        "matmuls": sum(r.count for r in report.rows),
        "fp8": sum(r.count for r in report.fp8_rows),
        "flops": report.flops,
        "fp8_flops": report.fp8_flops,
        "unknown": len(seen.unknown),
        "kernels": ledger.kernels,
        "bytes": ledger.bytes_moved,
        "for_fp8_kernels": ledger.for_fp8.kernels,
        "for_fp8_bytes": ledger.for_fp8.bytes_moved,
        "lost": [[n, *said] for said, n in sorted(lost.items())],
        "outside": dict(sorted(outside.items())),
        **more,
    }


def costs_of(bill: Bill) -> dict[str, Any]:
    """What a program costs besides: the bytes that each GPU sends to gather and to sum, by the type
    on the wire; and the matmuls and quantizations that run again for the backward pass, and the
    bytes that they move.
    """
    wire: dict[str, collections.Counter[str]] = {
        "gathered": collections.Counter(),
        "summed": collections.Counter(),
    }
    for sent in bill.collectives:
        parts = [parse_shape(text) for text in sent.shapes]  # some send several arrays at once
        whole = sum(part.nbytes for part in parts)
        for part in parts:
            nbytes = sent.bytes_sent * (sent.count or 1) * part.nbytes // whole
            wire["summed" if sent.kind in SUMS else "gathered"][part.dtype] += nbytes
    return {
        **{how: dict(sorted(by_type.items())) for how, by_type in wire.items()},
        "again_matmuls": sum(line.runs for line in bill.again.of("matmul")),
        "again_quantizations": sum(line.runs for line in bill.again.of("quantize")),
        "again_bytes": bill.again.bytes_moved,
    }


def rows_of(name: str, names: Sequence[str]) -> dict[str, Any]:
    """These rows of a way. A program that several chips compile is made, traced and lowered
    once.
    """
    way = ways()[name]
    made = functools.cache(lambda model, of: program(way.make, model, of == "training"))
    found = {}
    for case in names:
        _, model, of, target, gemm = case.split(" | ")
        isolate = way.package in ISOLATED or (model, of) == ("block", "forward")
        make = functools.partial(made, model, of)
        kept = program_of(case) if jax.__version__ == locked()["jax"] else None
        found[case] = row(make, isolate, target, gemm, model in COSTLY, kept)
    return found


def program_of(case: str) -> Path | None:
    """The file of a row's program, for "Read my dump"; None of a row whose program is not kept."""
    *_, model, of, target, gemm = case.split(" | ")
    if model not in LARGEST or (of, target, gemm) != ("training", "H100", "cublaslt"):
        return None
    return RESULTS / "programs" / f"{program_name(case)}.txt.gz"


_SOURCES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_STRING = r'"(?:[^"\\]|\\.)*"'
_METADATA = re.compile(rf"metadata=\{{(op_name={_STRING})?(?:{_STRING}|[^\"}}])*\}}")


def keep(file: Path, text: str) -> None:
    """Write a compiled program, without where in which file each instruction was written: those are
    paths of this machine.
    """
    text = "\n\n".join(part for part in text.split("\n\n") if not part.startswith(_SOURCES))
    text = _METADATA.sub(r"metadata={\1}", text)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


# The record ---------------------------------------------------------------------------------------


def names_of_rows(version: str) -> list[str]:
    """The rows with that JAX."""
    return [" | ".join((way, *case)) for way in ways() for case in cases(way, version)]


def rows(names: Sequence[str]) -> dict[str, Any]:
    """These rows, with the installed JAX and libraries: those of one way in this process, those of
    several each in one of its own.
    """
    by_way: dict[str, list[str]] = {}
    for name in names:
        by_way.setdefault(name.split(" | ")[0], []).append(name)
    if len(by_way) == 1:
        return rows_of(*[*by_way.items()][0])

    def apart(own: list[str]) -> dict[str, Any]:
        return measured_by(jax.__version__, [sys.executable], RECORD.module, own)["rows"]

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        found: dict[str, Any] = {}
        for way, made in zip(by_way, pool.map(apart, by_way.values()), strict=True):
            print(f"  {way}", flush=True)
            found |= made
        return found


def environment(version: str) -> list[str]:
    """The start of a command for a Python with all libraries and that JAX."""
    other = [] if version == locked()["jax"] else pinned(version)
    return [*run("--locked", "--group=libraries", *(f"--with={one}" for one in other)), "python"]


def about() -> dict[str, dict[str, Any]]:
    """What is said of each way, for who reads the data without this file."""
    fields = ("package", "says", "url", "forward", "fixes", "setting")
    return {name: {field: getattr(way, field) for field in fields} for name, way in ways().items()}


RECORD = Record(
    name="census",
    module="tools.recorders.census",
    about="What JAX's FP8 libraries become, of the programs in tools/recorders/census.py.",
    releases=(BEFORE,),
    names=names_of_rows,
    rows=rows,
    libraries=LIBRARIES,
    environment=environment,
    beside=lambda: {"ways": about()},
)


# One's own configuration of MaxText ---------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Record the census, or with --maxtext print what a configuration becomes."""
    if "--maxtext" not in arguments:
        return RECORD.main(arguments)
    parser = argparse.ArgumentParser(
        description="What the decoder of a configuration of MaxText becomes on a chip."
    )
    parser.add_argument("--maxtext", type=Path, required=True, metavar="YAML")
    parser.add_argument("overrides", nargs="*", help="as MaxText's: quantization=fp8")
    parser.add_argument("--chip", default="H100", choices=[*TARGETS])
    parser.add_argument("--mesh", default="data=1", help="MaxText's axes: data=2,fsdp=4")
    parser.add_argument("--gemm", default="cublaslt", choices=["cublaslt", "triton", "auto"])
    parser.add_argument("--forward", action="store_true", help="not the training step")
    options = parser.parse_intermixed_args(arguments)
    options.maxtext = options.maxtext.absolute()
    if not options.maxtext.is_file():
        parser.error(f"there is no file {options.maxtext}")
    try:
        sizes = {name: int(size) for name, size in (p.split("=") for p in options.mesh.split(","))}
    except ValueError:
        parser.error(f"--mesh={options.mesh} is not as data=2,fsdp=4")
    if importlib.util.find_spec("maxtext"):
        return tell_of_maxtext(options, sizes, parser)
    # All libraries are in an environment of their own.
    command = [*environment(locked()["jax"]), "-m", RECORD.module, *arguments]
    command[command.index("--maxtext") + 1] = str(options.maxtext)
    sys.exit(subprocess.run(command, env=variables(JAX_PLATFORMS="cpu"), cwd=ROOT).returncode)


def tell_of_maxtext(
    options: argparse.Namespace, sizes: Mapping[str, int], parser: argparse.ArgumentParser
) -> None:
    """Compile a configuration's decoder, and print fp8lens' report and bill."""
    warnings.simplefilter("ignore")  # of MaxText's own code
    # MaxText divides the batch by the devices that JAX has.
    jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))
    try:
        axes = config_of_maxtext(options.maxtext, options.overrides).mesh_axes
        if unknown := sizes.keys() - {*axes}:
            parser.error(f"no axis {', '.join(unknown)} in MaxText's mesh: {', '.join(axes)}")
        whole = {axis: sizes.get(axis, 1) for axis in axes}
        parts: dict[str, Any] = {
            OF_AXIS.get(axis, f"ici_{axis}_parallelism"): n for axis, n in whole.items()
        }
        config = config_of_maxtext(options.maxtext, options.overrides, **parts)
        step, args, _ = decoder_of(config, mesh(options.chip, whole), not options.forward)
        how: dict[str, Any] = {"isolate": True, "compiler_options": OPTIONS}
        seen = inspect(step, *args, target=options.chip, gemm=options.gemm, **how)
    except Exception as error:
        sys.exit(f"MaxText, or XLA, refuses this: {first_line(error)}")
    print(seen)
    print(seen.bill)


if __name__ == "__main__":
    main(sys.argv[1:])
