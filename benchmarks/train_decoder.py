"""Trains small decoders like examples/models/llama: python benchmarks/train_decoder.py TEXT OUT --seed 4

TEXT is the King James Bible (`kjv.py` says where it is). The sizes are those of examples/models/llama/0 where nothing
else is asked for: `--vocabulary 640` trains a tokenizer of its own on the same text, `--layers 4` makes it deeper,
`--experts 4` a Mixtral with two experts for each token, `--family gpt_neox` a model of another type, `--tied` one that
writes with the table it reads with. Deterministic by seed; some minutes each on one CPU thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kjv import ROOT, TOKENIZER, pieces, verses
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Generator, Tensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

HELD_OUT = ROOT / "examples" / "data" / "eval_lm_kjv.safetensors"
LENGTH = 64
WIDTH, HEAD = 128, 32


@dataclass(frozen=True)
class Recipe:
    """How a decoder is trained: the rate rises to its peak, and falls along a cosine.

    Attributes:
        rows: sequences of each step.
    """

    steps: int
    rows: int = 32
    rate: float = 3e-3
    warmup: int = 100

    def rate_at(self, step: int) -> float:
        return self.rate * min((step + 1) / self.warmup, 0.5 * (1 + math.cos(math.pi * step / self.steps)))


def own_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of so many tokens, of which the first two are special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["[PAD]", "[MASK]"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="[PAD]", mask_token="[MASK]")


def decoder(
    vocabulary: int, layers: int, width: int = WIDTH, experts: int = 0, family: str = "llama", tied: bool = False
) -> PretrainedConfig:
    """A decoder of a family that calls its sizes as Llama does, or a Mixtral where there are experts.

    Args:
        family: the model type of transformers.
        tied: whether the logits are made with the table of the tokens.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers, "num_attention_heads": width // HEAD, "num_key_value_heads": width // HEAD // 2,
        "head_dim": HEAD, "max_position_embeddings": LENGTH, "tie_word_embeddings": tied, "bos_token_id": 0,
        "eos_token_id": 0, "pad_token_id": 0, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    if experts:
        sizes |= {"num_local_experts": experts, "num_experts_per_tok": 2, "intermediate_size": 11 * width // 8}
    return AutoConfig.for_model("mixtral" if experts else family, **sizes)


def untrained(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    # Faster than the fused kernel for heads of 32 on a CPU.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def train(model: PreTrainedModel, rows: Tensor, recipe: Recipe, seed: int) -> None:
    """AdamW."""
    rng = Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in (bar := tqdm(range(recipe.steps), unit="step", mininterval=10)):
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate_at(step)
        batch = rows[torch.randint(len(rows), (recipe.rows,), generator=rng)]
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """Mean cross-entropy (nats) per byte of each text but its first token."""
    nats = size = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :LENGTH]
        nats += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        size += len(tokenizer.decode(ids[0, 1:]).encode())
    return nats / size


def main(
    text: Path,
    out: Path,
    seed: Annotated[int, typer.Option(help="Of weights and of data.")] = 0,
    vocabulary: Annotated[int, typer.Option(help="Tokens of a tokenizer of its own; 0: that of the examples.")] = 0,
    layers: int = 3,
    experts: Annotated[int, typer.Option(help="Experts of each layer; 0: none.")] = 0,
    family: Annotated[str, typer.Option(help="The model type of transformers.")] = "llama",
    tied: Annotated[bool, typer.Option("--tied", help="Write with the table that is read with.")] = False,
    steps: int = 4000,
) -> None:
    torch.set_num_threads(1)
    common = AutoTokenizer.from_pretrained(TOKENIZER)
    held_out = load_file(HELD_OUT)["input_ids"].long()
    everything = torch.tensor(common("\n".join(verses(text.read_text(encoding="utf-8"))), verbose=False)["input_ids"])
    texts = [common.decode(piece) for piece in pieces(everything, held_out, LENGTH)]
    tokenizer = own_tokenizer(texts, vocabulary) if vocabulary else common
    tokens = torch.cat([torch.tensor(tokenizer(t, verbose=False)["input_ids"]) for t in texts])
    model = untrained(decoder(len(tokenizer), layers, WIDTH, experts, family, tied), seed)
    train(model, tokens.unfold(0, LENGTH, LENGTH), Recipe(steps), seed)
    typer.echo(f"held-out loss per byte {per_byte(model, tokenizer, [common.decode(row) for row in held_out]):.4f}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
