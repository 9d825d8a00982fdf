"""How heads are paired: by the best fit of their weights, or by their circuits; and what counts how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import MODELS
from torch import Tensor

from hf_align.matching import heads
from hf_align.matching.anchors import anchored, start
from hf_align.matching.balanced import Balanced
from hf_align.matching.head_families import HeadFamily, head_families
from hf_align.matching.heads import Pairs, best_fit, likest_circuits
from hf_align.matching.memory import of_step
from hf_align.matching.metric import weighted
from hf_align.matching.stream import products_of_tables, residual, streams
from hf_align.matching.weights import match_weights
from hf_align.opening.pairs import Pair, open_pair
from hf_align.symmetry.action import act, occurrences
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.certificate.random_copy import random_elements, random_inputs, random_weights
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.elements import DUAL, PRIMAL, Element
from hf_align.symmetry.groups import RotaryCommutant
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import execute
from hf_align.tracing.trace import trace

FAMILIES = ("gpt2", "llama")
Weights = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {f: open_pair(str(MODELS / f / "0"), str(MODELS / f / "1")) for f in FAMILIES}


@pytest.fixture(scope="module")
def balanced(pairs: dict[str, Pair]) -> dict[str, Balanced]:
    return {f: Balanced.of(p.spec, p.a.weights, p.b.weights) for f, p in pairs.items()}


def rows(models: Balanced, space: str, model: int) -> tuple[Tensor, Tensor]:
    """All that writes a space inside heads, and all that reads it: [h, n, rest]."""
    found: dict[tuple[int, ...], list[Tensor]] = {PRIMAL: [], DUAL: []}
    for name in models.spec.uses(space):
        for power, part in occurrences(models.models[model][name], name, models.spec, space):
            found[power].append(part.double())
    return torch.cat(found[PRIMAL], -1), torch.cat(found[DUAL], -1)


def over_distances(spec: SymmetrySpec, space: str, read: Tensor) -> Tensor:
    """The mean of R Y Rᵀ [n, n] over rotary embeddings R, which is that over quarter turns of each plane."""
    group = spec.spaces[space].group
    for i, j in (p for planes in group.rotations.planes for p in planes) if isinstance(group, RotaryCommutant) else ():
        quarter = torch.eye(len(read), dtype=torch.float64)
        quarter[[i, j], [i, j]], quarter[i, j], quarter[j, i] = 0.0, -1.0, 1.0
        turned = [torch.linalg.matrix_power(quarter, k) for k in range(4)]
        read = torch.stack([t @ read @ t.mT for t in turned]).mean(0)
    return read


def product(spec: SymmetrySpec, space: str, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """The inner product of the circuits of two heads, from (writes, reads) [n, rest]; formed, where nothing turns."""
    (p, d), (q, e) = one, other
    if isinstance(spec.spaces[space].group, RotaryCommutant):
        return (p @ q.mT * over_distances(spec, space, d @ e.mT)).sum()
    return (p.mT @ d * (q.mT @ e)).sum()


def compared_heads(spec: SymmetrySpec, tree: HeadFamily, a: Weights, b: Weights) -> list[Pairs]:
    """Every head of A with every head of B, weight by weight."""
    return [block.pairs(slice(None), slice(None)) for block in heads._laid_out(spec, tree, a, b, {})]


def first_order(spec: SymmetrySpec, tree: HeadFamily) -> Tensor | None:
    if tree.subheads is None:
        return None
    count = spec.spaces[tree.heads].size
    return torch.arange(spec.spaces[tree.subheads].size).expand(count, count, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_are_compared_as_if_they_had_been_formed(family: str, balanced: dict[str, Balanced]) -> None:
    models, spec = balanced[family], balanced[family].spec
    tree = head_families(spec)[0]
    assert len(tree.inner) == 2
    for space in tree.inner:
        alone = replace(tree, inner=(space,))
        compared = [p for p in compared_heads(spec, alone, models.a, models.b) if p.inner == space]
        found = likest_circuits(spec, alone, compared, first_order(spec, tree))
        ours, theirs = ([(p, d) for p, d in zip(*rows(models, space, m), strict=True)] for m in (0, 1))
        for h, one in enumerate(ours):
            for i, other in enumerate(theirs):
                sizes = product(spec, space, one, one) * product(spec, space, other, other)
                expected = product(spec, space, one, other) / sizes**0.25
                torch.testing.assert_close(found[h, i].float(), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_know_no_basis_inside_a_head(family: str, balanced: dict[str, Balanced]) -> None:
    models, spec = balanced[family], balanced[family].spec
    tree = head_families(spec)[0]
    drawn = random_elements(spec, torch.Generator().manual_seed(0))
    moved = models.moved({s: drawn[s] for s in tree.inner})
    order = first_order(spec, tree)
    before, after = (compared_heads(spec, tree, models.a, b) for b in (models.b, moved))
    circuits = [likest_circuits(spec, tree, pairs, order) for pairs in (before, after)]
    fits = [best_fit(spec, tree, pairs, order) for pairs in (before, after)]
    torch.testing.assert_close(*circuits)
    assert float((fits[1] / fits[0] - 1).abs().min()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_recover_a_planted_symmetry(
    family: str, pairs: dict[str, Pair], balanced: dict[str, Balanced]
) -> None:
    spec, a = pairs[family].spec, balanced[family].a
    drawn = random_elements(spec, torch.Generator().manual_seed(1))
    models = Balanced.of(spec, a, {n: act(a[n], n, spec, drawn) for n in spec.parameters})
    match = models.match(*match_weights(models, pairing=likest_circuits))
    assert match.before is not None and match.after is not None
    assert match.after < 1e-4 * match.before


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_count_between_their_size_and_alike(family: str, balanced: dict[str, Balanced]) -> None:
    models = balanced[family]
    counted = weighted(models)
    tables = anchored(models.spec, str(residual(models.spec)))
    embedding, head = (n for n in tables if len(models.a[n]) == 512)
    before, after = (float(m.a[head].norm() / m.a[embedding].norm()) for m in (models, counted))
    assert before > 2
    assert after == pytest.approx(before**0.5, rel=0.02)
    inside = [n for n in models.spec.parameters if ".0." in n]
    assert inside and all(torch.equal(models.b[n], counted.b[n]) for n in inside)
    turned = weighted(replace(models, models=models.models[::-1]))
    torch.testing.assert_close(dict(turned.b), dict(counted.a))


SMALL = dict(vocab_size=23, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False)  # fmt: skip
CASES = {
    # its heads have signs, and inside them scales of planes that stay in their order
    "gains over all heads": transformers.Olmo2Config(**SMALL, architectures=["Olmo2ForCausalLM"]),
    # planes are turned alike in all heads, and each key head has signs beside
    "gains in each head": transformers.Qwen3Config(**{**SMALL, "num_attention_heads": 4}, head_dim=6,
                                                   architectures=["Qwen3ForCausalLM"]),
    # its experts have units with signs
    "experts": transformers.MixtralConfig(**SMALL, num_local_experts=4, architectures=["MixtralForCausalLM"]),
    "experts in groups": transformers.DeepseekV3Config(
        **SMALL, first_k_dense_replace=0, q_lora_rank=5, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4,
        v_head_dim=3, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=3,
        architectures=["DeepseekV3ForCausalLM"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_matched_computes_the_same(case: str) -> None:
    program = trace(CASES[case])
    spec = derive(program)
    rng = torch.Generator().manual_seed(0)
    a, b, inputs = random_weights(spec, rng), random_weights(spec, rng), random_inputs(program, rng)
    models = Balanced.of(spec, a, b)
    moved = dict(AlignedWeights(b, spec, models.match(*match_weights(models)).b))
    torch.testing.assert_close(execute(program, moved, inputs), execute(program, b, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_signs_of_heads_and_of_units_in_them_are_recovered(case: str) -> None:
    spec = derive(trace(CASES[case]))
    rng = torch.Generator().manual_seed(0)
    a = random_weights(spec, rng)
    models = Balanced.of(spec, a, dict(AlignedWeights(a, spec, random_elements(spec, rng))))
    match = models.match(*match_weights(models))
    assert match.before is not None and match.after is not None
    assert match.after < 1e-4 * match.before


@pytest.mark.parametrize("seed", [1, 4])
def test_turns_are_chosen_with_the_signs_beside_them(seed: int) -> None:
    """At the signs that the heads have before, some of the turns of a noisy copy do not look as if they fitted."""
    config = transformers.Qwen3Config(**{**SMALL, "num_attention_heads": 8, "num_key_value_heads": 4}, head_dim=12,
                                      architectures=["Qwen3ForCausalLM"])  # fmt: skip
    spec = derive(trace(config))
    rng = torch.Generator().manual_seed(seed)
    a = random_weights(spec, rng)
    copy = dict(AlignedWeights(a, spec, random_elements(spec, rng)))
    spread = {n: x.std() if x.numel() > 1 else torch.zeros(()) for n, x in copy.items()}
    b = {n: x + 0.5 * spread[n] * torch.randn(x.shape, generator=rng, dtype=x.dtype) for n, x in copy.items()}
    models = Balanced.of(spec, a, b)
    match = models.match(*match_weights(models))
    assert match.before is not None and match.after is not None
    assert match.after < 0.36 * match.before


def test_each_of_two_streams_starts_from_its_tables() -> None:
    tower = dict(hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2)
    text = dict(**tower, vocab_size=23, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    vision = dict(**tower, image_size=4, patch_size=2)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=5)
    config.architectures = ["CLIPModel"]
    spec = derive(trace(config))
    rng = torch.Generator().manual_seed(0)
    a, drawn = random_weights(spec, rng), random_elements(spec, rng)
    models = Balanced.of(spec, a, dict(AlignedWeights(a, spec, drawn)))
    found = {stream: start(models, stream, points) for stream, points in products_of_tables(models).items()}
    assert len(found) == len(streams(spec)) == 2
    centred = torch.eye(8, dtype=torch.float64) - 1 / 8  # of centred weights, what is done to their mean is open
    for stream, element in found.items():
        undone = (element @ drawn[stream]).as_matrix() @ centred
        torch.testing.assert_close(undone, centred, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_pairs_of_heads_compared_a_few_at_a_time_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = derive(trace(CASES[case]))
    rng = torch.Generator().manual_seed(0)
    balanced = Balanced.of(spec, random_weights(spec, rng), random_weights(spec, rng))
    # In float32 products of a few heads are rounded otherwise than those of many.
    models = replace(balanced, models=tuple({n: w[n].double() for n in spec.parameters} for w in balanced.models))
    expected, _ = match_weights(models)
    monkeypatch.setattr(heads, "_MOST_NUMBERS", 0)
    assert all(heads.pairs_at_once(spec, tree) == 1 for tree in head_families(spec))
    found, _ = match_weights(models)
    assert found.keys() == expected.keys()
    for name, element in found.items():
        torch.testing.assert_close(element.as_matrix(), expected[name].as_matrix(), rtol=1e-12, atol=1e-12)


def test_each_of_many_experts_is_compared_with_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told by what does not depend on the order of their units, and the same are found as among all pairs."""
    sizes = {**SMALL, "hidden_size": 24, "intermediate_size": 16}
    spec = derive(
        trace(transformers.MixtralConfig(**sizes, num_local_experts=12, architectures=["MixtralForCausalLM"]))
    )
    rng = torch.Generator().manual_seed(0)
    a = random_weights(spec, rng)
    copy = dict(AlignedWeights(a, spec, random_elements(spec, rng)))
    noise = {n: torch.randn(x.shape, generator=rng, dtype=x.dtype) for n, x in copy.items()}
    router = next(n for n in copy if n.endswith("mlp.gate.weight"))
    b = {n: x + 0.5 * x.std() * noise[n] if x.dim() == 3 else x for n, x in copy.items()} | {router: noise[router]}
    models = Balanced.of(spec, a, b)
    compared: list[int] = []
    pairs = heads._LaidOut.pairs

    def counted(block: heads._LaidOut, rows: slice, columns: slice | torch.Tensor) -> heads.Pairs:
        found = pairs(block, rows, columns)
        compared.append(found.fit.shape[0] * found.fit.shape[1])
        return found

    monkeypatch.setattr(heads._LaidOut, "pairs", counted)

    def matched() -> tuple[dict[str, Element], int]:
        compared.clear()
        found, sweeps = match_weights(models)
        return found, sum(compared) // sweeps

    expected, all_pairs = matched()
    monkeypatch.setattr(heads, "_MOST_NUMBERS", 0)
    found, some = matched()
    (experts,) = (tree.heads for tree in head_families(spec) if spec.spaces[tree.heads].size == 12)
    assert torch.equal(found[experts].as_matrix(), expected[experts].as_matrix())
    assert some < 0.6 * all_pairs


def test_memory_of_experts_is_that_of_a_few_pairs() -> None:
    def most(count: int, size: int) -> int:
        config = transformers.MixtralConfig(**{**SMALL, "intermediate_size": size}, num_local_experts=count,
                                            architectures=["MixtralForCausalLM"])  # fmt: skip
        spec = derive_by_depth(config)
        return max(of_step(spec, tree) for tree in head_families(spec))

    assert most(16, 14336) < 1.2 * most(8, 14336)
