"""The beam search's Torch modules, run eagerly, against a plain search over transformers' own logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from beam_reference import Hypothesis, Logits, Search, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import CONFIGS, SIZES, make_model
from tolerances import SCORES
from torch import Tensor
from transformers import LlamaConfig

from dagserve.build.weights import make_parameter
from dagserve.kernels.beam.selection import candidates, first_indices, order_key
from dagserve.kernels.shared_prefix_attention.grouped import shared_prefix_attention
from dagserve.kernels.shared_prefix_attention.reference import shared_prefix_attention as reference_attention
from dagserve.nodes.beam_search import Expand, Finish, Prefill, Step
from dagserve.nodes.decoder import parameter_mapping
from dagserve.nodes.operators import REFERENCE as OPERATORS


class Modules:
    """The four modules over one model, called in the order of the node."""

    def __init__(self, model: Any, steps: int, stops: Sequence[int], min_tokens: int, max_width: int) -> None:
        config, self.steps = model.config.to_dict(), steps
        arguments = (config, "fp32", OPERATORS, steps)
        self.prefill, self.step, self.finish = Prefill(*arguments), Step(*arguments), Finish(steps)
        self.expand = Expand(*arguments, stops, min_tokens, max_width)
        state, mapping = model.state_dict(), parameter_mapping(config)
        for module in (self.prefill, self.step, self.expand):
            for name, parameter in module.named_parameters():
                parameter.data = make_parameter(mapping[name], state, parameter)
        self.trace: list[Mapping[str, Tensor]] = []

    @torch.no_grad()
    def run(self, prompts: Sequence[Sequence[int]], width: int, returned: int, penalty: float) -> list[Tensor]:
        tokens = torch.tensor([t for prompt in prompts for t in prompt])
        lengths = torch.tensor([0, *map(len, prompts)])
        iota = torch.arange(int(lengths.max()), dtype=torch.int32)
        cu_seqlens = lengths.cumsum(0).int()
        count, penalties = torch.arange(returned, dtype=torch.int32), torch.tensor(penalty)
        hidden, prefix, suffix, *state, step = self.prefill(
            tokens, cu_seqlens, iota, torch.arange(width, dtype=torch.int32)
        )
        self.trace.clear()
        for index in range(self.steps):
            token, parent, still, step, *state = self.expand(hidden, step, *state, penalties, count)
            self.trace.append({"token": token, "parent": parent, "beams": state[1], "history": state[0]})
            if index + 1 < self.steps:
                if not still:
                    break
                hidden, suffix = self.step(token, parent, step, cu_seqlens, prefix, suffix)
                self.trace[-1] = {**self.trace[-1], "suffix": suffix}
        return list(self.finish(step, *state, penalties, count))


def sequences(outputs: Sequence[Tensor], prompt: int = 0) -> list[Hypothesis]:
    """The result of one prompt as the reference has it."""
    tokens, lengths, _, cumulative, steps, finished, counts = outputs
    found = []
    for i in range(int(counts[prompt])):
        n = int(lengths[prompt, i])
        scores = steps[prompt, i, :n].tolist()
        found.append(
            Hypothesis(
                tokens[prompt, i, :n].tolist(), scores, float(cumulative[prompt, i]), 0, bool(finished[prompt, i])
            )
        )
    return found


def logits_of(model: Any, prompt: Sequence[int]) -> Logits:
    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        out: npt.NDArray[np.float32] = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].numpy()
        return out

    return logits


def same(ours: Sequence[Hypothesis], theirs: Sequence[Hypothesis]) -> None:
    assert [h.tokens for h in ours] == [h.tokens for h in theirs]
    assert [h.finished for h in ours] == [h.finished for h in theirs]
    assert [h.cumulative for h in ours] == pytest.approx([h.cumulative for h in theirs], abs=1e-3)
    for a, b in zip(ours, theirs, strict=True):
        assert a.steps == pytest.approx(b.steps, abs=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("width", "steps"), [(1, 1), (1, 4), (5, 3), (16, 5)])
def test_every_step_is_the_plain_searchs(name: str, width: int, steps: int) -> None:
    """Tokens, parents, cumulative scores, histories of every step, and the result."""
    model = make_model(CONFIGS[name])
    generator = torch.Generator().manual_seed(width)
    prompts = [torch.randint(512, (n,), generator=generator).tolist() for n in (7, 1, 12)]
    stops = (5, 77)
    modules = Modules(model, steps, stops, 2, 16)
    outputs = modules.run(prompts, width, width, 0.7)
    for index, prompt in enumerate(prompts):
        search = Search(width, steps, frozenset(stops), 2, 0.7)
        same(sequences(outputs, index), search.run(logits_of(model, prompt), width))
        for ours, theirs in zip(modules.trace, search.trace, strict=False):
            assert ours["token"][index].tolist() == [h.tokens[-1] for h in theirs]
            assert ours["parent"][index].tolist() == [h.parent for h in theirs]
            written = [row[: len(h.tokens)] for row, h in zip(ours["history"][index].tolist(), theirs, strict=True)]
            assert written == [h.tokens for h in theirs]
            assert ours["beams"][index, :, 0].tolist() == pytest.approx([h.cumulative for h in theirs], abs=1e-3)


def test_suffix_keys_follow_their_beams() -> None:
    """After each step a beam's suffix K/V are those that its own tokens have in a prefill of the whole text."""
    model = make_model(CONFIGS["qwen3-tied-wide-heads"])
    prompt, width, steps = [3, 1, 4, 1, 5, 9], 4, 5
    modules = Modules(model, steps, (), 0, width)
    modules.run([prompt], width, width, 1.0)
    for index, state in enumerate(modules.trace[:-1]):
        for beam in range(width):
            tokens = [*prompt, *state["history"][0, beam, : index + 1].tolist()]
            n = len(tokens)
            whole = modules.prefill(
                torch.tensor(tokens), torch.tensor([0, n]).int(), torch.arange(n).int(), torch.zeros(1).int()
            )[1]
            columns = whole.shape[3]
            ours = state["suffix"][:, 0, beam, : (index + 1) * columns].reshape(-1, index + 1, columns)
            assert torch.allclose(ours, whole[:, 0, len(prompt) :], atol=1e-4)


