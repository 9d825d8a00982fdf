"""The picture of the README, docs/barriers.svg: losses on the way from A to B, as they are and aligned.

python benchmarks/picture.py  (minutes on two cores)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hf_align
from hf_align.running.evaluate import Comparison, Path1D

ROOT = Path(__file__).parent.parent
PAIRS = {"GPT-2, 3 layers": "gpt2", "Llama, 3 layers": "llama"}
POINTS = 11
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 190, 46, 46, 64
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; font-size: 14px }
  .axis { stroke: #999 } .line { fill: none; stroke-width: 2.5 }
  .naive { stroke: #b5541c } .aligned { stroke: #1c6fb5 } .naive-text { fill: #b5541c } .aligned-text { fill: #1c6fb5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ccc } .naive { stroke: #f0935a } .aligned { stroke: #66b3f0 }
    .naive-text { fill: #f0935a } .aligned-text { fill: #66b3f0 }
  }
"""


def panel(title: str, found: Comparison, left: float, low: float, high: float) -> str:
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

    def words(path: Path1D, kind: str, text: str, below: int) -> str:
        x, y = at(0.5, max(path.losses))
        return f'<text class="{kind}-text" x="{x:.1f}" y="{y + below:.1f}" text-anchor="middle">{text}</text>'

    bottom = TOP + HEIGHT
    return "\n".join([
        f'<text class="title" x="{left}" y="{TOP - 22}">{title}</text>',
        f'<path class="axis" fill="none" d="M{left} {TOP} V{bottom} H{left + WIDTH}"/>',
        *(f'<text x="{left - 6}" y="{at(0, loss)[1] + 4:.1f}" text-anchor="end">{loss}</text>'
          for loss in range(round(low), round(high) + 1)),
        f'<text x="{left}" y="{bottom + 18}">A</text>',
        f'<text x="{left + WIDTH / 2}" y="{bottom + 18}" text-anchor="middle">share of B in the average</text>',
        f'<text x="{left + WIDTH}" y="{bottom + 18}" text-anchor="end">B</text>',
        curve(found.naive, "naive"), curve(found.aligned, "aligned"),
        words(found.naive, "naive", f"averaged as they are: barrier {found.naive.barrier:.2f}", -8),
        words(found.aligned, "aligned", f"aligned first: {found.aligned.barrier:.2f}", 20),
    ])  # fmt: skip


def picture(pairs: Sequence[tuple[str, Comparison]]) -> str:
    losses = [loss for _, found in pairs for path in (found.naive, found.aligned) for loss in path.losses]
    low, high = int(min(losses)), int(max(losses)) + 1
    across = LEFT + len(pairs) * (WIDTH + GAP) - GAP + 14
    shown = [panel(title, found, LEFT + i * (WIDTH + GAP), low, high) for i, (title, found) in enumerate(pairs)]
    label = "Loss on held-out text along the line between two models of different seeds"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {TOP + HEIGHT + 30}" role="img">',
        f"<title>{label}</title>", f"<style>{STYLE}</style>", *shown,
        f'<text x="{LEFT}" y="{TOP - 6}">loss (nats per token)</text>', "</svg>",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    data = ROOT / "examples" / "data" / "eval_lm_kjv.safetensors"
    found = []
    for title, family in PAIRS.items():
        a, b = (ROOT / "examples" / "models" / family / seed for seed in "01")
        found.append((title, hf_align.evaluate(a, b, data, points=POINTS)))
        print(
            f"{title}: barrier {found[-1][1].naive.barrier:.3f} as they are, {found[-1][1].aligned.barrier:.3f} aligned"
        )
    (ROOT / "docs" / "barriers.svg").write_text(picture(found), encoding="utf-8")
