"""Faults that the tests must find, and the program that puts them in, one after another: `python tests/mutants.py`.

A mutant replaces one piece of the package by a faulty one, in a copy of the repository. The files of tests that are
most likely to find it run first, then the folders, then all of `make test`, until the first failure. A mutant that no
test finds survives: a test is missing. At the end the tests that failed run once without any mutant, where they must
pass. A piece that no longer stands in the package exactly once is an error, so that the list keeps up with the code.

Cost: about 20 seconds a mutant that its likely files find, minutes one that they do not. Rows are kept in
build/mutants/rows.jsonl, and a mutant that has one is not run again; `python tests/mutants.py A B` runs these again,
and `--again` all of them, each with the test that found it before the likely ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "token_recycling"
_SECONDS = 120, 300, 900, 3600
"""Limits of the stages of a mutant's tests: a loop that does not end counts as found."""


@dataclass(frozen=True)
class Mutant:
    """A fault."""

    name: str
    why: str
    """What it breaks."""
    old: str
    """A piece of source that stands in the package exactly once."""
    new: str
    tests: str
    """Files and folders of tests, the likeliest to find it first."""


MUTANTS = [
    # Loop: where a sequence ends, which tokens are accepted, how they are chosen.
    Mutant(
        "max-length-off-by-one",
        "one token more than max_new_tokens",
        "self._end >= self.max_length",
        "self._end > self.max_length",
        "loop/test_text.py hf/test_fuzzing.py loop",
    ),
    Mutant(
        "draws-not-given-back",
        "a seeded run depends on what was drafted, where all nodes are sampled at once",
        "            self._left[tokens - 1]()",
        "            self._left[-1]()",
        "cuda_graphs/test_parts.py",
    ),
    Mutant(
        "eos-ignored",
        "decoding goes on after the end of sequence",
        "ended = token in self._eos or ",
        "ended = ",
        "loop/test_text.py hf/test_stopping.py loop",
    ),
    Mutant(
        "criteria-of-last-token-only",
        "a criterion that holds in the middle of a step is overruled by the next one",
        "ended |= bool(torch.as_tensor(criterion(self.padded, scores)).all())",
        "ended = bool(torch.as_tensor(criterion(self.padded, scores)).all())",
        "loop/test_text.py hf/test_stopping.py loop hf",
    ),
    Mutant(
        "acceptance-unchecked",
        "the third emitted token of a step is accepted unseen",
        "for child in children[node] if drafted[child] == token]\n        if finished",
        "for child in children[node] if drafted[child] == token or len(emitted) == 3]\n        if finished",
        "loop/test_accept.py loop hf/test_fuzzing.py",
    ),
    Mutant(
        "acceptance-of-orphans",
        "tensor acceptance looks at a node alone, not at those above it",
        "reached = (right[:, None] | ~trees.ancestors).all(dim=2)",
        "reached = right",
        "loop/test_accept.py cuda_graphs/test_parts.py loop cuda_graphs",
    ),
    Mutant(
        "first-of-equal-siblings",
        "of siblings with equal tokens only the first is followed",
        "nodes = sorted(following)",
        "nodes = sorted(following)[:1]",
        "loop/test_accept.py loop",
    ),
    Mutant(
        "draw-reused",
        "siblings are accepted or rejected by one random number",
        "        if bool(torch.rand((), device=left.device, generator=generator) * source[token] < left[token]):",
        "        chance = chance if place else torch.rand((), device=left.device, generator=generator)\n"
        "        if bool(chance * source[token] < left[token]):",
        "loop/test_accept_drawn.py loop",
    ),
    Mutant(
        "residual-unscaled",
        "what is left of the distribution after a rejection is not renormalised",
        "left = excess / total",
        "left = excess",
        "loop/test_accept_drawn.py loop",
    ),
    Mutant(
        "residual-keeps-rejected",
        "a rejected token keeps its probability",
        "excess = (left - source).clamp_(min=0)",
        "excess = left.clone()",
        "loop/test_accept_drawn.py loop",
    ),
    Mutant(
        "drawn-with-replacement",
        "siblings are judged as if they were sampled with replacement",
        "        source[list(tokens[:place])] = 0\n",
        "",
        "loop/test_accept_drawn.py loop drafters/test_drawn_drafts.py",
    ),
    Mutant(
        "temperature-twice",
        "scores are warped before the processors warp them",
        "scores = self.processors(self.sequence.padded, raw)",
        "scores = self.processors(self.sequence.padded, self.warp(raw))",
        "hf/test_processors.py drafters/test_every_drafter.py hf loop",
    ),
    Mutant(
        "penalty-a-token-late",
        "processors do not see the newest token, which may be a drafted one",
        "scores = self.processors(self.sequence.padded, raw)",
        "scores = self.processors(self.sequence.padded[:, : max(1, self.sequence.columns - 1)], raw)",
        "hf/test_processors.py hf loop",
    ),
    Mutant(
        "processors-ignored-when-greedy",
        "min_new_tokens and penalties do not hold without sampling",
        "self.greedy = not (sample or len(processors) or keep_scores or keep_logits)",
        "self.greedy = not (sample or keep_scores or keep_logits)",
        "hf/test_processors.py hf/test_stopping.py hf",
    ),
    Mutant(
        "own-generator-ignored",
        "the tokens of a sequence are sampled from the generator of the process",
        "return int(torch.multinomial(self.distribution(logits), num_samples=1, generator=self.generator))",
        "return int(torch.multinomial(self.distribution(logits), num_samples=1))",
        "hf/test_batched.py serving/test_serving_surfaces.py loop hf serving",
    ),
    Mutant(
        "draft-beyond-the-last-position",
        "nodes stand at positions that the model does not have",
        "positions = remaining if longest is None else longest - self.sequence.length",
        "positions = remaining if longest is None else longest - self.sequence.length + 1",
        "loop/test_properties.py loop",
    ),
    Mutant(
        "learns-beyond-the-end",
        "drafters learn from nodes after the end of the sequence",
        "        if self.beyond is None:\n            return slice(None)",
        "        if self.beyond is None or self.finished:\n            return slice(None)",
        "loop/test_accept.py drafters/test_recycling.py trees loop drafters",
    ),
    Mutant(
        "errors-are-shared",
        "an error of one request ends the whole batch",
        "request.isolated = True",
        "request.isolated = False",
        "loop/test_continuous.py loop hf/test_batched.py",
    ),
    Mutant(
        "long-prompts-starve",
        "short prompts may pass over a long one for ever",
        "if self._passed_over >= _MOST_PASSED_OVER:",
        "if self._passed_over < 0:",
        "loop/test_waiting.py loop",
    ),
    # Trees and drafts.
    Mutant(
        "node-sees-parent-only",
        "a node does not see the nodes above its parent",
        "seen[node] |= seen[parent]",
        "seen[node, parent] = True",
        "trees/test_tree.py model/test_architectures.py",
    ),
    Mutant(
        "likeliest-without-ancestors",
        "a draft is cut by the probability of each node alone",
        "values[node] *= values[parents[node]]\n        return",
        "values[node] *= 1.0\n        return",
        "trees/test_draft.py trees loop",
    ),
    Mutant(
        "drawn-from-lost",
        "a part of a draft notes the distributions at the places of the whole",
        "sources = {places[node]: source for node, source in (self.sampled_from or {}).items() if node in places}",
        "sources = {node: source for node, source in (self.sampled_from or {}).items() if node in places}",
        "trees/test_draft.py trees drafters/test_drawn_drafts.py loop drafters",
    ),
    # Model: masks, positions, caches.
    Mutant(
        "sliding-window-dropped",
        "layers with a sliding window see all of the sequence",
        "return keys > queries - self.size",
        "return None",
        "model/test_architectures.py model",
    ),
    Mutant(
        "sliding-window-off-by-one",
        "the window is one token longer",
        "return keys > queries - self.size",
        "return keys >= queries - self.size",
        "model/test_architectures.py model",
    ),
    Mutant(
        "tree-across-a-border",
        "a tree lies across a length at which the model computes otherwise",
        "return length + nodes <= self.at or (self.beyond and length >= self.at)",
        "return length <= self.at or (self.beyond and length >= self.at)",
        "model/test_architectures.py model",
    ),
    Mutant(
        "siblings-at-different-positions",
        "nodes of one depth have the positions of their slots",
        '"position_ids": (self._sent(draft.depths) + held)[None],',
        '"position_ids": (torch.arange(len(draft), device=self._device) + held)[None],',
        "model/test_architectures.py model",
    ),
    Mutant(
        "siblings-of-a-batch-at-different-positions",
        "the same in a batch",
        "positions[row, :nodes] += self._sent(draft.depths)",
        "positions[row, :nodes] += torch.arange(nodes, device=device)",
        "model/test_architectures.py hf/test_batch.py model",
    ),
    Mutant(
        "mask-of-another-tree",
        "a mask is kept for another tree of the same size",
        "if known != key or room < length:",
        "if len(known) != len(key) or room < length:",
        "loop/test_properties.py model loop hf",
    ),
    Mutant(
        "row-sees-a-rejected-slot",
        "a row of a batch sees one slot behind its sequence",
        "visible = (torch.arange(held + n, device=device) < positions[:, :1])[:, None].repeat(1, n, 1)",
        "visible = (torch.arange(held + n, device=device) <= positions[:, :1])[:, None].repeat(1, n, 1)",
        "hf/test_batch.py model/test_architectures.py hf",
    ),
    Mutant(
        "cousins-in-a-batch",
        "in a batch every node sees all others of its tree",
        "visible[row, :nodes, held : held + nodes] |= self._sent(shapes.ancestors(draft.parents))",
        "visible[row, :nodes, held : held + nodes] = True",
        "hf/test_batch.py model/test_architectures.py hf",
    ),
    Mutant(
        "padding-has-positions",
        "tokens of a shorter prompt have positions counted from the padding",
        "places = (places - before).clamp(min=0)",
        "places = places.clone()",
        "model/test_recurrence.py hf/test_recurrent.py model/test_architectures.py",
    ),
    Mutant(
        "positions-of-pieces-from-zero",
        "every piece of a long prompt is read at the positions of the first",
        'more["position_ids"] = places[:, -tokens.shape[1] :]',
        'more["position_ids"] = places[:, : tokens.shape[1]]',
        "loop/test_waiting.py model/test_prefixes.py hf/test_conversation.py model",
    ),
    Mutant(
        "alibi-by-slot",
        "with ALiBi all nodes of a tree are as far away as its root",
        "mask, torch.cat([before, positions], dim=1))",
        "mask, torch.cat([before, positions[:, :1].expand_as(positions)], dim=1))",
        "model/test_architectures.py model",
    ),
    Mutant(
        "grouped-rows-interleaved",
        "grouped queries are masked by the rows of other nodes",
        "mask.repeat(1, 1, times, 1)",
        "mask.repeat_interleave(times, 2)",
        "model/test_architectures.py hf/test_fuzzing.py model",
    ),
    Mutant(
        "wrong-slot-kept",
        "the cache keeps the first slots of a tree, whichever were accepted",
        "slots.narrow(3, length + place, 1).copy_(slots.narrow(3, start + node, 1))",
        "slots.narrow(3, length + place, 1).copy_(slots.narrow(3, held + place, 1))",
        "model/test_kv_cache.py hf/test_caches.py model",
    ),
    Mutant(
        "index-keys-not-moved",
        "sparse attention keeps the index keys of rejected nodes",
        "layer.move(row, start + node, length + place)",
        "layer.move(row, start + node, start + node)",
        "model/test_kv_cache.py model/test_architectures.py model",
    ),
    Mutant(
        "cache-one-slot-long",
        "the slot of a rejected node stays at the end of the cache",
        "self._cut(max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True)))",
        "self._cut(1 + max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True)))",
        "model/test_kv_cache.py hf/test_caches.py model",
    ),
    Mutant(
        "row-not-moved",
        "a row that takes the place of one that ended keeps the slots of that one",
        "store.buffer[:, place, :, :slots] = store.buffer[:, row, :, :slots]\n            store.resize(len(rows))",
        "store.buffer[:1, place, :, :slots] = store.buffer[:1, row, :, :slots]\n            store.resize(len(rows))",
        "model/test_kv_cache.py loop/test_continuous.py hf/test_batch.py loop hf",
    ),
    Mutant(
        "state-of-the-root-kept",
        "recurrent layers keep the state after the root, not after the last accepted node",
        "keep_states(self.cache, [nodes[-1] if nodes else None for nodes in accepted])",
        "keep_states(self.cache, [nodes[0] if nodes else None for nodes in accepted])",
        "model/test_recurrence.py hf/test_recurrent.py model",
    ),
    Mutant(
        "linear-layer-of-another-thread",
        "what another thread finds out of a layer in the middle of a pass is used in that pass",
        "if part is self._last:",
        "if part is self._mixer.last:",
        "hf/test_threads.py model/test_recurrence.py",
    ),
    Mutant(
        "state-of-another-branch",
        "the state before a node is that of the node read before it",
        "_copied_rows([self._nodes[one][number] if one >= 0 else before for one in parents])",
        "_copied_rows([self._nodes[node - 1][number] if one >= 0 else before for one in parents])",
        "model/test_recurrence.py hf/test_recurrent.py model",
    ),
    Mutant(
        "stale-prefix",
        "the cache of an earlier sequence is used beyond the first token that differs",
        "same = int((root.tokens[:most] == tokens[n : n + most]).cumprod().sum())",
        "same = int((root.tokens[:most] == tokens[n : n + most]).sum())",
        "model/test_prefixes.py model",
    ),
    Mutant(
        "prefix-of-the-wrong-row",
        "of a batch the slots of the first row are kept for all",
        "[part.clone() for part in held.parts(row, n, len(tokens))]",
        "[part.clone() for part in held.parts(0, n, len(tokens))]",
        "model/test_prefixes.py loop/test_continuous.py serving/test_serving_prefixes.py loop",
    ),
    Mutant(
        "prefix-of-another-key",
        "an API key is given what was kept of another one: a side channel",
        "return Prefixes(self, key)",
        'return Prefixes(self, "")',
        "model/test_prefixes.py serving/test_serving_isolation.py serving/test_serving_prefixes.py serving",
    ),
    Mutant(
        "prefixes-without-limit",
        "nothing makes room in the cache of prefixes",
        "while self.nbytes + wanted > self.limit:",
        "while self.nbytes + wanted < 0:",
        "model/test_prefixes.py model",
    ),
    Mutant(
        "prefixes-by-age",
        "eviction drops segments in the order in which they came",
        "            self._by_use.move_to_end(segment)\n",
        "",
        "model/test_prefixes.py model",
    ),
    # What drafters learn.
    Mutant(
        "calibration-never-learns",
        "estimates never follow what was accepted",
        "calibration[cell, 0] += chosen",
        "calibration[cell, 0] += 0",
        "recycling/test_mixture.py recycling",
    ),
    Mutant(
        "first-rule-keeps-the-last",
        "the update rule `first` keeps the last row of a token",
        'order = -1 if rule == "first" else 1',
        "order = 1",
        "recycling/test_matrix.py recycling",
    ),
    Mutant(
        "matches-end-early",
        "a match is compared up to its second token only",
        "length < len(recent)\n                and at - length >= oldest",
        "length < min(2, len(recent))\n                and at - length >= oldest",
        "recycling/test_suffix_index.py recycling",
    ),
    Mutant(
        "matches-across-sequences",
        "what one sequence ended with is continued by the next one",
        "and token_at(index, at + 1) >= 0:",
        "and token_at(index, at + 1) >= -1:",
        "recycling/test_suffix_index.py recycling",
    ),
    Mutant(
        "matrix-of-another-tokenizer",
        "a matrix file of another tokenizer is loaded",
        'check_header(path, {"vocab_size": self.vocab_size, "k": self.k, "tokenizer": tokenizer}, header)',
        'check_header(path, {"vocab_size": self.vocab_size, "k": self.k, "tokenizer": ""}, header)',
        "recycling/test_matrix_files.py recycling",
    ),
    Mutant(
        "costs-ignored",
        "as many nodes are verified as there are, whatever passes cost",
        "np.argmax(expected[least - 1 :] / times[least - 1 : most])",
        "np.argmax(expected[least - 1 :])",
        "costs/test_budget.py costs",
    ),
    Mutant(
        "forecast-ratio-ignored",
        "estimates that were too high are believed again",
        "return min(1.0, accepted / predicted)",
        "return 1.0",
        "costs/test_drafting.py costs drafters/test_recycling.py",
    ),
    Mutant(
        "never-backs-off",
        "drafting goes on where it does not pay",
        "return 0 if paid or sums[0] >= sums[1] else min(int(own / _LOOKS), _LONGEST)",
        "return 0",
        "costs/test_costs.py costs drafters/test_recycling.py",
    ),
    Mutant(
        "costs-never-learned",
        "times of passes are those of the first measurement",
        "if len(self._observed) >= min(_TOGETHER, 1 + self.steps // _ONE_BY_ONE):",
        "if len(self._observed) < 0:",
        "costs/test_online.py costs",
    ),
    # Drafters.
    Mutant(
        "drafted-from-unwarped",
        "a draft model notes another distribution than it sampled from",
        "graph.sampled_from[parent] = probabilities[row]",
        "graph.sampled_from[parent] = torch.softmax(fitted, dim=-1)[row]",
        "drafters/test_drawn_drafts.py drafters/test_draft_model.py drafters",
    ),
    Mutant(
        "draft-model-keeps-wrong-slots",
        "a draft model keeps the first nodes that it read, whichever were accepted",
        "self._kept.keep(self.held - 1, [self.held - 1], [[0, *nodes]])",
        "self._kept.keep(self.held - 1, [self.held - 1], [[0, *range(1, 1 + len(nodes))]])",
        "drafters/test_draft_reader.py drafters/test_draft_model.py drafters",
    ),
    Mutant(
        "latest-match-instead-of-first",
        "prompt lookup drafts other tokens than transformers' own",
        "self._ends.setdefault(tuple(recent[end - size - begin : end - begin]), end)",
        "self._ends[tuple(recent[end - size - begin : end - begin])] = end",
        "drafters/test_prompt_lookup.py drafters",
    ),
    Mutant(
        "pool-grows-for-ever",
        "lookahead keeps every n-gram that it has seen",
        "if len(kept) > self.most:",
        "if len(kept) < 0:",
        "drafters/test_lookahead.py drafters",
    ),
    Mutant(
        "cycles-merged",
        "a draft graph is merged into a cycle",
        "if first == node or first in self._above(node):",
        "if first == node:",
        "drafters/test_draft_graph.py drafters",
    ),
    Mutant(
        "fused-shares-unlimited",
        "siblings of fused drafters are believed beyond certainty",
        "values[node] *= values[parents[node]] / max(1.0, sums[parents[node]])",
        "values[node] *= values[parents[node]]",
        "drafters/test_merge.py drafters/test_fuse.py drafters",
    ),
    Mutant(
        "acceptance-head-forgets",
        "SpecDec++ stops by the newest token alone, not by all so far",
        "probability *= head.acceptance(sequence.reader.states[-1])",
        "chance = head.acceptance(sequence.reader.states[-1])",
        "drafters/test_specdec_pp.py drafters",
    ),
    # transformers' generate.
    Mutant(
        "processor-of-another-row",
        "every row of a batch is held to what belongs to the first",
        "return LogitsProcessorList([_for_text(processor, row) for processor in self.processors])",
        "return LogitsProcessorList([_for_text(processor, 0) for processor in self.processors])",
        "hf/test_processors.py hf/test_batch.py hf ecosystem/test_grammars.py",
    ),
    Mutant(
        "end-of-a-batch-off-by-one",
        "a criterion over all rows ends them one token late",
        "sequence.end_at(min(sequence.columns, self._columns))",
        "sequence.end_at(min(sequence.columns, self._columns + 1))",
        "hf/test_batch.py hf",
    ),
    Mutant(
        "cache-shifted-too-far",
        "the cache that a batch returns is shifted by one slot",
        "TreeCache(self.cache).shift(self.paddings, columns - 1)",
        "TreeCache(self.cache).shift([one + 1 for one in self.paddings], columns - 1)",
        "hf/test_caches.py hf/test_batch.py hf",
    ),
    Mutant(
        "positions-unchecked",
        "a call with positions of its own is accelerated with others",
        "if not self._counts_from_zero:",
        "if self._counts_from_zero is None:",
        "model/test_self_test.py hf",
    ),
    Mutant(
        "streamed-twice",
        "a streamer is given the tokens of every step twice",
        "call.streamer.put(torch.tensor(steps[0].tokens))",
        "[call.streamer.put(torch.tensor(steps[0].tokens)) for _ in range(2)]",
        "drafters/test_every_drafter.py hf/test_stopping.py hf",
    ),
    Mutant(
        "seed-ignored",
        "calls that share passes sample by one seed",
        "generator = torch.Generator(call.input_ids.device).manual_seed(seed)",
        "generator = torch.Generator(call.input_ids.device).manual_seed(0)",
        "hf/test_batched.py serving/test_serving_surfaces.py hf serving",
    ),
    Mutant(
        "answer-beyond-the-context",
        "a conversation generates beyond the model's context",
        'asked["max_new_tokens"] = min(asked["max_new_tokens"], context - len(ids))',
        'asked["max_new_tokens"] = asked["max_new_tokens"]',
        "hf/test_conversation.py hf",
    ),
    # Captured steps.
    Mutant(
        "captured-slots-of-the-first-capture",
        "captured passes write to the slots of the sequence that they were captured with",
        "Frame(trees.lengths[:, None] + along, band)",
        "Frame(int(trees.lengths[0]) + along.expand(len(trees.lengths), -1), band)",
        "cuda_graphs/test_calls.py cuda_graphs",
    ),
    Mutant(
        "captured-room-for-the-first-row",
        "slots that grow keep the first sequence of a batch alone",
        "self.slots.take(before, rows, held)",
        "self.slots.take(before, 1, held)",
        "cuda_graphs/test_running.py cuda_graphs",
    ),
    Mutant(
        "captured-join-over-another",
        "a request that joins a captured batch takes the slots of another",
        "self.slots.take(other, 1, held, first=sequences)",
        "self.slots.take(other, 1, held, first=sequences - 1)",
        "cuda_graphs/test_running.py cuda_graphs",
    ),
    Mutant(
        "captured-leave-without-move",
        "a sequence that takes the place of another leaves its slots behind",
        "            self._within.move(order, longest)\n",
        "            pass\n",
        "cuda_graphs/test_running.py cuda_graphs",
    ),
    Mutant(
        "penalty-ignores-the-path",
        "a penalty that is computed at all nodes at once ignores drafted tokens",
        "below = tree.ancestors[0] & (torch.arange(n, device=scores.device) > 0)",
        "below = tree.ancestors[0] & (torch.arange(n, device=scores.device) < 0)",
        "cuda_graphs/test_parts.py cuda_graphs",
    ),
    Mutant(
        "graph-of-another-adapter",
        "a captured pass is replayed for another adapter than it was captured with",
        "if not isinstance(later, State) or self._parts != later._parts:",
        "if not isinstance(later, State):",
        "model/test_state.py cuda_graphs/test_changes.py cuda_graphs",
    ),
    Mutant(
        "forced-without-end",
        "a grammar that forces a text without end is followed for ever",
        "while len(found) < _MOST_FORCED and not self.watch.slow",
        "while not self.watch.slow",
        "loop/test_constraints.py",
    ),
    # Server.
    Mutant(
        "stop-string-across-tokens",
        "a stop string is missed where it comes in pieces",
        "cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stop), default=0)",
        "cut = len(self._held)",
        "serving/test_serving_stops.py serving/test_serving_parts.py serving",
    ),
    Mutant(
        "queue-without-limit",
        "the server takes any number of requests",
        "if len(self._jobs) >= settings.max_requests:",
        "if len(self._jobs) < 0:",
        "serving/test_serving_requests.py serving",
    ),
    Mutant(
        "limit-of-a-key-off-by-one",
        "a key may have one request more than it is allowed",
        "self._by_key[name] >= settings.max_requests_per_key:",
        "self._by_key[name] > settings.max_requests_per_key:",
        "serving/test_serving_requests.py serving",
    ),
    Mutant(
        "matrix-of-another-key",
        "requests of one API key draft by what those of another have taught",
        'name = "" if self.isolation is Isolation.shared else name',
        'name = ""',
        "serving/test_serving_isolation.py serving",
    ),
    Mutant(
        "request-teaches-the-base",
        "a request of its own leaves what it taught to the next one",
        "            yield self.base.fork()\n            return",
        "            yield self.base\n            return",
        "serving/test_serving_isolation.py serving",
    ),
    Mutant(
        "grammar-of-another-key",
        "how long a grammar compiles tells whether another key has used it",
        'kept = self._kept.setdefault(key if self._isolation is Isolation.per_key else "", kept)',
        'kept = self._kept.setdefault("", kept)',
        "serving/tools/test_forms.py serving/test_serving_isolation.py serving",
    ),
    Mutant(
        "metrics-key-opens-all",
        "the key for metrics may generate",
        "if keys and (key is None or key.name == METRICS):",
        "if keys and key is None:",
        "serving/test_serving_access.py serving",
    ),
    Mutant(
        "any-host",
        "a web page may reach the server through a name of its own",
        "return is_loopback(name) or name in self._allowed",
        "return True",
        "serving/test_serving_access.py serving",
    ),
    Mutant(
        "bodies-without-limit",
        "a body of unknown length is read to its end",
        "if read > self._max_bytes:",
        "if read < 0:",
        "serving/test_serving_requests.py serving",
    ),
    Mutant(
        "penalty-counts-the-prompt",
        "OpenAI's penalties count tokens of the prompt",
        "counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1])",
        "counts = torch.bincount(input_ids[0], minlength=scores.shape[-1])",
        "serving/test_serving_fields.py serving",
    ),
    Mutant(
        "finish-reason-of-the-last-token",
        "an end of sequence at the last token counts as cut off",
        'return "length" if full and not self._trimmer.stopped and self._last not in self._eos else "stop"',
        'return "length" if full else "stop"',
        "serving/test_serving_stops.py serving",
    ),
    Mutant(
        "logprobs-of-the-first-token",
        "all tokens of a step have the log-probabilities of its first",
        "recorder.scored(start + place, token)",
        "recorder.scored(start, token)",
        "serving/test_serving_openai.py serving/test_serving_fields.py serving",
    ),
    Mutant(
        "timeout-ignored",
        "a request runs for as long as it likes",
        "if self.timeout is None or self.seconds < self.timeout:",
        "if self.timeout is None or self.seconds >= 0:",
        "serving/test_serving_waiting.py serving/test_serving_errors.py serving",
    ),
    Mutant(
        "disconnected-client-goes-on",
        "what nobody waits for is generated to its end",
        "        if not (self._ended or self._failed):\n            self.cancelled = True",
        "        if not (self._ended or self._failed):\n            self.cancelled = False",
        "serving/test_serving_waiting.py serving/test_serving_connections.py serving",
    ),
    # Command line, benchmark, streaming.
    Mutant(
        "half-a-character",
        "a character of several bytes is streamed in pieces",
        "if not text or text.endswith(_INCOMPLETE):",
        "if not text:",
        "cli/test_cli_compare.py cli serving",
    ),
    Mutant(
        "compare-exits-with-zero",
        "`compare` says that all is well where outputs differ",
        'if not summary["identical"]:',
        'if summary["identical"] is None:',
        "cli/test_cli_compare.py cli",
    ),
    Mutant(
        "stop-option-ignored",
        "`generate --stop` goes on",
        'stops = {"stop_strings": stop, "tokenizer": loaded.tokenizer} if stop else {}',
        "stops = {}",
        "cli/test_cli_generate.py cli",
    ),
    Mutant(
        "context-exceeded",
        "the command line generates beyond the model's context",
        '"max_new_tokens": min(max_new_tokens, room),',
        '"max_new_tokens": max_new_tokens,',
        "cli/test_cli_generate.py cli",
    ),
    Mutant(
        "speedup-upside-down",
        "a report gives the time of the method by that of the baseline",
        'return sums["tokens"] / sums["call_seconds"] * sums["base_call_seconds"] / sums["base_tokens"]',
        'return sums["base_tokens"] / sums["base_call_seconds"] * sums["call_seconds"] / sums["tokens"]',
        "bench/test_report_arithmetic.py bench",
    ),
    Mutant(
        "always-identical",
        "the benchmark does not notice outputs that differ",
        "written.update(identical=divergence is None, divergence=divergence)",
        "written.update(identical=True, divergence=None)",
        "bench/test_bench_run.py bench cli/test_cli_compare.py",
    ),
    Mutant(
        "half-written-rows-stay",
        "a resumed benchmark keeps the rows of an item that was interrupted",
        "file.truncate(self._bytes)",
        "file.truncate()",
        "bench/test_bench_run.py bench",
    ),
    Mutant(
        "order-never-rotates",
        "one method always runs on a processor that another has warmed",
        "first = (index + repetition) % len(methods)",
        "first = 0",
        "bench/test_bench_run.py bench",
    ),
]


