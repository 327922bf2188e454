"""Axis-aligned parts of tensors, as pure data."""

from __future__ import annotations

#: (first, past the last) along each dimension of a tensor
Box = tuple[tuple[int, int], ...]


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None where that is nothing."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Box) -> tuple[slice, ...]:
    """The index of a box in a tensor that holds the box `origin`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin))


def parts(box: Box, most: int) -> list[Box]:
    """A box in pieces of at most `most` elements, cut along its first dimensions, whose order is that of the elements."""
    if volume(box) <= most:
        return [box]
    row = volume(box[1:])
    (start, stop), rest = box[0], box[1:]
    if row > most:
        return [((index, index + 1), *inner) for index in range(start, stop) for inner in parts(rest, most)]
    count = -(-(stop - start) // (most // row))
    # even pieces: a last one of a single row would be a message of its own
    edges = [start + (stop - start) * number // count for number in range(count + 1)]
    return [((first, last), *rest) for first, last in zip(edges, edges[1:])]
