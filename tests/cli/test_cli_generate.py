"""`token-recycling generate` on a tiny random llama with a byte tokenizer, and its matrix file."""

import json
import shutil

import pytest
import torch
from support.commandline import CONTEXT, PROMPT, assert_refused, interrupt, reference, run, run_json

from token_recycling import fingerprint
from token_recycling._util.text_stream import decoded
from token_recycling.model.loading import load
from token_recycling.recycling.matrix_file import read_matrix_file

pytestmark = pytest.mark.core


def test_generate_equals_transformers(loaded, tiny_model_dir):
    found = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24)
    assert found["tokens"] == reference(loaded, PROMPT, max_new_tokens=24, do_sample=False)
    assert found["text"] == decoded(loaded.tokenizer, found["tokens"])
    assert found["stats"]["tokens"] == len(found["tokens"])
    assert found["stats"]["steps"] > 0
    assert found["interrupted"] is False
    streamed = run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24)
    assert (streamed.exit_code, streamed.stdout) == (0, f"{found['text']}\n")


def test_sampling_equals_transformers(loaded, tiny_model_dir):
    greedy = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 12)["tokens"]
    one = ("--temperature", 9, "--top-p", 0, "--max-new-tokens", 12)
    assert run_json("generate", tiny_model_dir, PROMPT, *one)["tokens"] == greedy
    torch.manual_seed(0)
    expected = reference(loaded, PROMPT, max_new_tokens=12, do_sample=True, temperature=9.0, top_p=1.0, top_k=0)
    hot = ("--temperature", 9, "--max-new-tokens", 12, "--seed", 0)
    assert run_json("generate", tiny_model_dir, PROMPT, *hot)["tokens"] == expected, "from all tokens by default"
    torch.manual_seed(0)
    expected = reference(loaded, PROMPT, max_new_tokens=12, do_sample=True, temperature=0.7, top_p=0.9, top_k=20)
    options = ("--temperature", 0.7, "--top-p", 0.9, "--top-k", 20, "--max-new-tokens", 12)
    assert run_json("generate", tiny_model_dir, PROMPT, *options, "--seed", 0)["tokens"] == expected
    assert run_json("generate", tiny_model_dir, PROMPT, *options, "--seed", 4)["tokens"] != expected


def test_stop_string_ends_the_output(loaded, tiny_model_dir):
    whole = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24)
    stop = next(char for char in whole["text"] if char.isascii())
    found = run_json(
        "generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24, "--stop", "never there", "--stop", stop
    )
    assert len(found["tokens"]) < len(whole["tokens"])
    assert stop in decoded(loaded.tokenizer, found["tokens"][-1:])


def test_output_satisfies_a_schema(tiny_model_dir, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    choice = {"enum": ["a", "bc"]}
    schema = {"type": "object", "properties": {"x": choice}, "required": ["x"], "additionalProperties": False}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for given in (json.dumps(schema), file):
        found = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24, "--schema", given)
        jsonschema.validate(json.loads(found["text"]), schema)
    for given, word in (
        ('{"type": "array", "uniqueItems": true}', "#/uniqueItems"),
        ('{"type": ', "--schema must be"),
        (tmp_path / "none.json", "none.json"),
    ):
        assert_refused(run("generate", tiny_model_dir, PROMPT, "--schema", given), word)


def test_stats_are_printed_to_stderr(tiny_model_dir):
    result = run(
        "generate", tiny_model_dir, PROMPT, "--max-new-tokens", 20, "--stats", "--drafter", "recycling:k=3,tree=4"
    )
    words = "computed on the CPU, not on a GPU", "MAT", "tokens per second", "discarded", "forward", "depth 1", "rank 0"
    for word in ("recycling: tree 4 nodes, best first; 3 candidates", *words):
        assert word in result.stderr
        assert word not in result.stdout


def test_reproducible_runs_draft_equally(tiny_model_dir):
    asked = ("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 20, "--reproducible")
    first, again = (run_json(*asked)["stats"] for _ in range(2))
    assert first["steps_by_nodes"] == again["steps_by_nodes"]


def test_output_ends_at_the_context_length(tiny_model_dir):
    result = run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 1000, "--json")
    assert len(json.loads(result.stdout)["tokens"]) == CONTEXT - len(PROMPT)
    assert f"note: the output ends at the model's context length of {CONTEXT} tokens" in result.stderr
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


@pytest.mark.parametrize(("fast", "path"), [("on", "fast"), ("auto", "eager")])
def test_fast_selects_captured_passes(loaded, tiny_model_dir, fast, path):
    found = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 12, "--fast", fast)
    assert found["tokens"] == reference(loaded, PROMPT, max_new_tokens=12, do_sample=False)
    assert found["stats"]["path"].startswith(path)


