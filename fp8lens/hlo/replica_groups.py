"""Which devices take part in a collective together, in each form that XLA prints."""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod

from fp8lens.hlo.parse import HloModule, Instruction

SUMS = ("all-reduce", "reduce-scatter")  # which add in the type that they send
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*+)[\]>](?:, device_ids=\(([^()]*+(?:\([^()]*+\)[^()]*+)?)\))? \{([^}]*+)\}"
)
_LISTS = re.compile(r"\{\s*+(?:\{[\d,\s]*+\}\s*+,?\s*+)*+\}|")
MOST = 1 << 18  # devices: a text that names more is not a program's
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")


# Which devices ------------------------------------------------------------------------------------


def numbers(text: str | None) -> list[int]:
    return [
        int(n[:19]) for n in re.findall(r"\d+", text or "")
    ]  # nothing is counted in more digits


def _iota(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, 2, ... in the shape `dims`, its dimensions taken in another order, flat.
    ArithmeticError for too many.
    """
    if len(dims) > 64 or prod(dims) > MOST or sorted(order) != [*range(len(dims))]:
        raise ArithmeticError(f"{dims} in the order {order} are no devices")
    strides = [prod(dims[d + 1 :]) for d in range(len(dims))]
    return [
        sum(n * strides[d] for n, d in zip(index, order))
        for index in itertools.product(*(range(dims[d]) for d in order))
    ]


def device_counts(module: HloModule) -> tuple[int, int]:
    """Replicas, and partitions of each."""
    replicas, partitions = (
        numbers(module.attributes.get(key)) for key in ("replica_count", "num_partitions")
    )
    return (replicas or [1])[0], (partitions or [1])[0]


def groups(collective: Instruction) -> list[list[int]]:
    """The devices that take part together, in each form that XLA prints: lists, iota, axes of a
    mesh (xla/hlo/ir/replica_group.h); of a permute, those that its pairs connect. A device's number
    is its partition's, of several replicas replica * partitions + partition. Raises HloParseError
    where that is not what the text has.
    """
    replicas, partitions = device_counts(collective.computation.module)
    text = collective.attributes.get("replica_groups", "").strip()
    mesh, iota = _named_mesh(collective), _IOTA.fullmatch(text)
    named = prod(_mesh(mesh[1]).values()) if mesh else prod(numbers(iota[2])) if iota else 1
    if max(named, replicas * partitions) > MOST or iota and 0 in numbers(iota[1]):
        raise collective.error(f"unknown replica_groups, {text} of {replicas * partitions} devices")
    if pairs := collective.attributes.get("source_target_pairs"):
        joined: dict[int, list[int]] = {}
        for pair in itertools.batched(numbers(pairs), 2):
            small, large = sorted(
                (joined.setdefault(device, [device]) for device in (pair[0], pair[-1])), key=len
            )
            if small is not large:
                large += small
                joined.update(dict.fromkeys(small, large))
        return [sorted(g) for g in {id(g): g for g in joined.values()}.values()]
    if mesh:
        return _mesh_groups(*mesh.groups())
    if iota:
        dims = numbers(iota[2])
        return [
            list(g)
            for g in itertools.batched(
                _iota(dims, numbers(iota[3]) or [*range(len(dims))]), numbers(iota[1])[-1]
            )
        ]
    if not _LISTS.fullmatch(text):
        raise collective.error(f"unknown replica_groups, {text}")
    found = [numbers(g) for g in re.findall(r"\{([\d,\s]+)\}", text)] or [
        [*range(replicas * partitions)]
    ]
    reduces = collective.opcode.startswith(("all-gather", *SUMS))
    if (
        reduces
        and "channel_id" in collective.attributes
        and collective.attributes.get("use_global_device_ids") != "true"
    ):
        # XLA's kCrossReplicaAndPartition: the groups are of replicas, all partitions of each.
        found = [
            [r * partitions + p for r in g for p in range(partitions)]
            for g in found
            if g[-1] < replicas
        ]
    return found


def _named_mesh(collective: Instruction) -> re.Match | None:
    """Its groups as axes of a mesh: the sizes of all axes, the devices if they are in another
    order, the axes taken.
    """
    text, ids = (
        collective.attributes.get(key, "").strip() for key in ("replica_groups", "device_ids")
    )
    return _MESH.fullmatch(f"{text}, device_ids={ids}" if ids else text)


def _mesh(axes: str) -> dict[str, int]:
    return {
        name: int(size[:19]) for name, size in re.findall(r"(?<![\w.\-])([\w.\-]++)'?=(\d+)", axes)
    }


def _mesh_groups(axes: str, device_ids: str | None, chosen: str) -> list[list[int]]:
    """Groups of mesh['a'=2,'b'=4] {'b','a':(1)2}: along all of b, and the 2 of a that follow (1)
    before them.
    """
    sizes = _mesh(axes)
    after = {name: prod([*sizes.values()][n + 1 :]) for n, name in enumerate(sizes)}
    digits = []  # (stride, size)
    for name, before, size in re.findall(r"([A-Za-z_][\w.\-]*)'?(?::\((\d+)\)(\d+))?", chosen):
        part = int(size or sizes[name])
        digits.append((after[name] * (sizes[name] // (int(before or 1) * part)), part))
    ids = [*range(prod(sizes.values()))]
    if device_ids:
        iota = _IOTA.fullmatch(device_ids)
        ids = _iota(numbers(iota[1]), numbers(iota[3])) if iota else numbers(device_ids)
    found = defaultdict(list)
    for place, device in enumerate(ids):
        where = [place // stride % size for stride, size in digits]
        found[place - sum(n * stride for n, (stride, _) in zip(where, digits))].append(
            (where, device)
        )
    return [[device for _, device in sorted(group)] for group in found.values()]


def axis_of(
    collective: Instruction, together: list[list[int]], mesh_shape: Mapping[str, int] | None
) -> tuple[int, str]:
    total = prod(device_counts(collective.computation.module))
    total = max(total, 1 + max(itertools.chain(*together), default=0))
    if mesh_shape is None and (own := _named_mesh(collective)) and not own[2]:
        mesh_shape = _mesh(own[1])
        mesh_shape = (
            None if any(re.fullmatch(r"axis_\d+", name) for name in mesh_shape) else mesh_shape
        )
    size = max(map(len, together), default=1)
    mesh_shape = {name: n for name, n in (mesh_shape or {}).items() if n != 1}
    if mesh_shape and size > 1:
        strides = {name: prod([*mesh_shape.values()][n + 1 :]) for n, name in enumerate(mesh_shape)}
        along = [
            {
                name
                for name in mesh_shape
                if len({d // strides[name] % mesh_shape[name] for d in g}) > 1
            }
            for g in together
        ]
        if all(
            names == along[0] and len(g) == prod(mesh_shape[name] for name in names)
            for g, names in zip(together, along)
        ):
            return size, ", ".join(name for name in mesh_shape if name in along[0])
    steps = {b - a for g in together for a, b in itertools.pairwise(g)}
    return size, f"{size} of {total}" + (
        f", stride {min(steps)}" if len(steps) == 1 and steps != {1} else ""
    )
