"""Record real programs: training and serving steps, compiled for an H100 without a GPU.

    .tools/bin/uv run --isolated --locked --group libraries \\
        --with keras-hub,jinja2,tiktoken,sympy python -m tests.programs.real.make [NAME ...]

For each it keeps what XLA dumps, as an archive: the program as written, the one that XLA's
rewriter was given, and the compiled one. `tar xf NAME.tar.xz` gives a folder that `fp8lens NAME`
reads. Names of files on this machine are cut: those of a library begin with lib/python3.

te_delayed_step and te_nvfp4_layer_step are dumps from elsewhere: a dense layer of Transformer
Engine's for an H100, and its transformer layer for a B200, as tools/recorders/engine.py compiles
it. They have the compiled program alone.
"""

import functools
import io
import lzma
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

import fp8lens
import helpers  # noqa: F401 - it puts the recipes on the path
from fp8lens.dumps import COMPILED, files_beside, ptx_of
from tests.programs import library_programs
from tools.recorders import census

import fp8_decoder
import fp8_nnx
from fp8_linear import Amaxes, fp8_linear

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
e4m3, e5m2, f32, bf16, i32 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float32,
    jnp.bfloat16,
    jnp.int32,
)
WIDTH, HIDDEN, HEADS, LAYERS, LETTERS = 256, 512, 4, 2, 512
BATCH, LENGTH = 2, 128
Made = tuple[Callable, tuple, dict[str, Any]]  # a function, its arguments' shapes, options
PROGRAMS: dict[str, Callable[[], Made]] = {}


