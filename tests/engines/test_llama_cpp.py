"""Token Recycling in llama-cpp-python; `nox -s llama-cpp` runs this in its own environment."""

import gc
import itertools
import time

import numpy as np
import pytest
import torch
from support import tiny

pytest.importorskip("llama_cpp", reason="llama-cpp-python has an environment of its own: nox -s llama-cpp")
pytest.importorskip("gguf", reason="makes the model files: nox -s llama-cpp")

import gguf
import llama_cpp
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from support.gguf_files import write_gguf

from token_recycling import MatrixFileError, fingerprint
from token_recycling.engines.llama_cpp import accelerate

CONTEXT = 256
TOKENIZER = tiny.tokenizer()
VOCABULARY = len(TOKENIZER)


def _write_model(model, path, names=None, **values):
    write_gguf(model, path, names or TOKENIZER.convert_ids_to_tokens(range(VOCABULARY)), **values)
    return path


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny.llama(seed=3, context=0.01, vocab_size=VOCABULARY, **sizes)


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return _write_model(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def new_llama(path, draft=None, **options):
    """Return a `Llama` that computes in float32 throughout, like the reference."""
    float32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    one_thread = {"n_threads": 1, "n_threads_batch": 1}
    settings = {"n_ctx": CONTEXT, "logits_all": True, "verbose": False, **float32, **one_thread, **options}
    return Llama(str(path), draft_model=draft, **settings)


def accelerated_llama(path, num_pred_tokens=10, **options):
    """Return an accelerated `Llama` and its draft model; by default with the costs of a GPU instead of
    measured ones.
    """
    llama = accelerate(new_llama(path), num_pred_tokens, **{"token_cost": 0.02, **options})
    return llama, llama.draft_model


def decode(llama, prompt, length, **sampling):
    return list(itertools.islice(llama.generate(prompt, **{"temp": 0, **sampling}), length))


def prompts(number, shortest=1, longest=60):
    lengths = [shortest + seed * 37 % (longest - shortest + 1) for seed in range(number)]
    return [tiny.prompt(seed, length, VOCABULARY)[0].tolist() for seed, length in enumerate(lengths)]


def expected(model, prompt, length):
    """Return the output of transformers' own greedy decoding."""
    ids = torch.tensor([prompt])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return said[0, len(prompt) :].tolist()


def forward_pass_sizes(llama):
    """Return a list that records the number of tokens of every forward pass from now on."""
    evaluate, sizes = llama.eval, []

    def counting(tokens):
        sizes.append(len(tokens))
        evaluate(tokens)

    llama.eval = counting
    return sizes


def test_outputs_equal_those_of_transformers_in_fewer_forward_passes(path, model):
    llama, _ = accelerated_llama(path)
    sizes = forward_pass_sizes(llama)
    for prompt in prompts(12):
        assert decode(llama, prompt, 100) == expected(model, prompt, 100)
    assert len(sizes) < 12 * 100 / 1.4
    (prompt,), whole = prompts(1, 60, 60), CONTEXT - 60 + 1
    assert decode(llama, prompt, whole) == expected(model, prompt, whole), "to the end of the context"


def test_outputs_equal_those_of_plain_llama_cpp_in_16_bits(path):
    """Its default: keys and values in 16 bits."""
    short = {"type_k": None, "type_v": None}
    alone, llama = new_llama(path, **short), accelerate(new_llama(path, **short))
    for prompt in prompts(12):
        assert decode(llama, prompt, 100) == decode(alone, prompt, 100)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantized_models_give_the_same_logits_with_flash_attention(model, kind, tmp_path):
    """Bit by bit, so that near-ties resolve equally."""
    path = _write_model(model, tmp_path / "quantized.gguf", kind=gguf.GGMLQuantizationType[kind])
    settings = {"type_k": None, "type_v": None, "flash_attn": True}
    alone, llama = new_llama(path, **settings), accelerate(new_llama(path, **settings), 10, token_cost=0.02)
    sizes = forward_pass_sizes(llama)
    for prompt in prompts(6, 20):
        assert decode(llama, prompt, 100) == decode(alone, prompt, 100)
        steps = slice(len(prompt) - 1, len(prompt) + 98)
        np.testing.assert_array_equal(llama.scores[steps], alone.scores[steps])
    assert len(sizes) < 6 * 100 / 1.2


@pytest.mark.parametrize("flash", [True, False])
def test_warning_if_several_tokens_are_rounded_differently(path, caplog, flash):
    accelerate(new_llama(path, flash_attn=flash))
    assert ("flash_attn=True" in caplog.text) is not flash


@pytest.mark.parametrize(("kind", "exact"), [("ALL_F32", False), ("MOSTLY_F16", False), ("MOSTLY_Q4_1", True)])
def test_warning_names_inexact_weight_types(model, kind, exact, tmp_path, caplog):
    number = gguf.LlamaFileType[kind]
    accelerate(new_llama(_write_model(model, tmp_path / "typed.gguf", add_file_type=int(number)), flash_attn=True))
    assert (f"general.file_type {int(number)}" in caplog.text) is not exact


def test_seeded_sampling_gives_the_same_output_as_without_drafts(path):
    alone, (llama, _) = new_llama(path), accelerated_llama(path)
    sizes = forward_pass_sizes(llama)
    sampling = {"temp": 0.7, "top_k": 8, "top_p": 0.9, "repeat_penalty": 1.1}
    for seed, prompt in enumerate(prompts(12)):
        said = []
        for which in (alone, llama):
            which.set_seed(seed)
            said.append(decode(which, prompt, 60, **sampling))
        assert said[0] == said[1]
    assert len(sizes) < 12 * 60 / 1.2


def test_grammar_gives_the_same_output_as_without_drafts(path):
    alone, (llama, _) = new_llama(path), accelerated_llama(path)
    sizes = forward_pass_sizes(llama)
    said = []
    for which in (alone, llama):
        grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("ab" | "cd" | " ")+', verbose=False)
        said.append(which.create_completion("import os", max_tokens=60, temperature=0, grammar=grammar))
    assert said[0]["choices"] == said[1]["choices"]
    assert set(said[1]["choices"][0]["text"]) <= set("abcd ")
    assert len(sizes) < said[1]["usage"]["completion_tokens"] / 1.2


def with_processor(llama, prompt):
    """As grammar libraries do: the processor depends on the tokens that it gets."""

    def processor(tokens, logits):
        logits = logits.copy()
        logits[[tokens[-1], 7 * len(tokens) % VOCABULARY]] += -1, 2
        return logits

    return decode(llama, prompt, 60, logits_processor=[processor])


def with_criterion(llama, prompt):
    stopped = decode(llama, prompt, 60, stopping_criteria=lambda tokens, logits: len(tokens) > len(prompt) + 12)
    return stopped, llama.n_tokens


def between_tokens(llama, prompt):
    tokens = llama.generate(prompt, temp=0)
    return [(token, llama.n_tokens, len(llama.eval_tokens)) for token in itertools.islice(tokens, 40)]


def with_echo(llama, prompt):
    text = TOKENIZER.decode(prompt)
    choice = llama.create_completion(text, max_tokens=33, temperature=0, echo=True, logprobs=1)["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"]


def continued(llama, prompt):
    begun = decode(llama, prompt, 21)
    state = llama.save_state()
    going_on = decode(llama, begun[-1:], 20, reset=False)
    llama.load_state(state)
    return begun, going_on, state.n_tokens, decode(llama, begun[-1:], 20, reset=False)


@pytest.mark.parametrize("use", [with_processor, with_criterion, between_tokens, with_echo, continued])
def test_users_see_no_unverified_tokens(path, use):
    alone, (llama, _), (prompt,) = new_llama(path), accelerated_llama(path, token_cost=0), prompts(1, 20, 20)
    decode(llama, prompt, 60)  # so that whole outputs are drafted
    llama.reset()
    assert use(llama, prompt) == use(alone, prompt)


def test_every_row_of_logits_is_learned_with_its_context(path, model, monkeypatch):
    """Rows of prompts, accepted and rejected tokens, compared with transformers' logits after the same context."""
    llama, draft = accelerated_llama(path, token_cost=0)
    sizes, seen, read = forward_pass_sizes(llama), [], draft.replica.learn_logits

    def learn(contexts, logits):
        seen.append((llama.input_ids[: llama.n_tokens].tolist(), contexts.copy(), logits.copy()))
        read(contexts, logits)

    monkeypatch.setattr(draft.replica, "learn_logits", learn)
    said = [decode(llama, prompt, 40) for prompt in prompts(4, 5, 30)]
    assert [len(logits) for _, _, logits in seen] == sizes
    assert sum(sizes) > sum(map(len, said)) + 3 * 30, "some tokens were rejected"
    for tokens, contexts, logits in seen:
        start = len(tokens) - len(logits)
        with torch.no_grad():
            rows = model(torch.tensor([tokens])).logits[0, start:]
        torch.testing.assert_close(torch.from_numpy(logits), rows, atol=1e-3, rtol=1e-3)
        for row, context in enumerate(contexts):
            newest_first = tokens[: start + row + 1][::-1][:3]
            assert context.tolist() == newest_first + [-1] * (3 - len(newest_first))


def test_outputs_stay_correct_after_interrupted_calls(path, model):
    """A call is interrupted, another one begins, and the first continues from a prefix that is still in the cache."""
    llama, _ = accelerated_llama(path)
    first, second = prompts(2, 20, 40)
    begun = decode(llama, first, 13)
    assert decode(llama, second, 1) == expected(model, second, 1)
    assert decode(llama, first + begun, 40) == expected(model, first, 53)[13:]
    assert decode(llama, (first + begun)[:-5], 40) == expected(model, first, 48)[8:]
    assert decode(llama, second, 60) == expected(model, second, 60)


def test_matrix_is_saved_when_the_model_is_deleted_and_loaded_again(path, tmp_path):
    file = tmp_path / "tiny.matrix"
    (prompt,) = prompts(1, 20, 20)
    llama, draft = accelerated_llama(path, matrix=str(file))
    cold = forward_pass_sizes(llama)
    said = decode(llama, prompt, 60)
    rows = [array.copy() for array in draft.replica.matrix.rows]
    assert not file.exists()
    llama.eval = None
    del llama
    gc.collect()
    assert file.exists()
    again, warm = accelerated_llama(path, matrix=str(file), learns=False)
    for before, after in zip(rows, warm.replica.matrix.rows, strict=True):
        np.testing.assert_array_equal(before, after)
    hot = forward_pass_sizes(again)
    assert decode(again, prompt, 60) == said
    assert len(hot) < len(cold)
    for before, after in zip(rows, warm.replica.matrix.rows, strict=True):
        np.testing.assert_array_equal(before, after, "learns is false")


def test_matrix_file_is_bound_to_its_tokenizer(path, model, tmp_path):
    file = tmp_path / "tiny.matrix"
    llama, draft = accelerated_llama(path, matrix=str(file))
    decode(llama, prompts(1, 20, 20)[0], 20)
    draft.replica.save()
    draft.replica.matrix.load(file, fingerprint(TOKENIZER))
    names = [f"other{token}" for token in range(VOCABULARY)]
    with pytest.raises(MatrixFileError):
        accelerate(new_llama(_write_model(model, tmp_path / "other.gguf", names)), matrix=str(file))


def timed_llama(path, monkeypatch, cost):
    """Return a `Llama` whose forward passes take 1 plus `cost` for each further token, and their sizes."""
    clock, evaluate = [0.0], Llama.eval

    def working(self, tokens):
        clock[0] += 1 + cost * (len(tokens) - 1)
        evaluate(self, tokens)

    monkeypatch.setattr(Llama, "eval", working)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    llama = accelerate(new_llama(path), 10)
    return llama, llama.draft_model, forward_pass_sizes(llama)


@pytest.mark.measured
@pytest.mark.parametrize(("cost", "pays"), [(0.02, True), (1.5, False)])
def test_times_of_forward_passes_are_learned(path, monkeypatch, cost, pays):
    llama, draft, sizes = timed_llama(path, monkeypatch, cost)
    said = sum(len(decode(llama, prompt, 100)) for prompt in prompts(8))
    learned = draft.costs.seconds / draft.costs.seconds[0]
    decoding = [size for size in sizes if size <= 11][-300:]
    if pays:
        assert learned[5] < 1.5
        assert len(sizes) < said / 1.3
    else:
        assert learned[1] > 1.4
        assert sum(decoding) < 1.1 * len(decoding), "almost nothing is drafted"


def recurrent(path, patch):
    patch.setattr(llama_cpp, "llama_model_is_hybrid", lambda model: True)
    accelerate(new_llama(path))


def another_eval(path, patch):
    patch.setattr(Llama, "eval", lambda self, tokens, more=0: None)
    accelerate(new_llama(path))


def another_version(path, patch):
    patch.setattr(llama_cpp, "__version__", "0.4")
    accelerate(new_llama(path))


WRONG = {
    "no token": (lambda path, patch: accelerate(new_llama(path), 0), "got 0"),
    "unknown option": (lambda path, patch: accelerate(new_llama(path), depth=3), "'depth'"),
    "another draft model": (
        lambda path, patch: accelerate(new_llama(path, LlamaPromptLookupDecoding())),
        "LlamaPromptLookupDecoding",
    ),
    "logits of the last token": (
        lambda path, patch: accelerate(new_llama(path, logits_all=False, n_batch=64)),
        "logits_all=True",
    ),
    "a batch too small": (lambda path, patch: accelerate(new_llama(path, n_batch=8)), "of 8, got 32"),
    "twice": (lambda path, patch: accelerate(accelerate(new_llama(path))), "already"),
    "recurrent layers": (recurrent, "recurrent"),
    "another eval": (another_eval, "more"),
    "another version": (another_version, r"got 0\.4"),
}


@pytest.mark.parametrize(("use", "value"), WRONG.values(), ids=WRONG)
def test_wrong_use_is_refused(path, monkeypatch, use, value):
    with pytest.raises((ValueError, RuntimeError), match=value):
        use(path, monkeypatch)
