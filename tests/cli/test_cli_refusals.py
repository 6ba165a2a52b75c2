"""Invalid arguments of commands: one line that names the value, and exit status 2."""

import shutil

import pytest
import torch
from support.commandline import CONTEXT, assert_refused, run
from support.speaking import TEMPLATE
from transformers import T5Config, T5ForConditionalGeneration

from token_recycling.drafters.published import AdjacencyMatrix
from token_recycling.model.loading import check_source

G, C = ("generate", "MODEL", "hi"), ("compare", "MODEL", "hi")
REFUSED = [
    # Prompts
    (("generate", "MODEL", " \n"), "empty"),
    (("generate", "MODEL"), "empty"),
    (("generate", "MODEL", "-"), "standard input"),
    (("generate", "MODEL", "a\udcff"), "argument 1 is not text in UTF-8"),
    (("generate", "MODEL", "x" * CONTEXT), f"context of {CONTEXT}"),
    ((*G, "--file", "also"), "cannot be combined"),
    (("generate", "MODEL", "--file", "nowhere.txt"), "there is no file or folder nowhere.txt"),
    (("generate", "MODEL", "--file", "."), "folder"),
    ((*G, "--chat"), "chat template"),
    (("compare", "MODEL", "--prompts", "EMPTY"), "no prompt files"),
    (("compare", "MODEL", "--prompts", "BAD/latin.py"), "UTF-8"),
    ((*C, "--limit", 0), "--limit"),
    (("chat", "MODEL"), "chat template"),
    # Options
    ((*G, "--drafter", "guess"), "'guess'"),
    ((*G, "--drafter", "recycling:size=3"), "no option 'size'"),
    ((*G, "--drafter", "recycling:k=many"), "got 'many'"),
    ((*G, "--drafter", "published:update=newest"), "newest"),
    ((*G, "--drafter", "recycling:tree=oak"), "oak"),
    ((*G, "--drafter", "published:k=2,tree=paper"), "k=2"),
    ((*G, "--drafter", "suffix", "--drafter=plain"), "2 times"),
    ((*C, "--drafter", "suffix", "--drafter=plain"), "2 times"),
    (("chat", "CHAT", "--drafter", "guess"), "'guess'"),
    ((*G, "--dtype", "int3"), "int3"),
    ((*G, "--device", "abacus"), "abacus"),
    ((*G, "--device", "cpu:1"), "cpu:1"),
    ((*G, "--max-new-tokens", "0"), "--max-new-tokens"),
    ((*G, "--temperature", "-1"), "--temperature"),
    ((*G, "--top-k", "5"), "--temperature > 0"),
    ((*G, "--temperature", "1", "--seed", 10**20), f"--seed must be a number of 64 bits, got {10**20}"),
    ((*G, "--temperature", "1", "--seed", 2**64), f"--seed must be a number of 64 bits, got {2**64}"),
    (("warm", "MODEL", "--seed", -(2**63) - 1), f"--seed must be a number of 64 bits, got {-(2**63) - 1}"),
    ((*G, "--stop", ""), "--stop"),
    *(
        ((*G, "--schema", schema), f"--schema must be a JSON schema or a file with one, got '{schema}'")
        for schema in ("{", "[1]", "nowhere.json")
    ),
    (("chat", "CHAT", "--top-k", "3"), "--temperature > 0"),
    ((*G, "--fast"), "--fast"),
    ((*G, "--fast", "on", "--reproducible"), "reproducible"),
    ((*G, "--reproducible", "--matrix", "BAD/matrix"), "--reproducible and --matrix cannot be combined"),
    ((*G, "--reproducible", "--drafter", "layer_skip"), "layer_skip"),
    ((*G, "--matrix", "EMPTY"), "folder"),
    ((*G, "--matrix", "BAD/matrix"), "BAD/matrix"),
    ((*G, "--matrix", "BAD/none", "--drafter", "plain"), "got plain"),
    (("drafters", "sufix"), "'sufix'"),
    (("warm", "MODEL", "--minutes", 0), "--minutes must be > 0, got 0"),
    (("warm", "MODEL", "--output", "."), "folder ."),
    (("warm", "MODEL", "--drafter", "suffix"), "drafter suffix"),
    *(((name, "MODEL", "--device", "cpu", "--device-map", "auto"), "'cpu' and 'auto'") for name in ("warm", "serve")),
    # Models
    (("generate",), ""),
    (("generate", "./nowhere", "hi"), "./nowhere"),
    (("generate", "pyproject.toml", "hi"), "is a file"),
    (("generate", "EMPTY", "hi"), "config.json"),
    (("check", "EMPTY"), "config.json"),
    (("check", "BAD"), "BAD"),
    (("generate", "WEIGHTLESS", "hi"), "WEIGHTLESS"),
    (("generate", "T5", "hi"), "T5"),
    (("serve", "BAD/bad.gguf", "--port", 0), "bad.gguf is not a GGUF file"),
    (("compare", "BAD/bad.gguf", "hi"), "bad.gguf is not a GGUF file"),
    # Matrices
    (("matrix", "BAD/none"), "there is no matrix file"),
    (("matrix", "FOREIGN", "--token", "abc"), "--model"),
    (("matrix", "FOREIGN", "--token", "257"), "0 to 256"),
    (("matrix", "FOREIGN", "--model", "MODEL"), "tokenizer 0123456789abcdef"),
    (("matrix", "BAD/matrix"), "BAD/matrix is not a matrix file"),
    (("matrix", "FOREIGN", "--model", "EMPTY"), "EMPTY"),
    # Files
    (("bench", "MODEL", "--scenario", "BAD/none"), "BAD/none: No such file"),
    # Commands
    (("generat",), "Did you mean 'generate'?"),
    (("train", "medus"), "Did you mean 'medusa'?"),
]