def S(*dims: int, dtype: Any = bf16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


TOKENS = S(BATCH, LENGTH + 1, dtype=i32)


def program(make: Callable) -> Callable:
    """Adds a program under its function's name."""
    PROGRAMS[make.__name__] = make
    return make


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Of the next token, f32."""
    logits = logits.astype(f32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# Steps of the census's ways, small ----------------------------------------------------------------

SMALL = {
    "flax_dense_step": "flax: Dense, trained",
    "flax_qdq_step": "flax: quantize, dequantize, trained",
    "flax_einsum_attention_step": "flax: Fp8Einsum, trained",
    "qwix_ptq": "qwix: PTQ",
    "qwix_qt_step": "qwix: QT, E5M2 gradients",
    "qwix_qt_one_scale_step": "qwix: QT, E5M2 gradients, one scale",
    "qwix_tiles": "qwix: PTQ, small tiles",
    "aqt_step": "aqt: trained, E5M2 gradients",
    "keras_dense_step": "keras: Dense, trained",
    "haiku_delayed": "haiku: delayed scales",
}


def small(name: str) -> Made:
    fn, args = library_programs.PROGRAMS[name]()
    return fn, args, {}


for _name, _of in SMALL.items():
    PROGRAMS[_name] = functools.partial(small, _of)


# Decoders -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped-query attention with rotary places, its projections in FP8."""

    general: Any

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.DenseGeneral, use_bias=False, dtype=bf16, dot_general_cls=self.general
        )
        depth = WIDTH // HEADS
        q = dense((HEADS, depth), name="query")(x)
        k = dense((HEADS // 2, depth), name="key")(x)
        v = dense((HEADS // 2, depth), name="value")(x)
        q, k = fp8_decoder.rotated(q), fp8_decoder.rotated(k)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dense(WIDTH, axis=(-2, -1), name="out")(seen)


class Layer(nn.Module):
    """Of a decoder, as `nn.scan` takes it."""

    general: Any

    @nn.compact
    def __call__(self, x, _):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=bf16, dot_general_cls=self.general
        )
        x = x + Attention(self.general, name="attention")(nn.RMSNorm(dtype=bf16)(x))
        h = nn.RMSNorm(dtype=bf16)(x)
        gated = nn.silu(dense(HIDDEN, name="wi_0")(h)) * dense(HIDDEN, name="wi_1")(h)
        return x + dense(WIDTH, name="wo")(gated), None


class ScannedDecoder(nn.Module):
    """Layers by one scan, each computed again in the backward pass."""

    general: Any = fp8_ops.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(LETTERS, WIDTH, dtype=bf16)
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0, fp8_ops.OVERWRITE_WITH_GRADIENT: 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(self.general, name="layers")(embed(tokens), None)
        return embed.attend(nn.RMSNorm(dtype=bf16)(x))


class Decoder(nn.Module):
    """The same layers, one after the other."""

    general: Any = fp8_ops.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(LETTERS, WIDTH, dtype=bf16)(tokens)
        for n in range(LAYERS):
            x, _ = Layer(self.general, name=f"layer_{n}")(x, None)
        return nn.Dense(LETTERS, use_bias=False, dtype=bf16)(nn.RMSNorm(dtype=bf16)(x))


def linen_step(model: nn.Module, microbatches: int = 1) -> Made:
    """A training step with Optax's AdamW; what FP8 keeps is overwritten with its gradient."""
    optimizer = optax.adamw(1e-3)
    overwrite = fp8_ops.OVERWRITE_WITH_GRADIENT

    def loss(variables, tokens):
        return cross_entropy(model.apply(variables, tokens[:, :-1]), tokens)

    def gradient_of(variables, tokens):
        if microbatches == 1:
            return jax.value_and_grad(loss)(variables, tokens)

        def add(carry, part):
            variables, total, gradients = carry
            value, gradient = jax.value_and_grad(loss)(variables, part)
            variables = variables | {overwrite: gradient.pop(overwrite)}
            gradients = jax.tree.map(jnp.add, gradients, gradient["params"])
            return (variables, total + value, gradients), None

        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        parts = tokens.reshape(microbatches, -1, tokens.shape[-1])
        (variables, total, gradients), _ = lax.scan(add, (variables, jnp.float32(0), zeros), parts)
        mean = jax.tree.map(lambda g: g / microbatches, gradients)
        return total / microbatches, variables | {"params": mean}

    def step(variables, moments, tokens):
        value, gradient = gradient_of(variables, tokens)
        params = variables["params"]
        change, moments = optimizer.update(gradient["params"], moments, params)
        return gradient | {"params": optax.apply_updates(params, change)}, moments, value

    variables = jax.eval_shape(model.init, jax.random.key(0), S(BATCH, LENGTH, dtype=i32))
    moments = jax.eval_shape(optimizer.init, variables["params"])
    tokens = S(BATCH * microbatches, LENGTH + 1, dtype=i32)
    return step, (variables, moments, tokens), {}


@program
def flax_decoder_step() -> Made:
    return linen_step(Decoder())


@program
def flax_scan_remat_step() -> Made:
    return linen_step(ScannedDecoder())


@program
def flax_accumulation_step() -> Made:
    return linen_step(Decoder(), microbatches=4)


def fp8_nnx_linear(of: int, to: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A layer of NNX with the recipe's product."""
    return nnx.Linear(of, to, dtype=bf16, dot_general=fp8_nnx.Fp8Dot(), rngs=rngs)


class NnxLayer(nnx.Module):
    """Of a decoder in NNX."""

    def __init__(self, rngs):
        self.norm, self.norm2 = (nnx.RMSNorm(WIDTH, dtype=bf16, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dtype=bf16, decode=False, rngs=rngs)
        for name in ("query", "key", "value", "out"):
            getattr(self.attention, name).dot_general = nnx.data(fp8_nnx.Fp8Dot())
        self.up = fp8_nnx_linear(WIDTH, HIDDEN, rngs)
        self.down = fp8_nnx_linear(HIDDEN, WIDTH, rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxDecoder(nnx.Module):
    """Such layers, one after the other."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(LETTERS, WIDTH, dtype=bf16, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, LETTERS, dtype=bf16, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@program
def nnx_decoder_step() -> Made:
    """NNX with the recipe's product, and its step."""

    def make():
        model = NnxDecoder(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def loss(model, tokens):
        return cross_entropy(model(tokens[:, :-1]), tokens)

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        value, gradient = fp8_nnx.value_and_grad(loss)(model, tokens)
        fp8_nnx.update(model, optimizer, gradient)
        return nnx.state((model, optimizer)), value

    return step, (state, TOKENS), {}


@program
def recipe_decoder_step() -> Made:
    """notebooks/recipes/fp8_decoder.py."""
    decoder = fp8_decoder.Decoder("fp8", LETTERS, WIDTH, HEADS, HIDDEN, blocks=2)
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(
        functools.partial(fp8_decoder.new_state, decoder, optimizer), jax.random.key(0)
    )
    step = functools.partial(fp8_decoder.train_step.__wrapped__, decoder, optimizer)
    return step, (state, TOKENS), {}


@program
def maxtext_decoder_step() -> Made:
    """MaxText's own decoder and train_step: Llama's layers, by scan, with remat, `fp8`."""
    from maxtext.common import train_state_nnx
    from maxtext.trainers.pre_train import train
    from maxtext.utils import model_creation_utils

    config = census.config_of_maxtext(
        quantization="fp8",
        attention="dot_product",
        decoder_block="llama2",
        base_emb_dim=WIDTH,
        base_mlp_dim=HIDDEN,
        base_num_query_heads=HEADS,
        base_num_kv_heads=HEADS // 2,
        head_dim=WIDTH // HEADS,
        base_num_decoder_layers=LAYERS,
        vocab_size=LETTERS,
        per_device_batch_size=BATCH,
        max_target_length=LENGTH,
    )
    mesh = fp8lens.mesh("H100", dict.fromkeys(config.mesh_axes, 1))
    made = model_creation_utils.get_nnx_create_model_fn(config, mesh)

    def make():
        model = made()
        return train_state_nnx.TrainStateNNX(
            model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        )

    with mesh:
        graph, state = nnx.split(nnx.eval_shape(make))
    rows = S(BATCH, LENGTH, dtype=i32)
    data = {
        f"{of}{what}": rows
        for of in ("inputs", "targets")
        for what in ("", "_position", "_segmentation")
    }

    def train_step(state, data):
        with mesh:
            new, metrics = train.train_step(graph, config, None, None, state, data)
            return new, metrics["scalar"]["learning/loss"]

    return train_step, (state, data), {"mesh_shape": dict(mesh.shape)}


@program
def keras_hub_gemma_step() -> Made:
    """KerasHub's Gemma, quantize("float8"): loss and gradients."""
    import keras
    import keras_hub

    with keras.device("cpu"):
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = keras_hub.models.GemmaBackbone(
            vocabulary_size=LETTERS,
            num_layers=2,
            num_query_heads=HEADS,
            num_key_value_heads=1,
            hidden_dim=WIDTH,
            intermediate_dim=2 * HIDDEN,
            head_dim=WIDTH // HEADS,
        )
        model.quantize("float8")
    trainable, rest = census.of_keras(model)
    whole = [leaf for leaf in rest if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert not whole, "only floats are differentiated"

    def step(trainable, rest, tokens):
        def loss(trainable, rest):
            given = {"token_ids": tokens[:, :-1], "padding_mask": jnp.ones_like(tokens[:, :-1])}
            x, _ = model.stateless_call(trainable, rest, given, training=True)
            table = trainable[0].astype(x.dtype)
            return cross_entropy(x @ table.T, tokens)

        return jax.value_and_grad(loss, (0, 1))(trainable, rest)

    return step, (trainable, rest, TOKENS), {}


# Other steps --------------------------------------------------------------------------------------


@program
def lora_step() -> Made:
    """A frozen FP8 weight with its scale, and two thin matrices that learn."""

    def layer(x, frozen, scale, down, up, x_scale):
        q = jnp.clip(x / x_scale.astype(x.dtype), -448, 448).astype(e4m3)
        y = lax.dot(
            q.astype(bf16) * x_scale.astype(bf16), (frozen.astype(bf16) * scale.astype(bf16)).T
        )
        return y + (x @ down.astype(bf16)) @ up.astype(bf16) * 2

    def step(learnt, frozen, x, target):
        def loss(learnt):
            h = x
            for (down, up), kept in zip(learnt, frozen, strict=True):
                h = jax.nn.silu(layer(h, kept["w"], kept["scale"], down, up, kept["x_scale"]))
            return jnp.mean(jnp.square(h.astype(f32) - target))

        value, gradient = jax.value_and_grad(loss)(learnt)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, learnt, gradient), value

    scale, rank = S(dtype=f32), 16
    sizes = ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    learnt = [(S(k, rank, dtype=f32), S(rank, n, dtype=f32)) for k, n in sizes]
    frozen = [{"w": S(n, k, dtype=e4m3), "scale": scale, "x_scale": scale} for k, n in sizes]
    rows = BATCH * LENGTH
    return step, (learnt, frozen, S(rows, WIDTH), S(rows, WIDTH, dtype=f32)), {}


@program
def decode_one_token() -> Made:
    """One token through a layer: FP8 weights, and a cache of keys and values kept in FP8."""

    def dense(x, its):
        scale = its["x_scale"]
        q = jnp.clip(x.astype(f32) / scale, -448, 448).astype(e4m3)
        wide = its["w"].astype(bf16) * its["w_scale"].astype(bf16)
        return (q.astype(bf16) * scale.astype(bf16)) @ wide

    def step(weights, cache, x, place):
        q, k, v = (dense(fp8_decoder.norm(x), weights[n]).reshape(1, HEADS, -1) for n in "qkv")
        kept = []
        for was, new in zip(cache, (k, v), strict=True):
            new = jnp.clip(new[:, None], -448, 448).astype(e4m3)
            kept.append(lax.dynamic_update_slice(was, new, (0, place, 0, 0)))
        keys, values = (part.astype(bf16) for part in kept)
        scores = jnp.einsum("bhd,bthd->bht", q, keys, preferred_element_type=f32)
        seen = jnp.arange(keys.shape[1]) <= place
        chance = jax.nn.softmax(jnp.where(seen, scores / 8, -jnp.inf)).astype(bf16)
        x = x + dense(jnp.einsum("bht,bthd->bhd", chance, values).reshape(1, WIDTH), weights["o"])
        h = fp8_decoder.norm(x)
        gated = jax.nn.silu(dense(h, weights["gate"])) * dense(h, weights["up"])
        return kept, x + dense(gated, weights["down"])

    sizes = dict.fromkeys("qkvo", (WIDTH, WIDTH))
    sizes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    scale = S(dtype=f32)
    weights = {
        name: {"w": S(*size, dtype=e4m3), "w_scale": scale, "x_scale": scale}
        for name, size in sizes.items()
    }
    cache = [S(1, 512, HEADS, WIDTH // HEADS, dtype=e4m3)] * 2
    return step, (weights, cache, S(1, WIDTH), S(dtype=i32)), {}


@program
def fp8_head_step() -> Made:
    """A vocabulary's head with constant scales and capped logits, its gradients by hand."""
    x_scale, w_scale, g_scale = 100 / 448, 1.6 / 448, 0.75 / 57344

    @jax.custom_vjp
    def head(x, w):
        return forward(x, w)[0]

    def product(a, b, a_scale, b_scale, dims):
        whole = lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=bf16)
        return whole * jnp.asarray(a_scale * b_scale, bf16)

    def forward(x, w):
        x, w = (x / x_scale).astype(e4m3), (w / w_scale).astype(e4m3)
        return product(x, w, x_scale, w_scale, ((1,), (1,))), (x, w)

    def backward(saved, g):
        x, w = saved
        g = (g / g_scale).astype(e5m2)
        return (
            product(g, w, g_scale, w_scale, ((1,), (0,))),
            product(g, x, g_scale, x_scale, ((0,), (0,))),
        )

    head.defvjp(forward, backward)

    def step(w, x, targets):
        def loss(w, x):
            z = 15 * jnp.tanh(head(x, w.astype(bf16)).astype(f32) / 15)
            return optax.softmax_cross_entropy_with_integer_labels(z, targets).mean()

        return jax.value_and_grad(loss, (0, 1))(w, x)

    rows = BATCH * LENGTH
    return step, (S(1024, WIDTH, dtype=f32), S(rows, WIDTH), S(rows, dtype=i32)), {}


@program
def current_scaling_step() -> Made:
    """Two layers, each tensor quantized with its own amax: the commonest recipe."""

    def quantized(x, to):
        scale = jnp.maximum(jnp.max(jnp.abs(x)).astype(f32), 1e-12) / float(jnp.finfo(to).max)
        bound = float(jnp.finfo(to).max)
        return jnp.clip(x.astype(f32) / scale, -bound, bound).astype(to), scale

    def product(a, b, dims):
        (a, a_scale), (b, b_scale) = a, b
        return lax.dot_general(
            a.astype(bf16) * a_scale.astype(bf16),
            b.astype(bf16) * b_scale.astype(bf16),
            (dims, ((), ())),
        )

    @jax.custom_vjp
    def linear(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        saved = quantized(x, e4m3), quantized(w.astype(bf16), e4m3)
        return product(*saved, ((1,), (1,))), saved

    def backward(saved, g):
        g = quantized(g, e5m2)
        of_w = product(g, saved[0], ((0,), (0,)))
        return product(g, saved[1], ((1,), (0,))), of_w.astype(f32)

    linear.defvjp(forward, backward)

    def step(weights, x, target):
        def loss(weights):
            h = jax.nn.gelu(linear(x, weights["up"]))
            return jnp.mean(jnp.square(linear(h, weights["down"]).astype(f32) - target))

        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 1e-2 * g, weights, gradient), value

    weights = {"up": S(HIDDEN, WIDTH, dtype=f32), "down": S(WIDTH, HIDDEN, dtype=f32)}
    rows = BATCH * LENGTH
    return step, (weights, S(rows, WIDTH), S(rows, WIDTH, dtype=f32)), {}


@program
def sharded_step() -> Made:
    """Chapter 08's layers under `jax.checkpoint`, fully sharded over four GPUs."""

    def apply(weights, x):
        for its in weights:
            x = jax.nn.gelu(fp8_linear(x, its["w"], its["amaxes"]))
        return x

    def loss(weights, x, target):
        return jnp.mean(jnp.square(jax.checkpoint(apply)(weights, x).astype(f32) - target))

    history = S(16, dtype=f32)
    sizes = ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
    weights = [
        {"w": S(*size, dtype=f32), "amaxes": Amaxes(history, history, history)} for size in sizes
    ]
    rows = census.GPUS * LENGTH
    arguments = weights, S(rows, WIDTH), S(rows, WIDTH, dtype=f32)
    return census.divided(jax.value_and_grad(loss), arguments)


# Recording ----------------------------------------------------------------------------------------


def without_paths(text: str) -> str:
    """No folder of this machine in a file's name: an installed file's begins with lib/python3, ours
    in the checkout, and `fp8lens` is where it is installed.
    """
    text = re.sub(r'"/[^"\n]*/(lib/python3[^"\n]*)"', r'"\1"', text).replace(f"{ROOT}/", "")
    return text.replace('"fp8lens/', '"lib/python3.12/site-packages/fp8lens/')


def kept(name: str, texts: dict[str, str]) -> None:
    """Writes the texts, by their files' names, into the program's archive: the same bytes whenever
    it is made.
    """
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9 | lzma.PRESET_EXTREME) as archive:
        for file, text in sorted(texts.items()):
            plain = without_paths(text)
            assert not re.search(r'"/[^"\n]*\.py"', plain), file
            about = tarfile.TarInfo(f"{name}/{file}")
            about.size = len(plain.encode())
            archive.addfile(about, io.BytesIO(plain.encode()))


def record(name: str) -> None:
    """Compiles a program, and keeps what XLA dumps. PTX of Triton's kernels alone: of others HLO
    tells all.
    """
    fn, args, options = PROGRAMS[name]()
    with tempfile.TemporaryDirectory() as dump:
        asked = {
            "xla_gpu_autotune_level": 0,
            "xla_dump_to": dump,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "gemm-rewriter",
            "xla_dump_emitter_re": "^ptx$",
        }
        fp8lens.aot_compile(fn, *args, compiler_options=asked, **options)
        names = sorted(path.name for path in Path(dump).iterdir())
        compiled = next(name for name in names if name.endswith(COMPILED))
        wanted = [compiled, *files_beside(compiled, names)]
        texts = {file: (Path(dump) / file).read_text() for file in wanted}
    by_triton = set(re.findall(r"%([\w.\-]+) = .*__triton", texts[compiled]))
    entries = {re.sub(r"[.-]", "_", name) for name in by_triton}
    for file in [file for file in texts if file.endswith(".ptx")]:
        if entries.isdisjoint(ptx_of({file: texts[file]})):
            del texts[file]
    kept(name, texts)


if __name__ == "__main__":
    for _name in sys.argv[1:] or PROGRAMS:
        print(_name, flush=True)
        record(_name)
