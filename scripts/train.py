"""Train the models that ship with the project: a target and a smaller draft model with the same tokenizer.

    python scripts/train.py prepare                   # corpus -> tokenizer and token files
    python scripts/train.py texts                     # a sample of the training files, as a folder
    python scripts/train.py fit target                # resumes from its last checkpoint; Ctrl-C is safe
    python scripts/train.py fit draft
    python scripts/train.py export target             # bf16 safetensors and the model card, with held-out bits per byte

Work files are in `build/models`. Hidden matrices are trained with Muon, which on this budget needs far fewer tokens
than AdamW; embeddings and norms with AdamW. The learning rate is constant, then falls linearly to zero over the last
part of the token budget; `--tokens` on resuming changes the budget. Windows grow during training, since short windows
are cheaper.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from card import model_card
from corpus import default_roots, encode, licences, read_sources, train_tokenizer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

WORK = Path(__file__).parent.parent / "build" / "models"
SHIPPED = Path(__file__).parent.parent / "models"
VOCABULARY = 8192
WINDOWS = ((0.0, 256), (0.6, 512), (0.9, 1024))
"""(fraction of the budget, window length in tokens from there on)."""
BATCH_TOKENS = 8192
DECAY_SHARE = 0.6
"""Fraction of the budget, at its end, over which the learning rate falls to zero."""
CHECKPOINT_SECONDS = 240

SHAPES = {
    "target": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "heads": (4, 2)},
    "draft": {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 2, "heads": (3, 3)},
}
app = typer.Typer(add_completion=False, help=__doc__)
console = Console()


@dataclass
class Progressed:
    """Progress of a run; saved with every checkpoint."""

    tokens: int = 0
    seconds: float = 0.0


@app.command()
def prepare() -> None:
    """Read the corpus, train the tokenizer and write both sides of the split as token files."""
    WORK.mkdir(parents=True, exist_ok=True)
    sources = read_sources(default_roots())
    training = [source for source in sources if not source.held_out]
    held_out = [source for source in sources if source.held_out]
    tokenizer = train_tokenizer((source.text for source in training[::3]), VOCABULARY)
    tokenizer.save_pretrained(WORK / "tokenizer")
    facts = {"licences": licences(sources), "held_out": [source.name for source in held_out]}
    for side, chosen in (("train", training), ("held_out", held_out)):
        tokens = encode(tokenizer, chosen)
        tokens.tofile(WORK / f"{side}.bin")
        facts[side + "_files"] = len(chosen)
        facts[side + "_bytes"] = sum(len(source.text.encode()) for source in chosen)
        facts[side + "_tokens"] = len(tokens)
        density = facts[side + "_bytes"] / len(tokens)
        console.print(f"{side}: {len(chosen)} files, {len(tokens):,} tokens, {density:.2f} bytes per token")
    (WORK / "corpus.json").write_text(json.dumps(facts, indent=1))


@app.command()
def texts(share: Annotated[int, typer.Option(help="sample one of this many files")] = 12) -> None:
    """Write a sample of the training files to `build/models/texts`: the prompts that heads are trained on."""
    sample = [source for source in read_sources(default_roots()) if not source.held_out][::share]
    for number, source in enumerate(sample):
        path = WORK / "texts" / f"{number:05}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.text, encoding="utf-8")
    console.print(f"{len(sample):,} files in {WORK / 'texts'}")


def new_model(shape: dict[str, Any]) -> LlamaForCausalLM:
    """Return a llama with seeded random weights and tied embeddings."""
    heads, key_value_heads = shape["heads"]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=WINDOWS[-1][1],
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices, and AdamW for the (tied) embedding and the norms."""
    hidden = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    chosen = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(hidden, lr=learning_rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def rate_at(share: float) -> float:
    """Return the multiplier of the learning rate after `share` of the budget: constant, then linear to zero."""
    return min(1.0, max(0.0, (1.0 - share) / DECAY_SHARE))


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token; `windows` is (batch, length + 1). Forward bf16, loss float32."""
    with torch.autocast(windows.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=windows[:, :-1].contiguous(), use_cache=False).last_hidden_state
        logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def batch_at(tokens: np.ndarray, position: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the batch that starts after `position` trained tokens: whole windows in a seeded shuffle that changes
    every epoch.
    """
    rows = BATCH_TOKENS // length
    windows = (len(tokens) - 1) // length
    start, picked = position // length, []
    for index in range(start, start + rows):
        epoch, place = divmod(index, windows)
        order = _order(windows, epoch)
        picked.append(tokens[order[place] * length : order[place] * length + length + 1])
    return torch.from_numpy(np.stack(picked).astype(np.int64)).to(device)


_orders: dict[tuple[int, int], np.ndarray] = {}


def _order(windows: int, epoch: int) -> np.ndarray:
    if (windows, epoch) not in _orders:
        _orders[windows, epoch] = np.random.default_rng(epoch).permutation(windows)
    return _orders[windows, epoch]


@torch.inference_mode()
def held_out_bits(model: LlamaForCausalLM, device: torch.device, limit: int | None = None) -> float:
    """Return bits per byte of the held-out files, in windows of 1,024 tokens; `limit`: maximum number of tokens."""
    facts = json.loads((WORK / "corpus.json").read_text())
    tokens = np.fromfile(WORK / "held_out.bin", dtype=np.uint16)
    bytes_per_token = facts["held_out_bytes"] / facts["held_out_tokens"]
    length = WINDOWS[-1][1]
    count = min(limit or len(tokens), len(tokens) - 1) // length
    model.eval()
    total = 0.0
    for start in range(0, count, 8):
        rows = [tokens[i * length : i * length + length + 1] for i in range(start, min(start + 8, count))]
        windows = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
        total += loss_of(model, windows).item() * len(rows)
    model.train()
    return total / count / math.log(2) / bytes_per_token


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, parts: list[torch.optim.Optimizer], progressed: Progressed
) -> None:
    """Write a checkpoint to a temporary file, then rename it: an interruption leaves the last checkpoint intact."""
    state = {
        "model": model.state_dict(),
        "optimizers": [part.state_dict() for part in parts],
        "progressed": asdict(progressed),
    }
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


