"""Foreign code in and around a model, and whether the model may be accelerated with it.

Verifying a tree is exact if every row of a forward pass is computed alike, whatever other rows the pass has, and if
`generate` passes to the model what the loop passes. The families of transformers keep that (`architectures`). Code that
a user or another library brings may not: a steering hook may change the last row alone, an overridden
`prepare_inputs_for_generation` may change the tokens, a processor may write to a weight between two passes.

**What is foreign** (`model.origin`): code of any package but transformers, torch, accelerate, this one and Python's own
library. `search` lists it: hooks, modules of other classes, methods and functions that were replaced in an object, a
class, a family's module or a library, attention that is registered by name, modes of torch. A model without foreign
code costs nothing but the search, once for each of its forms (`facts`).

**What no trial can show** is left to `generate`: another loop, functions that choose tokens, random numbers of training
mode, functions of caches that were replaced (`search`).

**What is plain** (`plain`): code that keeps no state, so that a trial of it holds for as long as the values that it
reads are the same. It stores nothing outside its local variables, it reaches nothing that may change unnoticed, and
each name that it uses is listed there as harmless. Other code is left to `generate`. Adapters of peft and what trl sets
on a model are plain.

**What a trial proves** (`trial`, the only part that runs anything): that our passes over a tree, behind a prompt, with
several numbers of rows and sequences, give the logits of `generate` along the same tokens, to rounding. It is made once
for each form of the code: its functions and the values that they read. What it need not meet is traced (`decisions`).

**Code beside the model** (`bystanders`): processors, criteria and streamers run between forward passes, which are
fewer here, behind a cache that holds drafts. Code that could reach the model, its weights or that cache is left to
`generate`; so is all code beside a model that runs foreign code, with which it could share state.

**Who decides**: `why_not`, in each call. Each refusal names the code, where it is and why. Trials, and the search for
what code reaches, are loaded once there is foreign code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..origin import is_foreign, is_of, name_of
from ..parts import replaced_in
from ..target import Target
from .search import Foreign, foreign_code, why_not_patched, why_not_plain_loop


def why_not(target: Target, batch: int, padded: bool, beside: Sequence[Any], cache: Cache | None) -> str | None:
    """Return why foreign code prevents accelerating a call of a model with `batch` sequences, `padded` or not, or None;
    with code `beside` the model (`code_beside`), and in the caller's own `cache`, if the call has one. Trials are kept;
    what the code reaches, which others may change between calls, is searched in every call.
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


def mixes_sequences(target: Target) -> bool:
    """Whether foreign code may look at all sequences of a batch, so that none may join or leave it."""
    pieces, _ = _code_in(target)
    if not pieces:
        return False
    from . import trial

    return trial.mixes_sequences(target, pieces)


def why_not_plain(model: PreTrainedModel, code: Any) -> str | None:
    """Return why code beside a model may keep state from call to call, or None if it is plain; grammar libraries keep
    none that matters.
    """
    from .bystanders import GRAMMARS
    from .plain import Reachable

    description = name_of(code)
    reason = None if is_of(code, GRAMMARS) else Reachable(model, Foreign(description, code)).reason
    return None if reason is None else f"{description}: {reason}"


def code_beside(objects: Iterable[Any]) -> list[Any]:
    """Return the code of users or other libraries among processors, criteria and streamers: the objects themselves, or
    functions that an object of transformers calls.
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
    """Return the foreign code in a model that trials must prove, and why none could; searched once."""

    def search() -> tuple[tuple[Foreign, ...], str | None]:
        pieces = foreign_code(target.model, target.info.quantised)
        return pieces, why_not_plain_loop(target.model, pieces)

    return target.facts.get("foreign code", search, of="code")
