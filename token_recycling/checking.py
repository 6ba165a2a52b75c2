"""What is supported, said in advance: by what is known of the architecture, and by trying it.

The self-test is the claim itself, on a short random text: the logits after every node of a tree, from one forward pass
with a cache, against those of an ordinary pass over the text up to that node, without one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from .architectures import Support, support
from .drafting import Draft
from .fast.support import by_configuration, without_fast_path
from .target import Target
from .tree import Tree

_SMALL = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
_LENGTH, _LONGEST = 24, 512


def check(model: PreTrainedModel, self_test: bool = False) -> Support:
    """Whether and how a model can be accelerated, and why not; never raises for a model.

    `self_test` also compares the logits of a tree with those of linear decoding, and watches whether a step would make
    the host wait: five short forward passes.
    """
    found = support(model)
    if not found.supported:
        return found
    found = replace(found, no_fast_path=by_configuration(found))
    notes = found.notes
    if not found.tested:
        notes = (*notes, f"{found.model} (family {found.family!r}) is not among those tested: a self-test decides")
    if not self_test:
        return replace(found, notes=notes)
    length = _LENGTH
    windows = [reach.size for reach in found.layers.values() if reach.kind != "full"]
    if windows and max(windows) < _LONGEST:
        length += max(windows)
    elif windows:
        notes = (*notes, f"the self-test's text of {length} tokens does not cross the window of {max(windows)}")
    try:
        target = Target(model, trusted=True)
        difference, scale = largest_difference(target, random_text(target, length), _SMALL)
    except Exception as error:  # a model of an unknown kind can fail in any way
        reason = f"expected a forward pass over a tree, got {type(error).__name__}: {error}"
        return replace(found, reason=reason, notes=notes)
    tolerance = scale * (1e-3 if target.dtype == torch.float32 else 0.2)
    if not scale > 0:
        reason = f"expected logits that differ for the self-test, got {found.model} with all the same; load its weights"
        return replace(found, reason=reason, notes=notes)
    if not difference <= tolerance:
        reason = (
            f"expected logits of a tree within {tolerance:.1e} of linear decoding, got a difference of "
            f"{difference:.1e}: {found.model} does not follow the mask or the positions it is given"
        )
        return replace(found, reason=reason, difference=difference, notes=notes)
    no_fast_path = without_fast_path(target)
    return replace(found, difference=difference, notes=notes, no_fast_path=no_fast_path)


def random_text(target: Target, length: int, seed: int = 0) -> torch.Tensor:
    """(length,) random ids on the target's device."""
    drawn = torch.randint(0, target.embedded, (length,), generator=torch.Generator().manual_seed(seed))
    return drawn.to(target.device)


@torch.no_grad()
def largest_difference(target: Target, text: torch.Tensor, tree: Tree, seed: int = 1) -> tuple[float, float]:
    """The largest difference between a tree's logits and those of passes over the text up to each leaf, and the
    standard deviation of the latter.

    `text` (length,) ends with the root; the other nodes are random.
    """
    tokens = torch.cat([text[-1:], random_text(target, len(tree) - 1, seed)])
    cache = target.new_cache()
    target.prefill([text], cache)
    length = len(text) - 1
    target.cross([text], cache)
    ours = target.forward(target.inputs([Draft(tree, tokens)], [length], length), cache)[0]
    wanted = torch.empty_like(ours)
    for leaf, children in enumerate(tree.children):
        if not children:
            path = list(tree.lineages[leaf])
            ids = torch.cat([text[:-1], tokens[path]])[None]
            wanted[path] = target.model(input_ids=ids, use_cache=False).logits[0, -len(path) :]
    return float((ours - wanted).abs().max()), float(wanted.float().std())
