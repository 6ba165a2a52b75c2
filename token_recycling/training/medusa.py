"""Train Medusa-1 heads: the target is frozen, and the heads learn to predict its own outputs.

Cai et al., 2401.10774, section 2.2.1: the hidden state that predicts the token after position t must also predict the
tokens after that; head k learns the k-th of these, with cross-entropy weighted by 0.8^k. Only output tokens are trained
on, not prompts. The accuracy of each head's candidates by rank is measured on held-out outputs, for the static tree
(section 2.3.3).

Cost of a batch: a forward pass of the target, and the output layer, forward and backward, for every head and token.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..drafters.medusa import MedusaHeads, save_heads
from ..model.hidden import last_state, layer_states, output_layer, output_width
from ..model.inspection import weights_fingerprint
from ..model.target import Target
from .continuations import Continuations
from .declaration import MedusaTraining, Trained, TrainingRun
from .loop import Shuffled, Task, fit

Batch = tuple[torch.Tensor, torch.Tensor]
NOTHING = -100
"""Label of a position after the end of an output, which is not trained on."""
_DECAY = 0.8
"""Weight of the loss of head k: this to the power of k."""
RANKS = 10
"""Candidates per head whose accuracy is measured."""


def task_of(model: PreTrainedModel, texts: Continuations, training: MedusaTraining) -> Task[MedusaHeads, Batch]:
    """Return the task of training heads for `model`."""
    target = Target(model)
    output = output_layer(model).weight if training.own_output else None
    heads = MedusaHeads(training.heads, output_width(model), training.blocks, output).to(target.device)  # type: ignore[arg-type]
    shared, shuffled = output_layer(model), Shuffled(len(texts), training.batch, training.seed)

    def batch_at(number: int) -> Batch:
        return examples(target, texts.select(shuffled[number]), training.heads)

    def loss_of(part: MedusaHeads, batch: Batch) -> torch.Tensor:
        hidden, expected = batch
        losses = [
            _DECAY**number * cross_entropy(logits.float(), labels, ignore_index=NOTHING)
            for number, (logits, labels) in enumerate(zip(part(hidden, shared), expected, strict=True), start=1)
            if bool((labels != NOTHING).any())
        ]
        return sum(losses, hidden.new_zeros(()))

    decided = {"model": weights_fingerprint(model), "texts": texts.digest, "training": asdict(training)}
    return Task(heads, batch_at, loss_of, decided)


@torch.no_grad()
def examples(target: Target, texts: Continuations, heads: int) -> Batch:
    """Return the target's hidden states (n, width) at every position where it chose a token, and labels (heads, n): the
    token that head k has to predict there, `NOTHING` after the end of an output.
    """
    ids = torch.nn.utils.rnn.pad_sequence(texts.texts, batch_first=True).to(target.device)
    with layer_states(target.model, last_state(target.config.num_hidden_layers)) as hidden_layers:
        target.eager(input_ids=ids, use_cache=False)
    hidden = hidden_layers[-1].to(target.device)
    states, labels = [], []
    for row, (sequence, prompt) in enumerate(zip(texts.texts, texts.prompt_lengths, strict=True)):
        states.append(hidden[row, prompt - 1 : len(sequence) - 1])
        # The state at position p yields the token at p + 1, so head k predicts the token at p + 1 + k.
        beyond = torch.cat([sequence[prompt + 1 :], sequence.new_full((heads,), NOTHING)])
        labels.append(beyond.unfold(0, heads, 1).T)
    return torch.cat(states), torch.cat(labels, dim=1).to(target.device)


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, heads: MedusaHeads, texts: Continuations, ranks: int = RANKS, batch: int = 8
) -> list[list[float]]:
    """Return for each head how often its candidate of rank 0, 1, ... is the target's token, over all tokens of
    `texts`.
    """
    target, shared = Target(model), output_layer(model)
    ranks = min(ranks, target.vocab_size)
    right = torch.zeros(heads.heads, ranks, dtype=torch.long, device=target.device)
    total = torch.zeros(heads.heads, 1, dtype=torch.long, device=target.device)
    for start in range(0, len(texts), batch):
        hidden, expected = examples(target, texts.select(range(len(texts))[start : start + batch]), heads.heads)
        for number, (logits, labels) in enumerate(zip(heads(hidden, shared), expected, strict=True)):
            candidates = logits.topk(ranks).indices
            right[number] += (candidates == labels[:, None]).sum(dim=0)
            total[number] += (labels != NOTHING).sum()
    return (right / total.clamp(min=1)).tolist()


def train(options: MedusaTraining, run: TrainingRun) -> Trained:
    """Train the heads, measure them and save them."""
    model = run.target.model
    with run.progress("training") as progress:
        heads = fit(task_of(model, run.texts, options), run.schedule, run.checkpoint, progress)
    heads.bfloat16().float()  # measured as saved
    with run.progress("measuring"):
        measured = accuracy(model, heads, run.held_out)
    save_heads(run.folder, heads.bfloat16(), model, measured, training=run.facts)
    return Trained(
        {"accuracy": measured},
        f"heads trained on {len(run.texts):,} texts; accuracy in {len(run.held_out):,} held-out ones:",
        ("head", "token after the next", "top 1", "top 5", "top 10"),
        [
            (str(number), f"+{number}", *(sum(ranks[:most]) for most in (1, 5, 10)))
            for number, ranks in enumerate(measured, start=1)
        ],
    )
