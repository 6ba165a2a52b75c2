"""What a case can be made of: the one table of dimensions, as words and the source code that they stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

TESTS = str(Path(__file__).parents[2] / "tests")
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from support.architectures import BASE, LEFT_OUT, SUPPORTED  # noqa: E402
from support.recurrent_architectures import RECURRENT as _RECURRENT  # noqa: E402

VOCABULARY = int(BASE["vocab_size"])
FAMILIES: dict[str, dict[str, Any]] = {
    str(case): {
        "model_type": case.family,
        **{name: value for name, value in {**BASE, **case.config}.items() if value is not LEFT_OUT},
    }
    for case in [*SUPPORTED, *_RECURRENT]
}
RECURRENT = [str(case) for case in _RECURRENT]
"""Families whose layers keep a state over the text."""
COMMON = ["llama", "qwen2 window of 8", "qwen3", "mistral window of 8", "gemma2 window of 8", "gpt2", "mixtral"]
"""Drawn more often."""
PLAIN_LINEAR = [*COMMON, "gemma3_text window of 8", "phi3", "olmo2", "falcon", "bloom", "stablelm", "opt", "gpt_neox"]
"""Families whose linear layers are called and not looked into, so that others may stand for them."""
ONE_THREAD = ["dynamic"]
"""Words of families whose rotary frequencies depend on the texts before: not for several threads."""
WITHOUT_DROPOUT = ["llama", "qwen2 window of 8", "qwen3", "mistral window of 8", "gemma2 window of 8"]
POSITIONS = {256: 0.82, 40: 0.1, 1024: 0.08}
"""How many a model was made for, and how often; with the most there are LONG texts.
"""
LONG = [(230, 262), (500, 520)]
"""Bounds of their prompts: fast steps have slots for 256 tokens at first, and a prompt is read in pieces of 512."""

WEIGHTS = {
    "float32": "",
    "int8 weights": "int8_weights(model)",
    "dynamic int8": (
        "model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)  # rounds by pass"
    ),
    "adapter": "add_adapters(model)",
}

SURFACES = {
    "accelerate": """
    model = tr.accelerate(model, {drafter}, fast={fast!r}){copied}
    return model, model.generate
""",
    "generate": """
    drafter = {drafter}
    return model, functools.partial(tr.generate, model, drafter=drafter, fast={fast!r})
""",
    "custom_generate": """
    recycle = tr.custom_generate({drafter}, fast={fast!r})
    return model, functools.partial(model.generate, custom_generate=recycle)
""",
    "stream": """
    drafter = {drafter}

    def generate(ids, attention_mask=None, top_k=0, pad_token_id=0, **arguments):
        steps = tr.stream(model, ids, drafter, fast={fast!r}, **arguments)
        return torch.cat([ids, torch.tensor([[token for step in steps for token in step.tokens]])], dim=1)

    generate.leave = lambda ids: next(tr.stream(model, ids, drafter, fast={fast!r}))
    return model, generate
