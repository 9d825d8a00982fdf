"""In how many directions can the weights move without any effect on the outputs? The null space of the Jacobian."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Generator, Tensor

from hf_align.execute import run
from hf_align.trace import Program

_SEEN = 10
"""Combinations of the outputs at one position that the count looks at: no more are independent of each other there
than the model is wide."""
_CLEAR = 1e-10
"""Far above the rounding of zero, relative to the largest of the spectrum."""
_ITERATIONS = 20
_NUMBERS = 2**24
"""Numbers in memory at once, about: outputs are differentiated as many together as this allows."""


def rows_of(program: Program) -> int:
    """Outputs that one run of the program adds to the Jacobian."""
    *places, size = program.output.meta["val"].shape
    return int(torch.Size(places).numel() * min(size, _SEEN))


def without_derivative(program: Program) -> frozenset[str]:
    """The parameters that only decide choices (which experts, which tokens): no floating point way leads from them to
    the output."""
    differentiable, stack = set(), [program.output]
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if node not in differentiable and not (isinstance(value, Tensor) and not value.is_floating_point()):
            differentiable.add(node)
            stack.extend(node.all_input_nodes)
    read = {name for node, name in program.parameters.items() if node in differentiable}
    return frozenset(program.parameters.values()) - read


def jacobian(
    program: Program, weights: dict[str, Tensor], batches: Iterable[dict[str, Tensor]], rng: Generator
) -> tuple[Tensor, Tensor]:
    """The derivatives of the outputs on all batches by the weights, and which weights are read at all.

    A weight that is read and then lost (a key's bias) is a null direction; one that is not read (the row of a table
    that no input looks up), or that only decides choices, is only not there.

    Returns:
        [parameters, parameters] or less, the triangular factor of the Jacobian, float64; and [parameters], bool.
    """
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    choosing = without_derivative(program)
    reached = torch.zeros(sum(w.numel() for w in weights.values()), dtype=torch.bool)
    results = (n.meta.get("val") for n in program.graph.nodes)
    at_once = 1 + _NUMBERS // sum(r.numel() for r in results if isinstance(r, Tensor))
    rows = []
    for inputs in batches:
        with torch.enable_grad():
            values = run(program, leaves, inputs)
            output = values[program.output]
            mix = torch.randn(*output.shape, min(output.shape[-1], _SEEN), generator=rng, dtype=output.dtype)
            outputs = (output.unsqueeze(-2) @ mix).reshape(-1)
            at_readers = _noise_at_readers(program, values, rng)
        rows.append(_differentiate(outputs, leaves, at_once))
        reached |= _differentiate(at_readers.reshape(1), leaves)[0] != 0
    stacked = torch.cat(rows)
    reached &= torch.cat([torch.full((w.numel(),), n not in choosing) for n, w in weights.items()])
    sizes = stacked.norm(dim=0)  # zero for a tower that these inputs do not need
    return torch.linalg.qr(stacked / sizes[sizes > 0].median(), mode="r")[1], reached


def _noise_at_readers(program: Program, values: dict[torch.fx.Node, object], rng: Generator) -> Tensor:
    """A random combination of all values that are computed from a weight directly."""
    total = torch.zeros((), dtype=torch.float64)
    for user in dict.fromkeys(u for placeholder in program.parameters for u in placeholder.users):
        value = values.get(user)
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, Tensor) and part.requires_grad:
                total = total + (part * torch.randn(part.shape, generator=rng, dtype=part.dtype)).sum()
    return total


def _differentiate(outputs: Tensor, leaves: dict[str, Tensor], at_once: int = 1) -> Tensor:
    """[outputs, parameters], by reverse mode, some outputs together."""
    found = []
    for directions in torch.eye(len(outputs), dtype=outputs.dtype).split(at_once):
        grads = torch.autograd.grad(outputs, list(leaves.values()), directions, retain_graph=True, allow_unused=True,
                                    is_grads_batched=True)  # fmt: skip
        columns = [torch.zeros(w.shape).expand(len(directions), *w.shape) if g is None else g
                   for g, w in zip(grads, leaves.values(), strict=True)]  # fmt: skip
        found.append(torch.cat([c.reshape(len(directions), -1) for c in columns], dim=1))
    return torch.cat(found)


def nullity(triangular: Tensor, known: Tensor) -> int:
    """How many singular values are zero, cut off at the widest gap in the spectrum.

    Where `known` null directions (orthonormal, [known, parameters]) are all there are, no spectrum is needed.
    """
    if _are_null(known, triangular) and _smallest(torch.cat([triangular, triangular.norm() * known])) > _CLEAR:
        return len(known)
    return triangular.shape[1] - _rank(torch.linalg.svdvals(triangular))


def _are_null(directions: Tensor, triangular: Tensor) -> bool:
    return float((triangular @ directions.T).norm()) < _CLEAR * float(triangular.norm())


def _smallest(rows: Tensor) -> float:
    """The smallest singular value over the length of all together, from above, by inverse iteration."""
    factor = torch.linalg.qr(rows, mode="r")[1]
    if rows.shape[0] < rows.shape[1] or not bool((factor.diagonal() != 0).all()):
        return 0.0
    probe = torch.ones(rows.shape[1], 1, dtype=rows.dtype)
    for _ in range(_ITERATIONS):
        probe = torch.linalg.solve_triangular(factor.T, probe / probe.norm(), upper=False)
        probe = torch.linalg.solve_triangular(factor, probe, upper=True)
    return float(probe.norm().rsqrt() / rows.norm())


def null_space(triangular: Tensor) -> Tensor:
    """Orthonormal null directions, [nullity, parameters]."""
    _, s, vh = torch.linalg.svd(triangular)
    return vh[_rank(s) :]


def _rank(singular_values: Tensor) -> int:
    if not len(singular_values):
        return 0
    s = (singular_values / singular_values[0]).clamp_min(1e-17)
    ratios = torch.where(s[1:] < 1e-6, s[:-1] / s[1:], torch.zeros_like(s[1:]))
    return int(ratios.argmax()) + 1 if ratios.any() else len(s)
