"""Which devices take part in a collective together, in each form that XLA prints
(xla/hlo/ir/replica_group.h), and along which axes of a mesh.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from math import prod

from fp8lens.hlo.parse import HloModule, Instruction

SUMS = ("all-reduce", "reduce-scatter")  # which add in the type that they send
# mesh['x'=2,'y'=4] {'x'}; device_ids, where it has them, are an attribute to our parser.
_MESH = re.compile(r"@?mesh[\[<]([^\]>]*+)[\]>]")
_AXIS = re.compile(r"([\w.\-]+)'?=(\d+)")
_TAKEN = re.compile(r"([A-Za-z_][\w.\-]*)'?(?::\((\d+)\)(\d+))?")
_IDS = re.compile(r"(?:\(((?:[^()]|\([^()]*\))*)\) )?\{([^{}]+)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"\{\s*+(?:\{[\d,\s]*+\}\s*+,?\s*+)*+\}|")
# Of a send that XLA made of a permute.
_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?([\d,{}\s]*+)")
MOST = 1 << 18  # devices: a text that names more is not a program's
Groups = list[list[int]]


def numbers(text: str | None) -> list[int]:
    """The numbers in a text, of each the first 19 digits: nothing is counted in more."""
    return [int(n[:19]) for n in re.findall(r"\d+", text or "")]


def device_counts(module: HloModule) -> tuple[int, int]:
    """Replicas, and partitions of each."""
    replicas, partitions = (
        numbers(module.attributes.get(key)) for key in ("replica_count", "num_partitions")
    )
    return (replicas or [1])[0], (partitions or [1])[0]


def groups(collective: Instruction) -> Groups:
    """The devices that take part together; of a permute, and of a send that XLA made of one, those
    that its pairs connect. A device's number is its partition's, of several replicas replica *
    partitions + partition. Raises HloParseError where that is not what the text has.
    """
    attributes = collective.attributes
    text = attributes.get("replica_groups", "").strip()
    try:
        sent = _PAIRS.search(attributes.get("frontend_attributes", ""))
        if pairs := sent[1] if sent else attributes.get("source_target_pairs"):
            return _connected(numbers(pairs))
        if axes := _MESH.match(text):
            return _mesh_groups(_sizes(axes[1]), text[axes.end() :], attributes.get("device_ids"))
        if iota := _IOTA.fullmatch(text):
            return _in_groups(_iota(iota[2], iota[3]), numbers(iota[1])[-1])
        if _LISTS.fullmatch(text):
            return _listed(collective, [numbers(g) for g in re.findall(r"\{([\d,\s]+)\}", text)])
    except (ArithmeticError, ValueError, LookupError):
        pass  # as any other text
    raise collective.error(f"unknown replica_groups, {text}")


def _in_groups(devices: list[int], size: int) -> Groups:
    return [[*group] for group in itertools.batched(devices, size)]


def _sorted(devices: int, key: Callable[[int], list[int]]) -> list[int]:
    """0, 1, 2, ... in the order of a key. ArithmeticError for too many."""
    if devices > MOST:
        raise ArithmeticError(f"{devices} are too many devices")
    return sorted(range(devices), key=key)


def _iota(dims: str, order: str | None) -> list[int]:
    """0, 1, 2, ... in the shape `dims`, its dimensions taken in another order, flat."""
    sizes = numbers(dims)
    taken = numbers(order) or [*range(len(sizes))]
    digits = [(prod(sizes[d + 1 :]), sizes[d]) for d in taken]
    if len(taken) != len(sizes):
        raise ArithmeticError(f"{order} is no order of {dims}")
    return _sorted(prod(sizes), lambda n: _places(n, digits))


def _places(device: int, digits: list[tuple[int, int]]) -> list[int]:
    """A device's place along several dimensions, each (stride, size)."""
    return [device // stride % size for stride, size in digits]


def _sizes(axes: str) -> dict[str, int]:
    """A mesh's axes with their sizes."""
    return {name: int(size[:19]) for name, size in _AXIS.findall(axes)}


def _mesh_groups(sizes: Mapping[str, int], chosen: str, device_ids: str | None) -> Groups:
    """Groups of mesh['a'=2,'b'=4] {'b','a':(1)2}: along all of b, and the 2 of a that follow (1)
    before them. `device_ids` has (the devices in their order) {the axes}.
    """
    read = _IDS.fullmatch((device_ids or chosen).strip())
    if not read:
        raise ValueError("no axes are chosen")
    strides = _strides(sizes)
    digits = []
    for name, before, size in _TAKEN.findall(read[2]):
        part = int(size or sizes[name])
        stride = strides[name] * (sizes[name] // (int(before or 1) * part))
        digits.append((stride, part))

    def apart_then_together(place: int) -> list[int]:
        places = _places(place, digits)
        common = sum(n * stride for n, (stride, _) in zip(places, digits, strict=True))
        return [place - common, *places]

    places = _sorted(prod(sizes.values()), apart_then_together)
    ids = [*range(len(places))]
    if read[1]:
        iota = _IOTA.fullmatch(read[1])
        ids = _iota(iota[1], iota[3]) if iota else numbers(read[1])
    return _in_groups([ids[place] for place in places], prod(size for _, size in digits))


def _strides(sizes: Mapping[str, int]) -> dict[str, int]:
    """The distance of two neighbours along each axis, the last counted first."""
    return {name: prod([*sizes.values()][n + 1 :]) for n, name in enumerate(sizes)}


def _listed(collective: Instruction, found: Groups) -> Groups:
    """Groups as they are listed: of devices, or of replicas with all partitions of each, which XLA
    calls kCrossReplicaAndPartition. Without a list all take part.
    """
    replicas, partitions = device_counts(collective.computation.module)
    if not found:
        return [_sorted(replicas * partitions, lambda n: [n])]
    attributes = collective.attributes
    may_be_of_replicas = collective.opcode.startswith(("all-gather", *SUMS))
    is_of_devices = attributes.get("use_global_device_ids") == "true"
    if is_of_devices or "channel_id" not in attributes or not may_be_of_replicas:
        return found
    return [[n * partitions + k for n in group for k in range(partitions)] for group in found]


def _connected(pairs: list[int]) -> Groups:
    """The devices that pairs of (source, target) connect, directly or not."""
    joined: dict[int, list[int]] = {}
    for source, target in itertools.batched(pairs, 2):
        one = joined.setdefault(source, [source])
        other = joined.setdefault(target, [target])
        small, large = sorted((one, other), key=len)
        if small is not large:
            large += small
            joined.update(dict.fromkeys(small, large))
    distinct = {id(group): group for group in joined.values()}
    return [sorted(group) for group in distinct.values()]


def axis_of(
    collective: Instruction, together: Groups, mesh_shape: Mapping[str, int] | None
) -> tuple[int, str]:
    """How many devices take part together, and along which axes of the mesh, as Collective.axis
    has it. `together` is what `groups` gives. Without a `mesh_shape` the names are those that the
    text has.
    """
    size = max(map(len, together), default=1)
    if mesh_shape is None:
        mesh_shape = _own_mesh(collective)
    names = _whole_axes(together, mesh_shape) if size > 1 else []
    if names:
        return size, ", ".join(names)
    devices = prod(device_counts(collective.computation.module))
    total = max(devices, 1 + max(itertools.chain(*together), default=0))
    distances = {b - a for g in together for a, b in itertools.pairwise(g)}
    stride = f", stride {min(distances)}" if len(distances) == 1 and distances != {1} else ""
    return size, f"{size} of {total}{stride}"


def _own_mesh(collective: Instruction) -> dict[str, int]:
    """The mesh that a collective's text names, in its own order of devices; empty where it names
    none, or names axes only by number.
    """
    own = _MESH.match(collective.attributes.get("replica_groups", "").strip())
    if own is None or "device_ids" in collective.attributes or re.search(r"axis_\d", own[1]):
        return {}
    return _sizes(own[1])


def _whole_axes(together: Groups, mesh_shape: Mapping[str, int]) -> list[str]:
    """The axes of a mesh that groups go along; none where some group is not the whole of them, or
    goes along others.
    """
    strides = _strides(mesh_shape)

    def along(group: list[int]) -> list[str]:
        names = []
        for name, size in mesh_shape.items():
            if len({device // strides[name] % size for device in group}) > 1:
                names.append(name)
        return names

    names = along(together[0])
    devices = prod(mesh_shape[name] for name in names)
    are_whole = all(len(group) == devices and along(group) == names for group in together)
    return names if are_whole else []
