"""Whether a model runs on data, asked before anything else is done with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_align.errors import HfAlignError, first_line
from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.network import Batch, Network, Weights
from hf_align.runtime.first_at_home import first_at_home


@torch.no_grad()
def require_runs(network: Network, weights: Weights, data: Sequence[Batch], called: object) -> None:
    """See that a model runs on data, and gives a loss where there are labels.

    Of each batch it reads the first example and those with the smallest and the largest whole numbers: the size of an
    image is that of all, and a label or a token that there is none of is at an end.

    Args:
        called: what the data is called.

    Raises:
        HfAlignError: it does not.
    """
    placed = network.placed(weights) if data else {}
    for batch in data:
        _require_runs(network, placed, batch, called)


def _require_runs(network: Network, placed: Weights, batch: Batch, called: object) -> None:
    rows = sorted({0, *(row for tensor in batch.values() for row in _ends(tensor))})
    some = {name: tensor[rows] for name, tensor in batch.items()}
    some = some if "labels" in batch else unlabelled(some, network.config)
    few = {name: tensor.to(network.device) for name, tensor in some.items()}
    try:
        with first_at_home(network.device):
            output = network(placed, few)
    except (HfAlignError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # modelling code says in its own way what it cannot read
        raise HfAlignError(f"{called}: {_model(network)} does not run on it ({first_line(error)})") from error
    if "labels" in batch and not isinstance(getattr(output, "loss", None), Tensor):
        raise HfAlignError(f"{called}: {_model(network)} gives no loss on it")


def _ends(tensor: Tensor) -> list[int]:
    """The rows with the smallest and with the largest entry; none of real numbers, all of which are inputs."""
    if tensor.is_floating_point() or not tensor.numel():
        return []
    flat = tensor.reshape(len(tensor), -1).long()
    return [int(flat.amin(1).argmin()), int(flat.amax(1).argmax())]


def _model(network: Network) -> str:
    return (network.config.architectures or [network.config.model_type])[0]
