"""Training of the acceptance head of SpecDec++ (Huang et al., 2405.19715, section 3.3).

A text X is what the target says after a prompt. At every place after the prompt the draft model draws a token Y, and
how likely the target would accept it is known: min(1, p(Y)/q(Y)), both after the tokens of X before it. What the head
reads is what the draft model makes of a mixture of both, in which each token is X's with a small probability and Y's
otherwise; the loss is taken over the latter alone. So most of the places that are read say something, and what stands
before a token is drafted, as it will be in use. The draft model stays as it is.

The loss is binary cross-entropy with these soft labels. Rejections are rare where both models agree, and count more:
what a head learns then is not the probability a, but one with odds that are smaller by the weight; see `weighted`.

Cost: one forward pass of both models over every text for the labels, and one of the draft model in every epoch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from ..draft_models.acceptance import AcceptanceHead, width_for
from ..hidden import hidden_states
from ..priming import weights_fingerprint
from ..target import Target
from .continuations import Continuations
from .loop import Plan, fit

BINS = 10
"""Of a calibration, by predicted probability."""


@dataclass(frozen=True)
class Recipe:
    """What a head is, and what it is told; the defaults are those of the paper."""

    depth: int = 3
    """Residual blocks."""
    rejection_weight: float = 6.0
    """How much a rejection counts against an acceptance."""
    target_share: float = 0.15
    """Share of the target's own tokens in what the head reads."""
    temperature: float = 1.0
    """At which the draft model draws and both models are compared; 0 for greedy decoding of both."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 0 or not self.rejection_weight > 0 or not 0 <= self.target_share < 1 or self.temperature < 0:
            raise ValueError(
                "expected a depth and a temperature of 0 or more, a rejection_weight above 0 and a target_share from 0 "
                f"to less than 1, got {self}"
            )


@dataclass(frozen=True)
class Labelled:
    """A text with what the draft model would have said instead."""

    text: torch.Tensor
    """(length,) int64: the prompt and the target's tokens."""
    start: int
    """Length of the prompt."""
    drafted: torch.Tensor
    """(length - start,) int64: the draft model's token at every place after the prompt."""
    labels: torch.Tensor
    """(length - start,) float32: how likely the target accepts it."""

    def mixed(self, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The text (length,) with drafted tokens in place of all but a `share` of the target's, and where they are,
        (length - start,) bool.
        """
        draws = torch.rand(len(self.drafted), generator=torch.Generator().manual_seed(seed))
        replaced = draws >= share
        tokens = self.text.clone()
        tokens[self.start :] = torch.where(replaced, self.drafted, tokens[self.start :])
        return tokens, replaced


@torch.no_grad()
def labelled(target: Target, draft: Target, texts: Continuations, recipe: Recipe) -> list[Labelled]:
    """Every text with drafted tokens and their labels; what is drawn depends on the seed and the text's place alone."""
    found = []
    for place, (text, start) in enumerate(zip(texts.texts, texts.prompt_lengths, strict=True)):
        p = _probabilities(target, text, start, recipe.temperature, target.vocab_size)
        q = _probabilities(draft, text, start, recipe.temperature, target.vocab_size)
        generator = torch.Generator().manual_seed(recipe.seed + place)
        drafted = torch.multinomial(q, 1, generator=generator)
        labels = (p.gather(1, drafted) / q.gather(1, drafted)).clamp(max=1.0)
        found.append(Labelled(text, start, drafted[:, 0], labels[:, 0]))
    return found


def _probabilities(model: Target, text: torch.Tensor, start: int, temperature: float, vocabulary: int) -> torch.Tensor:
    """(length - start, vocabulary) float32 on the CPU: of the next token, from the prompt's last one on."""
    logits = model.model(input_ids=_readable(text, model)[None, :-1], use_cache=False).logits[0, start - 1 :]
    logits = logits[:, :vocabulary].float().cpu()
    logits = functional.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    if not temperature:
        return functional.one_hot(logits.argmax(dim=-1), vocabulary).float()
    return torch.softmax(logits / temperature, dim=-1)


def _readable(text: torch.Tensor, model: Target) -> torch.Tensor:
    """On the model's device; tokens that it has no embedding for as its last one, as when drafting."""
    return text.to(model.device).clamp(max=model.embedded - 1)


@torch.no_grad()
def states_and_labels(
    draft: Target, texts: Sequence[Labelled], share: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft model's last hidden states (n, hidden size) after the drafted tokens of the mixed texts, and the labels
    (n,) of these tokens.
    """
    mixtures = [text.mixed(share, seed + place) for place, text in enumerate(texts)]
    # What is filled up on the right is seen by nothing that is looked at.
    ids = torch.nn.utils.rnn.pad_sequence([_readable(tokens, draft) for tokens, _ in mixtures], batch_first=True)
    with hidden_states(draft.model) as seen:
        draft.model(input_ids=ids, use_cache=False)
    states, labels = [], []
    for row, (text, (tokens, replaced)) in enumerate(zip(texts, mixtures, strict=True)):
        own = seen[0][row, text.start : len(tokens)]
        states.append(own[replaced.to(own.device)].float())
        labels.append(text.labels[replaced].to(own.device))
    return torch.cat(states), torch.cat(labels)


def loss(head: AcceptanceHead, states: torch.Tensor, labels: torch.Tensor, rejection_weight: float) -> torch.Tensor:
    """Mean weighted binary cross-entropy in nats: -y log a - w (1 - y) log(1 - a)."""
    odds = head(states)
    return (labels * functional.softplus(-odds) + rejection_weight * (1 - labels) * functional.softplus(odds)).mean()


def weighted(acceptance: float, rejection_weight: float) -> float:
    """What a perfect head says where tokens are accepted with probability `acceptance`: the least loss is there."""
    return acceptance / (acceptance + rejection_weight * (1 - acceptance))


class Batches:
    """Texts in batches, in a new order in every epoch; batch number i depends on i alone."""

    def __init__(self, draft: Target, texts: Sequence[Labelled], batch: int, recipe: Recipe) -> None:
        self._draft, self._texts, self._batch, self._recipe = draft, texts, batch, recipe
        self.in_epoch = -(-len(texts) // batch)
        """Batches of one epoch."""

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        epoch, place = divmod(step, self.in_epoch)
        seed = 1_000_003 * (epoch + 1) + self._recipe.seed
        order = torch.randperm(len(self._texts), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = [self._texts[index] for index in order[place * self._batch :][: self._batch]]
        return states_and_labels(self._draft, chosen, self._recipe.target_share, seed + place * self._batch)


@torch.no_grad()
def judged(
    head: AcceptanceHead, draft: Target, texts: Sequence[Labelled], recipe: Recipe, batch: int
) -> dict[str, Any]:
    """How well a head foresees these texts: the mean binary KL in nats from its prediction to the label (appendix C.3,
    not weighted), that of the best constant, and the calibration, a line for every tenth of predicted probability:
    number of tokens, mean prediction, mean label.
    """
    parts = [
        states_and_labels(draft, texts[start : start + batch], recipe.target_share, recipe.seed + start)
        for start in range(0, len(texts), batch)
    ]
    labels = torch.cat([labels for _, labels in parts]).double().cpu()
    odds = torch.cat([head(states) for states, _ in parts]).double().cpu()
    predicted = torch.sigmoid(odds)
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    return {
        "tokens": len(labels),
        "acceptance": float(labels.mean()),
        "kl": float(kl(labels, odds)),
        "kl_of_a_constant": float(kl(labels, torch.logit(labels.mean()).expand(len(labels)))),
        "calibration": [
            [int(chosen.sum()), float(predicted[chosen].mean()), float(labels[chosen].mean())]
            for chosen in (bins == number for number in range(BINS))
            if chosen.any()
        ],
    }


def kl(labels: torch.Tensor, odds: torch.Tensor) -> torch.Tensor:
    """Mean binary KL divergence in nats of probabilities `labels` (n,) from predictions of log odds `odds` (n,)."""
    crossed = labels * functional.softplus(-odds) + (1 - labels) * functional.softplus(odds)
    entropy = -torch.xlogy(labels, labels) - torch.xlogy(1 - labels, 1 - labels)
    return (crossed - entropy).mean()


@dataclass(frozen=True)
class Trained:
    """A head and how it was made."""

    head: AcceptanceHead
    figures: dict[str, Any]
    """As JSON holds them: what `judged` says of the texts trained on and of those held out, numbers of texts, steps."""


def train(
    target: Target,
    draft: Target,
    texts: Continuations,
    recipe: Recipe,
    *,
    epochs: int = 3,
    batch: int = 32,
    rate: float = 1e-3,
    held_out: float = 0.1,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Trained:
    """A head for `draft` that foresees `target`, trained on all of `texts` but the last share `held_out`.

    With a `checkpoint` an interrupted run goes on from there, to the same weights; labels are made anew. `progress` is
    told how many steps are done and the last loss. Raises ValueError for too few texts, and CheckpointError.
    """
    if epochs < 1 or batch < 1 or not 0 < held_out < 1:
        raise ValueError(
            "expected epochs and batch of 1 or more and a held_out share between 0 and 1, "
            f"got {epochs}, {batch} and {held_out}"
        )
    known = labelled(target, draft, texts, recipe)
    kept = len(texts.split(held_out)[0])
    batches = Batches(draft, known[:kept], batch, recipe)
    plan = Plan(epochs * batches.in_epoch, rate)
    head = AcceptanceHead(width_for(draft.model), recipe.depth)
    options = {
        "recipe": asdict(recipe),
        "batch": batch,
        "texts": kept,
        "labels": _digest(known),
        "draft": weights_fingerprint(draft.model),
    }
    head.reset(recipe.seed)
    head.to(draft.device)
    fit(
        head,
        batches,
        lambda part, made: loss(part, *made, recipe.rejection_weight),
        plan,
        checkpoint,
        options,
        progress,
    )
    figures = {
        "texts": kept,
        "held_out_texts": len(known) - kept,
        "tokens": sum(len(text.drafted) for text in known[:kept]),
        "recipe": asdict(recipe),
        "epochs": epochs,
        "batch": batch,
        "rate": rate,
        "steps": plan.steps,
        "trained_on": judged(head, draft, known[:kept], recipe, batch),
        "held_out": judged(head, draft, known[kept:], recipe, batch),
    }
    return Trained(head, figures)


def _digest(texts: Sequence[Labelled]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.text.numpy().tobytes() + text.drafted.numpy().tobytes() + bytes([text.start % 256]))
    return digest.hexdigest()[:16]
