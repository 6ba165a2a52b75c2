"""The command line on a tiny random llama with a byte tokenizer: every command, every refusal."""

import json
import shutil
import subprocess
import sys
import time
from itertools import chain

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from token_recycling import AdjacencyMatrix, Tree, __version__, fingerprint
from token_recycling.cli.app import app
from token_recycling.cli.console import TINTS, by_step
from token_recycling.cli.listing import busiest
from token_recycling.cli.loading import load
from token_recycling.cli.streaming import IncrementalText, decoded, pieces
from token_recycling.drafters.recycling import Recycling
from token_recycling.matrix import read_matrix
from token_recycling.target import Target

PROMPT = "def add(a, b):"
CONTEXT = 96


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A llama whose tokens are bytes, so that characters of several bytes come in parts."""
    folder = tmp_path_factory.mktemp("tiny")
    vocab = {byte: place for place, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=256,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tiny_model_dir):
    return load(tiny_model_dir)


def run(*args, **extra):
    return CliRunner().invoke(app, list(map(str, args)), **extra)


def run_json(*args, status=0, **extra):
    result = run(*args, "--json", **extra)
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


def assert_refused(result, *words):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def reference(tiny, prompt, **arguments):
    ids = tiny.tokenizer(prompt, return_tensors="pt")
    return tiny.model.generate(**ids, **arguments)[0, ids["input_ids"].shape[1] :].tolist()


# generate


def test_generate_equals_transformers(tiny, tiny_model_dir):
    found = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40)
    assert found["tokens"] == reference(tiny, PROMPT, max_new_tokens=40, do_sample=False)
    assert found["text"] == decoded(tiny.tokenizer, found["tokens"])
    assert found["stats"]["tokens"] == len(found["tokens"])
    assert found["stats"]["steps"] > 0
    assert found["interrupted"] is False


def test_streamed_text_equals_the_text(tiny_model_dir):
    text = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40)["text"]
    streamed = run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40)
    assert streamed.exit_code == 0
    assert streamed.stdout == f"{text}\n"


def test_prompt_from_file_and_standard_input(tiny_model_dir, tmp_path):
    file = tmp_path / "prompt.py"
    file.write_text(f"{PROMPT}\n")
    options = ("--max-new-tokens", 12)
    expected = run_json("generate", tiny_model_dir, PROMPT, *options)["tokens"]
    assert run_json("generate", tiny_model_dir, "--file", file, *options)["tokens"] == expected
    assert run_json("generate", tiny_model_dir, *options, input=f"{PROMPT}\n")["tokens"] == expected


def test_sampling_equals_transformers(tiny, tiny_model_dir):
    torch.manual_seed(3)
    expected = reference(tiny, PROMPT, max_new_tokens=30, do_sample=True, temperature=0.7, top_p=0.9, top_k=20)
    options = ("--temperature", 0.7, "--top-p", 0.9, "--top-k", 20, "--max-new-tokens", 30)
    assert run_json("generate", tiny_model_dir, PROMPT, *options, "--seed", 3)["tokens"] == expected
    assert run_json("generate", tiny_model_dir, PROMPT, *options, "--seed", 4)["tokens"] != expected


def test_stop_string_ends_the_text(tiny, tiny_model_dir):
    whole = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40)
    stop = next(char for char in whole["text"] if char.isascii())
    found = run_json(
        "generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40, "--stop", "never there", "--stop", stop
    )
    assert len(found["tokens"]) < len(whole["tokens"])
    assert stop in decoded(tiny.tokenizer, found["tokens"][-1:])


def test_stats_are_printed_beside_the_text(tiny_model_dir):
    result = run(
        "generate", tiny_model_dir, PROMPT, "--max-new-tokens", 20, "--stats", "--drafter", "recycling:k=3,tree=4"
    )
    for word in ("recycling: k = 3", "MAT", "tokens per second", "discarded", "forward", "depth 1", "rank 0"):
        assert word in result.stderr
        assert word not in result.stdout


def test_no_more_tokens_than_the_context_holds(tiny_model_dir):
    result = run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 1000, "--json")
    assert len(json.loads(result.stdout)["tokens"]) == CONTEXT - len(PROMPT)
    assert f"note: the text ends where the model's context of {CONTEXT} tokens does" in result.stderr
    assert run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 10).stderr == ""


def test_dtype_threads_and_device(tiny_model_dir):
    before = torch.get_num_threads()
    try:
        options = ("--dtype", "bfloat16", "--device", "cpu", "--threads", 1, "--max-new-tokens", 5)
        assert len(run_json("generate", tiny_model_dir, PROMPT, *options)["tokens"]) == 5
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert load(tiny_model_dir).model.dtype == torch.float32
    assert load(tiny_model_dir, dtype="bfloat16").model.dtype == torch.bfloat16


def test_chat_template_is_used_if_there_is_one(tiny, tiny_model_dir, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options = ("--max-new-tokens", 8)
    plain = reference(tiny, PROMPT, max_new_tokens=8, do_sample=False)
    chat = reference(tiny, f"[{PROMPT}]", max_new_tokens=8, do_sample=False)
    assert plain != chat
    result = run("generate", folder, PROMPT, *options, "--json")
    assert json.loads(result.stdout)["tokens"] == chat
    assert "--no-chat" in result.stderr
    assert run_json("generate", folder, PROMPT, *options, "--chat")["tokens"] == chat
    assert run_json("generate", folder, PROMPT, *options, "--no-chat")["tokens"] == plain
    assert_refused(run("generate", tiny_model_dir, PROMPT, "--chat"), "chat template")


# the matrix of generate


def test_matrix_is_saved_and_loaded(tiny, tiny_model_dir, tmp_path):
    file = tmp_path / "new" / "matrix.safetensors"
    options = ("--max-new-tokens", 40, "--matrix", file)
    cold = run_json("generate", tiny_model_dir, PROMPT, *options)
    matrix, header = read_matrix(file)
    assert header["tokenizer"] == fingerprint(tiny.tokenizer)
    assert matrix.filled.any()
    hot = run_json("generate", tiny_model_dir, PROMPT, *options)
    assert hot["tokens"] == cold["tokens"]
    assert hot["stats"]["steps"] < cold["stats"]["steps"]


def test_ctrl_c_keeps_what_was_learned(tiny_model_dir, tmp_path, monkeypatch):
    draft, calls = Recycling.draft, []

    def draft_or_interrupt(self, context):
        calls.append(context)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return draft(self, context)

    monkeypatch.setattr(Recycling, "draft", draft_or_interrupt)
    file = tmp_path / "matrix.safetensors"
    found = run_json("generate", tiny_model_dir, PROMPT, "--matrix", file, status=130)
    assert found["interrupted"] is True
    assert found["stats"]["steps"] == 3
    assert len(found["tokens"]) >= 3
    assert read_matrix(file)[0].filled.any()


def test_a_matrix_that_does_not_fit_is_refused_and_kept(tiny_model_dir, tmp_path):
    file = tmp_path / "matrix.safetensors"
    run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 5, "--matrix", file)
    whole = file.read_bytes()
    assert_refused(
        run("generate", tiny_model_dir, PROMPT, "--matrix", file, "--drafter", "recycling:k=4"), "expected k of 4"
    )
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-7])
    assert_refused(run("generate", tiny_model_dir, PROMPT, "--matrix", file), str(file))
    assert file.read_bytes() == whole[:-7]
    assert_refused(run("generate", tiny_model_dir, PROMPT, "--matrix", tmp_path), "folder")
    assert_refused(run("generate", tiny_model_dir, PROMPT, "--matrix", file, "--drafter", "plain"), "got plain")


# compare


@pytest.fixture
def prompt_folder(tmp_path):
    for name, text in (("b.py", "import os\n"), ("a.py", f"{PROMPT}\n"), (".hidden", "no"), ("c.py", "class A:\n")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_compare_prints_both_and_a_summary(tiny_model_dir, prompt_folder):
    result = run("compare", tiny_model_dir, "--prompts", prompt_folder, "--max-new-tokens", 30, "--limit", 2)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == "identical: yes"
    assert any(line.startswith("1 of 2: a.py") for line in lines)
    assert any(line.startswith("2 of 2: b.py") for line in lines)
    assert "c.py" not in result.stdout
    for word in ("speedup:", "MAT:", "plain:", "recycled:"):
        assert any(line.startswith(word) for line in lines)


def test_compare_as_json(tiny, tiny_model_dir, prompt_folder):
    found = run_json("compare", tiny_model_dir, "--prompts", prompt_folder, "--max-new-tokens", 30)
    assert [row["name"] for row in found["prompts"]] == ["a.py", "b.py", "c.py"]
    first = found["prompts"][0]
    assert list(chain.from_iterable(first["steps"])) == reference(tiny, PROMPT, max_new_tokens=30, do_sample=False)
    assert first["identical"]
    assert first["divergence"] is None
    assert first["stats"]["steps"] == len(first["steps"])
    summary = found["summary"]
    tokens = sum(row["recycled"]["tokens"] for row in found["prompts"])
    assert summary["mat"] == pytest.approx(tokens / sum(row["stats"]["steps"] for row in found["prompts"]))
    seconds = [sum(row[side]["seconds"] for row in found["prompts"]) for side in ("plain", "recycled")]
    assert summary["speedup"] == pytest.approx(seconds[0] / seconds[1])
    assert summary["identical"] is True
    assert summary["prompts"] == 3


def test_compare_starts_cold_and_stays_hot(tiny_model_dir):
    once, again = run_json("compare", tiny_model_dir, PROMPT, PROMPT, "--max-new-tokens", 40)["prompts"]
    cold = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40)["stats"]["steps"]
    assert once["stats"]["steps"] == cold
    assert again["stats"]["steps"] < cold


def test_compare_tells_where_texts_part(tiny, tiny_model_dir, monkeypatch):
    forward = Target.forward

    def wrong(self, *inputs):
        logits = forward(self, *inputs).clone()
        logits[..., 65] += 1000
        return logits

    monkeypatch.setattr(Target, "forward", wrong)
    plain = reference(tiny, PROMPT, max_new_tokens=10, do_sample=False)
    position = next(place for place, token in enumerate(plain) if token != 65)
    found = run_json("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10, status=1)
    divergence = found["prompts"][0]["divergence"]
    ids = torch.tensor([tiny.tokenizer(PROMPT)["input_ids"] + plain[:position]])
    best = tiny.model(ids).logits[0, -1].detach().topk(2).values
    assert (divergence["position"], divergence["plain"], divergence["recycled"]) == (position, plain[position], 65)
    assert divergence["margin"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert found["summary"]["identical"] is False
    text = run("compare", tiny_model_dir, PROMPT, "--max-new-tokens", 10)
    assert text.exit_code == 1
    assert "differs: token" in text.stdout
    assert text.stdout.splitlines()[-1] == "identical: no"


def test_steps_can_be_told_apart_with_and_without_colours():
    assert by_step(["a", "b", "c"], colours=False).plain == "a▏b▏c"
    tinted = by_step(["a", "b", "c"], colours=True)
    assert tinted.plain == "abc"
    assert [str(span.style) for span in tinted.spans] == [TINTS[0], TINTS[1], TINTS[0]]


@pytest.mark.parametrize("text", ["naïve 日本語 🙂!", "plain", "", "ends inside \N{SNOWMAN}"])
def test_pieces_hold_back_parts_of_characters(tiny, text):
    tokens = tiny.tokenizer(text)["input_ids"]
    if text.endswith("\N{SNOWMAN}"):
        tokens = tokens[:-1]
    found = pieces(tiny.tokenizer, [[token] for token in tokens])
    assert len(found) == len(tokens)
    assert "".join(found) == decoded(tiny.tokenizer, tokens)
    shown = IncrementalText(tiny.tokenizer)
    assert all("\N{REPLACEMENT CHARACTER}" not in shown.push([token]) for token in tokens)


# check


@pytest.mark.parametrize("self_test", [False, True])
def test_check_says_how_a_model_is_supported(tiny_model_dir, self_test):
    options = ["--self-test"] * self_test
    text = run("check", tiny_model_dir, *options)
    assert text.exit_code == 0
    assert "LlamaForCausalLM, family llama" in text.stdout
    assert "one mask" in text.stdout
    found = run_json("check", tiny_model_dir, *options)
    assert found["supported"]
    assert found["tested"]
    assert found["reason"] is None
    assert (found["difference"] is not None) is self_test
    assert ("logits differ by" in text.stdout) is self_test


def test_check_says_why_a_model_is_refused(tmp_path):
    MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4).save_pretrained(tmp_path / "mamba")
    T5Config().save_pretrained(tmp_path / "t5")
    for name, reason in (("mamba", "cannot go back to before a rejected token"), ("t5", "encoder-decoder")):
        text = run("check", tmp_path / name)
        assert text.exit_code == 1
        assert reason in text.stdout
        found = run_json("check", tmp_path / name, status=1)
        assert not found["supported"]
        assert reason in found["reason"]


def test_check_needs_a_model(tmp_path):
    assert_refused(run("check", tmp_path), "config.json")
    (tmp_path / "config.json").write_text("{}")
    assert_refused(run("check", tmp_path), "configuration of a model")


# matrix and drafters


@pytest.fixture
def matrix_file(tiny, tmp_path):
    matrix = AdjacencyMatrix(257, 2)
    matrix.candidates[72] = torch.tensor([10, 72], dtype=torch.int32)
    matrix.candidates[10] = torch.tensor([72, 3], dtype=torch.int32)
    matrix.candidates[5] = torch.tensor([72, 9], dtype=torch.int32)
    matrix.save(tmp_path / "matrix.safetensors", fingerprint(tiny.tokenizer))
    return tmp_path / "matrix.safetensors"


def test_matrix_as_json(tiny, tiny_model_dir, matrix_file):
    found = run_json("matrix", matrix_file, "--model", tiny_model_dir, "--rows", 2)
    assert (found["vocab_size"], found["k"], found["rows_filled"], found["format_version"]) == (257, 2, 3, 1)
    assert found["tokenizer"] == fingerprint(tiny.tokenizer)
    assert found["bytes"] == matrix_file.stat().st_size
    assert [row["token"] for row in found["rows"]] == [72, 10]
    assert found["rows"][0]["candidates"] == [10, 72]
    assert found["rows"][0]["text"] == tiny.tokenizer.decode([72])
    assert found["rows"][0]["candidate_texts"] == [tiny.tokenizer.decode([10]), tiny.tokenizer.decode([72])]


def test_matrix_as_text_and_particular_rows(tiny, tiny_model_dir, matrix_file):
    text = run("matrix", matrix_file).stdout
    assert "257 tokens x 2 candidates" in text
    assert "rows filled: 3" in text
    assert fingerprint(tiny.tokenizer) in text
    asked = run_json("matrix", matrix_file, "--token", 5, "--token", "72")["rows"]
    assert [(row["token"], row["candidates"], row["text"]) for row in asked] == [
        (5, [72, 9], None),
        (72, [10, 72], None),
    ]
    by_text = run_json("matrix", matrix_file, "--model", tiny_model_dir, "--token", "ab")["rows"]
    assert [row["text"] for row in by_text] == ["a", "b"]


def test_busiest_rows_are_filled_ones():
    matrix = AdjacencyMatrix(10, 2)
    assert busiest(matrix, 5) == []
    matrix.candidates[3] = torch.tensor([4, 5], dtype=torch.int32)
    assert busiest(matrix, 5) == [3]


def test_matrix_refusals(tiny_model_dir, matrix_file, tmp_path):
    assert_refused(run("matrix", tmp_path / "none"), "there is none")
    assert_refused(run("matrix", matrix_file, "--token", "abc"), "--model")
    assert_refused(run("matrix", matrix_file, "--token", "257"), "0 to 256")
    assert_refused(run("matrix", matrix_file, "--model", tmp_path / "none"), "no such folder")
    AdjacencyMatrix(257, 2).save(tmp_path / "other", "0123456789abcdef")
    assert_refused(run("matrix", tmp_path / "other", "--model", tiny_model_dir), "tokenizer 0123456789abcdef")
    (tmp_path / "broken").write_bytes(matrix_file.read_bytes()[:40])
    assert_refused(run("matrix", tmp_path / "broken"), "broken")


def test_drafters_are_listed_from_their_classes():
    found = {drafter["name"]: drafter for drafter in run_json("drafters")["drafters"]}
    assert found["plain"]["options"] == []
    assert found["plain"]["summary"] == "Drafts nothing."
    options = {option["name"]: option for option in found["recycling"]["options"]}
    assert options["k"] == {"name": "k", "type": "int", "default": "8", "summary": "Candidates kept after every token."}
    assert options["update"]["type"] == "last | first | unordered"
    assert options["tree"]["type"] == "str | int"
    assert options["tree"]["summary"].endswith("or a file of them.")
    assert "matrix" not in options
    text = run("drafters").stdout
    assert "recycling" in text
    assert "Candidates kept" in text


# refusals


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["MODEL", ""], "empty"),
        (["MODEL", " \n"], "empty"),
        (["MODEL"], "empty"),
        (["MODEL", "x" * CONTEXT], f"context of {CONTEXT}"),
        (["MODEL", "hi", "--file", "also"], "got both"),
        (["MODEL", "--file", "nowhere.txt"], "there is none"),
        (["MODEL", "--file", "."], "folder"),
        (["MODEL", "hi", "--drafter", "guess"], "got 'guess'"),
        (["MODEL", "hi", "--drafter", "recycling:size=3"], "got 'size'"),
        (["MODEL", "hi", "--drafter", "recycling:k=many"], "got 'many'"),
        (["MODEL", "hi", "--drafter", "recycling:update=newest"], "newest"),
        (["MODEL", "hi", "--drafter", "recycling:tree=oak"], "oak"),
        (["MODEL", "hi", "--drafter", "recycling:k=2,tree=paper"], "k = 2"),
        (["MODEL", "hi", "--dtype", "int3"], "int3"),
        (["MODEL", "hi", "--device", "abacus"], "abacus"),
        (["MODEL", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["MODEL", "hi", "--temperature", "-1"], "--temperature"),
        (["MODEL", "hi", "--top-k", "5"], "--temperature above 0"),
        (["MODEL", "hi", "--fast"], "--fast"),
        ([], "MODEL"),
        (["./nowhere", "hi"], "no such folder"),
        (["tests/nowhere", "hi"], "no such folder"),
        (["pyproject.toml", "hi"], "got the file"),
    ],
)
def test_generate_refuses(arguments, word, tiny_model_dir):
    assert_refused(run("generate", *(tiny_model_dir if one == "MODEL" else one for one in arguments)), word)


def test_compare_refuses(tiny_model_dir, tmp_path):
    assert_refused(run("compare", tiny_model_dir, "--prompts", tmp_path), "holds none")
    (tmp_path / "empty.py").write_text("\n")
    assert_refused(run("compare", tiny_model_dir, "--prompts", tmp_path), "empty.py")
    (tmp_path / "empty.py").write_bytes(b"\xff\xfe")
    assert_refused(run("compare", tiny_model_dir, "--prompts", tmp_path), "UTF-8")
    assert_refused(run("compare", tiny_model_dir, "hi", "--limit", 0), "--limit")


def test_unusable_models_are_refused(tiny_model_dir, tmp_path):
    assert_refused(run("generate", tmp_path, "hi"), "config.json")
    weightless = tmp_path / "weightless"
    shutil.copytree(tiny_model_dir, weightless)
    (weightless / "model.safetensors").unlink()
    assert_refused(run("generate", weightless, "hi"), "weightless")
    (weightless / "config.json").write_text("{")
    assert_refused(run("generate", weightless, "hi"), "weightless")
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=257, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    t5.save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{tiny_model_dir}/{name}", tmp_path / "t5")
    assert_refused(run("generate", tmp_path / "t5", "hi"), "T5")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    import huggingface_hub

    def no_network(self, name, timeout):
        raise OSError(f"cannot be reached\nfor {name} within {timeout} s")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    assert_refused(run("generate", "somebody/some-model", "hi"), "somebody/some-model", "cannot be reached")


# the program


def test_version_and_help():
    assert run("--version").stdout == f"token-recycling {__version__}\n"
    assert "compare" in run().stdout
    assert "--temperature" in run("generate", "--help").stdout


def test_help_and_wrong_usage_answer_at_once():
    code = "import sys, token_recycling.cli; print({'torch', 'transformers'} & set(sys.modules))"
    start = time.perf_counter()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
    assert time.perf_counter() - start < 3


def test_a_template_given_as_paths(tiny_model_dir):
    found = run_json("generate", tiny_model_dir, PROMPT, "--drafter", "recycling:tree=0 1 00", "--max-new-tokens", 10)
    assert repr(Tree.from_paths([(0,), (1,), (0, 0)])) in found["stats"]["drafter"]
