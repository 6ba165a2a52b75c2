"""Run EleutherAI's lm-evaluation-harness with an accelerated model: the same answers and scores, in less time.

    pip install lm-eval
    python examples/lm_eval_harness.py [MODEL]

The task in `lm_eval/` is local; nothing is downloaded. For your own task, change folder and task name. Generation gets
faster (`output_type: generate_until`); log-likelihoods need one forward pass and take as long as before.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling import accelerated

ROOT = Path(__file__).parent.parent
TASK = "continue_python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "models" / "target"), help="a folder or a hub name")
    source = parser.parse_args().model
    os.chdir(ROOT)  # the task names its data from here

    # `--model hf` on the harness's command line uses this class, which accepts a loaded model.
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    evaluated = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(source), batch_size=1)
    tasks = TaskManager(include_path="examples/lm_eval", include_defaults=False)

    def evaluate() -> tuple[Any, Any, float]:
        """Return scores, answers and seconds."""
        start = time.perf_counter()
        found = lm_eval.simple_evaluate(evaluated, tasks=[TASK], task_manager=tasks, log_samples=True)
        taken = time.perf_counter() - start
        return found["results"][TASK], [sample["resps"] for sample in found["samples"][TASK]], taken

    with accelerated(model):
        evaluate()  # what is learned once, and a first call's extra cost
    scores, answers, plain = evaluate()
    with accelerated(model):
        same_scores, same_answers, faster = evaluate()

    print(
        f"exact match {scores['exact_match,first_line']:.3f}, accelerated {same_scores['exact_match,first_line']:.3f}"
    )
    print(f"identical answers: {'yes' if answers == same_answers else 'no'}")
    print(f"plain {plain:.2f} s, accelerated {faster:.2f} s: {plain / faster:.2f} times as fast")


if __name__ == "__main__":
    main()
