"""What the paper on Graph-structured Speculative Decoding reports (2407.16207), on the shipped pair: sequence, tree and
graph side by side, and what merging does to the draft model's distributions.

In the first table every method decodes every prompt greedily, in an order that
rotates; outputs are compared with plain decoding. Acceptance is accepted tokens by drafting steps: for a sequence, by
drafted tokens. The second one takes merged nodes as they come up while the target's texts are drafted, and compares the
draft model's next-token distribution after a node's own path with that after the path of the node that it is merged
with (section 5.3, table 5). The last line is one JSON object.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import token_recycling
from token_recycling import Drafter, Stats, make_drafter
from token_recycling.drafters._shared.expand import Rules, grow
from token_recycling.drafters._shared.graph import Graph
from token_recycling.drafters._shared.reader import Reader
from token_recycling.model.tree_model import TreeModel

ROOT = Path(__file__).parent.parent
WIDE = {"theta_prob": 0.2, "theta_sib": 0.3}
NARROW = {"theta_prob": 0.4, "theta_sib": 0.1}
LOOSE = {"theta_prob": 0.05, "theta_sib": 0.05}
METHODS: dict[str, dict[str, Any]] = {
    "SSD 2": {"mode": "sequence", "depth": 2},
    "SSD 4": {"mode": "sequence", "depth": 4},
    "SSD 10": {"mode": "sequence", "depth": 10},
    "TSD 0.4 0.1": {"mode": "tree", **NARROW},
    "GSD 0.4 0.1, tau 1": {"mode": "graph", "tau": 1, **NARROW},
    "TSD 0.2 0.3": {"mode": "tree", **WIDE},
    "GSD 0.2 0.3, tau 2": {"mode": "graph", "tau": 2, **WIDE},
    "GSD 0.2 0.3, tau 1": {"mode": "graph", "tau": 1, **WIDE},
}
BUSHY: dict[str, dict[str, Any]] = {
    "TSD 0.05 0.05": {"mode": "tree", **LOOSE},
    "GSD 0.05 0.05, tau 2": {"mode": "graph", "tau": 2, **LOOSE},
    "GSD 0.05 0.05, tau 1": {"mode": "graph", "tau": 1, **LOOSE},
}
console = Console(width=150)


def main(
    model: Annotated[Path, typer.Argument(help="the target's folder")] = ROOT / "models" / "target",
    draft: Annotated[Path, typer.Argument(help="the draft model's folder")] = ROOT / "models" / "draft",
    prompts: Annotated[Path, typer.Option(help="a folder of prompts, one a file")] = ROOT / "models" / "prompts",
    limit: Annotated[int, typer.Option(help="number of prompts, the first ones")] = 24,
    max_new_tokens: Annotated[int, typer.Option(help="tokens generated for each prompt")] = 128,
    bushy: Annotated[bool, typer.Option(help="also trees that are hardly pruned: slow")] = False,
    nodes: Annotated[int, typer.Option(help="nodes verified in a step, at most")] = 2000,
    pairs: Annotated[int, typer.Option(help="merged nodes compared for each k and tau; 0 leaves the table out")] = 300,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 for torch's choice")] = 0,
) -> None:
    """Prints both tables."""
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    target, drafting = (
        transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval() for name in (model, draft)
    )
    files = sorted(path for path in prompts.iterdir() if path.is_file())[:limit]
    encoded = [tokenizer(path.read_text(), return_tensors="pt").input_ids for path in files]
    methods = {**METHODS, **BUSHY} if bushy else METHODS
    made = {name: make_drafter("draft_model", model=drafting, nodes=nodes, **how) for name, how in methods.items()}
    rows, texts = compare(target, {"plain": make_drafter("plain"), **made}, encoded, max_new_tokens)
    kept = divergences(drafting, texts, [ids.shape[1] for ids in encoded], pairs) if pairs else []
    print(json.dumps({"prompts": len(files), "max_new_tokens": max_new_tokens, "rows": rows, "divergence": kept}))


def compare(
    target: transformers.PreTrainedModel, drafters: dict[str, Drafter], encoded: list[torch.Tensor], max_new_tokens: int
) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """The first table, its rows, and the texts (length,)."""
    arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    for drafter in drafters.values():
        token_recycling.generate(target, encoded[0][:, :32], drafter=drafter, **{**arguments, "max_new_tokens": 8})
    stats = {name: Stats() for name in drafters}
    seconds, different, texts = dict.fromkeys(drafters, 0.0), dict.fromkeys(drafters, 0), []
    for index, ids in enumerate(track(encoded, "decoding", console=Console(stderr=True))):
        order, outputs = list(drafters), {}
        for name in order[index % len(order) :] + order[: index % len(order)]:
            began = time.perf_counter()
            outputs[name] = token_recycling.generate(
                target, ids, drafter=drafters[name], stats=stats[name], **arguments
            )
            seconds[name] += time.perf_counter() - began
        for name in order:
            different[name] += not torch.equal(outputs[name], outputs["plain"])
        texts.append(outputs["plain"][0])
    rows = [
        row_of(name, stats[name], len(encoded), seconds["plain"] / seconds[name], different[name]) for name in drafters
    ]
    print_rows(rows)
    return rows, texts


def row_of(name: str, stats: Stats, prompts: int, speedup: float, different: int) -> dict[str, Any]:
    """The figures of one method; times in milliseconds a step, counts for each prompt."""
    own, seconds, steps = stats.drafter_statistics, stats.seconds, max(1, stats.steps)
    verification = seconds["forward"] + seconds["verify"]
    return {
        "method": name,
        "mat": stats.mat,
        "acceptance_rate": stats.accepted.total() / max(1, own["draft_forwards"]),
        "drafted_by_model": own["drafted_by_model"] / prompts,
        "verified": stats.drafted / prompts,
        "graph_success": own["steps_with_merge_accepted"] / steps,
        "draft_ms": 1000 * seconds["retrieve"] / steps,
        "verification_ms": 1000 * verification / steps,
        "rest_ms": 1000 * (stats.decode_seconds - seconds["retrieve"] - verification) / steps,
        "accepted_by_child": list(stats.acceptance_by_rank.values()),
        "speedup": speedup,
        "different_outputs": different,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The first table."""
    columns = ("method", "MAT", "acceptance", "drafted", "verified", "graph success", "draft ms", "verification ms")
    table = Table(*columns, "rest ms", "1st to 4th child accepted", "speedup", "identical")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['mat']:.2f}",
            f"{row['acceptance_rate']:.3f}",
            f"{row['drafted_by_model']:.0f}",
            f"{row['verified']:.0f}",
            f"{row['graph_success']:.1%}",
            *(f"{row[part + '_ms']:.1f}" for part in ("draft", "verification", "rest")),
            " ".join(f"{share:.2f}" for share in row["accepted_by_child"]),
            f"{row['speedup']:.2f}",
            "NO" if row["different_outputs"] else "yes",
        )
    console.print(table)


