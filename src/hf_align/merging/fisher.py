"""The mean of two models with every entry weighted by how much its model's predictions depend on it (Matena & Raffel,
arXiv 2111.09832): the mode of the product of two Gaussian posteriors with diagonal precision.

The diagonal of the Fisher information belongs to a basis, so that it means something only once the bases agree.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.samples import Samples
from hf_align.merging.tensors import linear
from hf_align.running.network import Batch, Network, Weights, batches, predictions

_FLOOR = 1e-3
"""Of every entry's information, as a share of the mean: entries that nothing depends on are averaged."""


def fisher_mean(models: Aligned, samples: Samples) -> Mix:
    """(1-t)·Fa·a + t·Fb·b over (1-t)·Fa + t·Fb, entry by entry; all information is held in memory, float32.

    Raises:
        HfAlignError: the network does not hold its weights.
    """
    network = samples.network
    network.must_hold("--method fisher holds as much as both models")
    first = information(network, network.placed(models.a), samples.each[0], Generator().manual_seed(0))
    second = information(network, network.placed(models.b), samples.each[1], Generator().manual_seed(0))

    def mix(name: str, weight: float) -> Tensor:
        a, b = models.a[name], models.b[name]
        if name not in first:
            return linear(a, b, weight)
        ours, theirs = (1 - weight) * first[name], weight * second[name]
        return torch.lerp(a, b, (theirs / (ours + theirs)).to(a))

    return mix


def information(network: Network, weights: Weights, inputs: Batch, rng: Generator) -> dict[str, Tensor]:
    """The diagonal of the Fisher information, scaled to a mean of one over all entries, and floored.

    One sample of the model's own predictive distribution for each prediction of each example: a class where it
    predicts classes, else a Gaussian of variance one around what it predicts. No labels are needed.

    Args:
        weights: by name in memory, on the network's device.
        inputs: arguments of `forward`, [examples, ...].

    Returns:
        floating point parameters by name, float32 on the CPU.
    """
    learnt = {n: t.detach().requires_grad_() for n, t in weights.items() if n in network.trained}
    total = {n: torch.zeros_like(t, device="cpu") for n, t in learnt.items()}
    for example in batches(inputs, 1):
        output = network({**weights, **learnt}, {k: t.to(network.device) for k, t in example.items()})
        likelihood = _log_likelihood(predictions(output), getattr(output, "logits", None) is not None, rng)
        gradients = torch.autograd.grad(likelihood, list(learnt.values()), allow_unused=True)
        for name, gradient in zip(learnt, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient.square().cpu()
    mean = sum(float(t.sum()) for t in total.values()) / sum(t.numel() for t in total.values())
    return {n: t / max(mean, 1e-30) + _FLOOR for n, t in total.items()}


def _log_likelihood(predicted: Tensor, of_classes: bool, rng: Generator) -> Tensor:
    """Of a sample of what is predicted, [..., classes] or of any shape; with a gradient by the prediction."""
    if not of_classes:
        return (predicted * torch.randn(predicted.shape, generator=rng).to(predicted)).sum()
    logs = predicted.log_softmax(-1).reshape(-1, predicted.shape[-1])
    drawn = torch.multinomial(logs.detach().exp().cpu(), 1, generator=rng).to(logs.device)
    return logs.gather(-1, drawn).sum()
