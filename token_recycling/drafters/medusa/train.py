"""What `token-recycling train medusa` takes, does and shows; the training itself is in `fitting`."""

from __future__ import annotations

from dataclasses import dataclass

from ...training.declaration import Trained, Training, TrainingRun, option


@dataclass(frozen=True)
class MedusaTraining(Training):
    """Trains heads on what the target says after pieces of FILES; use them as --drafter medusa:heads=FOLDER."""

    heads: int = option(4, "How many tokens after the next one are foreseen.", min=1)
    blocks: int = option(1, "Residual blocks of a head.", min=1)
    own_output: bool = option(False, "A whole output layer for each head, as in the paper: large.")
    decay: float = 0.8
    """Weight of a head's loss, to the power of its number."""
    batch: int = option(2, "Texts in a batch.", min=1)
    seed: int = option(0, "Of all that is drawn.", min=0)

    held_out_use = "the accuracy is measured on"

    def train(self, run: TrainingRun) -> Trained:
        from .fitting import accuracy, train_medusa
        from .heads import save_heads

        model, steps = run.target.model, run.schedule.steps
        with run.progress("training") as progress:
            heads = train_medusa(
                model, run.texts, self, run.schedule, run.checkpoint, lambda step, loss: progress(step, steps, loss)
            )
        heads.bfloat16().float()  # measured as they are saved
        with run.progress("measuring"):
            measured = accuracy(model, heads, run.held_out)
        save_heads(run.folder, heads.bfloat16(), model, measured, training=run.facts)
        return Trained(
            {"accuracy": measured},
            f"heads trained on {len(run.texts):,} texts; right in {len(run.held_out):,} held out:",
            ("head", "token after the next", "top 1", "top 5", "top 10"),
            [
                (str(number), f"+{number}", *(sum(ranks[:most]) for most in (1, 5, 10)))
                for number, ranks in enumerate(measured, start=1)
            ],
        )
