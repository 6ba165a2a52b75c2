"""Foreign code in and around a model, and whether the model may be accelerated with it.

Tree verification is exact only under two conditions: a forward pass computes every row alike, whatever other rows it
has, and `generate` passes the same inputs to the model as the loop does. The families of transformers meet both
(`architectures`). Code from a user or another library may not: a steering hook may change only the last row, an
overridden `prepare_inputs_for_generation` may change the tokens, a processor may write to a weight between two passes.

**Foreign code** (`model.origin`) belongs to any package except transformers, torch, accelerate, this one and Python's
standard library. `search` lists it: hooks, modules of other classes, methods and functions that were replaced in an
object, a class, a family's module or a library, attention registered by name, and torch modes. A model without foreign
code costs only the search, which is repeated when the model or its code changes (`facts`).

**Code that no trial can clear** runs through transformers' own `generate`: another decoding loop, functions that choose
tokens, random numbers of training mode, replaced functions of caches (`search`).

**Plain code** (`plain`) keeps no state, so a trial stays valid while the values that the code reads are unchanged. It
stores nothing outside its local variables, reaches nothing that may change unnoticed, and uses only names listed as
harmless. Other code runs through `generate`. Adapters of peft and functions that trl sets on a model are plain.

**A trial** (`trial`, the only part that runs anything) compares logits, up to rounding: those of our passes over a
tree, after a prompt, with several numbers of rows and sequences, with those of `generate` along the same tokens. It
runs once per form of the code: its functions and the values that they read. Cases that a trial may miss are traced
(`decisions`).

**Code next to the model** (`bystanders`): processors, criteria and streamers run between forward passes. Accelerated
calls have fewer passes, and their cache holds drafts. So a call runs through `generate` if such code could reach the
model, its weights or that cache, or if the model runs foreign code with which it could share state.

`why_not` decides in each call. Each refusal names the code, its location and the reason. The modules for trials and for
searching reachable objects are imported only if there is foreign code.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..origin import is_foreign, is_of, name_of
from ..parts import replaced_in
from ..target import Target
from .search import Foreign, foreign_code, why_not_patched, why_not_plain_loop

_NO_CODE = "no foreign code"


def why_not(target: Target, batch: int, padded: bool, beside: Sequence[Any], cache: Cache | None) -> str | None:
    """Return why foreign code prevents accelerating a call with `batch` sequences, `padded` or not, or None. `beside`:
    code next to the model (`code_beside`); `cache`: the caller's own, if the call has one. Results of trials are kept.
    Reachable objects may change between calls, so they are searched in every call.
    """
    pieces, reason = _code_in(target)
    if reason is None and cache is not None:
        reason = why_not_patched(cache)
    if reason is None and pieces:
        from . import trial

        reason = trial.why_not(target, pieces, batch, padded)
    if reason is None and beside:
        from . import bystanders

        reason = bystanders.why_not(target.model, pieces, beside, cache)
    return reason


def keeps_state(target: Target) -> bool:
    """Return whether foreign code in a model may keep state between forward passes, so that all calls fall back."""
    pieces, _ = _code_in(target)
    if not pieces:
        return False
    from .plain import reachable

    return any(reach.reason is not None for reach in reachable(target.model, pieces))


def mixes_sequences(target: Target) -> bool:
    """Return whether foreign code may read across the sequences of a batch, so that none may join or leave it."""
    pieces, _ = _code_in(target)
    if not pieces:
        return False
    from . import trial

    return trial.mixes_sequences(target, pieces)


def values_in(target: Target) -> Hashable:
    """Return a value that equals later ones while the foreign code in a model reads the same values; None if the model
    has none.
    """
    pieces, _ = _code_in(target)
    if not pieces:
        return None
    from . import trial

    return trial.values_of(target, pieces)


def why_not_plain(model: PreTrainedModel, code: Any) -> str | None:
    """Return why code next to a model may keep state between calls; None if it is plain, as grammar libraries are."""
    from .bystanders import GRAMMARS
    from .plain import Reachable

    description = name_of(code)
    reason = None if is_of(code, GRAMMARS) else Reachable(model, Foreign(description, code)).reason
    return None if reason is None else f"{description}: {reason}"


def code_beside(objects: Iterable[Any]) -> list[Any]:
    """Return the code of users or other libraries among processors, criteria and streamers: foreign objects, and
    foreign functions held by objects of transformers.
    """
    code = []
    for bystander in objects:
        cls = type(bystander)
        of_transformers = cls.__module__.startswith("transformers.")
        if any(map(replaced_in, cls.__mro__)) if of_transformers else is_foreign(bystander):
            code.append(bystander)
        elif not cls.__module__.startswith("token_recycling."):
            code += [
                value for value in getattr(bystander, "__dict__", {}).values() if callable(value) and is_foreign(value)
            ]
    return code


def _code_in(target: Target) -> tuple[tuple[Foreign, ...], str | None]:
    """Return the foreign code in a model that trials must check, and why no trial can clear it; searched once. Code may
    hold the model, so it is kept with the target: the facts about a model would keep it alive. They note its absence.
    """
    facts = target.facts
    without: tuple[tuple[Foreign, ...], str | None] | None = facts.recall(_NO_CODE, of="code")
    if without is not None:
        return without
    state = facts.fingerprint.code
    if target.foreign is None or target.foreign[0] is not state:
        pieces = foreign_code(target.model, target.info.quantized)
        reason = why_not_plain_loop(target.model, pieces)
        target.foreign = state, pieces, reason
        if not pieces:
            return facts.get(_NO_CODE, lambda: (pieces, reason), of="code")
    _, pieces, reason = target.foreign
    return pieces, reason