def place_of(mutant: Mutant, root: Path) -> Path:
    """The one file that has the old piece; raises ValueError if there is none, or it stands there more than once."""
    counts = {path: path.read_text("utf-8").count(mutant.old) for path in sorted((root / PACKAGE).rglob("*.py"))}
    found = {path: count for path, count in counts.items() if count}
    if sum(found.values()) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "no file"
        raise ValueError(f"{mutant.name}: the old piece must stand in the package once, got {where}: {mutant.old!r}")
    return next(iter(found))


def copied(root: Path, copy: Path) -> None:
    """Make `copy` the tracked and new files of a repository, as links to the same contents."""
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(root / name, copy / name)


def run(copy: Path, tests: list[str], numba: Path, seconds: float) -> tuple[str | None, float]:
    """Run tests in `copy` until the first failure; return the test that failed, None if none did, and seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(numba), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:.0f} s", time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?\[.*\]|\S+)(?: - .*)?$", done.stdout, re.MULTILINE)
    killer = failed[1] if failed else None if done.returncode in (0, 4, 5) else f"pytest ended with {done.returncode}"
    return killer, time.monotonic() - began


def stages_of(mutant: Mutant, root: Path) -> list[list[str]]:
    """What to run, one after the other: the likely files, the likely folders, all tests."""
    likely = [Path("tests", name) for name in mutant.tests.split() if (root / "tests" / name).exists()]
    files, folders = ([str(path) for path in likely if (path.suffix == ".py") is isfile] for isfile in (True, False))
    return [files, folders, ["tests"]]


def confirmed(copy: Path, killers: list[str], numba: Path) -> list[str]:
    """Of tests that have failed with a mutant those that fail without one too."""
    found = [killer for killer in killers if "::" in killer]
    failed = []
    while found:
        killer, _ = run(copy, found, numba, sum(_SECONDS))
        if killer is None:
            break
        failed.append(killer)
        found = [one for one in found if one != killer] if killer in found else []
    return failed


def main() -> int:
    """Run mutants and print a table; the exit status is 1 if any survived or could not be put in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of mutants; all if none is given")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository whose package and tests are tried")
    parser.add_argument("--rows", type=Path, help="file of results; default build/mutants/rows.jsonl")
    parser.add_argument("--stages", type=int, default=3, help="1: likely files alone; 2: their folders too")
    parser.add_argument("--again", action="store_true", help="run what has a row too, its test of then first")
    parser.add_argument("--check", action="store_true", help="see that all can be put in, and run nothing")
    given = parser.parse_args()
    unknown = set(given.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no mutants of these names: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    folder = ROOT / "build" / "mutants"
    rows_file = given.rows or folder / "rows.jsonl"
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in rows_file.read_text("utf-8").splitlines()] if rows_file.exists() else []
    before = {row["name"]: row["killed_by"] for row in known}
    rows = {row["name"]: row for row in known if not (given.names or given.again)}
    copy, failed = folder / f"copy-{os.getpid()}", 0
    if not given.check:
        copied(given.root, copy)
    try:
        for number, mutant in enumerate(chosen, start=1):
            row = rows.get(mutant.name)
            try:
                path = place_of(mutant, given.root)
            except ValueError as error:
                failed += 1
                print(f"{number:3} of {len(chosen)}  not put in  {error}", flush=True)
                continue
            if given.check:
                continue
            if row is None:
                stages = [[test for test in (before.get(mutant.name),) if test and "::" in test]]
                stages += stages_of(mutant, copy)[: given.stages]
                row = tried(mutant, copy, copy / path.relative_to(given.root), folder / "numba", stages)
                rows[mutant.name] = row
                with rows_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            failed += row["killed_by"] is None
            how = f"killed by {row['killed_by']}" if row["killed_by"] else f"SURVIVED: {mutant.why}"
            print(f"{number:3} of {len(chosen)}  {row['seconds']:6.0f} s  {mutant.name}  {how}", flush=True)
        killers = {rows[one.name]["killed_by"] for one in chosen if one.name in rows} - {None}
        for killer in [] if given.check else confirmed(copy, sorted(killers), folder / "numba"):
            failed += 1
            print(f"fails without a mutant too: {killer}")
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    print(f"{len(chosen)} mutants, {failed} problems")
    return int(failed > 0)


def tried(mutant: Mutant, copy: Path, path: Path, numba: Path, stages: list[list[str]]) -> dict[str, Any]:
    """Put a mutant into `path` of a copy, run tests, and take it out again."""
    source, seconds, killer = path.read_text("utf-8"), 0.0, None
    stat = path.stat()
    path.unlink()  # a link: the original must stay
    path.write_text(source.replace(mutant.old, mutant.new), "utf-8")
    try:
        for tests, limit in zip(stages, _SECONDS, strict=False):
            killer, spent = run(copy, tests, numba, limit) if tests else (None, 0.0)
            seconds += spent
            if killer is not None:
                break
    finally:
        path.write_text(source, "utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as numba's compiled functions know it
    return {
        "name": mutant.name,
        "killed_by": killer,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
