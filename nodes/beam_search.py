"""Torch modules of the beam search: prefill, expansion, step, finish, or all in one. Imported only for a build.

The state of a search, for ``P`` prompts with ``W`` beams of at most ``N`` tokens each (docs/beam.md has the semantics):

==============  ===================  ==============================================================================
``beams``       ``f32[P,B,N+1]``     cumulative score of each open beam (-inf: none), then the score of each token
``history``     ``i64[P,B,N]``       its tokens
``pool``        ``f32[P,W,N+2]``     of the best completed sequences: final score (-inf: none), cumulative, tokens'
``completed``   ``i64[P,W,N+1]``     their length, then their tokens
``step``        ``i64[1]``           how many tokens have been generated
``prefix``      ``[2K,P,L,C]``       keys and values of the prompts in turn, for K layers; C = num_kv_heads * head_dim
``suffix``      ``[2K,P,W,M*C]``     the same of generated tokens; M = max(N-1, 1)
==============  ===================  ==============================================================================

``B`` is 1 before the first expansion, then ``W``. In a search of a catalog, rows of ``history`` and ``completed`` end
in one more column: the node of the catalog's trie that the beam has reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dagserve.kernels.attention.padded import Packing
from dagserve.kernels.beam.op import IMPLEMENTATIONS as MERGE
from dagserve.kernels.beam.op import REORDER
from dagserve.kernels.beam.selection import NEVER, first_indices, order_key
from dagserve.kernels.lm_head.op import CANDIDATES
from dagserve.kernels.rope.reference import rotation
from dagserve.kernels.shared_prefix_attention.op import IMPLEMENTATIONS as SHARED
from dagserve.nodes.decoder import Backbone, DecoderConfig, OutputHead


class Prefill(Backbone):
    """Packed prefill of the prompts: hidden state of each last token, K/V of all, and the state of a fresh search."""

    def __init__(
        self,
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        steps: int,
        catalog: bool = False,
    ) -> None:
        super().__init__(config, precision, operators)
        self.steps, self.columns = steps, steps + catalog

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, iota: Tensor, width: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Runs the prefill.

        Args:
            tokens: ``i64[T]``, packed.
            cu_seqlens: ``i32[P+1]``.
            iota: ``i32[L]``, 0..max_seqlen-1.
            width: ``i32[W]``, of any content: it carries the width.

        Returns:
            ``hidden [P,1,H], prefix, suffix, history, beams, completed, pool, step``.
        """
        packing = Packing.of(cu_seqlens, tokens.shape[0], iota)
        x = self.embed(tokens)
        cos, sin = rotation(packing.positions, self.get_buffer("inverse_frequencies"))
        kept: list[Tensor] = []
        for layer in self.blocks():
            x, k, v = layer.with_keys(x, cos, sin, packing)
            kept += [rows[packing.pad].flatten(2) for rows in (k, v)]
        hidden = self.norm(x[packing.last]).unsqueeze(1)
        prompts, beams, n = hidden.shape[0], width.shape[0], self.steps
        prefix = torch.stack(kept)
        suffix = x.new_zeros(prefix.shape[0], prompts, beams, max(n - 1, 1) * prefix.shape[3])
        return (
            hidden,
            prefix,
            suffix,
            tokens.new_zeros(prompts, 1, self.columns),
            torch.zeros(prompts, 1, n + 1, device=x.device),
            tokens.new_zeros(prompts, beams, self.columns + 1),
            torch.full((prompts, beams, n + 2), NEVER, device=x.device),
            tokens.new_zeros(1),
        )

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random prompts."""
        packed = super().example({**sizes, "B": sizes["P"]}, generator)
        return (*packed, torch.arange(sizes["W"], dtype=torch.int32))


class Step(Backbone):
    """One decode step of all beams: suffix K/V follow their beams, then one token a beam goes through the model."""

    def __init__(self, config: Mapping[str, Any], precision: str, operators: Mapping[str, str], steps: int) -> None:
        super().__init__(config, precision, operators)
        c = DecoderConfig.of(config)
        self.kv_heads, self.head_dim, self.keys = c.num_kv_heads, c.head_dim, max(steps - 1, 1)
        self.shared = SHARED[operators["shared_prefix_attention"]]
        self.reorder = REORDER[operators["suffix_reorder"]]

    def forward(  # type: ignore[override]
        self, token: Tensor, parent: Tensor, step: Tensor, cu_seqlens: Tensor, prefix: Tensor, suffix: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs one step.

        Args:
            token: ``i64[P,W]``, the last token of each beam.
            parent: ``i64[P,W]``, the beam it was before the last expansion.
            step: ``i64[1]``, generated tokens, this one included.
            cu_seqlens: ``i32[P+1]``.
            prefix, suffix: see the module.

        Returns:
            ``hidden [P,W,H]`` and the new suffix.
        """
        prompts, width = token.shape
        starts, ends = cu_seqlens.narrow(0, 0, prompts), cu_seqlens.narrow(0, 1, prompts)
        lengths = (ends - starts).long()
        moved = self.reorder(suffix, parent, step - 1, self.keys)
        moved = moved.reshape(suffix.shape[0], prompts, width, self.keys, self.kv_heads, self.head_dim)
        here = (torch.arange(self.keys, device=token.device) == step - 1)[:, None, None]
        # Sums, not expanded views, of which the exporter would ask that no size is 1.
        positions = ((lengths + step - 1)[:, None] + torch.zeros_like(token)).reshape(prompts * width)
        x = self.embed(token.flatten())
        cos, sin = rotation(positions, self.get_buffer("inverse_frequencies"))
        prefix = prefix.reshape(*prefix.shape[:3], self.kv_heads, self.head_dim)
        kept: list[Tensor] = []
        for i, layer in enumerate(self.blocks()):
            q, k, v = layer.project(x, cos, sin)
            new = [r.reshape(prompts, width, 1, self.kv_heads, self.head_dim) for r in (k, v)]
            keys, values = (torch.where(here, r, moved[2 * i + j]) for j, r in enumerate(new))
            kept += [keys, values]
            q = q.reshape(prompts, width, -1, self.head_dim)
            out = self.shared(q, prefix[2 * i], prefix[2 * i + 1], lengths, keys, values, step)
            x = layer.after_attention(x, out.reshape(prompts * width, -1))
        hidden = self.norm(x).reshape(prompts, width, -1)
        return hidden, torch.stack(kept).reshape(suffix.shape)

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random beams over random K/V, small ones: attention over large ones is so sharp that rounding grows."""
        prompts, width, longest = sizes["P"], sizes["W"], sizes["L"]
        layers, columns = 2 * len(self.layers), self.kv_heads * self.head_dim
        lengths = torch.randint(1, longest + 1, (prompts,), generator=generator)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        dtype = self.embed.weight.dtype
        return (
            torch.randint(self.embed.num_embeddings, (prompts, width), generator=generator),
            torch.randint(width, (prompts, width), generator=generator),
            torch.ones(1, dtype=torch.int64),
            cu_seqlens,
            (0.1 * torch.randn(layers, prompts, longest, columns, generator=generator)).to(dtype),
            (0.1 * torch.randn(layers, prompts, width, self.keys * columns, generator=generator)).to(dtype),
        )


class Expand(OutputHead):
    """LM head, candidates of every beam, and the merge of a prompt's beams into the next ones."""

    def __init__(
        self,
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        steps: int,
        stop_tokens: Sequence[int],
        min_tokens: int,
        max_width: int,
    ) -> None:
        super().__init__(config, precision, operators)
        self.steps, self.min_tokens = steps, min_tokens
        self.per_beam = 1 + max(1, len(stop_tokens))
        self.columns = max(self.vocabulary, self.per_beam * max_width)
        self.candidates, self.merge = CANDIDATES[operators["candidates"]], MERGE[operators["beam_merge"]]
        stops = torch.zeros(self.columns, dtype=torch.bool)
        stops[list(stop_tokens)] = True
        self.register_buffer("stops", stops, persistent=False)

    def forward(
        self,
        hidden: Tensor,
        step: Tensor,
        history: Tensor,
        beams: Tensor,
        completed: Tensor,
        pool: Tensor,
        length_penalty: Tensor,
        returned: Tensor,
    ) -> tuple[Tensor, ...]:
        """One expansion.

        Args:
            hidden: ``[P,B,H]``.
            step, history, beams, completed, pool: the state, see the module.
            length_penalty: ``f32``, a scalar.
            returned: ``i32[R]``, 0..R-1: the request wants R sequences.

        Returns:
            ``token i64[P,W], parent i64[P,W], open u8[1]`` and the next ``step, history, beams, completed, pool``.
            ``open`` is 0 when no open beam can enter any prompt's result any more.
        """
        width = pool.shape[1]
        count = self.per_beam * width
        ids, scores = self.candidates(self.padded_logits(hidden), self.allowed(step), count)
        total, token, parent = self.merge(beams[:, :, 0], scores, ids, count)
        valid = total > NEVER
        stop = self.get_buffer("stops")[token] & valid
        here = torch.arange(self.steps, device=hidden.device) == step
        tokens = torch.where(here, token[..., None], _rows(history, parent))
        last = total - _rows(beams, parent)[..., 0]
        steps = torch.where(here, last[..., None], _rows(beams, parent)[..., 1:])
        length = step + 1
        final = torch.where(stop, total / length.float() ** length_penalty, NEVER)
        completed, pool = _merge(
            completed,
            pool,
            torch.cat([(length + torch.zeros_like(token))[..., None], tokens], dim=-1),
            torch.cat([final[..., None], total[..., None], steps], dim=-1),
        )
        going = first_indices(order_key(torch.where(valid & ~stop, 1.0, 0.0)), width)
        good = (valid & ~stop).gather(1, going)
        cumulative = torch.where(good, total.gather(1, going), NEVER)
        beams = torch.cat([cumulative[..., None], _rows(steps, going)], dim=-1)
        still = _open(cumulative, pool, length, self.steps, length_penalty, returned)
        token = torch.where(good, token.gather(1, going), 0)
        return token, parent.gather(1, going), still, length, _rows(tokens, going), beams, completed, pool

    def padded_logits(self, hidden: Tensor) -> Tensor:
        """``[P,B,V]`` in the model's dtype, with -inf columns where a beam may have more candidates than tokens."""
        logits = self.logits(hidden)
        missing = self.columns - self.vocabulary
        return torch.nn.functional.pad(logits, (0, missing), value=NEVER) if missing else logits

    def allowed(self, step: Tensor) -> Tensor | None:
        """``bool[V]``: all tokens, but for stop tokens before the minimum length."""
        return ~self.get_buffer("stops") | (step + 1 >= self.min_tokens) if self.min_tokens > 1 else None

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random hidden states over the first expansion's state."""
        prompts, before, width = sizes["P"], sizes["B"], sizes["W"]
        return (
            torch.randn(prompts, before, self.hidden_size, generator=generator).to(self.dtype),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(prompts, before, self.steps, dtype=torch.int64),
            torch.zeros(prompts, before, self.steps + 1),
            torch.zeros(prompts, width, self.steps + 1, dtype=torch.int64),
            torch.full((prompts, width, self.steps + 2), NEVER),
            torch.tensor(1.0),
            torch.arange(min(sizes["R"], width), dtype=torch.int32),
        )