""",
}
COPIES = {
    "": "",
    "pickled": "\n    model = pickle.loads(pickle.dumps(model))",
    "deep copy": "\n    model = copy.deepcopy(model)",
    "twice accelerated": "\n    drafter = model.acceleration.drafter"
    "\n    model = tr.accelerate(tr.decelerate(model), drafter, fast={fast!r})",
}

CACHES = {
    "": "",
    "passed in": "transformers.DynamicCache(config=model.config)",
    "passed in, unconfigured": "transformers.DynamicCache()",
    "static, passed in": "transformers.StaticCache(config=model.config, max_cache_len=600)",
    "static": "cache_implementation='static'",
    "offloaded": "cache_implementation='offloaded'",
}
"""An argument of every call, or the cache that all calls share."""

NOT_SHARED = {"mamba", "falcon_mamba", "mamba2"}
"""Families whose `generate` takes no cache of several turns."""
NOT_STATIC = {"gpt_neo local window of 32"}
"""Families that transformers decodes otherwise in a static cache longer than their window."""
DROPS_CACHE = "longrope"
"""Families that transformers reads anew beyond their border, in a new cache: one that was passed in stays as it was,
and one that would be offloaded is not.
"""


class Option(NamedTuple):
    """What may be added to a call."""

    share: float
    """Of the calls that can have it."""
    code: str
    kind: Literal["argument", "criterion", "processor"] = "argument"
    steps: bool = False
    """Whether `stream` takes it too."""
    sampled: bool = False
    """For sampled texts alone."""
    alone: bool = False
    """For one text alone."""

    @property
    def slow(self) -> bool:
        """Whether fast steps do not hold with it: they take what looks at single rows of scores."""
        return self.kind == "processor" or not (self.kind == "criterion" or self.sampled or self.code.startswith("eos"))


OPTIONS = {
    "eos": Option(0.35, "eos_token_id=[5, 11, 23, 41, 60, 77], pad_token_id=0", steps=True),
    "one eos": Option(0.1, "eos_token_id=9, pad_token_id=9", steps=True),
    "repetition_penalty": Option(0.12, "repetition_penalty=1.3"),
    "no_repeat_ngram": Option(0.12, "no_repeat_ngram_size=2"),
    "bad_words": Option(0.06, "bad_words_ids=[[5], [7, 8], [11, 3, 2]]"),
    "min_new_tokens": Option(0.08, "min_new_tokens=6"),
    "sequence_bias": Option(0.04, "sequence_bias={(4,): 2.0, (9, 7): -3.0}"),
    "suppress": Option(0.04, "suppress_tokens=[3, 4, 5], begin_suppress_tokens=[6, 7]"),
    "forced_eos": Option(0.03, "forced_eos_token_id=9"),
    "length_penalty": Option(0.03, "exponential_decay_length_penalty=(3, 1.5)"),
    "prefix_allowed": Option(
        0.04, f"prefix_allowed_tokens_fn=lambda row, ids: list(range(len(ids) % 3, {VOCABULARY}, 2))"
    ),
    "renormalize": Option(0.03, "renormalize_logits=True, remove_invalid_values=True"),
    "watermark": Option(0.02, "watermarking_config=transformers.WatermarkingConfig(bias=2.0)"),
    "guidance": Option(0.02, "guidance_scale=1.5"),
    "stop_strings": Option(0.06, "stop_strings=['a', 'cd', '#!'], tokenizer=tokenizer()"),
    "own criterion": Option(0.08, "lambda ids, scores, **_: ids[:, -1] % 9 == 2", "criterion", steps=True),
    "joint criterion": Option(
        0.05,
        "lambda ids, scores, **_: torch.full((len(ids),), bool((ids[:, -1] % 7 == 3).any()))",
        "criterion",
        steps=True,
    ),
    "counting criterion": Option(0.04, "Counting().criterion", "criterion", steps=True),
    "own processor": Option(
        0.06, "lambda ids, scores: scores.roll(int(ids.shape[1]) % 3, -1)", "processor", steps=True
    ),
    "counting processor": Option(0.04, "Counting().processor", "processor", steps=True),
    "penalty object": Option(
        0.05,
        "transformers.generation.logits_process.RepetitionPenaltyLogitsProcessor(1.4)",
        "processor",
        steps=True,
    ),
    "streamer": Option(0.1, "streamer=given", alone=True),
    "all outputs": Option(0.12, "return_dict_in_generate=True, output_scores=True, output_logits=True"),
    "logits": Option(0.04, "return_dict_in_generate=True, output_logits=True"),
    "returned": Option(0.08, "return_dict_in_generate=True"),
    "three samples": Option(0.15, "num_return_sequences=3", sampled=True),
    "temperature": Option(0.4, "temperature=0.7", sampled=True),
    "top_p": Option(0.25, "top_p=0.9", sampled=True),
    "min_p": Option(0.15, "min_p=0.02", sampled=True),
    "typical_p": Option(0.1, "typical_p=0.9", sampled=True),
    "cutoffs": Option(0.1, "epsilon_cutoff=0.002, eta_cutoff=0.002", sampled=True),
    "hidden states": Option(0.02, "return_dict_in_generate=True, output_hidden_states=True"),
    "no cache": Option(0.02, "use_cache=False"),
    "beams": Option(0.015, "num_beams=2"),
    "prompt lookup": Option(0.015, "prompt_lookup_num_tokens=3", alone=True),
}
NOT_CUSTOM = {"beams", "prompt lookup", "streamer", "stop_strings"}
"""What transformers does not do, or loses, where it is given a function as `custom_generate`."""
TOGETHER = [
    {"eos", "one eos"},
    {"all outputs", "logits", "returned", "hidden states"},
    {"no cache", "beams", "prompt lookup", "streamer"},
]
"""Of each of these sets a call has one at most."""

EVENTS = {
    "": 0.6,
    "in threads": 0.07,
    "in inference mode": 0.06,
    "weights changed": 0.04,
    "weights loaded": 0.03,
    "trained and back": 0.03,
    "eos set": 0.04,
    "in training": 0.03,
    "adapter switched": 0.3,
    "criterion raises": 0.03,
    "criterion interrupts": 0.03,
    "processor raises": 0.03,
    "streamer interrupts": 0.03,
    "stream left": 0.15,
}
"""What happens before, around or in a call; weights. An adapter is switched where there is one."""

BEFORE = {
    "weights changed": "torch._foreach_mul_([weight.detach() for weight in model.parameters()], 0.9)",
    "weights loaded": "model.load_state_dict({name: -state for name, state in model.state_dict().items()})",
    "eos set": "model.generation_config.eos_token_id = [5, 11, 23, 41, 60, 77]",
    "trained and back": "model.train(); model.eval()",
    "in training": "model.train()",
    "adapter switched": "switch(model)",
    "stream left": "getattr(generate, 'leave', list)(ids)  # begins another text, and leaves it",
}
INTERRUPTIONS = {
    "criterion raises": ("criterion", "RuntimeError"),
    "criterion interrupts": ("criterion", "KeyboardInterrupt"),
    "processor raises": ("processor", "RuntimeError"),
    "streamer interrupts": ("streamer", "KeyboardInterrupt"),
}
TREES: list[Any] = ["auto", 4, 16, "paper", "chain:3", "static:12", "0 1 00"]
DRAFTERS: dict[str, dict[str, list[Any]]] = {
    "recycling": {
        "tree": TREES,
        "k": [2, 4, 8],
        "orders": [1, 2, 4],
        "memory": [0.01, 0.4],
        "suffix": [False],
        "learns_prompt": [False],
        "primed": [True],
        "remembers": [0.5],
        "favours": [0.3],
    },
    "published": {"tree": ["paper", "chain:4", "static:16"], "k": [8, 10], "update": ["last"], "learns_prompt": [True]},
    "suffix": {"num_tokens": [1, 8, 40], "factor": [0.5, 4.0], "min_match": [1, 2, 3]},
    "prompt_lookup": {"num_tokens": [1, 5, 10], "max_matching_ngram_size": [1, 2, 4]},
    "lookahead": {"window": [2, 7], "ngram_size": [3, 5], "guesses": [2, 7], "pool_from_prompt": [True]},
    "rest": {
        "nodes": [1, 8, 64],
        "num_tokens": [2, 10],
        "max_matching_ngram_size": [3, 16],
        "min_matching_ngram_size": [1, 2],
        "max_matches": [3],
    },
    "draft_model": {
        "mode": ["sequence", "tree", "graph"],
        "depth": [1, 3, 10],
        "k": [1, 2, 4],
        "theta_prob": [0.0, 0.4],
        "theta_sib": [0.0, 0.1],
        "tau": [1, 2],
        "nodes": ["auto", 6, 24],
        "sampled": [True],
    },
    "layer_skip": {"mode": ["sequence", "tree", "graph"], "depth": [2, 6], "k": [1, 3], "nodes": ["auto", 8]},
    "specdec_pp": {"threshold": [0.3, 0.9], "min_length": [1, 2], "max_length": [4, 20], "sampled": [True]},
    "medusa": {"tree": ["auto", 6], "k": [4, 10]},
    "eagle": {"tree": ["auto", 6, "static"], "k": [4, 10], "depth": [5, 8]},
    "dflash": {"tree": ["auto", 6, "chain:3"], "k": [4, 8]},
    "assistant": {"mode": ["sequence", "tree", "graph"], "depth": [1, 4], "nodes": ["auto", 6], "sampled": [True]},
    "plain": {},
    "garbage": {},
}
"""Options by drafter; `fuse` has other drafters as parts."""
REQUIRED: dict[str, list[dict[str, str]]] = {
    "rest": [{"datastore": "datastore(new_model())"}],
    "draft_model": [{"model": "new_model()"}, {"model": "related(new_model())"}],
    "layer_skip": [{"layers": "[1]"}, {"layers": "'auto'"}],
    "specdec_pp": [
        {"model": model, "head": "acceptance_head(model)"} for model in ("new_model()", "related(new_model())")
    ],
    "medusa": [{"heads": "medusa_heads(model)"}],
    "eagle": [{"head": "eagle_head(model)"}],
    "dflash": [{"model": "dflash_assistant(model)"}],
    "assistant": [
        {"model": "related(new_model())", "tokenizer": "words(model)", "assistant_tokenizer": "words(model)"},
    ],
}
"""One of these is given always."""
WITH_MODELS = {"assistant", "draft_model", "layer_skip", "specdec_pp"}
"""Drafters that draft with a model like the target, which may keep no states."""
COSTS = [0.005, 0.05, 0.3]
"""What a node more costs, in passes over one token: made up, so that trees do not depend on the machine."""