@pytest.fixture(scope="module")
def places(tiny_model_dir, tmp_path_factory):
    """Return the folders and files that the placeholders in the table stand for."""
    root = tmp_path_factory.mktemp("refused")
    for name in ("EMPTY", "BAD"):
        (root / name).mkdir()
    copies = "WEIGHTLESS", "CHAT", "T5"
    for name in copies:
        shutil.copytree(tiny_model_dir, root / name)
    (root / "WEIGHTLESS" / "model.safetensors").unlink()
    (root / "CHAT" / "chat_template.jinja").write_text(TEMPLATE)
    small = {"vocab_size": 257, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**small, decoder_start_token_id=0)).save_pretrained(root / "T5")
    AdjacencyMatrix(257, 2).save(root / "FOREIGN", "0123456789abcdef")
    (root / "BAD" / "matrix").write_bytes((root / "FOREIGN").read_bytes()[:40])
    (root / "BAD" / "latin.py").write_bytes(b"\xff\xfe")
    (root / "BAD" / "bad.gguf").write_bytes(b"PK and nothing")
    (root / "BAD" / "config.json").write_text("{")
    return {"MODEL": tiny_model_dir, **{name: str(root / name) for name in ("EMPTY", "BAD", "FOREIGN", *copies)}}


@pytest.mark.parametrize(("arguments", "word"), REFUSED)
def test_invalid_arguments_are_refused_in_one_line(places, arguments, word):
    def placed(one):
        name, *rest = str(one).split("/")
        return "/".join([places.get(name, name), *rest])

    assert_refused(run(*map(placed, arguments)), placed(word))


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
@pytest.mark.parametrize(("build", "words"), [(None, ("without CUDA", "pip install torch")), ("13.0", ("nvidia-smi",))])
def test_unavailable_device_is_explained(tiny_model_dir, monkeypatch, build, words):
    monkeypatch.setattr(torch.version, "cuda", build)
    for command in (["generate", tiny_model_dir, "hi"], ["check", tiny_model_dir, "--self-test"]):
        assert_refused(run(*command, "--device", "cuda"), "'cuda'", *words)


@pytest.mark.parametrize("name", ["model.gguf", "somebody/model.gguf", "a/b/c", "-name", "two words"])
def test_invalid_hub_names_are_not_looked_up(monkeypatch, name):
    import huggingface_hub

    for function in ("try_to_load_from_cache", "HfApi"):
        monkeypatch.setattr(huggingface_hub, function, lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=f"no folder or file '{name}'"):
        check_source(name)


def test_unreachable_hub_is_one_line(tiny_model_dir, monkeypatch):
    import huggingface_hub

    def no_network(self, name, timeout):
        raise OSError(f"cannot be reached\nfor {name} within {timeout} s")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    name = "somebody/some-model"
    for given in ((name, "hi"), (tiny_model_dir, "hi", "--drafter", f"draft_model:model={name}")):
        assert_refused(run("generate", *given), f"no folder or file '{name}'", "cannot be reached")
