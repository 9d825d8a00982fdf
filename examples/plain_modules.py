"""Two networks of plain torch, trained apart: the line between them before and after alignment, and their mean."""

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hf_align


def trained(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(30):
        for pixels, labels in DataLoader(data("train"), batch_size=64, shuffle=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(pixels), labels).backward()
            optimiser.step()
    return net


def data(split: str) -> TensorDataset:
    tensors = load_file(f"examples/data/{split}_digits.safetensors")
    return TensorDataset(tensors["pixel_values"], tensors["labels"].long())


a, b = trained(0), trained(1)
held_out = DataLoader(data("eval"), batch_size=100)
alignment = hf_align.align(b, to=a, inputs=torch.zeros(4, 1, 8, 8))
losses = hf_align.evaluate(a, b, held_out, points=11, align=alignment)
print(f"barrier {losses.naive.barrier:.2f} as they are, {losses.aligned.barrier:.2f} aligned")
for name, merged in (("as they are", hf_align.merge([a, b], align="none", inputs=torch.zeros(4, 1, 8, 8))),
                     ("aligned", hf_align.merge([a, b], align=alignment))):  # fmt: skip
    right = sum(int((merged(x).argmax(-1) == y).sum()) for x, y in held_out)
    print(f"the mean of both, {name}, tells {right} of 500 digits")
