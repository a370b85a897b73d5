"""Walking a graph, whatever its nodes are."""

from collections.abc import Callable, Hashable, Iterable


def walk[Node: Hashable](
    start: Iterable[Node], step: Callable[[Node], Iterable[Node]], most: int | None = None
) -> dict[Node, Node | None]:
    """Every node that steps lead to, nearest first, with the one before it: None for those of
    `start`. No step is taken from a node once there are more than `most`.
    """
    reached: dict[Node, Node | None] = dict.fromkeys(start)
    todo = list(reached)
    for node in todo:
        if most is not None and len(todo) > most:
            break
        for following in step(node):
            if following not in reached:
                reached[following] = node
                todo.append(following)
    return reached
