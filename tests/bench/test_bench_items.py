"""Items to decode: texts, conversations, known answers and batches, and items that exceed the context."""

import pytest
from support import benching

from token_recycling.bench.data import Question
from token_recycling.bench.prompts import prompt, replayed
from token_recycling.bench.session import notes_on_length


def test_replay_uses_the_second_half_of_a_text(tmp_path):
    where, question = benching.setup(), benching.questions(1)
    ids = where.ids(benching.TEXTS[0])
    found = benching.run(where, benching.plan(["plain"], question), tmp_path)
    (row,) = [one for one in found if one["mode"] == "replay"]
    assert row["prompt_tokens"] == len(ids) // 2
    assert row["tokens"] == min(benching.NEW, len(ids) - len(ids) // 2)


def test_question_longer_than_the_context_is_a_failure(tmp_path):
    where = benching.setup(max_new_tokens=24, config={"max_position_embeddings": 32})
    long = [Question("long/1", "long", benching.TEXTS[:1], "turns"), Question("long/2", "long", ("Hi",), "turns")]
    assert notes_on_length(where, long) == [
        "1 of 2 questions are longer than the model's context of 32 tokens and count as failures"
    ]
    found = benching.run(where, benching.plan(["plain"], long, False), tmp_path)
    assert [one["failure"] is None for one in found] == [False, False, True, True]
    assert found[0]["failure"].startswith("PromptTooLongError: the prompt must have fewer tokens")
    assert found[2]["tokens"] == 32 - found[2]["prompt_tokens"] < 24
    short = [Question(f"short/{text}", "short", (text,), "turns") for text in ("a", "a b c d")]
    *apart, generated, plain = benching.run(where, benching.plan(["plain"], short, False, [1, 2]), tmp_path / "batch")
    assert min(one["tokens"] for one in apart) < max(one["tokens"] for one in apart)
    assert generated["tokens"] == plain["tokens"] == 2 * min(one["tokens"] for one in apart)


def test_text_longer_than_the_context_is_continued_from_an_earlier_position(tmp_path):
    where = benching.setup(max_new_tokens=4, config={"max_position_embeddings": 10})
    found = benching.run(where, benching.plan(["plain"], benching.questions(1)), tmp_path)
    assert {(one["mode"], one["prompt_tokens"], one["tokens"]) for one in found} == {
        ("generate", 6, 4),
        ("replay", 6, 4),
    }


def test_conversations_continue_with_the_methods_own_answers(tmp_path):
    question = Question("talk/1", "talk", ("import os", "import sys"), "turns", ("1 2",))
    where = benching.setup(max_new_tokens=5)
    first = where.ids("User: import os\nAssistant:")[None]
    answer = where.model.generate(first, max_new_tokens=5, do_sample=False)[0, first.shape[1] :].tolist()
    said = f"User: import os\nAssistant: {where.decoded(answer).strip()}\nUser: import sys\nAssistant:"
    found = benching.run(where, benching.plan(["plain"], [question]), tmp_path)
    assert {one["prompt_tokens"] for one in found[:2]} == {first.shape[1] + len(where.ids(said))}
    assert (found[2]["mode"], found[2]["prompt_tokens"]) == ("replay", first.shape[1])
    assert found[2]["tokens"] == len(where.ids(" 1 2"))


def test_conversation_uses_the_chat_template():
    where = benching.setup(chat=True)
    where.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    talk = Question("talk/1", "talk", ("Hi", "And?"), "turns")
    for question, answers, wanted in (
        (talk, (), "[user]Hi>"),
        (talk, (" Yes. ",), "[user]Hi[assistant]Yes.[user]And?>"),
        (Question("p/1", "p", ("Hi",), "prompt"), (), "[user]Hi>"),
        (Question("t/1", "t", ("Hi",), "text"), (), "Hi"),
    ):
        assert where.decoded(prompt(where, question, answers)[0]) == wanted


def test_every_batch_has_a_row(tmp_path):
    where = benching.setup(max_new_tokens=8)
    made = benching.plan(["recycling:tree=2"], benching.questions(3), sizes=[1, 2])
    assert [len(workload.items) for workload in made.workloads] == [3, 2]
    found = benching.run(where, made, tmp_path)
    assert [(one["method"], one["batch"]) for one in found] == [
        (method, size) for size in (1, 1, 1, 2, 1) for method in ("generate", "recycling:tree=2")
    ]
    pair = found[6:8]
    assert {one["prompt"] for one in pair} == {"texts/0+texts/1"}
    assert [one["tokens"] for one in pair] == [16, 16]
    assert pair[0]["mat"] == 1.0
    assert [one["identical"] for one in pair] == [None, True]
    assert all(one["loop_tokens"] is None for one in pair)


def test_batches_exclude_single_sequence_methods():
    made = benching.plan(["prompt_lookup_hf", "plain"], benching.questions(2), sizes=[2])
    assert made.workloads[0].specs == ("generate", "plain")
    assert made.notes == ["prompt_lookup_hf decodes one sequence at a time: no batches measured"]
    with pytest.raises(ValueError, match="--replay"):
        benching.plan([], benching.questions(2), True, sizes=[2])


def test_notes_name_what_cannot_be_replayed():
    asked = [*benching.questions(2), Question("q/1", "q", ("Why?",), "turns")]
    made = benching.plan(["assisted:model=x", "recycling"], asked)
    assert [workload.mode for workload in made.workloads] == ["generate", "replay"]
    assert made.workloads[0].specs == ("generate", "assisted:model=x", "recycling")
    assert made.workloads[1].specs == ("plain", "recycling")
    assert len(made.workloads[1].items) == 2
    assert made.notes == [
        "assisted:model=x cannot replay reference text: excluded from replay",
        "1 of 3 questions have no known answer and are not replayed",
    ]
    unknown = benching.plan(["plain"], asked[2:])
    assert [workload.mode for workload in unknown.workloads] == ["generate"]


def test_text_of_one_token_has_nothing_to_replay():
    where = benching.setup()
    text = where.decoded(where.ids(benching.TEXTS[0])[:1])
    assert replayed(where, Question("one", "one", (text,), "text")) == []
