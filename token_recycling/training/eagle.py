"""Train an EAGLE head: the target is frozen, and the head learns to predict it at every position of the target's
outputs.

Version 1 (2401.15077, section 4.1): the head's output is trained to equal the target's next hidden state (smooth L1),
and to yield the target's distribution of the token after it (cross-entropy, weight 0.1). Noise on the states simulates
the head's errors. Version 3 (2503.01840, section 3.2): the head reads its own outputs as in drafting ("training-time
test"). In pass j every position has the sequence's token j positions later and the head's own state, attends to the
sequence up to itself and to its own earlier passes, and learns the target's distribution over the head's vocabulary
(weighted by 0.8^j). Unlike in the papers, prompts are also trained on.

Cost of a batch: a forward pass of the target, and a forward and backward pass of the head per pass; in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch.nn.functional import pad, smooth_l1_loss
from transformers import DynamicCache, LlamaConfig, PretrainedConfig, PreTrainedModel

from ..drafters._shared.neural import placed_copy
from ..drafters.eagle.formats import THETA, save_head
from ..drafters.eagle.head import Eagle1Head, Eagle3Head, EagleHead, HeadShape
from ..model.hidden import layer_states, output_layer, output_width
from ..model.inspection import weights_fingerprint
from ..model.parts import uncompiled
from ..model.target import Target
from .continuations import Continuations
from .declaration import EagleTraining, Trained, TrainingRun
from .loop import Shuffled, Task, fit

DEPTHS, RANKS = 5, 10
"""Depths, and candidates per depth, whose acceptance is measured."""
_TOKEN_WEIGHT = 0.1
_DECAY = 0.8
"""Weight of the loss of pass j: this to the power of j."""
_NOISE, _NOISE_LENGTH = 0.2, 512
"""Width of the noise on states for outputs of that length; wider for shorter outputs."""


class Examples(NamedTuple):
    """Training examples: outputs, padded on the right, with the target's states and logits."""

    ids: torch.Tensor
    """(batch, length) int64."""
    lengths: torch.Tensor
    """(batch,) int64."""
    states: torch.Tensor
    """(batch, length, ...): the states that the head reads."""
    logits: torch.Tensor
    """(batch, length, vocabulary): the target's logits after every token."""


def new_head(model: PreTrainedModel, texts: Continuations, training: EagleTraining) -> EagleHead:
    """Return an untrained head for `model`. A version 3 head can predict the tokens most frequent in `texts`, and its
    output layer is initialized from the target's.
    """
    output, target = output_layer(model), Target(model)
    vocabulary, width = target.vocab_size, output_width(model)
    heads = math.gcd(width, _size(target.config, "num_attention_heads", 1))
    layer = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=training.intermediate or _size(target.config, "intermediate_size", 4 * width),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, _size(target.config, "num_key_value_heads", heads)),
        max_position_embeddings=target.max_length or 2048,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="sdpa",
    )
    torch.manual_seed(training.seed)
    if training.version == 1:
        return Eagle1Head(HeadShape(1, layer, layer.hidden_size, fc_bias=True)).to(model.device)
    counts = torch.cat(texts.texts).bincount(minlength=vocabulary)
    size = min(training.vocabulary, vocabulary)
    ids = None if size == vocabulary else counts.argsort(descending=True, stable=True)[:size].sort().values
    head = Eagle3Head(HeadShape(3, layer, layer.hidden_size, draft_vocabulary=size), ids)
    with torch.no_grad():
        head.lm_head.weight.copy_(output.weight if ids is None else output.weight[ids.to(output.weight.device)])  # type: ignore[index, arg-type]
    return head.to(model.device)


def _size(config: PretrainedConfig, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else otherwise


def task_of(model: PreTrainedModel, texts: Continuations, training: EagleTraining) -> Task[EagleHead, Examples]:
    """Return the task of training a head for `model`."""
    with torch.random.fork_rng():
        head = new_head(model, texts, training)
    shuffled = Shuffled(len(texts), training.batch, training.seed)

    def batch_at(number: int) -> Examples:
        example = examples(model, head, texts.select(shuffled[number]))
        if training.version == 3:
            return example
        draws = torch.Generator().manual_seed(training.seed + number)
        noise = (
            (torch.rand(example.states.shape, generator=draws) - 0.5) * _NOISE * _NOISE_LENGTH / example.ids.shape[1]
        )
        return example._replace(states=example.states.float() + noise.to(example.states.device))

    def loss_of(head: EagleHead, batch: Examples) -> torch.Tensor:
        with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16):
            return training_loss(model, head, batch, training)

    decided = {"model": weights_fingerprint(model), "texts": texts.digest, "training": asdict(training)}
    return Task(head, batch_at, loss_of, decided)


@torch.no_grad()
def examples(model: PreTrainedModel, head: EagleHead, texts: Continuations) -> Examples:
    """Return the target's states and logits on outputs."""
    ids = torch.nn.utils.rnn.pad_sequence(texts.texts, batch_first=True).to(model.device)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    with (
        layer_states(model, head.shape.states_of(layers)) as hidden_layers,
        torch.autocast(ids.device.type, dtype=torch.bfloat16),
    ):
        logits = uncompiled(model)(input_ids=ids, use_cache=False).logits
    lengths = torch.tensor([len(sequence) for sequence in texts.texts], device=ids.device)
    return Examples(ids, lengths, hidden_layers[-1].to(ids.device), logits.to(ids.device))


