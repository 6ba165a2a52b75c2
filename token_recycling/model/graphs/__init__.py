"""Captured forward passes: of constant shapes, captured once as CUDA graphs and replayed.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to launch it. A graph is one
launch. It holds for one number of sequences, of rows and of slots, so that a model has one for each of the few shapes
that occur (docs/how-it-works.md). Everything else of a step, from the draft to what is learned, is that of eager steps;
on the device it is launched while the graph runs. Captured passes are the default on CUDA (`fast="auto"`), where the
common shapes are captured when a model is accelerated. `backend.Backend` chooses between these and eager passes.
"""
