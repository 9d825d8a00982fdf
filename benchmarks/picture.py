"""The picture of the README, docs/barriers.svg: losses on the way from A to B, as they are and aligned, and what
regression makes of the two.

python benchmarks/picture.py  (minutes on two cores)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hf_align
from hf_align.running.data import load_data
from hf_align.running.evaluate import Comparison, Evaluator, Path1D
from hf_align.running.network import Network

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data" / "eval_lm_kjv.safetensors"
PAIRS = {"GPT-2, 3 layers": "gpt2", "Llama, 3 layers": "llama"}
POINTS = 11
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 190, 46, 46, 64
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; font-size: 14px }
  .axis { stroke: #999 } .line { fill: none; stroke-width: 2.5 }
  .naive { stroke: #b5541c } .aligned { stroke: #1c6fb5 } .naive-text { fill: #b5541c } .aligned-text { fill: #1c6fb5 }
  .merge, .merge-text { fill: #1a7f45 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ccc } .naive { stroke: #f0935a } .aligned { stroke: #66b3f0 }
    .naive-text { fill: #f0935a } .aligned-text { fill: #66b3f0 } .merge, .merge-text { fill: #5cc98a }
  }
"""


@dataclass(frozen=True)
class Pair:
    """What was found for two models.

    Attributes:
        lines: losses on the way from one to the other.
        merged: the loss of what regression makes of them.
    """

    title: str
    lines: Comparison
    merged: float

    @classmethod
    def of(cls, title: str, a: Path, b: Path) -> Pair:
        alignment = hf_align.align(b, to=a)
        merged = hf_align.merge([a, b], method="regression", align=alignment)
        weights = {name: weight.detach() for name, weight in merged.named_parameters()}
        loss = Evaluator(Network(merged.config), load_data(DATA, None, merged.config)).loss(weights)
        return cls(title, hf_align.evaluate(a, b, DATA, points=POINTS, align=alignment), loss)

    @property
    def above(self) -> float:
        """How far the merge is above the mean of its models."""
        ends = self.lines.naive.losses
        return self.merged - (ends[0] + ends[-1]) / 2


def panel(pair: Pair, left: float, low: float, high: float) -> str:
    """One pair of models.

    Args:
        left: where it begins.
        low, high: losses at its lower and upper edge.
    """

    def at(share: float, loss: float) -> tuple[float, float]:
        return left + share * WIDTH, TOP + (high - loss) / (high - low) * HEIGHT

    def curve(path: Path1D, kind: str) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, path.lambdas, path.losses))
        return f'<polyline class="line {kind}" points="{points}"/>'

    def words(loss: float, kind: str, text: str, below: int) -> str:
        x, y = at(0.5, loss)
        return f'<text class="{kind}-text" x="{x:.1f}" y="{y + below:.1f}" text-anchor="middle">{text}</text>'

    bottom, found, (x, y) = TOP + HEIGHT, pair.lines, at(0.5, pair.merged)
    return "\n".join([
        f'<text class="title" x="{left}" y="{TOP - 28}">{pair.title}</text>',
        f'<path class="axis" fill="none" d="M{left} {TOP} V{bottom} H{left + WIDTH}"/>',
        *(f'<text x="{left - 6}" y="{at(0, loss)[1] + 4:.1f}" text-anchor="end">{loss}</text>'
          for loss in range(round(low), round(high) + 1)),
        f'<text x="{left}" y="{bottom + 18}">A</text>',
        f'<text x="{left + WIDTH / 2}" y="{bottom + 18}" text-anchor="middle">share of B in the average</text>',
        f'<text x="{left + WIDTH}" y="{bottom + 18}" text-anchor="end">B</text>',
        curve(found.naive, "naive"), curve(found.aligned, "aligned"),
        f'<circle class="merge" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        words(max(found.naive.losses), "naive", f"averaged as they are: barrier {found.naive.barrier:.2f}", -8),
        words(max(found.aligned.losses), "aligned", f"aligned: {found.aligned.barrier:.2f}", -8),
        words(pair.merged, "merge", f"and by regression: {pair.above:.2f}", 18),
    ])  # fmt: skip


def picture(pairs: Sequence[Pair]) -> str:
    losses = [loss for pair in pairs for path in (pair.lines.naive, pair.lines.aligned) for loss in path.losses]
    low, high = int(min(losses)), int(max(losses)) + 1
    across = LEFT + len(pairs) * (WIDTH + GAP) - GAP + 14
    shown = [panel(pair, LEFT + i * (WIDTH + GAP), low, high) for i, pair in enumerate(pairs)]
    label = "Loss on held-out text along the line between two models of different seeds"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {TOP + HEIGHT + 30}" role="img">',
        f"<title>{label}</title>", f"<style>{STYLE}</style>", *shown,
        f'<text x="{LEFT}" y="{TOP - 12}">loss (nats per token)</text>', "</svg>",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    found = []
    for title, family in PAIRS.items():
        pair = Pair.of(title, *(ROOT / "examples" / "models" / family / seed for seed in "01"))
        barriers = pair.lines.naive.barrier, pair.lines.aligned.barrier, pair.above
        print(f"{title}: barrier {', '.join(f'{b:.3f}' for b in barriers)} (as they are, aligned, by regression)")
        found.append(pair)
    (ROOT / "docs" / "barriers.svg").write_text(picture(found), encoding="utf-8")
