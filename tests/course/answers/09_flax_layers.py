"""Answers to the puzzle of chapter 09."""

import functools

import jax
import jax.numpy as jnp

from tests.course.answers import Chapter

chapter = Chapter("09_flax_layers")
OWG = "_overwrite_with_gradient"


@chapter.puzzle(lambda: chapter.accumulate)
def accumulate(answer):
    return chapter.check_accumulate(answer)


def at_once(loss, variables, batches):
    return jax.vmap(jax.grad(loss), (None, 0))(variables, batches)


def mean(tree):
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)


@accumulate.right
def one_after_the_other(loss, variables, batches):
    now, gradients = variables, []
    for batch in batches:
        gradients.append(jax.grad(loss)(now, batch))
        now = {**now, OWG: gradients[-1][OWG]}
    params = [gradient["params"] for gradient in gradients]
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *params), now[OWG]


@accumulate.right
def last_batch_first(loss, variables, batches):
    return one_after_the_other(loss, variables, batches[::-1])


@accumulate.right
def by_maximum(loss, variables, batches):
    gradients = at_once(loss, variables, batches)
    return mean(gradients["params"]), jax.tree.map(
        functools.partial(jnp.max, axis=0), gradients[OWG]
    )


@accumulate.right
def gradients_stacked(loss, variables, batches):
    def step(collection, batch):
        gradient = jax.value_and_grad(loss)(
            {"params": variables["params"], OWG: collection}, batch
        )[1]
        return gradient[OWG], gradient["params"]

    collection, params = jax.lax.scan(step, variables[OWG], batches)
    return mean(params), collection


accumulate.right(jax.jit(one_after_the_other, static_argnums=0))


@accumulate.wrong("not yet: the largest amax of the history is ")
def the_first_version(loss, variables, batches):
    gradients = mean(at_once(loss, variables, batches))
    return gradients["params"], gradients[OWG]


@accumulate.wrong("not yet: the largest amax of the history is ")
def by_sum(loss, variables, batches):
    gradients = at_once(loss, variables, batches)
    return mean(gradients["params"]), jax.tree.map(lambda g: jnp.sum(g, axis=0), gradients[OWG])


@accumulate.wrong("not yet: the largest amax of the history is ")
def of_the_first_batch(loss, variables, batches):
    gradients = at_once(loss, variables, batches)
    return mean(gradients["params"]), jax.tree.map(lambda g: g[0], gradients[OWG])


@accumulate.wrong("not yet: the scale is ")
def histories_only(loss, variables, batches):
    params, collection = by_maximum(loss, variables, batches)
    (name,) = collection
    kept = {key: value for key, value in variables[OWG][name].items() if key.endswith("scale")}
    return params, {name: collection[name] | kept}


@accumulate.wrong("not yet: the largest amax of the history is 0")
def forgets(loss, variables, batches):
    return one_after_the_other(loss, variables, batches)[0], variables[OWG]


@accumulate.wrong("not yet: the gradient is off by 300%")
def a_sum(loss, variables, batches):
    params, collection = one_after_the_other(loss, variables, batches)
    return jax.tree.map(lambda leaf: 4 * leaf, params), collection


@accumulate.wrong("not yet: the gradient is off by ")
def of_the_last_batch(loss, variables, batches):
    params = jax.grad(loss)(variables, batches[-1])["params"]
    return params, one_after_the_other(loss, variables, batches)[1]


@accumulate.wrong(
    "not yet: it must return a gradient like params, and a collection like the old one"
)
def everything_together(loss, variables, batches):
    return mean(at_once(loss, variables, batches))


@accumulate.wrong(
    "not yet: it must return a gradient like params, and a collection like the old one"
)
def a_gradient_for_each_batch(loss, variables, batches):
    gradients = at_once(loss, variables, batches)
    return gradients["params"], mean(gradients[OWG])


@accumulate.wrong(
    "not yet: it must return a gradient like params, and a collection like the old one"
)
def nothing(loss, variables, batches): ...


@accumulate.wrong("not yet: NotImplementedError")
def raises(loss, variables, batches):
    raise NotImplementedError


accumulate.wrong("not yet: TypeError")(None)
accumulate.wrong("not yet: TypeError")(lambda variables, batches: variables)
