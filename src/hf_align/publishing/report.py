"""One self-contained page on a merge: does it help, what moved and how far, what is pinned and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_align.matching.choices import as_chosen
from hf_align.matching.match import Match
from hf_align.publishing.provenance import ALIGNMENT, FOLDER, Provenance, home_of_alignment
from hf_align.publishing.templated import template
from hf_align.settings.options import Options
from hf_align.symmetry.elements import Element, Monomial
from hf_align.symmetry.explain import explain
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.symmetry.spec import AxisActions, SymmetrySpec, size_of
from hf_align.tracing.build import read_config

_WIDEST = 4096
"""The largest map whose eigenvalues are computed: 8192 already take minutes."""
_COLOURS = (
    "#3b7dd8",
    "#e0803a",
    "#8d5fd3",
    "#2f9e75",
    "#c9458b",
    "#b59a1d",
    "#4aa8b8",
    "#c0504d",
    "#7a8a3b",
    "#6b7a90",
)
_CHOSEN = {"residual": Options.residual, "heads": Options.heads, "spaces": ""}
"""What decides which spaces move, and what a merge that aligned nothing leaves open."""
_APART = 16
"""Units of the chart that two labels must be apart."""
_PINNED = "var(--pinned)"
_SIDES = {"naive": "var(--grey)", "aligned": "var(--blue)"}
"""What is compared; the first of them alone where nothing was aligned."""


@dataclass(frozen=True)
class Kind:
    """A space, or the same one in every layer.

    Attributes:
        name: with a star for the number of the layer.
        moved: one value from 0 to 1 for each layer: the share of entries that moved, or the mean turn over half a turn.
        said: what those values mean.
    """

    name: str
    group: str
    size: int
    colour: str
    moved: tuple[float, ...]
    said: str


@dataclass(frozen=True)
class Edge:
    """One axis of a weight, as strips side by side, each a row of (share of the axis, colour, what it is)."""

    strips: tuple[tuple[tuple[float, str, str], ...], ...]


@dataclass(frozen=True)
class Weight:
    """A weight, or the same one in every layer, with its axes."""

    name: str
    shape: str
    edges: tuple[Edge, ...]


def write_report(folder: Path, output: Path, *, specs: Path | None = None, trust_remote_code: bool = False) -> None:
    """Write the page on a merge that `hf-align merge` has written.

    Args:
        folder: the merged model.
        specs: the reviewed overrides that it was made with, if any were.

    Raises:
        HfAlignError: the folder is no merge, or its alignment belongs to another architecture.
    """
    made = Provenance.load(folder)
    spec = symmetries(read_config(home_of_alignment(folder), trust_remote_code=trust_remote_code), specs)
    residual, heads, spaces = (str(made.strategy.get(k) or d) for k, d in _CHOSEN.items())
    spec = as_chosen(spec, residual, heads, spaces.split())
    file = folder / FOLDER / ALIGNMENT
    elements = Match.load(file, spec).b if file.is_file() else {}
    colours = _colours(spec)
    output.write_text(
        template("report.html.j2").render(
            made=made,
            sides={name: _SIDES[name] for name in (_SIDES if made.is_aligned else ("naive",))},
            title=made.title,
            chart=_chart(made.comparison) if made.comparison else None,
            heat=_heat(_of_moving(spec, made.agreement)),
            features=_features(made.comparison["features"]) if made.comparison else None,
            kinds=_kinds(spec, elements, colours),
            turns=_turns(spec, elements),
            pinned=_pinned(spec),
            weights=_weights(spec, colours),
            options=made.options,
            legend=[(name, colour) for name, colour in colours.items()],
        ),
        encoding="utf-8",
    )


# Loss along the line ------------------------------------------------------------------------------------------------


def _chart(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Polylines in a box of 640 by 320, and where its ticks are."""
    paths = {name: comparison[name]["losses"] for name in ("naive", "aligned")}
    low, high = min(map(min, paths.values())), max(map(max, paths.values()))
    ticks = _ticks(low, high)
    bottom, top = min(low, ticks[0]), max(high, ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        return round(56 + 560 * x, 1), round(262 - 222 * (y - bottom) / ((top - bottom) or 1), 1)

    def line(losses: Sequence[float]) -> str:
        points = (at(x, y) for x, y in zip(comparison["lambdas"], losses, strict=True))
        return " ".join(f"{x},{y}" for x, y in points)

    def peak(name: str) -> tuple[float, float, str]:
        x, y = max(zip(comparison["lambdas"], paths[name], strict=True), key=lambda point: point[1])
        return at(x, y)[0], at(x, y)[1] - 8, f"{y:.3f}"

    ends = (comparison["loss_a"], comparison["loss_b"])
    peaks = [peak(name) for name in paths]
    return {
        "naive": line(paths["naive"]),
        "aligned": line(paths["aligned"]),
        "base": " ".join(f"{x},{y}" for x, y in (at(i, end) for i, end in enumerate(ends))),
        "peaks": peaks if abs(peaks[0][1] - peaks[1][1]) > _APART else peaks[:1],
        "y": [(at(0, tick)[1], f"{tick:g}") for tick in ticks],
        "x": [(at(x, 0)[0], f"{x:g}") for x in (0, 0.25, 0.5, 0.75, 1)],
    }


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose an interval."""
    rough = max(high - low, 1e-6) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.floor(low / step)
    return [round(i * step, 10) for i in range(first, math.ceil(high / step) + 1)]


# Weights that are alike ----------------------------------------------------------------------------------------------


def _of_moving(spec: SymmetrySpec, agreement: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Only weights that something moves."""
    return {n: v for n, v in agreement.items()
            if any(f.space for axis in spec.parameters.get(n, ()) for segment in axis for f in segment)}  # fmt: skip


def _heat(found: Mapping[str, tuple[float, float]]) -> dict[str, Any] | None:
    """Pairs of numbers, as they are and aligned, by kind of weight and by layer."""
    rows: dict[str, dict[int, tuple[str, float, float]]] = {}
    for name, (naive, aligned) in found.items():
        rows.setdefault(_starred(name), {})[_layer(name)] = (name, naive, aligned)
    if not rows:
        return None
    columns = max(max(row) for row in rows.values()) + 1
    in_layers = {kind: row for kind, row in rows.items() if "*" in kind}
    outside = {kind: row for kind, row in rows.items() if "*" not in kind}
    return {"rows": {**outside, **in_layers}, "columns": columns}


def _features(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """How features correlate, by what reads them and by layer; and their mean in each layer, as two lines."""
    readers: dict[tuple[int, float, float], list[str]] = {}
    for name, each in found.items():  # what several weights read is one feature
        readers.setdefault((_layer(name), each["naive"], each["aligned"]), []).append(name)
    heat = _heat({_joined(names): (naive, aligned) for (_, naive, aligned), names in readers.items()})
    if heat is None:
        return None
    layers = sorted({layer for kind, row in heat["rows"].items() if "*" in kind for layer in row})
    lines = {}
    for side, name in enumerate(("naive", "aligned"), start=1):
        means = []
        for layer in layers:
            values = [row[layer][side] for kind, row in heat["rows"].items() if "*" in kind and layer in row]
            means.append(sum(values) / len(values))
        lines[name] = [(round(56 + 560 * (i + 0.5) / len(layers), 1), round(192 - 170 * max(mean, 0), 1), mean)
                       for i, mean in enumerate(means)]  # fmt: skip
    every = max(1, len(layers) // 12)
    ticks = [(x, layer) for (x, _, _), layer in zip(lines["aligned"], layers, strict=True)][::every] if layers else []
    return {"heat": heat, "lines": lines, "layers": ticks}


def _joined(names: Sequence[str]) -> str:
    """Weights of one module that read the same, in one name: `layers.0.attn.q_proj, k_proj, v_proj`."""
    bare = [name.removesuffix(".weight") for name in names]
    module = bare[0].rpartition(".")[0]
    return ", ".join([bare[0], *(n.removeprefix(f"{module}.") for n in bare[1:3])]) + (", …" if len(bare) > 3 else "")


def _layer(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0


def _starred(name: str) -> str:
    """A name with a star for the number of the layer."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by what they have in common: all but the number of the layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_starred(name), []).append(name)
    return found


# What moved ----------------------------------------------------------------------------------------------------------


def _colours(spec: SymmetrySpec) -> dict[str, str]:
    return {kind: _COLOURS[i % len(_COLOURS)] for i, kind in enumerate(_by_kind(spec.spaces))}


def _kinds(spec: SymmetrySpec, elements: Mapping[str, Element], colours: Mapping[str, str]) -> list[Kind]:
    kinds = []
    for kind, names in _by_kind(spec.spaces).items():
        space = spec.spaces[names[0]]
        moves = [_moved(elements[name]) for name in names if name in elements]
        moved = tuple(value for value, _ in moves)
        said = _said(moved, moves[0][1]) if moves else "not moved"
        kinds.append(Kind(kind, space.group_name, space.size, colours[kind], moved, said))
    return kinds


def _moved(element: Element) -> tuple[float, str]:
    """How far an element is from doing nothing, from 0 to 1, and in what."""
    if isinstance(element, Monomial):
        still = element.order == torch.arange(element.order.shape[-1])
        return float((~still).double().mean()), "elsewhere"
    if element.as_matrix().shape[-1] > _WIDEST:
        return float("nan"), "turned"
    return float(_angles(element).abs().mean() / math.pi), "turned"


def _angles(element: Element) -> torch.Tensor:
    """Eigen-angles of the orthogonal part of a map, [*index, n], from -π to π."""
    left, _, right = torch.linalg.svd(element.as_matrix().double())
    return torch.linalg.eigvals(left @ right).angle()


def _said(moved: Sequence[float], what: str) -> str:
    mean = sum(moved) / len(moved)
    if what == "elsewhere":
        return f"{mean:.0%} of the entries elsewhere"
    return f"turned by {180 * mean:.0f}° on average" if mean == mean else "too wide to say"


def _turns(spec: SymmetrySpec, elements: Mapping[str, Element]) -> dict[str, Any] | None:
    """Eigen-angles of the map of the space that most weights share: on a circle, and counted by size."""
    shared = [n for n in elements if not spec.spaces[n].index]
    if not shared:
        return None
    name = max(shared, key=lambda n: len(spec.uses(n)))
    if spec.spaces[name].size > _WIDEST:
        return None
    angles = [float(a) for a in _angles(elements[name]).flatten()]
    counts = [0] * 18
    for angle in angles:
        counts[min(17, int(abs(angle) / math.pi * 18))] += 1
    points = [(round(100 + 84 * math.cos(a), 1), round(100 - 84 * math.sin(a), 1)) for a in angles]
    return {
        "name": name,
        "group": spec.spaces[name].group_name,
        "size": len(angles),
        "points": points,
        "bars": [(i, count, round(130 * count / max(counts), 1)) for i, count in enumerate(counts)],
        "mean": sum(map(abs, angles)) / len(angles) * 180 / math.pi,
    }


# What does not move, and what each weight carries ---------------------------------------------------------------------


def _pinned(spec: SymmetrySpec) -> list[tuple[str, str, list[str]]]:
    """(weight, axis, reasons), once for each kind of weight."""
    said = {type(gauge).__name__: gauge.said for gauge in spec.gauges}
    return [(kind, axis, [_short(reason, name, said) for reason in why])
            for kind, (name, *_) in _by_kind(spec.parameters).items()
            for axis, why in explain(spec, name)["pinned"].items()]  # fmt: skip


def _short(reason: str, weight: str, said: Mapping[str, str]) -> str:
    """A reason in plain words, with no more than two of the weights of other modules that it lists.

    Args:
        said: of each kind of gauge.
    """
    if found := re.fullmatch(r"fixed by (\w+): (.*)", reason):
        module = weight.rpartition(".")[0]
        elsewhere = ", ".join(name for name in found[2].split(", ") if name.rpartition(".")[0] != module)
        reason = f"{said[found[1]]}{': ' if elsewhere else ''}{elsewhere}"
    first, *others = reason.split(", ")
    return ", ".join([first, *others[:1]]) + (f" and {len(others) - 1} more" if len(others) > 1 else "")


def _weights(spec: SymmetrySpec, colours: Mapping[str, str]) -> list[Weight]:
    weights = []
    for kind, (name, *_) in _by_kind(spec.parameters).items():
        edges = tuple(_edge(axis, colours) for axis in _shown(spec.parameters[name]))
        weights.append(Weight(kind, " × ".join(map(str, spec.shape(name))), edges))
    return weights


def _shown(axes: Sequence[AxisActions]) -> Sequence[AxisActions]:
    """The two axes of a weight that say most: those that something moves, in their order."""
    moving = [axis for axis in axes if any(f.space for segment in axis for f in segment)]
    still = [axis for axis in axes if axis not in moving]
    chosen = [*moving, *still][:2]
    return [axis for axis in axes if any(axis is c for c in chosen)]


def _edge(axis: AxisActions, colours: Mapping[str, str]) -> Edge:
    """The first strip has the outermost factor of each segment, the next what is inside of it, and so on."""
    depth = max(len(segment) for segment in axis)
    strips = []
    for level in range(depth):
        strip = []
        for segment in axis:
            factor = segment[min(level, len(segment) - 1)]
            share = size_of((segment,)) / size_of(axis)
            kind = _starred(factor.space) if factor.space else ""
            strip.append((share, colours[kind] if kind else _PINNED, f"{factor.size}: {kind or 'does not move'}"))
        strips.append(tuple(strip))
    return Edge(tuple(strips))
