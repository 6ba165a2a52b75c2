"""Arctic's suffix decoding on the same turns: its own cache, asked as its simulator asks it, without a model.

`arctic_inference.suffix_decoding` of arctic-inference 0.3.0 (Oliaro et al., 2411.04975) must be importable; docs/LOG.md
says how it is built alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .turns import Turn


class Arctic:
    """Suffix trees of prompts and of earlier answers."""

    def __init__(self, factor: float = 1.0, depth: int = 64, probability: float = 0.1, trees: bool = True) -> None:
        """`factor`: drafted tokens for each of the match; the defaults are its simulator's."""
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache, self._requests = SuffixDecodingCache(max_tree_depth=depth), 0
        self._how: dict[str, Any] = {
            "max_spec_tokens": depth,
            "max_spec_factor": factor,
            "min_token_prob": probability,
            "use_tree_spec": trees,
        }

    def replay(self, turn: Turn) -> list[tuple[int, int]]:
        """Of every step its drafted tokens and its emitted ones."""
        request, steps, text = self._requests, [], list(turn.prompt)
        self._requests += 1
        self._cache.start_request(request, np.array(turn.prompt, np.int32))
        while len(text) < len(turn.prompt) + len(turn.answer):
            left = turn.answer[len(text) - len(turn.prompt) :]
            draft = self._cache.speculate(request, np.array(text, np.int32), **self._how)
            node, accepted = -1, 0
            for token in left[:-1]:
                node = next(
                    (
                        place
                        for place, parent in enumerate(draft.parents)
                        if parent == node and draft.token_ids[place] == token
                    ),
                    None,
                )
                if node is None:
                    break
                accepted += 1
            emitted = left[: accepted + 1]
            self._cache.add_active_response(request, np.array(emitted, np.int32))
            text += emitted
            steps.append((len(draft.token_ids), len(emitted)))
        self._cache.stop_request(request)
        return steps