def test_a_search_ends_once_nothing_open_can_enter_the_result() -> None:
    model = make_model(CONFIGS["llama-tied"])
    stop = int(logits_of(model, [1, 2])([]).argmax())
    for penalty, steps in ((-5.0, 1), (5.0, 5)):
        modules = Modules(model, 5, (stop,), 0, 4)
        outputs = modules.run([[1, 2]], 4, 1, penalty)
        assert len(modules.trace) == steps
        same(sequences(outputs), Search(4, 5, frozenset([stop]), 0, penalty).run(logits_of(model, [1, 2]), 1))


TINY = LlamaConfig(**{**SIZES, "vocab_size": 4, "hidden_size": 16, "intermediate_size": 16})


@pytest.mark.parametrize("stops", [(), (2,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0, 2.5])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_wide_search_is_exhaustive(stops: tuple[int, ...], penalty: float, steps: int) -> None:
    """With W >= V^(N-1) the result is the best of all sequences. A vocabulary smaller than 2W; all beams may stop."""
    model = make_model(TINY, seed=steps)
    width = 4 ** (steps - 1)
    for min_tokens in (0, steps):
        search = Search(width, steps, frozenset(stops), min_tokens, penalty)
        ours = sequences(Modules(model, steps, stops, min_tokens, width).run([[1, 2]], width, width, penalty))
        best = exhaustive(logits_of(model, [1, 2]), 4, search, width)
        assert [h.final(penalty) for h in ours] == pytest.approx([h.final(penalty) for h in best], abs=1e-4)
        assert sorted(tuple(h.tokens) for h in ours) == sorted(tuple(h.tokens) for h in best)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sets(st.integers(0, 7), max_size=3),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0, -0.5, 3.0]),
    st.integers(1, 9),
)
def test_random_searches(
    seed: int, width: int, steps: int, stops: set[int], min_tokens: int, penalty: float, returned: int
) -> None:
    """Early stops and stop tokens at every place; logits are made to be equal often."""
    torch.manual_seed(seed)
    model = make_model(LlamaConfig(**{**SIZES, "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1}), seed)
    with torch.no_grad():
        model.lm_head.weight[4:6] = model.lm_head.weight[2:4]
    returned = min(returned, width)
    outputs = Modules(model, steps, tuple(sorted(stops)), min_tokens, 9).run([[1, 2]], width, returned, penalty)
    expected = Search(width, steps, frozenset(stops), min_tokens, penalty).run(logits_of(model, [1, 2]), returned)
    ours = sequences(outputs)
    assert [h.final(penalty) for h in ours] == pytest.approx([h.final(penalty) for h in expected], abs=1e-4)
    assert len({tuple(h.tokens) for h in ours}) == len(ours)
    for one in ours:  # of sequences that are equal but for rounding either may be found: each must have its own score
        values = [logits_of(model, [1, 2])(one.tokens[:i]) for i in range(len(one.tokens))]
        scores = [torch.tensor(v).log_softmax(0)[t].item() for v, t in zip(values, one.tokens, strict=True)]
        assert one.steps == pytest.approx(scores, abs=1e-4)
        assert one.finished == (one.tokens[-1] in stops)
        assert not stops & {*one.tokens[:-1]}


@given(st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan")]), min_size=1, max_size=30))
def test_the_order_is_total(values: list[float]) -> None:
    plain = [-np.inf if np.isnan(v) else v + 0.0 for v in values]
    expected = sorted(range(len(values)), key=lambda i: (-plain[i], i))
    assert first_indices(order_key(torch.tensor(values)), len(values)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_are_ordered_by_the_models_own_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    allowed = torch.ones(40, dtype=torch.bool)
    allowed[7] = False
    ids, scores = candidates(logits, allowed, 12)
    full = logits.float().log_softmax(-1)
    for row in range(3):
        expected = sorted((t for t in range(40) if t != 7), key=lambda t: (-float(logits[row, t]), t))[:12]
        assert ids[row].tolist() == expected
        assert torch.allclose(scores[row], full[row, expected], atol=SCORES["fp32"])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (3, 3, 16), (14, 2, 4)])
@pytest.mark.parametrize("count", [1, 3])
def test_shared_prefix_attention(heads: int, kv_heads: int, size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor([5, 1])
    q, suffix_k, suffix_v = draw(2, 6, heads, size), draw(2, 6, 3, kv_heads, size), draw(2, 6, 3, kv_heads, size)
    prefix_k, prefix_v = draw(2, 5, kv_heads, size), draw(2, 5, kv_heads, size)
    prefix_k[1, 1:], prefix_v[1, 1:] = 1e4, 1e4  # what must not be read
    arguments = (q, prefix_k, prefix_v, lengths, suffix_k, suffix_v, torch.tensor([count]))
    assert torch.allclose(shared_prefix_attention(*arguments), reference_attention(*arguments), atol=1e-5)