def test_device_maps(tiny_model_dir):
    pytest.importorskip("accelerate")
    wanted = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 5)["tokens"]
    mapped = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 5, "--device-map", "auto")["tokens"]
    assert mapped == wanted


def test_chat_template_is_used_by_default(loaded, tiny_model_dir, tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    plain, chat = (reference(loaded, text, max_new_tokens=8, do_sample=False) for text in (PROMPT, f"[{PROMPT}]"))
    assert plain != chat
    for options, wanted in (((), chat), (("--chat",), chat), (("--raw",), plain)):
        assert run_json("generate", folder, PROMPT, "--max-new-tokens", 8, *options)["tokens"] == wanted


def test_dash_reads_standard_input(tiny_model_dir, tmp_path):
    said, options = f"{PROMPT}\n", ("--max-new-tokens", 4)
    wanted = run_json("generate", tiny_model_dir, PROMPT, *options)["tokens"]
    (tmp_path / "prompt.py").write_text(f"\ufeff{said}", encoding="utf-8")  # as some editors on Windows save it
    assert run_json("generate", tiny_model_dir, "--file", tmp_path / "prompt.py", *options)["tokens"] == wanted
    for given in ([], ["-"], ["--file", "-"]):
        assert run_json("generate", tiny_model_dir, *given, *options, input=said)["tokens"] == wanted
    first, second = run_json("compare", tiny_model_dir, "a", "-", *options, input=said)["prompts"]
    assert (first["name"], second["name"]) == ("argument 1", "standard input")
    assert [token for step in second["steps"] for token in step] == wanted


# The matrix file


def test_matrix_is_saved_and_loaded(loaded, tiny_model_dir, tmp_path):
    file = tmp_path / "new" / "matrix.safetensors"
    options = ("--max-new-tokens", 24, "--matrix", file)
    cold = run_json("generate", tiny_model_dir, PROMPT, *options)
    tensors, header = read_matrix_file(file)
    assert header["tokenizer"] == fingerprint(loaded.tokenizer)
    assert tensors["candidates"].any()
    hot = run_json("generate", tiny_model_dir, PROMPT, *options)
    assert hot["tokens"] == cold["tokens"]
    assert hot["stats"]["steps"] < cold["stats"]["steps"]


def test_ctrl_c_saves_the_matrix(tiny_model_dir, tmp_path, monkeypatch):
    interrupt(monkeypatch, 3)  # of a draft; the first step has none
    file = tmp_path / "matrix.safetensors"
    found = run_json("generate", tiny_model_dir, PROMPT, "--matrix", file, status=130)
    assert found["interrupted"] is True
    assert found["stats"]["steps"] == 3
    assert len(found["tokens"]) >= 3
    assert read_matrix_file(file)[0]["candidates"].any()


def test_unusable_matrix_is_refused_and_unchanged(tiny_model_dir, tmp_path):
    file = tmp_path / "matrix.safetensors"
    run("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 5, "--matrix", file)
    whole = file.read_bytes()
    for drafter, reason in (("recycling:k=4", "k must be 4"), ("published", "drafter 'recycling'")):
        refused = run("generate", tiny_model_dir, PROMPT, "--matrix", file, "--drafter", drafter)
        assert_refused(refused, reason)
        assert file.read_bytes() == whole
    file.write_bytes(whole[:-7])
    assert_refused(run("generate", tiny_model_dir, PROMPT, "--matrix", file), str(file))
    assert file.read_bytes() == whole[:-7]


def test_warm_saves_a_matrix_for_later_runs(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("token_recycling.hf.warm._ANSWER", 20)
    file = tmp_path / "warm.matrix"
    found = run_json("warm", tiny_model_dir, "--minutes", 0.002, "--output", file)
    assert file.is_file()
    assert (found["file"], found["texts"] > 0, found["tokens"] > 0) == (str(file), True, True)
    cold = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24)
    assert run("warm", tiny_model_dir, "--minutes", 0.002).exit_code == 0
    warm = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 24, "--drafter", "recycling:warmed=true")
    assert warm["tokens"] == cold["tokens"]


def test_options_reach_the_warming(tiny_model_dir, tmp_path, monkeypatch):
    given = {}

    def warm(model, tokenizer, drafter, minutes, **options):
        given.update(options, minutes=minutes, drafter=drafter.name)
        raise ValueError("nothing was learned")

    monkeypatch.setattr("token_recycling.hf.warm.warm", warm)
    options = ("--minutes", 2, "--seed", 5, "--history", "--output", tmp_path / "own", "--drafter", "published")
    assert_refused(run("warm", tiny_model_dir, *options), "nothing was learned")
    assert given == {"minutes": 2, "seed": 5, "history": True, "output": tmp_path / "own", "drafter": "published"}
