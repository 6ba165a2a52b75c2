"""Questions from files, folders and names; downloads from a server in this process."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from token_recycling._util.files import cache_folder
from token_recycling.bench.data import MT_BENCH, SOURCES, DataSource, digest, load


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def question(number, category, *turns, **more):
    return {"question_id": number, "category": category, "turns": list(turns), **more}


def test_questions_in_spec_bench_format(tmp_path):
    rows = [question(80 + place, name, "Hello.", "And?") for place, name in enumerate(sorted(MT_BENCH))]
    rows.append(question(200, "translation", "Guten Tag", reference=["Good day"]))
    rows.append(question(300, "rag", "When?", reference=[["1624", "17th century"]]))
    (tmp_path / "spec_bench").mkdir()
    found = load([write_rows(tmp_path / "spec_bench" / "question.jsonl", *rows)])
    assert [one.category for one in found] == ["mt_bench", "translation", "rag"] + ["mt_bench"] * 7
    assert [one.name for one in found[:4]] == ["spec_bench/80", "spec_bench/200", "spec_bench/300", "spec_bench/81"]
    assert found[0].turns == ("Hello.", "And?")
    assert [one.references for one in found[:4]] == [(), ("Good day",), ("1624",), ()]
    assert {one.form for one in found} == {"turns"}


SETS = [
    # Categories of MT-bench in other sets stay unchanged; a set with one category counts under its own name.
    (question(1, "math", "2 + 2?"), ("set/1", "math", "turns", ())),
    (question(2, "law", "Why?"), ("set/2", "law", "turns", ())),
    # Answers are used up to the first missing one.
    (question(3, "a", "One?", "Two?", "3?", reference=["1", "2", ""]), ("set/3", "a", "turns", ("1", "2"))),
    (question(4, "a", "One?", "Two?", reference=["", "2"]), ("set/4", "a", "turns", ())),
    (question(5, "a", "One?", reference=["1", "2"]), ("set/5", "a", "turns", ("1",))),
    # Prompts and texts; several answers to one question have different names.
    ({"prompt": "def f(", "completion": "x):"}, ("set/6", "set", "prompt", ("x):",))),
    ({"text": "Write it.", "code": "def g(): ...", "task_id": 77}, ("set/77", "set", "text", ("def g(): ...",))),
    ({"text": "Once upon a time"}, ("set/8", "set", "text", ())),
    ({"question_id": 9, "prompt": "?", "reference": "a"}, ("set/9/1", "set", "prompt", ("a",))),
    ({"question_id": 9, "prompt": "?", "reference": "b"}, ("set/9/2", "set", "prompt", ("b",))),
]


def test_questions_from_a_file(tmp_path):
    rows, wanted = zip(*SETS, strict=True)
    path = write_rows(tmp_path / "own.jsonl", *rows)
    found = sorted(load([f"set={path}"]), key=lambda one: one.name)
    assert [(one.name, one.category, one.form, one.references) for one in found] == sorted(wanted)
    one = write_rows(tmp_path / "own.jsonl", question(2, "code", "Write it."))
    assert [(each.name, each.category) for each in load([one])] == [("own/2", "own")]


def test_texts_from_a_folder(tmp_path):
    folder = tmp_path / "prompts"
    (folder / "deeper").mkdir(parents=True)
    for name, text in (("b.py", "import os\n\n"), ("a.py", "\ufeffx = 1"), (".hidden", "no")):
        (folder / name).write_text(text, encoding="utf-8")
    found = load([str(folder)])
    assert [(one.name, one.category, one.turns) for one in found] == [
        ("prompts/a.py", "prompts", ("x = 1",)),
        ("prompts/b.py", "prompts", ("import os",)),
    ]
    assert load([str(folder / "a.py")])[0].name == "a/a.py"


def test_limit_applies_per_category_and_digest_depends_on_the_questions(tmp_path):
    rows = [question(place, "ab"[place % 2], f"Question {place}?") for place in range(6)]
    path = write_rows(tmp_path / "own.jsonl", *rows)
    assert [one.name for one in load([path], limit=2)] == ["own/0", "own/1", "own/2", "own/3"]
    assert digest(load([path])) == digest(load([path])) != digest(load([path], limit=2))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no questions"]),
        ("{", ["must be JSON", "line 1"]),
        ('{"text": "x"}\n{"question": "Why?"}\n', ["turns, prompt, text", "question", "line 2"]),
        ('{"prompt": ""}\n', ["with text in one of", '{"prompt": ""}']),
        ('{"turns": "Why?"}\n', ["list of texts"]),
        ('{"prompt": ["Why?"]}\n', ["prompt must be text"]),
        ("[1]\n", ["an object", "list"]),
        ('{"turns": ["Why?", " "]}\n', ["every turn", "own/1"]),
    ],
)
def test_error_names_the_problem_in_a_file(tmp_path, content, words):
    path = tmp_path / "own.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="own") as error:
        load([str(path)])
    assert all(word in str(error.value) for word in words)


def test_error_names_the_invalid_name(tmp_path):
    path = write_rows(tmp_path / "own.jsonl", {"text": "x"})
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    latin = str(tmp_path / "latin.txt")
    for names, said in (
        (["nothing.jsonl"], r"nothing\.jsonl"),
        (["name="], "'name='"),
        ([path, path], "'own/1' 2 times"),
        ([latin], "UTF-8"),
    ):
        with pytest.raises(ValueError, match=said):
            load(names)


# Downloads

CONTENT = json.dumps(question(1, "code", "Write it.")).encode() + b"\n"


@pytest.fixture(scope="module")
def server():
    """A server with one file; the list records requested paths."""
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
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/question.jsonl", asked
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def served(server, monkeypatch):
    """The file, available as `mbpp`."""
    url, asked = server
    asked.clear()
    monkeypatch.setitem(SOURCES, "mbpp", DataSource(url, hashlib.sha256(CONTENT).hexdigest()))
    return asked


def test_set_is_downloaded_once_and_refused_when_damaged(served):
    for _ in range(2):
        assert [(one.name, one.category) for one in load(["mbpp"])] == [("mbpp/1", "mbpp")]
    assert served == ["/question.jsonl"]
    kept = cache_folder() / "mbpp.jsonl"
    assert kept.read_bytes() == CONTENT
    kept.write_bytes(CONTENT[:-5])
    with pytest.raises(ValueError, match="delete the file to download it again"):
        load(["mbpp"])


def test_download_with_other_content_is_refused_and_not_kept(served, monkeypatch):
    monkeypatch.setitem(SOURCES, "mbpp", SOURCES["mbpp"]._replace(sha256="0" * 64))
    with pytest.raises(ValueError, match=rf"SHA-256 {'0' * 64}.*got {len(CONTENT)} bytes"):
        load(["mbpp"])
    assert list(cache_folder().iterdir()) == []


@pytest.mark.parametrize(("address", "said"), [(None, "404"), ("http://127.0.0.1:9/", "cannot download mbpp")])
def test_failed_download_names_the_remedy(served, monkeypatch, address, said):
    monkeypatch.setitem(SOURCES, "mbpp", SOURCES["mbpp"]._replace(url=address or SOURCES["mbpp"].url + "x"))
    with pytest.raises(OSError, match=rf"{said}.*--data mbpp=FILE"):
        load(["mbpp"])
