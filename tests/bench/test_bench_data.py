"""Questions from files, folders and names; downloads from a server in this process."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from token_recycling.bench.run import download as downloads
from token_recycling.bench.run.data import MT_BENCH, digest, load
from token_recycling.bench.run.download import SOURCES, DataSource, cache_folder


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def question(number, category, *turns, **more):
    return {"question_id": number, "category": category, "turns": list(turns), **more}


def test_questions_in_the_form_of_spec_bench(tmp_path):
    rows = [question(80 + place, name, "Hello.", "And?") for place, name in enumerate(sorted(MT_BENCH))]
    rows.append(question(200, "translation", "Guten Tag", reference=["Good day"]))
    rows.append(question(300, "rag", "When?", reference=[["1624", "17th century"]]))
    (tmp_path / "spec_bench").mkdir()
    found = load([written(tmp_path / "spec_bench" / "question.jsonl", *rows)])
    assert [one.category for one in found] == ["mt_bench", "translation", "rag"] + ["mt_bench"] * 7
    assert [one.name for one in found[:4]] == ["spec_bench/80", "spec_bench/200", "spec_bench/300", "spec_bench/81"]
    assert found[0].turns == ("Hello.", "And?")
    assert [one.references for one in found[:4]] == [(), ("Good day",), ("1624",), ()]
    assert {one.form for one in found} == {"turns"}


def test_some_of_the_categories_of_mt_bench_stay_what_they_are(tmp_path):
    found = load([written(tmp_path / "own.jsonl", question(1, "math", "2 + 2?"), question(2, "law", "Why?"))])
    assert [one.category for one in found] == ["math", "law"]


def test_a_set_of_one_category_counts_under_its_own_name(tmp_path):
    path = written(tmp_path / "half.jsonl", question(2, "code", "Write it."), question(3, "code", "Write that."))
    assert [(one.name, one.category) for one in load([path])] == [("half/2", "half"), ("half/3", "half")]
    assert load([f"mbpp={path}"])[0].name == "mbpp/2"
    assert load([f"mbpp={path}"])[0].category == "mbpp"


def test_prompts_and_texts_of_jsonl(tmp_path):
    path = written(
        tmp_path / "own.jsonl",
        {"prompt": "def f(", "completion": "x):"},
        {"text": "Write a function.", "code": "def g(): ...", "task_id": 7},
        {"text": "Once upon a time"},
    )
    found = load([path])
    assert [one.name for one in found] == ["own/1", "own/7", "own/3"]
    assert [one.form for one in found] == ["prompt", "text", "text"]
    assert [one.references for one in found] == [("x):",), ("def g(): ...",), ()]


def test_answers_are_known_up_to_the_first_that_is_not(tmp_path):
    path = written(
        tmp_path / "own.jsonl",
        question(1, "a", "One?", "Two?", reference=["1", ""]),
        question(2, "a", "One?", "Two?", reference=["", "2"]),
        question(3, "a", "One?", reference=["1", "2"]),
    )
    assert [one.references for one in load([path])] == [("1",), (), ("1",)]


def test_texts_of_a_folder(tmp_path):
    folder = tmp_path / "prompts"
    (folder / "deeper").mkdir(parents=True)
    for name, text in (("b.py", "import os\n\n"), ("a.py", "x = 1"), (".hidden", "no")):
        (folder / name).write_text(text)
    found = load([str(folder)])
    assert [(one.name, one.category, one.turns) for one in found] == [
        ("prompts/a.py", "prompts", ("x = 1",)),
        ("prompts/b.py", "prompts", ("import os",)),
    ]
    assert load([str(folder / "a.py")])[0].name == "a/a.py"


def test_the_limit_holds_for_every_category(tmp_path):
    rows = [question(place, "ab"[place % 2], f"Question {place}?") for place in range(6)]
    path = written(tmp_path / "own.jsonl", *rows)
    assert [one.name for one in load([path], limit=2)] == ["own/0", "own/1", "own/2", "own/3"]
    assert len(load([path])) == 6


def test_the_digest_tells_questions_apart(tmp_path):
    one, other = (load([f"set={written(tmp_path / name, {'text': name})}"]) for name in ("a.jsonl", "b.jsonl"))
    assert digest(one) == digest(list(one))
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no questions"]),
        ("{", ["must be JSON", "line 1"]),
        ('{"text": "x"}\n{"question": "Why?"}\n', ["turns, prompt, text", "question", "line 2"]),
        ('{"turns": "Why?"}\n', ["list of texts"]),
        ('{"prompt": ["Why?"]}\n', ["prompt must be text"]),
        ("[1]\n", ["an object", "list"]),
        ('{"turns": ["Why?", " "]}\n', ["every turn", "own/1"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, content, words):
    path = tmp_path / "own.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="own") as error:
        load([str(path)])
    assert all(word in str(error.value) for word in words)


def test_answers_of_several_models_to_one_question_are_told_apart(tmp_path):
    rows = [
        {"question_id": number, "prompt": "Why?", "reference": answer}
        for number, answer in ((7, "a"), (8, "b"), (7, "c"))
    ]
    found = load([str(written(tmp_path / "own.jsonl", *rows))])
    assert [(one.name, one.references) for one in found] == [
        ("own/7/1", ("a",)),
        ("own/8", ("b",)),
        ("own/7/2", ("c",)),
    ]


def test_what_is_wrong_with_a_name_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.jsonl.*spec_bench or mbpp"):
        load(["nothing.jsonl"])
    path = written(tmp_path / "own.jsonl", {"text": "x"})
    with pytest.raises(ValueError, match="'own/1' 2 times"):
        load([path, path])
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="UTF-8"):
        load([str(tmp_path / "latin.txt")])


CONTENT = json.dumps(question(1, "code", "Write it.")).encode() + b"\n"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server with one file, known as `mbpp`; the list holds the paths that were asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/question.jsonl" else 404)
            self.end_headers()
            if self.path == "/question.jsonl":
                self.wfile.write(CONTENT)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/question.jsonl"
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SOURCES, "mbpp", DataSource(url, hashlib.sha256(CONTENT).hexdigest()))
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_set_is_downloaded_once(served):
    assert [(one.name, one.category) for one in load(["mbpp"])] == [("mbpp/1", "mbpp")]
    assert load(["mbpp"])
    assert served == ["/question.jsonl"]
    assert (cache_folder() / "mbpp.jsonl").read_bytes() == CONTENT


def test_a_download_of_other_content_is_refused_and_not_kept(served, monkeypatch):
    monkeypatch.setitem(SOURCES, "mbpp", SOURCES["mbpp"]._replace(sha256="0" * 64))
    with pytest.raises(ValueError, match=rf"SHA-256 {'0' * 64}.*got {len(CONTENT)} bytes"):
        load(["mbpp"])
    assert list(cache_folder().iterdir()) == []


def test_a_damaged_file_in_the_cache_is_refused(served):
    load(["mbpp"])
    (cache_folder() / "mbpp.jsonl").write_bytes(CONTENT[:-5])
    with pytest.raises(ValueError, match="delete the file to download it again"):
        load(["mbpp"])


@pytest.mark.parametrize(("address", "said"), [(None, "404"), ("http://127.0.0.1:9/", "cannot download mbpp")])
def test_without_an_answer_the_remedy_is_named(served, monkeypatch, address, said):
    url = address or SOURCES["mbpp"].url + "x"
    monkeypatch.setitem(SOURCES, "mbpp", SOURCES["mbpp"]._replace(url=url))
    with pytest.raises(OSError, match=rf"{said}.*--data mbpp=FILE"):
        load(["mbpp"])


def test_the_cache_is_below_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("TOKEN_RECYCLING_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "token_recycling"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "token_recycling"


def test_sources_are_pinned_to_a_commit():
    for source in downloads.SOURCES.values():
        commit = source.url.removeprefix("https://raw.githubusercontent.com/").split("/")[2]
        assert len(commit) == 40
        assert len(bytes.fromhex(source.sha256)) == 32
