"""Two streams that a gain links: what is left of their rotations.

Where a LayerNorm writes γ ⊙ n + β into a stream of its own, neither stream may be rotated by itself. But a rotation X
of what it writes and a rotation X' of what it reads go together if (X + 1 wᵀ) diag(γ) - diag(γ) X' is diagonal up to
u 1ᵀ: the diagonal is taken up by the gain, n has mean zero, and the norms behind see nothing along the all-ones
direction. For any γ there is one such pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import Tensor, fx

from hf_align.symmetry.certificate.shears import Streams
from hf_align.symmetry.groups import OrthogonalFixingOnes
from hf_align.tracing.trace import operand

_ZERO = 1e-9


def linked_rotations(streams: Streams, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The pairs of rotations at these weights, each as changes of some parameters."""
    program, seen = streams.program, streams.seen_tops()
    for norm, gain in streams.gains.items():
        source = operand(norm, 0)
        if gain not in program.parameters or source is None or len(gain.users) > 1:
            continue
        factors = weights[program.parameters[gain]]
        behind, before = (_turning(streams, top, norm, weights) for top in (streams.top(norm), streams.top(source)))
        if behind is None or before is None or behind & before or (behind | before) & seen or _is_one(factors):
            continue
        for after, earlier, diagonal in _pairs(factors):
            whole = after - after.mean(0)  # what n's turn shows of it
            turns = {b: after if b == streams.top(norm) else whole for b in behind} | dict.fromkeys(before, earlier)
            yield _together(streams, turns, weights, {program.parameters[gain]: diagonal})


def free_rotations(streams: Streams, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What norms of tables of their own write: their changes by themselves, and the rotations of its stream."""
    seen = streams.seen_tops()
    for norm, own in streams.own_norms.items():
        yield from own.alone(weights)
        behind = _turning(streams, streams.top(norm), norm, weights)
        if behind is None or behind & seen:
            continue
        for turn in OrthogonalFixingOnes(len(weights[own.gain])).tangents():
            yield _together(streams, dict.fromkeys(behind, turn), weights, {})


def _together(
    streams: Streams, turns: Mapping[Hashable, Tensor], weights: Mapping[str, Tensor], own: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What changes beside `own` where each stream moves by its matrix."""
    changes = dict(own)
    for top, matrix in turns.items():
        for name, change in streams.changes(top, matrix, weights).items():
            changes[name] = changes.get(name, torch.zeros_like(change)) + change
    return changes


def _turning(streams: Streams, first: Hashable, norm: fx.Node, weights: Mapping[str, Tensor]) -> set[Hashable] | None:
    """A stream and those behind its norms, which turn with it if those have no gain; None if they cannot."""
    found, stack = {first}, [first]
    while stack:
        top = stack.pop()
        for other, gain in streams.gains.items():
            source = operand(other, 0)
            writes_it = streams.top(other) == top
            if other is norm or source is None or not (writes_it or streams.top(source) == top):
                continue
            if gain is not None and not _is_one(weights[streams.program.parameters[gain]]):
                return None
            if writes_it and streams.top(source) not in found:
                return None
            if streams.top(other) not in found:
                found.add(streams.top(other))
                stack.append(streams.top(other))
    return found


def _is_one(gain: Tensor) -> bool:
    return torch.allclose(gain, torch.ones_like(gain))


def _pairs(gain: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(X + 1 wᵀ, X', the change of the gain) for every pair beside what either stream has alone."""
    size = len(gain)
    turns, unit = OrthogonalFixingOnes(size).tangents(), torch.eye(size, dtype=gain.dtype)
    along = torch.ones(size, 1, dtype=gain.dtype) * unit[:, None, :]  # 1 wᵀ for every w
    after = torch.cat([turns, along])
    free = torch.cat([torch.diag_embed(unit), along.mT])
    columns = torch.cat([after * gain, -gain[:, None] * turns, -free]).flatten(1)
    u, s, _ = torch.linalg.svd(columns, full_matrices=True)
    for c in u[:, int((s > _ZERO * s[0]).sum()) :].T:
        first, second, diagonal = c[: len(after)], c[len(after) : len(after) + len(turns)], c[-2 * size : -size]
        yield torch.einsum("k,kij->ij", first, after), torch.einsum("k,kij->ij", second, turns), diagonal
