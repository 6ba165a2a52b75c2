"""docs/ecosystem.md: its blocks run unchanged, each after the first one, with the pinned versions."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from support.serving import serving

import token_recycling as tr

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8")
TOP, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLACE = "http://127.0.0.1:8000"
LIBRARIES = {
    "peft": "peft",
    "trl": "trl",
    "accelerate": "accelerate",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "optimum-quanto": "optimum-quanto",
    "GPTQ and AWQ": "gptqmodel",
    "xgrammar": "xgrammar",
    "outlines": "outlines",
    "lm-evaluation-harness": "lm-eval",
    "LangChain": "langchain-openai",
    "smolagents": "smolagents",
    "Gradio": "gradio",
}
SERVED = {"LangChain": None, "smolagents": (ROOT / "examples" / "continue.jinja").read_text(encoding="utf-8")}
"""Libraries that call a server, and the server's chat template."""


def require(library):
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed: `nox -s ecosystem` installs what it can")


def block(section):
    (code,) = BLOCK.findall(section)
    return code


def section_of(title):
    (found,) = (section for section in SECTIONS if section.startswith(f"{title}\n"))
    return found


@pytest.mark.parametrize("title", [title for title in LIBRARIES if title != "GPTQ and AWQ"])
def test_block_runs(title, shipped, tmp_path, monkeypatch):
    require(LIBRARIES[title])
    for name, value in {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    code = block(section_of(title))
    if title == "bitsandbytes" and "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        with pytest.raises(tr.UnsupportedModelError, match="how many tokens are read at once"):
            run(code)
    elif title not in SERVED:
        run(code)
    if title not in SERVED:
        return
    model, tokenizer = shipped
    monkeypatch.setattr(tokenizer, "chat_template", SERVED[title])
    with serving(model, tokenizer, name="target", drafter="recycling") as server:
        assert PLACE in code
        run(code.replace(PLACE, server.url))
        assert server.metrics()["token_recycling_accepted_tokens_total"] > 0


def run(code):
    """Run the first block of the page, then a section's block."""
    names = {}
    exec(compile(block(TOP) + code, "docs/ecosystem.md", "exec"), names)