class ExpandCatalog(OutputHead):
    """LM head and one step down a catalog's trie: of the legal continuations the best ones, open and complete apart.

    With ``normalize`` ``vocabulary`` a token's score is its log-probability over the whole vocabulary; with ``catalog``
    over the tokens that continue its beam in the catalog, and the LM head computes the level's rows alone.
    """

    def __init__(
        self, config: Mapping[str, Any], precision: str, operators: Mapping[str, str], steps: int, normalize: str
    ) -> None:
        super().__init__(config, precision, operators)
        self.steps, self.over_vocabulary = steps, normalize == "vocabulary"

    def forward(
        self,
        hidden: Tensor,
        step: Tensor,
        history: Tensor,
        beams: Tensor,
        completed: Tensor,
        pool: Tensor,
        length_penalty: Tensor,
        returned: Tensor,
        first: Tensor,
        label: Tensor,
        marks: Tensor,
        alphabet: Tensor,
        children: Tensor,
    ) -> tuple[Tensor, ...]:
        """One expansion; the trie is described in :mod:`dagserve.catalog`.

        Args:
            hidden, step, history, beams, completed, pool, length_penalty, returned: as :meth:`Expand.forward`.
            first: ``i32[F]``, the first child of each node but those of the last level.
            label: ``i32[N]``, the token that leads to each node, as a row of its level's alphabet.
            marks: ``u8[M]``, two bits a node: whether a permitted item ends here, and whether one is further down.
            alphabet: ``i32[U]``, the tokens of this level.
            children: ``i32[C]``, 0..C-1 for the most children that a node of the level above has.

        Returns:
            As :meth:`Expand.forward`.
        """
        width, places, n = pool.shape[1], children.shape[0], self.steps
        child, legal = _children(history[..., n], first, children)
        legal = legal & (beams[..., :1] > NEVER)
        child = torch.where(legal, child, 0)
        bits = marks[child >> 2].int() >> (2 * (child & 3)).int()
        row = label[child].long()
        totals = (beams[..., :1] + self.scores(hidden, row, legal, alphabet.long())).flatten(1)
        ends = legal & ((bits & 1) > 0)
        goes = legal & ((bits & 2) > 0)

        def best(wanted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Totals, places among children, parents and whether there is one, of the ``W`` best."""
            masked = torch.where(wanted.flatten(1), totals, NEVER)
            masked = torch.cat([masked, pool[..., 0] * 0 + NEVER], dim=1)
            chosen = first_indices(order_key(masked), width)
            total = masked.gather(1, chosen)
            good = total > NEVER
            chosen = torch.where(good, chosen, 0)
            return total, chosen, chosen // places, good

        length = step + 1
        here = torch.arange(n + 1, device=hidden.device) == step
        last = torch.arange(n + 1, device=hidden.device) == n

        def grown(chosen: Tensor, parent: Tensor, total: Tensor, good: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Tokens, their rows of ``history`` and the scores of their tokens."""
            token = torch.where(good, alphabet.long()[row.flatten(1).gather(1, chosen)], 0)
            rows = torch.where(here, token[..., None], _rows(history, parent))
            rows = torch.where(last, child.flatten(1).gather(1, chosen)[..., None], rows)
            added = total - _rows(beams, parent)[..., 0]
            return token, rows, torch.where(here[:n], added[..., None], _rows(beams, parent)[..., 1:])

        total, chosen, parent, good = best(ends)
        _, rows, steps = grown(chosen, parent, total, good)
        final = torch.where(good, total / length.float() ** length_penalty, NEVER)
        completed, pool = _merge(
            completed,
            pool,
            torch.cat([(length + torch.zeros_like(chosen))[..., None], rows], dim=-1),
            torch.cat([final[..., None], total[..., None], steps], dim=-1),
        )
        total, chosen, parent, good = best(goes)
        token, rows, steps = grown(chosen, parent, total, good)
        still = _open(total, pool, length, n, length_penalty, returned)
        return token, parent, still, length, rows, torch.cat([total[..., None], steps], dim=-1), completed, pool

    def scores(self, hidden: Tensor, row: Tensor, legal: Tensor, alphabet: Tensor) -> Tensor:
        """``f32[P,B,C]``, log-probabilities of the children, at most 0."""
        if self.over_vocabulary:
            logits = self.logits(hidden).float()
            taken, normalizer = logits.gather(-1, alphabet[row]), logits.logsumexp(dim=-1, keepdim=True)
        else:
            logits = (hidden @ self.rows(alphabet).t()).float()
            taken = logits.gather(-1, row)
            normalizer = torch.where(legal, taken, NEVER).logsumexp(dim=-1, keepdim=True)
        return torch.where(legal, (taken - normalizer).clamp(max=0), NEVER)

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random hidden states at the root of a trie with as many leaves as the sizes allow."""
        prompts, before, width, n = sizes["P"], sizes["B"], sizes["W"], self.steps
        nodes, alphabet = sizes["N"], min(sizes["U"], self.vocabulary)
        leaves = max(min(nodes - 1, alphabet, sizes["C"]), 0)
        first = torch.full((sizes["F"],), 1 + leaves, dtype=torch.int32)
        first[0] = 1
        return (
            torch.randn(prompts, before, self.hidden_size, generator=generator).to(self.dtype),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(prompts, before, n + 1, dtype=torch.int64),
            torch.zeros(prompts, before, n + 1),
            torch.zeros(prompts, width, n + 2, dtype=torch.int64),
            torch.full((prompts, width, n + 2), NEVER),
            torch.tensor(1.0),
            torch.arange(min(sizes["R"], width), dtype=torch.int32),
            first,
            ((torch.arange(nodes) - 1) % alphabet).clamp(min=0).int(),
            torch.full((sizes["M"],), 0b01010101, dtype=torch.uint8),
            torch.arange(alphabet, dtype=torch.int32),
            torch.arange(sizes["C"], dtype=torch.int32),
        )


class Finish(nn.Module):
    """The result: completed sequences and, after the last step, open beams, best first."""

    def __init__(self, steps: int, catalog: bool = False) -> None:
        super().__init__()
        self.steps, self.catalog = steps, catalog

    def forward(
        self,
        step: Tensor,
        history: Tensor,
        beams: Tensor,
        completed: Tensor,
        pool: Tensor,
        length_penalty: Tensor,
        returned: Tensor,
    ) -> tuple[Tensor, ...]:
        """Ranks by final score; of equal ones completed sequences come first, in the order they were completed.

        In a catalog's search an open beam is the beginning of an item, not an item: only completed ones count.

        Returns:
            ``tokens i64[P,R,N], lengths i32[P,R], scores f32[P,R], cumulative f32[P,R], step_scores f32[P,R,N],
            finished bool[P,R], counts i32[P]``, and in a catalog's search ``nodes i64[P,R]``.
        """
        done = (step >= self.steps) & (beams[..., 0] > NEVER) & (not self.catalog)
        final = torch.where(done, beams[..., 0] / step.float() ** length_penalty, NEVER)
        lengths = (step + torch.zeros_like(history[..., 0]))[..., None]
        ended = torch.cat([torch.ones_like(completed[..., 0]), torch.zeros_like(history[..., 0])], dim=1)
        completed = torch.cat([completed, torch.cat([lengths, history], dim=-1)], dim=1)
        pool = torch.cat([pool, torch.cat([final[..., None], beams], dim=-1)], dim=1)
        order = first_indices(order_key(pool[..., 0]), returned.shape[0])
        rows, numbers = _rows(completed, order), _rows(pool, order)
        there = numbers[..., 0] > NEVER
        nodes = (torch.where(there, rows[..., self.steps + 1], 0),) if self.catalog else ()
        return (
            torch.where(there[..., None], rows[..., 1 : self.steps + 1], 0).clone(),
            torch.where(there, rows[..., 0], 0).int(),
            numbers[..., 0].clone(memory_format=torch.contiguous_format),
            numbers[..., 1].clone(memory_format=torch.contiguous_format),
            torch.where(there[..., None], numbers[..., 2:], 0.0),
            there & (ended.gather(1, order) > 0),
            there.sum(dim=1).int(),
            *nodes,
        )

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """A search that has come to its end, half of the pool empty."""
        prompts, width, n = sizes["P"], sizes["W"], self.steps
        beams = -torch.rand(prompts, width, n + 1, generator=generator)
        pool = -torch.rand(prompts, width, n + 2, generator=generator)
        pool[:, width // 2 :, 0] = NEVER
        return (
            torch.full((1,), n),
            torch.randint(5, (prompts, width, n + self.catalog), generator=generator),
            beams,
            torch.randint(5, (prompts, width, n + 1 + self.catalog), generator=generator),
            pool,
            torch.tensor(1.0),
            torch.arange(min(sizes["R"], width), dtype=torch.int32),
        )


class Unrolled(Prefill):
    """The whole search in one package: all steps are computed, also where no open beam can enter the result any more.

    What is found is the same: no step after that one changes it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        precision: str,
        operators: Mapping[str, str],
        steps: int,
        stop_tokens: Sequence[int],
        min_tokens: int,
        max_width: int,
    ) -> None:
        super().__init__(config, precision, operators, steps)
        expand = Expand(config, precision, operators, steps, stop_tokens, min_tokens, max_width)
        if expand.name == "embed":
            expand.add_module("embed", self.embed)
        else:
            self.add_module(expand.name, expand.get_submodule(expand.name))
        decode = Step(config, precision, operators, steps)
        for name in ("embed", "layers", "norm"):  # one copy, under the backbone's names
            decode.add_module(name, self.get_submodule(name))
        self.expand, self.decode, self.finish = expand, decode, Finish(steps)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        iota: Tensor,
        width: Tensor,
        beams: Tensor,
        length_penalty: Tensor,
        returned: Tensor,
    ) -> tuple[Tensor, ...]:
        """The whole search.

        Args:
            tokens, cu_seqlens, iota, width: as :meth:`Prefill.forward`.
            beams: ``i32[B]``, 0..W-1: ``width`` by another symbol. The exporter cannot prove ``2 * W <= W * 2 * W``,
                which the merge needs, where both are one symbol.
            length_penalty, returned: as :meth:`Expand.forward`.

        Returns:
            As :meth:`Finish.forward`.
        """
        hidden, prefix, suffix, *state, step = super().forward(tokens, cu_seqlens, iota, width)
        for left in reversed(range(self.steps)):
            token, parent, _, step, *state = self.expand(hidden, step, *state, length_penalty, returned)
            if left:
                hidden, suffix = self.decode(token, parent, step, cu_seqlens, prefix, suffix)
                hidden, state[0], state[1] = (rows.index_select(1, beams) for rows in (hidden, state[0], state[1]))
        found: tuple[Tensor, ...] = self.finish(step, *state, length_penalty, returned)
        return found

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random prompts."""
        beams = torch.arange(sizes["W"], dtype=torch.int32)
        returned = beams[: sizes["R"]].clone()
        return (*super().example(sizes, generator), beams, torch.tensor(1.0), returned)


def _open(
    cumulative: Tensor, pool: Tensor, length: Tensor, steps: int, length_penalty: Tensor, returned: Tensor
) -> Tensor:
    """``u8[1]``: whether the best that any open beam may still reach beats the last one a request gets."""
    shortest = (length + 1).float() ** length_penalty
    longest = float(steps) ** length_penalty
    reachable = torch.maximum(cumulative / shortest, cumulative / longest)
    worst = pool[..., 0].index_select(1, returned.amax().long().reshape(1))
    return ((reachable > NEVER) & (reachable > worst)).any().to(torch.uint8).reshape(1)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[p, index[p, i]]`` for ``values: [P,B,...]`` and ``index: i64[P,I]``."""
    places = index[..., None].expand(*index.shape, values.shape[2])
    return values.gather(1, places)


def _children(node: Tensor, first: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """``i64[P,B,C]``, ids from each node's first child on, and which of them are its children."""
    end = first.shape[0] - 1
    begin = first[node.clamp(max=end)].long()[..., None]
    child = begin + children
    return child, child < first[(node + 1).clamp(max=end)].long()[..., None]


def _merge(completed: Tensor, pool: Tensor, more: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best of the pool and of more sequences, as many as the pool holds; earlier ones first where equal."""
    width = pool.shape[1]
    completed, pool = torch.cat([completed, more], dim=1), torch.cat([pool, scores], dim=1)
    order = first_indices(order_key(pool[..., 0]), width)
    return _rows(completed, order), _rows(pool, order)
