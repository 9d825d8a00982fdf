"""Networks of torchvision as plain modules: python benchmarks/vision.py

One of each family, with random weights and running statistics, and a twin of it in a random basis. Needs torchvision
(`make .venv/coverage`, and `PYTHONPATH=.venv/coverage`). Writes benchmarks/vision.md.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from revision import revision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hf_align

HERE = Path(__file__)
NAMES = ("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "densenet121", "googlenet", "inception_v3",
         "squeezenet1_1", "shufflenet_v2_x1_0", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5", "efficientnet_b0",
         "regnet_y_400mf", "convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16")  # fmt: skip
SIZES = {"inception_v3": 75, "vit_b_16": 224}
MISSING = ("nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool",
           "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d",
           "_deform_conv2d_backward")  # fmt: skip
"""Ops in C++, which no network here calls, and which wheels for another torch cannot load."""
ABOUT = """# Networks of torchvision

    PYTHONPATH=.venv/coverage OMP_NUM_THREADS=1 python benchmarks/vision.py

Any `torch.nn.Module` is taken as it is ([how](../docs/modules.md)): one network of each family, random weights, in
float32. *Moved* is the share of weights that a random element of the group changes, and *twin* the largest change of
what the network answers, over the largest answer. CPU seconds of both, on one thread.

"""
HEADER = ("| network | million parameters | free spaces | ops without a rule | moved | twin | CPU s |",
          "| --- | --- | --- | --- | --- | --- | --- |")  # fmt: skip


def network(name: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    inner = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    made: nn.Module = getattr(models, name)(**inner).eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            for mean in (module.running_mean, module.bias):
                nn.init.normal_(mean, 0.0, 0.1)
            for scale in (module.running_var, module.weight):
                nn.init.uniform_(scale, 0.5, 1.5)
    last = [m for m in made.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]
    nn.init.normal_(last.weight, 0.0, 0.02)  # some begin with a head of zeros, which answers nothing
    return made


@torch.no_grad()
def answers(module: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = tree_leaves(module(x))[0]
    return found


def row(name: str) -> str:
    began = time.process_time()
    made, size = network(name), SIZES.get(name, 64)
    x = torch.randn(2, 3, size, size)
    twin = hf_align.randomize(made, seed=1, inputs=x)
    change = (answers(twin, x) - answers(made, x)).abs().max() / answers(made, x).abs().max()
    pairs = list(zip(made.parameters(), twin.parameters(), strict=True))
    moved = sum(p.numel() for p, q in pairs if float((p - q).abs().max()) > 1e-3) / sum(p.numel() for p, _ in pairs)
    spec = hf_align.symmetries(made, inputs=x).spec
    free = sum(space.group is not None for space in spec.spaces.values())
    return (f"| {name} | {sum(p.numel() for p, _ in pairs) / 1e6:.1f} | {free} of {len(spec.spaces)} | "
            f"{', '.join(spec.unknown_ops) or 'none'} | {moved:.0%} | {float(change):.0e} | "
            f"{time.process_time() - began:.0f} |")  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    library = torch.library.Library("torchvision", "FRAGMENT")
    for op in MISSING:
        library.define(f"{op}(Tensor x) -> Tensor")
    rows = []
    for name in NAMES:
        rows.append(row(name))
        print(rows[-1], flush=True)
    text = "\n".join([*HEADER, *rows]) + f"\n\nRevision {revision()}.\n"
    HERE.with_suffix(".md").write_text(ABOUT + text, encoding="utf-8")


if __name__ == "__main__":
    main()
