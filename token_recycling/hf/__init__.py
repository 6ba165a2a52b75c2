"""The library inside transformers' own `generate`.

A call passes these modules in order: `accelerate` makes the model one of an accelerated class, `acceleration` has that
class and receives what `generate` prepared, `generate_call` checks the call and decodes it by `loop`. `batch_stopping`
and `cache_handover` restore what transformers would have done for a whole batch and for a cache that the caller sees.
"""
