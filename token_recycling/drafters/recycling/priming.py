"""What is known of a model before its first text: its candidates after every single token, or text of its own.

Most rows of a matrix that is empty at first stay so for long. Here the model reads each token of the vocabulary alone,
after the start token if there is one, in large batches. The rows are kept in the user's cache folder, named by the
weights, so that it is done once a model. What it taught by text that it wrote from nothing (`hf.warm`) is kept beside.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from ..._util.files import cache_folder
from ..._util.topk import top_candidates
from ...model.inspection import weights_fingerprint
from ...model.tree_model import TreeModel
from ...recycling.matrix_file import check_header, read_matrix_file, write_matrix
from ...recycling.ngram_matrix import NgramMatrix

logger = logging.getLogger("token_recycling")

_LOGITS_AT_ONCE = 64_000_000


def prime(matrix: NgramMatrix, target: TreeModel) -> None:
    """Fills the rows of all tokens that nothing was learned for, from the file of an earlier run if there is one."""
    path = primed_file(target.model, matrix.k)
    if path.exists():
        tensors, header = read_matrix_file(path)
        check_header(path, {"vocab_size": matrix.vocab_size, "k": matrix.k}, header)
        candidates, shares = tensors["candidates"], tensors["shares"]
    else:
        logger.info("asking the model for its candidates after each of %d tokens, once", matrix.vocab_size)
        candidates, shares = _candidates_after_each(matrix, target)
        write_matrix(path, {"candidates": candidates, "shares": shares})
    empty = ~matrix.filled
    matrix.candidates[empty] = candidates[empty]
    matrix.shares[empty] = shares[empty]


@torch.no_grad()
def _candidates_after_each(matrix: NgramMatrix, target: TreeModel) -> tuple[np.ndarray, np.ndarray]:
    """Candidates (vocabulary, k) int32 and their shares (vocabulary, k) uint16 after every token alone."""
    learned = NgramMatrix(matrix.vocab_size, matrix.k, orders=1)
    begin = target.config.bos_token_id
    before = [begin] if isinstance(begin, int) and begin < target.embedded else []
    at_once = max(1, _LOGITS_AT_ONCE // (matrix.vocab_size * (len(before) + 1)))
    for tokens in torch.arange(min(target.embedded, matrix.vocab_size), device=target.device).split(at_once):
        start = torch.tensor(before, device=target.device, dtype=torch.long).expand(len(tokens), -1)
        logits = target.eager(input_ids=torch.cat([start, tokens[:, None]], dim=1), use_cache=False).logits[:, -1]
        learned.learn(tokens.cpu().numpy()[:, None], *top_candidates(logits, matrix.k))
    return learned.candidates, learned.shares


def primed_file(model: PreTrainedModel, k: int) -> Path:
    """Where the primed rows of a model are kept."""
    return cache_folder() / "primed" / f"{weights_fingerprint(model)}-{k}.safetensors"


def load_warmed(matrix: NgramMatrix, target: TreeModel) -> None:
    """Fills a matrix with what the model has taught by text of its own; raises ValueError where that was not kept."""
    path = warmed_file(target, matrix.k, matrix.orders)
    if not path.exists():
        raise ValueError(
            f"expected what this model was warmed with at {path}, for k={matrix.k}, orders={matrix.orders}, got no "
            "file; run `token-recycling warm MODEL` first, or leave out warmed=true"
        )
    matrix.load(path)


def warmed_file(target: TreeModel, k: int, orders: int) -> Path:
    """Where what a model has taught by text of its own is kept."""
    return cache_folder() / "warm" / f"{weights_fingerprint(target.model)}-{k}-{orders}.safetensors"
