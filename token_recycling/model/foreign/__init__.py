"""Foreign code in and around a model, and whether the model may be accelerated with it.

Verifying a tree is exact if every row of a forward pass is computed alike, whatever other rows the pass has, and if
`generate` passes to the model what the loop passes. The families of transformers keep that (`architectures`). Code that
a user or another library brings may not: a steering hook may change the last row alone, an overridden
`prepare_inputs_for_generation` may change the tokens, a processor may write to a weight between two passes.

**What is foreign** (`model.origin`): code of any package but transformers, torch, accelerate, this one and Python's own
library. `search` lists it: hooks, modules of other classes, methods and functions that were replaced in an object, a
class, a family's module or a library, attention that is registered by name, modes of torch. A model without foreign
code costs nothing but the search, once for each of its forms (`facts`).

**What no trial can show** is left to `generate`: another loop, functions that choose tokens, random numbers of training
mode, functions of caches that were replaced (`search`).

**What is plain** (`plain`): code that keeps no state, so that a trial of it holds for as long as the values that it
reads are the same. It stores nothing outside its local variables, it reaches nothing that may change unnoticed, and
each name that it uses is listed there as harmless. Other code is left to `generate`. Adapters of peft are plain.

**What a trial proves** (`trial`, the only part that runs anything): that our passes over a tree, behind a prompt, with
several numbers of rows and sequences, give the logits of `generate` along the same tokens, to rounding. It is made once
for each form of the code: its functions and the values that they read.

**Code beside the model** (`bystanders`): processors, criteria and streamers run between forward passes, which are
fewer here, behind a cache that holds drafts. Code that could reach the model, its weights or that cache is left to
`generate`; so is all code beside a model that runs foreign code, with which it could share state.

**Who decides**: `hf.call.why_not_code`, in each call. Each refusal names the code, where it is and why.
"""
