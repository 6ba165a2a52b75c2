"""Plain autoregressive decoding: every draft is a lone root. The baseline of all comparisons, run by the same loop."""

from __future__ import annotations

from dataclasses import dataclass

from ..trees.draft import Context, Draft
from ._base import Drafter, DrafterTraits


@dataclass
class Plain(Drafter):
    """Drafts nothing."""

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(on_host=True, reproducible=True)

    def draft(self, context: Context) -> Draft:
        return Draft.chain(context.root)

    def describe(self) -> str:
        return "plain: no draft, one token per step"
