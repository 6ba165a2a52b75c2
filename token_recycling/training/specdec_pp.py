"""Train the acceptance head of SpecDec++ (Huang et al., 2405.19715, section 3.3).

A sequence X is the target's output after a prompt. At every position after the prompt the draft model samples a token
Y, which the target would accept with probability min(1, p(Y)/q(Y)), both given the preceding tokens of X. The head
reads the draft model's states over a mixture: each token is X's with a small probability and Y's otherwise, as in use.
The loss, binary cross-entropy with these soft labels, covers only the tokens from Y. Rejections are rare where both
models agree, and are weighted more: if the target accepts with probability a and rejections have weight w, a perfect
head predicts a / (a + w (1 - a)).

Cost: one forward pass of both models over every sequence for the labels, and one of the draft model in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from ..drafters.specdec_pp import AcceptanceHead, save_head
from ..model.hidden import last_state, layer_states, output_width
from ..model.inspection import weights_fingerprint
from ..model.target import Target
from .continuations import Continuations, digest
from .declaration import SpecDecTraining, Trained, TrainingRun
from .loop import Shuffled, Task, fit

Batch = tuple[torch.Tensor, torch.Tensor]
BINS = 10
"""Number of calibration bins, by predicted probability."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """A target output with the draft model's own choices."""

    sequence: torch.Tensor
    """(length,) int64: the prompt and the target's tokens."""
    start: int
    """Length of the prompt."""
    drafted: torch.Tensor
    """(length - start,) int64: the draft model's token at every position after the prompt."""
    labels: torch.Tensor
    """(length - start,) float32: the probability that the target accepts that token."""

    def mixed(self, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequence (length,) with all but a `share` of its output drafted, and a bool mask of that."""
        draws = torch.rand(len(self.drafted), generator=torch.Generator().manual_seed(seed))
        replaced = draws >= share
        tokens = self.sequence.clone()
        tokens[self.start :] = torch.where(replaced, self.drafted, tokens[self.start :])
        return tokens, replaced


@torch.no_grad()
def labelled(
    target: Target,
    draft: Target,
    texts: Continuations,
    how: SpecDecTraining,
    progress: Callable[[int, int], None] | None = None,
) -> list[Labelled]:
    """Return every sequence with drafted tokens and labels; sampling depends only on the seed and the index."""
    result = []
    for place, (sequence, start) in enumerate(zip(texts.texts, texts.prompt_lengths, strict=True)):
        p = _probabilities(target, sequence, start, how.draft_temperature, target.vocab_size)
        q = _probabilities(draft, sequence, start, how.draft_temperature, target.vocab_size)
        generator = torch.Generator().manual_seed(how.seed + place)
        drafted = torch.multinomial(q, 1, generator=generator)
        labels = (p.gather(1, drafted) / q.gather(1, drafted)).clamp(max=1.0)
        result.append(Labelled(sequence, start, drafted[:, 0], labels[:, 0]))
        if progress is not None:
            progress(len(result), len(texts))
    return result


def _probabilities(
    model: Target, sequence: torch.Tensor, start: int, temperature: float, vocabulary: int
) -> torch.Tensor:
    """Return the probabilities of the next token (length - start, vocabulary) float32 on the CPU, from the prompt's
    last token on.
    """
    logits = model.eager(input_ids=_readable(sequence, model)[None, :-1], use_cache=False).logits[0, start - 1 :]
    logits = logits[:, :vocabulary].float().cpu()
    logits = functional.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    if not temperature:
        return functional.one_hot(logits.argmax(dim=-1), vocabulary).float()
    return torch.softmax(logits / temperature, dim=-1)


def _readable(sequence: torch.Tensor, model: Target) -> torch.Tensor:
    """Return `sequence` on the model's device; tokens without an embedding are replaced as in drafting."""
    return sequence.to(model.device).clamp(max=model.embedded - 1)


@torch.no_grad()
def states_and_labels(draft: Target, texts: Sequence[Labelled], share: float, seed: int) -> Batch:
    """Return the draft model's last hidden states (n, width) after the drafted tokens of mixed sequences, and their
    labels (n,).
    """
    mixtures = [sequence.mixed(share, seed + place) for place, sequence in enumerate(texts)]
    # Padding is on the right, where no real token attends to it.
    ids = torch.nn.utils.rnn.pad_sequence([_readable(tokens, draft) for tokens, _ in mixtures], batch_first=True)
    with layer_states(draft.model, last_state(draft.config.num_hidden_layers)) as hidden_layers:
        draft.eager(input_ids=ids, use_cache=False)
    hidden = hidden_layers[-1]
    states, labels = [], []
    for row, (sequence, (tokens, is_replaced)) in enumerate(zip(texts, mixtures, strict=True)):
        drafted = hidden[row, sequence.start : len(tokens)]
        states.append(drafted[is_replaced.to(drafted.device)].float())
        labels.append(sequence.labels[is_replaced].to(drafted.device))
    return torch.cat(states), torch.cat(labels)


def loss(head: AcceptanceHead, states: torch.Tensor, labels: torch.Tensor, rejection_weight: float) -> torch.Tensor:
    """Return the mean weighted binary cross-entropy in nats: -y log a - w (1 - y) log(1 - a). 0 without labels."""
    return _crossed(labels, head(states), rejection_weight).mean() if len(labels) else labels.new_zeros(())


def _crossed(labels: torch.Tensor, odds: torch.Tensor, rejection_weight: float = 1.0) -> torch.Tensor:
    return labels * functional.softplus(-odds) + rejection_weight * (1 - labels) * functional.softplus(odds)


def task_of(draft: Target, texts: Sequence[Labelled], how: SpecDecTraining) -> Task[AcceptanceHead, Batch]:
    """Return the task of training a head for `draft`."""
    head = AcceptanceHead(output_width(draft.model), how.depth)
    head.reset(how.seed)
    head.to(draft.device)
    shuffled = Shuffled(len(texts), how.batch, how.seed)

    def batch_at(number: int) -> Batch:
        seed = how.seed + (number + 1) * how.batch  # different mixtures in every epoch
        return states_and_labels(draft, [texts[place] for place in shuffled[number]], how.target_share, seed)

    def loss_of(part: AcceptanceHead, batch: Batch) -> torch.Tensor:
        return loss(part, *batch, how.rejection_weight)

    tokens = digest(part for sequence in texts for part in (sequence.sequence, sequence.drafted))
    decided = {"draft": weights_fingerprint(draft.model), "texts": tokens, "training": asdict(how)}
    return Task(head, batch_at, loss_of, decided)


@torch.no_grad()
def judged(head: AcceptanceHead, draft: Target, texts: Sequence[Labelled], how: SpecDecTraining) -> dict[str, Any]:
    """Return how well a head predicts acceptance: the mean binary KL in nats from prediction to label (appendix C.3),
    that of the best constant, and for every tenth of predicted probability the tokens, mean prediction and mean label.
    """
    parts = [
        states_and_labels(draft, texts[start : start + how.batch], how.target_share, how.seed + start)
        for start in range(0, len(texts), how.batch)
    ]
    labels = torch.cat([labels for _, labels in parts]).double().cpu()
    odds = torch.cat([head(states) for states, _ in parts]).double().cpu()
    predicted = torch.sigmoid(odds)
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    return {
        "tokens": len(labels),
        "acceptance": float(labels.mean()),
        "kl": float(kl(labels, odds)),
        "kl_of_a_constant": max(0.0, float(_entropy(labels.mean()) - _entropy(labels).mean())),
        "calibration": [
            [int(chosen.sum()), float(predicted[chosen].mean()), float(labels[chosen].mean())]
            for chosen in (bins == number for number in range(BINS))
            if chosen.any()
        ],
    }


def kl(labels: torch.Tensor, odds: torch.Tensor) -> torch.Tensor:
    """Return mean binary KL divergence in nats of probabilities `labels` (n,) from predicted log odds `odds` (n,)."""
    return (_crossed(labels, odds) - _entropy(labels)).mean()


def _entropy(probability: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(probability, probability) - torch.xlogy(1 - probability, 1 - probability)


def train(options: SpecDecTraining, run: TrainingRun) -> Trained:
    """Train the head, measure it and save it."""
    target, draft = run.target, run.draft
    assert draft is not None
    with run.progress("labelling") as progress:
        examples = labelled(target, draft, run.texts, options, progress)
    with run.progress("training") as progress:
        head = fit(task_of(draft, examples, options), run.schedule, run.checkpoint, progress)
    with run.progress("judging"):
        figures = {
            "trained_on": judged(head, draft, examples[: len(run.held_out)], options),
            "held_out": judged(head, draft, labelled(target, draft, run.held_out, options), options),
        }
    save_head(run.folder, head, draft.model, {"judged": figures, "training": run.facts})
    return Trained(
        {"judged": figures},
        f"a head trained on {len(run.texts):,} texts; binary KL in nats a token:",
        ("texts", "drafted tokens", "accepted", "KL", "KL of a constant"),
        [
            (name, f"{of['tokens']:,}", of["acceptance"], f"{of['kl']:.4f}", f"{of['kl_of_a_constant']:.4f}")
            for name, of in zip(("trained on, some of them", "held out"), figures.values(), strict=True)
        ],
        figures["held_out"]["calibration"],
        options.rejection_weight,
    )