@torch.no_grad()
def divergences(
    drafting: transformers.PreTrainedModel, texts: list[torch.Tensor], prompts: list[int], pairs: int
) -> list[dict[str, Any]]:
    """The second table: mean divergence in nats, for every k and tau; tau = 0 pairs nodes at random."""
    rows = []
    table = Table("k", "tau", "merged nodes", "KL in nats, mean", "median", "same next token")
    for k in (3, 5):
        for tau in range(5):
            found = merged_pairs(drafting, texts, prompts, Rules(10, k, 2000, 0.1, 0.1, tau), pairs)
            if not found:
                continue
            unmerged, merged = (torch.cat(one).log_softmax(-1) for one in zip(*found, strict=True))
            each = (unmerged.exp() * (unmerged - merged)).sum(-1)
            same = float((unmerged.argmax(-1) == merged.argmax(-1)).float().mean())
            row = {"k": k, "tau": tau, "pairs": len(found), "mean": float(each.mean()), "median": float(each.median())}
            rows.append({**row, "same_token": same})
            table.add_row(
                str(k), str(tau), str(len(found)), f"{row['mean']:.4f}", f"{row['median']:.4f}", f"{same:.0%}"
            )
    console.print(table)
    return rows


def merged_pairs(
    drafting: transformers.PreTrainedModel, texts: list[torch.Tensor], prompts: list[int], rules: Rules, pairs: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits (1, vocabulary) after merged nodes on their own path, and after the nodes that they are merged with."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    chance, model = random.Random(0), TreeModel(drafting)
    for text, prompt in zip(texts, prompts, strict=True):
        reader = Reader(model)
        for length in range(prompt, len(text), 16):
            graph = grow(reader, text[:length], rules, model.vocab_size)
            some = list(graph.merged.items())
            if not rules.tau:
                some = [(chance.randrange(1, len(graph)), chance.randrange(1, len(graph))) for _ in range(2)]
            for node, first in some[:6]:
                found.append(tuple(after(drafting, text[:length], graph, one) for one in (node, first)))
            if len(found) >= pairs:
                return found
    return found


def after(drafting: transformers.PreTrainedModel, text: torch.Tensor, graph: Graph, node: int) -> torch.Tensor:
    """The draft model's logits (1, vocabulary) after the text and the path to a node."""
    path: list[int] = []
    while node:
        path.append(graph.tokens[node])
        node = graph.parents[node]
    ids = torch.cat([text, torch.tensor(path[::-1], dtype=torch.long)])
    return drafting(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits[0]


if __name__ == "__main__":
    typer.run(main)
