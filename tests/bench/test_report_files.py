"""The files of the report, and the command that writes them."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from support.commandline import assert_refused, run, run_json
from support.measured import METHODS, failed, row, whole_run, write

from token_recycling.bench.report import write as report

HOSTILE = '<script>alert("1")</script> a|b *c*'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of a whole run, one of whose methods has a hostile name and fails with a hostile message."""
    rows = whole_run(prompts=1, tokens=40)
    for each in rows:
        if each["method"] == "suffix":
            each["label"] = HOSTILE
    rows.append(failed("suffix", "mbpp/999", f"RuntimeError: {HOSTILE}", label=HOSTILE, category="mbpp"))
    folder = write(tmp_path_factory.mktemp("report"), rows)
    report.write(folder)
    return folder


class Page(HTMLParser):
    """Tags and what they refer to; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.targets, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.targets += [value for name, value in attrs if name in ("href", "src", "xlink:href", "srcset", "data")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_outside_itself(folder, page):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert all(target.startswith("#") for target in page.targets)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert text.count("<svg") > 15


def test_ids_of_the_page_are_unique_and_targets_exist(folder, page):
    assert len(page.ids) == len(set(page.ids))
    inside = re.findall(r"url\(#([^)]+)\)", (folder / "report.html").read_text(encoding="utf-8"))
    assert {target[1:] for target in page.targets} | set(inside) <= set(page.ids)


def test_labels_and_messages_are_shown_as_they_are_and_never_run(page):
    text = "".join(page.text)
    assert HOSTILE in text
    assert f"RuntimeError: {HOSTILE}" in text


def test_markdown_names_every_plot_file_and_every_method(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"!\[.*?\]\((plots/.*?)\)", text)
    assert sorted(named) == sorted(f"plots/{file.name}" for file in (folder / "plots").iterdir())
    for label, *_ in METHODS.values():
        assert label in text or label == METHODS["suffix"][0]
    assert "Some Processor" in text
    assert "<script>" not in text.replace("\\<", "")


def test_both_modes_and_every_study_are_reported(folder):
    names = {file.stem for file in (folder / "plots").iterdir()}
    for mode in ("generate", "replay"):
        assert {f"{name}_{mode}" for name in ("speedup", "lengths", "parts", "places")} <= names
    studies = ("breadth", "depth", "update", "order", "hot", "k", "temperature", "parts")
    assert {f"study_{name}_generate" for name in studies} <= names
    assert "batches" in names


def test_the_same_rows_give_the_same_files(tmp_path):
    """So a run that was interrupted and went on ends with the report that it would have had."""
    wanted = ("plain", "recycling")
    rows = [each for each in whole_run(prompts=1, tokens=20) if each["mode"] == "replay" and each["method"] in wanted]
    first, again = (report.write(write(tmp_path / name, rows)) for name in ("first", "again"))
    assert len(first) == 6
    for one, other in zip(first, again, strict=True):
        assert one.relative_to(tmp_path / "first") == other.relative_to(tmp_path / "again")
        assert one.read_bytes() == other.read_bytes()


def test_a_report_of_next_to_nothing(tmp_path):
    files = report.write(write(tmp_path, [failed()]))
    assert [file.name for file in files] == ["report.md", "report.html"]
    files = report.write(write(tmp_path, [row("generate", lengths={"1": 10})]))
    assert [file.name for file in files] == ["report.md", "report.html"]


# the command


def test_the_command_prints_the_tables_and_writes_the_files(tmp_path):
    write(tmp_path, [row("generate", total_seconds=[4.0]), row("plain"), row("ours")])
    found = run("report", tmp_path)
    assert found.exit_code == 0, found.stderr
    assert "Behind the speedup" in found.stdout
    assert "label of ours" in found.stdout
    assert "careful: No replay was measured" in found.stdout
    assert "report.html and 1 plots" in found.stdout
    assert (tmp_path / "plots" / "speedup_generate.svg").is_file()


def test_the_command_as_json_has_every_figure_and_writes_nothing(tmp_path):
    write(tmp_path, [row("generate", total_seconds=[4.0]), row("plain", total_seconds=[3.0]), row("ours", "set/1")])
    found = run_json("report", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    (comparison,) = found["comparisons"]
    ours = comparison["results"][2]
    assert (ours["method"], ours["speedup"], ours["mat"]) == ("ours", 2.0, 2.0)
    assert ours["median"] == 2.0
    assert (ours["categories"]["set"]["decoding"], ours["categories"]["set"]["whole_call"]) == (10.0, 5.0)
    assert ours["drafted"] is None
    assert found["environments"][0]["cores"] == 2
    again = run_json("report", tmp_path, "--baseline", "plain")
    assert again["comparisons"][0]["results"][2]["speedup"] == 1.5
    assert run_json("report", tmp_path, "--clock", "processor")["comparisons"][0]["results"][2]["speedup"] == 1.0


def test_the_command_refuses_with_one_line(tmp_path):
    assert_refused(run("report", tmp_path), "rows.jsonl")
    write(tmp_path, [row()])
    assert_refused(run("report", tmp_path, "--baseline", "generate"), "recycling", "'generate'")


_CODE = """
import sys
sys.modules.update(dict.fromkeys({hidden}))
from token_recycling.cli.app import app
try:
    app(["report", {folder!r}])
finally:
    print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""


def _report(folder, *hidden):
    code = _CODE.format(hidden=hidden, folder=str(folder))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("missing", ["pandas", "matplotlib"])
def test_without_the_extra_the_error_says_what_to_install(tmp_path, missing):
    found = _report(write(tmp_path, [row("generate"), row()]), missing)
    assert found.returncode == 2
    assert found.stderr.strip().endswith(f"got no {missing}; pip install 'token-recycling[bench]'")


def test_a_report_needs_no_torch(tmp_path):
    found = _report(write(tmp_path, [row("generate"), row()]))
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("[]\n")
