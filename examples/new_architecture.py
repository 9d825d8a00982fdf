"""An architecture of your own: a plain torch module becomes a model of transformers, and nobody has to describe it.

B is A in another basis, so a right alignment finds A again.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import hf_align


class MixerConfig(PretrainedConfig):
    model_type = "mixer-of-mine"

    def __init__(self, vocab_size: int = 61, width: int = 32, hidden: int = 48, **more: object) -> None:
        self.vocab_size, self.width, self.hidden = vocab_size, width, hidden
        super().__init__(**{"tie_word_embeddings": False, **more})


class Mixer(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.norm = nn.RMSNorm(config.width)
        self.up, self.down = nn.Linear(config.width, config.hidden), nn.Linear(config.hidden, config.width)
        self.last = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return CausalLMOutput(logits=self.head(self.last(x)))


AutoConfig.register(MixerConfig.model_type, MixerConfig)
AutoModelForCausalLM.register(MixerConfig, Mixer)

a = Mixer(MixerConfig())
print(hf_align.symmetries(a))

alignment = hf_align.align(hf_align.randomize(a, seed=1), to=a)
before, after = alignment.distance
print(f"distance of the weights {before:.3g} -> {after:.3g}")
