"""Captured forward passes: passes of constant shapes, captured once as CUDA graphs and replayed.

On a data-center accelerator the forward pass of a step takes less time than Python needs to launch it. A graph is one
launch. It is valid for one number of sequences, rows and slots, so a model has one for each of the few shapes that
occur (docs/how-it-works.md). All other parts of a step, from the draft to learning, are those of eager steps; their
device operations are launched while the graph runs. Captured passes are the default on CUDA (`fast="auto"`), where the
common shapes are captured when a model is accelerated. `backend.Backend` chooses between these and eager passes.
"""
