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
# Of a send, as XLA makes it of a permute.
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?([\d,{}\s]*+)")
_LISTS = re.compile(r"\{\s*+(?:\{[\d,\s]*+\}\s*+,?\s*+)*+\}|")
MOST = 1 << 18  # devices: a text that names more is not a program's
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")


# Which devices ------------------------------------------------------------------------------------


def numbers(text: str | None) -> list[int]:
    """The numbers in a text, of each the first 19 digits: nothing is counted in more."""
    return [int(n[:19]) for n in re.findall(r"\d+", text or "")]


def _iota(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, 2, ... in the shape `dims`, its dimensions taken in another order, flat.
    ArithmeticError for too many.
    """
    if len(dims) > 64 or prod(dims) > MOST or sorted(order) != [*range(len(dims))]:
        raise ArithmeticError(f"{dims} in the order {order} are no devices")
    strides = [prod(dims[d + 1 :]) for d in range(len(dims))]
    steps = [strides[d] for d in order]
    indices = itertools.product(*(range(dims[d]) for d in order))
    devices = []
    for index in indices:
        devices.append(sum(n * step for n, step in zip(index, steps, strict=True)))
    return devices


def device_counts(module: HloModule) -> tuple[int, int]:
    """Replicas, and partitions of each."""
    replicas, partitions = (
        numbers(module.attributes.get(key)) for key in ("replica_count", "num_partitions")
    )
    return (replicas or [1])[0], (partitions or [1])[0]


def groups(collective: Instruction) -> list[list[int]]:
    """The devices that take part together, in each form that XLA prints: lists, iota, axes of a
    mesh (xla/hlo/ir/replica_group.h); of a permute, and of a send that XLA made of one, those that
    its pairs connect. A device's number is its partition's, of several replicas replica *
    partitions + partition. Raises HloParseError where that is not what the text has.
    """
    replicas, partitions = device_counts(collective.computation.module)
    text = collective.attributes.get("replica_groups", "").strip()
    if replicas * partitions > MOST:
        raise collective.error(f"{replicas * partitions} devices are more than a program's")
    sent = _PAIRS.search(collective.attributes.get("frontend_attributes", ""))
    if pairs := sent[1] if sent else collective.attributes.get("source_target_pairs"):
        return _connected(numbers(pairs))
    try:
        if mesh := _named_mesh(collective):
            return _mesh_groups(*mesh.groups())
        if iota := _IOTA.fullmatch(text):
            dims = numbers(iota[2])
            devices = _iota(dims, numbers(iota[3]) or [*range(len(dims))])
            return [[*group] for group in itertools.batched(devices, numbers(iota[1])[-1])]
    except (ArithmeticError, ValueError):
        raise collective.error(f"unknown replica_groups, {text}") from None
    if not _LISTS.fullmatch(text):
        raise collective.error(f"unknown replica_groups, {text}")
    found = [numbers(g) for g in re.findall(r"\{([\d,\s]+)\}", text)]
    found = found or [[*range(replicas * partitions)]]
    if not _names_replicas(collective):
        return found
    return [
        [replica * partitions + n for replica in group for n in range(partitions)]
        for group in found
        if group[-1] < replicas
    ]


def _connected(pairs: list[int]) -> list[list[int]]:
    """The devices that pairs of (source, target) connect, directly or not."""
    joined: dict[int, list[int]] = {}
    for pair in itertools.batched(pairs, 2):
        source, target = (joined.setdefault(device, [device]) for device in (pair[0], pair[-1]))
        small, large = sorted((source, target), key=len)
        if small is not large:
            large += small
            joined.update(dict.fromkeys(small, large))
    distinct = {id(group): group for group in joined.values()}
    return [sorted(group) for group in distinct.values()]


def _names_replicas(collective: Instruction) -> bool:
    """Whether the groups are of replicas, with all partitions of each: what XLA calls
    kCrossReplicaAndPartition.
    """
    attributes = collective.attributes
    return (
        collective.opcode.startswith(("all-gather", *SUMS))
        and "channel_id" in attributes
        and attributes.get("use_global_device_ids") != "true"
    )


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
    devices = prod(sizes.values())
    if devices > MOST:
        raise ArithmeticError(f"{devices} are too many devices")
    ids = [*range(devices)]
    if device_ids:
        iota = _IOTA.fullmatch(device_ids)
        ids = _iota(numbers(iota[1]), numbers(iota[3])) if iota else numbers(device_ids)
    # Those whose places differ in the chosen digits alone are together, in the order of the digits.
    together: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for place, device in enumerate(ids):
        where = [place // stride % size for stride, size in digits]
        chosen_part = sum(n * stride for n, (stride, _) in zip(where, digits, strict=True))
        together[place - chosen_part].append((where, device))
    return [[device for _, device in sorted(group)] for group in together.values()]


def axis_of(
    collective: Instruction, together: list[list[int]], mesh_shape: Mapping[str, int] | None
) -> tuple[int, str]:
    """How many devices take part together, and along which axes of the mesh, as Collective.axis
    has it. `together` is what `groups` gives. Without a `mesh_shape` the names are those that the
    text has.
    """
    size = max(map(len, together), default=1)
    if mesh_shape is None:
        mesh_shape = _own_mesh(collective)
    names = _whole_axes(together, mesh_shape or {}) if size > 1 else []
    if names:
        return size, ", ".join(names)
    devices = prod(device_counts(collective.computation.module))
    total = max(devices, 1 + max(itertools.chain(*together), default=0))
    distances = {b - a for g in together for a, b in itertools.pairwise(g)}
    stride = f", stride {min(distances)}" if len(distances) == 1 and distances != {1} else ""
    return size, f"{size} of {total}{stride}"


def _own_mesh(collective: Instruction) -> dict[str, int] | None:
    """The mesh that a collective's text names, in its own order of devices; None where it names
    none, or names axes only by number.
    """
    own = _named_mesh(collective)
    if own is None or own[2]:
        return None
    mesh = _mesh(own[1])
    return None if any(re.fullmatch(r"axis_\d+", name) for name in mesh) else mesh


def _whole_axes(together: list[list[int]], mesh_shape: Mapping[str, int]) -> list[str]:
    """The axes of a mesh that groups go along; none where some group is not the whole of them, or
    goes along others.
    """

    def coordinates(device: int) -> list[int]:
        found = []
        for size in reversed([*mesh_shape.values()]):
            device, place = divmod(device, size)
            found.append(place)
        return found[::-1]

    def along(group: list[int]) -> list[str]:
        places = zip(mesh_shape, zip(*map(coordinates, group), strict=True), strict=True)
        return [name for name, of_each in places if len({*of_each}) > 1]

    names = along(together[0])
    devices = prod(mesh_shape[name] for name in names)
    are_whole = all(len(group) == devices and along(group) == names for group in together)
    return names if are_whole else []