def unrolled(model: PreTrainedModel, head: EagleHead, batch: Examples, passes: int) -> Iterator[torch.Tensor]:
    """Yield the head's outputs (batch, length - 1, width) of each pass. In pass j, from 0, row t predicts the token at
    t + 2 + j from the preceding token and its own state of the previous pass; in pass 0, from the target's state at t.
    """
    embedded = model.get_input_embeddings()(batch.ids[:, 1:]).to(batch.ids.device)
    rows = embedded.shape[1]
    states, cache = head.fused(batch.states[:, :-1]), DynamicCache()
    positions = torch.arange(rows, device=embedded.device)[None]
    itself = torch.eye(rows, dtype=torch.bool, device=embedded.device)
    visible = itself.new_ones(rows, rows).tril()
    for number in range(passes):
        outputs = head(embedded, states, positions + number, visible[None, None], cache)
        yield outputs
        states, visible = head.fed(outputs), torch.cat([visible, itself], dim=1)
        embedded = pad(embedded[:, 1:], (0, 0, 0, 1))


def training_loss(model: PreTrainedModel, head: EagleHead, batch: Examples, training: EagleTraining) -> torch.Tensor:
    """Return a scalar loss over positions where the target's choice is in the head's vocabulary; 0 without any."""
    learnable = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
    logits = batch.logits
    if head.ids is not None:
        learnable &= torch.isin(logits.argmax(dim=-1), head.ids)
        logits = logits[..., head.ids]
    targets, losses = torch.softmax(logits.float(), dim=-1), []
    for number, outputs in enumerate(unrolled(model, head, batch, training.passes)):
        here = learnable[:, 1 + number :]
        if not bool(here.any()):
            break
        predicted = outputs[:, : here.shape[1]][here]
        logs = torch.log_softmax(head.logits(predicted, output_layer(model)).float(), dim=-1)
        loss = -(targets[:, 1 + number :][here] * logs).sum(dim=-1).mean()
        if training.version == 1:
            of_states = smooth_l1_loss(predicted.float(), batch.states[:, 1 + number :][here].float())
            loss = of_states + _TOKEN_WEIGHT * loss
        losses.append(_DECAY**number * loss)
    return sum(losses, batch.states.new_zeros(()))


@torch.no_grad()
def acceptance(
    model: PreTrainedModel,
    head: EagleHead,
    texts: Continuations,
    depths: int = DEPTHS,
    ranks: int = RANKS,
    batch: int = 8,
) -> list[list[float]]:
    """Return for each depth how often the head's candidate of rank 0, 1, ... is the target's token in `texts`, given
    the correct tokens above it.
    """
    ranks = min(ranks, head.shape.draft_vocabulary or head.shape.layer.vocab_size)
    right, total = torch.zeros(depths, ranks, dtype=torch.long), torch.zeros(depths, 1, dtype=torch.long)
    for start in range(0, len(texts), batch):
        some = texts.select(range(len(texts))[start : start + batch])
        example, prompts = examples(model, head, some), torch.tensor(some.prompt_lengths)
        positions = torch.arange(example.ids.shape[1])
        is_output = (positions >= prompts[:, None]) & (positions < example.lengths.cpu()[:, None])
        with torch.autocast(example.ids.device.type, dtype=torch.bfloat16):
            for depth, outputs in enumerate(unrolled(model, head, example, depths)):
                here, labels = is_output[:, 2 + depth :], example.ids[:, 2 + depth :].cpu()
                candidates = head.logits(outputs[:, : here.shape[1]], output_layer(model)).topk(ranks).indices
                if head.ids is not None:
                    candidates = head.ids[candidates]
                right[depth] += (candidates.cpu()[here] == labels[here][:, None]).sum(dim=0)
                total[depth] += here.sum()
    return (right / total.clamp(min=1)).tolist()


def train(options: EagleTraining, run: TrainingRun) -> Trained:
    """Train the head, measure it and save it."""
    model = run.target.model
    with run.progress("training") as progress:
        head = fit(task_of(model, run.texts, options), run.schedule, run.checkpoint, progress)
    head = placed_copy(head, model.device, torch.bfloat16)  # measured as saved
    with run.progress("measuring"):
        measured = [[round(share, 4) for share in ranks] for ranks in acceptance(model, head, run.held_out)]
    save_head(run.folder, head, model, acceptance=measured, training=run.facts)
    return Trained(
        {"acceptance": measured},
        f"head trained on {len(run.texts):,} texts; acceptance in {len(run.held_out):,} held-out ones, if all "
        "earlier tokens were accepted:",
        ("depth", "top 1", "top 5", "top 10"),
        [(str(depth), *(sum(ranks[:most]) for most in (1, 5, 10))) for depth, ranks in enumerate(measured, start=1)],
    )