@app.command()
def fit(
    name: Annotated[str, typer.Argument(help="target or draft")],
    tokens: Annotated[int, typer.Option(help="token budget of the whole run, in millions")] = 60,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 4e-3,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cuda" if torch.cuda.is_available() else "cpu",
    compiled: Annotated[bool, typer.Option(help="torch.compile the step: about 1.4x as fast on a CPU")] = True,
) -> None:
    """Train one model up to its token budget, from its last checkpoint if there is one."""
    where, budget, path = torch.device(device), tokens * 10**6, WORK / f"{name}.pt"
    model = new_model(SHAPES[name]).to(where).train()
    parts, progressed = optimizers(model, learning_rate), Progressed()
    if path.exists():
        state = torch.load(path, map_location=where)
        model.load_state_dict(state["model"])
        for part, saved in zip(parts, state["optimizers"], strict=True):
            part.load_state_dict(saved)
        progressed = Progressed(**state["progressed"])
        console.print(f"resuming {name} at {progressed.tokens:,} tokens")
    step_loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    stream = np.fromfile(WORK / "train.bin", dtype=np.uint16)
    saved_at = began = time.monotonic()
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, refresh_per_second=0.2) as bar:
        task = bar.add_task(name, total=budget, completed=progressed.tokens)
        while progressed.tokens < budget:
            before = time.monotonic()
            share = progressed.tokens / budget
            length = max(window for since, window in WINDOWS if share >= since)
            loss = step_loss(model, batch_at(stream, progressed.tokens, length, where))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            warm = min(1.0, (progressed.tokens + BATCH_TOKENS) / (100 * BATCH_TOKENS))
            for part in parts:
                for group in part.param_groups:
                    group["lr"] = learning_rate * rate_at(share) * warm
                part.step()
                part.zero_grad(set_to_none=True)
            progressed.tokens += BATCH_TOKENS
            progressed.seconds += time.monotonic() - before
            bar.update(task, completed=progressed.tokens, description=f"{name} loss {loss.item():.3f}")
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                save_checkpoint(path, model, parts, progressed)
                speed = BATCH_TOKENS / (time.monotonic() - before)
                bits = held_out_bits(model, where, limit=65_536)
                bar.console.print(
                    f"{progressed.tokens:,} tokens, loss {loss.item():.3f}, {bits:.3f} bits/byte, {speed:,.0f} tokens/s"
                )
                saved_at = time.monotonic()
    save_checkpoint(path, model, parts, progressed)
    minutes = (time.monotonic() - began) / 60
    console.print(f"{name}: {held_out_bits(model, where):.4f} bits per byte on held-out files, {minutes:.0f} minutes")


@app.command()
def export(name: Annotated[str, typer.Argument(help="target or draft")]) -> None:
    """Write models/NAME: bf16 weights, tokenizer, model card and its figures."""
    model = new_model(SHAPES[name])
    state = torch.load(WORK / f"{name}.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    model = model.to(torch.bfloat16)
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    bits = held_out_bits(model, torch.device("cpu"))
    model.save_pretrained(SHIPPED / name)
    AutoTokenizer.from_pretrained(WORK / "tokenizer").save_pretrained(SHIPPED / name)
    described = SHIPPED / name / "tokenizer_config.json"  # transformers 4 lacks the class that transformers 5 writes
    described.write_text(described.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    figures = {
        "parameters": model.num_parameters(),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "context": model.config.max_position_embeddings,
        "held_out_bits_per_byte": round(bits, 4),
        **state["progressed"],
        **json.loads((WORK / "corpus.json").read_text()),
    }
    (SHIPPED / name / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    (SHIPPED / name / "README.md").write_text(model_card(name, figures))
    console.print(f"{name}: {model.num_parameters():,} parameters, {bits:.4f} bits per byte on held-out files")


if __name__ == "__main__":
    app()
