"""MTP: layers shipped with the target predict the tokens after the next one (`MtpModel` of transformers).

The first layer reads the target's last hidden state and the token chosen from it, and predicts the token after. Each
further layer continues; beyond the last layer, its own output is fed back, as in vLLM and SGLang. transformers drafts
one token per layer, for one sequence; here the runners-up of every position are also drafted, as siblings of the best
token, as many as pay. Drafts are deterministic, so sampled outputs are exact.

Cost per step: a pass of every layer and of the target's output layer, and one more per further position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import transformers

from .._util.text_stream import first_line
from .._util.topk import top_candidates
from ..model.attention import attending, stand_in
from ..model.compat import MtpCache, MtpModel, attention_name, needed
from ..model.hidden import last_state
from ..model.target import Target
from ..trees.draft import Budget, Context, Draft
from ._base import DrafterTraits, check_at_least, check_auto_or_nodes
from ._shared.neural import placed_copy
from ._shared.states import PendingStates, StatesDrafter, StatesSequence, appending

_OWN = "own"
_PIECE = 512


@dataclass
class Mtp(StatesDrafter[MtpModel]):
    """Drafts with the target's own MTP layers."""

    layers: str | MtpModel = _OWN
    """own: use the target checkpoint's MTP layers; in Python also a MtpModel."""
    tree: int | Literal["auto"] = "auto"
    """auto: as many nodes and positions as pay at each step, by the layers' probabilities; or a number of nodes."""
    k: int = 4
    """Candidates per position; 1 for a chain."""
    depth: int = 4
    """Maximum number of positions; beyond the number of layers the last layer reads its own output."""

    def __post_init__(self) -> None:
        needed(MtpModel, "the drafter mtp")
        check_at_least(1, self, "k", "depth")
        check_auto_or_nodes(self, "tree")
        if isinstance(self.layers, str) and self.layers != _OWN:
            raise ValueError(
                f"layers must be {_OWN} (those in the target's files) or, in Python, a MtpModel, got {self.layers!r}"
            )

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(states=last_state, on_host=True, nodes=self.nodes)

    def start(self, prompt: torch.Tensor, target: Target) -> MtpSequence:
        return MtpSequence(self, MtpReader(self.placed(target), len(prompt)))

    def place(self, target: Target) -> MtpModel:
        layers = _own_layers(target) if isinstance(self.layers, str) else _tied(self.layers, target)
        kinds = getattr(layers.config, "layer_types", None) or []
        if "linear_attention" in kinds:
            raise ValueError(
                f"MTP layers of type {', '.join(kinds)} in {type(target.model).__name__} are unsupported: recurrent "
                "states cannot roll back rejected tokens; choose another drafter, such as recycling"
            )
        stand_in(layers.config, attention_name(layers.config), grouped=True)
        return layers

    def describe(self) -> str:
        return f"mtp: {self.k} candidates per position, at most {self.depth} positions, tree {self.tree_description()}"


def _own_layers(target: Target) -> MtpModel:
    name = type(target.model).__name__
    if not getattr(target.config, "num_mtp_layers", None):
        raise ValueError(
            f"transformers {transformers.__version__} reads no MTP layers of {name} (num_mtp_layers in its "
            "configuration); choose another drafter, such as recycling"
        )
    try:
        return MtpModel.from_pretrained(target.model, device_map={"": target.device}).eval()
    except Exception as error:  # a user's files can be wrong in any way
        raise ValueError(
            f"the {target.config.num_mtp_layers} MTP layers of {name} cannot be loaded: {first_line(error)}; "
            "load the target from a folder or the hub with all of its weights"
        ) from error


def _tied(layers: MtpModel, target: Target) -> MtpModel:
    """Return the layers with the target's embedding and output layer; a copy if they have others."""
    ours, theirs = target.config.hidden_size, layers.config.hidden_size
    if ours != theirs:
        raise ValueError(f"MTP layers must have the target's width, {ours}, got {theirs}; use the target's own")
    there = layers.layers[0].eh_proj.weight
    is_there = (there.device, there.dtype) == (target.device, target.dtype)
    if layers.shared_head is target.model.get_output_embeddings() and is_there:
        return layers.eval()
    copied = placed_copy(layers, target.device, target.dtype)
    copied.tie_with_main_model(target.model)
    return copied


class MtpReader(PendingStates):
    """Reads one sequence with the layers, and predicts a chain after it.

    A row is a hidden state of the target and the token after it; every further layer reads the same rows with the
    tokens one position later, the last of which are drafted. So the cache entries of the last rows, one fewer than
    there are layers, are dropped before the next pass and read again: these states (n, hidden) stay pending.
    """

    def __init__(self, layers: MtpModel, prompt: int) -> None:
        super().__init__(prompt)
        self._layers = layers
        self._new_cache()

    def _new_cache(self) -> None:
        self._cache = appending(MtpCache(config=self._layers.config))
        self._cache.activate_past_recording()
        self._surplus, self._beyond = 0, 0
        """Cache rows to drop before the next pass, and rows of the last layer after them."""

    @torch.no_grad()
    def read(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return logits (layers, vocabulary) of the tokens after `sequence` (length,), each after the best so far."""
        states = self.taken()
        while True:
            self._forget()
            piece = states[:_PIECE]
            logits = self._pass(piece, sequence[self._next + 1 :][: len(piece)].to(piece.device))
            self._surplus = min(len(piece), len(self._layers.layers) - 1)
            self._next += len(piece) - self._surplus
            self._pending = [states[len(piece) - self._surplus :]]
            if len(piece) == len(states):
                return logits
            states = self._pending[0]

    def _forget(self) -> None:
        if self._next == self.begin:
            self._new_cache()
            return
        *others, last = self._cache.layers
        for layer in others:
            layer.crop(-self._surplus)
        last.crop(-self._surplus - self._beyond)
        self._beyond = 0

    def _pass(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (layers, vocabulary) of all layers after the last of some rows."""
        self._hidden, self._tokens = states[None], tokens[None]
        self._positions = torch.arange(self._next + 1, self._next + 1 + len(tokens), device=tokens.device)[None]
        return torch.cat([self._layer(number) for number in range(len(self._layers.layers))])

    def _layer(self, number: int) -> torch.Tensor:
        """Return logits (1, vocabulary) of a layer after the last row; the next layer reads rows one position later."""
        config = self._layers.config
        with attending(config, attention_name(config), grouped=True):
            self._hidden = self._layers.forward_layer(
                number, self._hidden, self._positions, self._cache, input_ids=self._tokens
            )
        scale, size = (getattr(config, name, None) for name in ("logits_mup_width_multiplier", "unpadded_vocab_size"))
        logits = self._layers.shared_head(self._hidden[:, -1] / (scale or 1))[..., :size]
        self._tokens = torch.cat([self._tokens[:, 1:], logits.argmax(dim=-1, keepdim=True)], dim=1)
        self._positions = self._positions + 1
        return logits

    @torch.no_grad()
    def read_on(self) -> torch.Tensor:
        """Return logits (1, vocabulary) of the token after all predicted ones: the last layer reads its own output."""
        self._hidden, self._tokens = self._hidden[:, -1:], self._tokens[:, -1:]
        self._positions = self._positions[:, -1:]
        self._beyond += 1
        return self._layer(len(self._layers.layers) - 1)


class MtpSequence(StatesSequence):
    """The layers' predictions for one sequence."""

    drafter: Mtp

    def __init__(self, drafter: Mtp, reader: MtpReader) -> None:
        super().__init__(drafter, reader)
        self._reader = reader

    def draft(self, context: Context) -> Draft:
        drafter, budget, positions = self.drafter, context.budget, min(self.drafter.depth, context.remaining - 1)
        if not self._reader.waits or positions < 1 or not budget.pays([1.0]):
            return Draft.chain(context.root)
        logits = self._reader.read(context.tokens)
        passes = len(logits)
        budget.passes += passes - 1
        candidates, probabilities = top_candidates(logits[:positions], min(drafter.k, logits.shape[-1]))
        while len(probabilities) < positions and _goes_on(probabilities, budget):
            more, likely = top_candidates(self._reader.read_on(), candidates.shape[1])
            candidates, probabilities = np.concatenate([candidates, more]), np.concatenate([probabilities, likely])
            passes += 1
        self._counts["draft_forwards"] += passes
        return _below_the_best(context.root, candidates, probabilities)


def _below_the_best(root: torch.Tensor, candidates: np.ndarray, probabilities: np.ndarray) -> Draft:
    """Return the draft of all candidates (positions, k), those of a position as children of the best one of the
    preceding position.
    """
    positions, k = candidates.shape
    best = np.append(0, np.arange(1, k * positions, k))[:positions]
    return Draft(
        np.append(root.item(), candidates.ravel()),
        np.append(-1, best.repeat(k)),
        np.append(1, probabilities.ravel()),
    )


def _goes_on(probabilities: np.ndarray, budget: Budget) -> bool:
    """Return whether a pass for one more position pays."""
    of_best = np.cumprod(probabilities[:, 0], dtype=np.float64)
    gains = np.append(1.0, of_best[:-1])[:, None] * probabilities
    return budget.pays([float(of_best[-1])], gains.ravel().tolist())
