"""The paper's studies: what is varied, and the trees that are made for it."""

import pytest
from support import benching

from token_recycling.bench.run import studies
from token_recycling.bench.run.data import Question
from token_recycling.bench.run.studies import STUDIES, template
from token_recycling.trees.templates import paper


@pytest.mark.parametrize(
    ("nodes", "depth", "k"),
    [
        *((nodes, 6, 8) for nodes in studies.BREADTHS),
        *((80, depth, 8) for depth in studies.DEPTHS),
        *((80, 6, k) for k in studies.KS),
    ],
)
def test_trees_of_growing_breadth_depth_and_candidates(nodes, depth, k):
    tree = template(nodes, depth, k)
    assert (len(tree) - 1, tree.depth, tree.layer_sizes[0], tree.breadth) == (nodes, depth, k, k)


def test_a_tree_of_the_papers_sizes_resembles_the_papers():
    ours, theirs = set(template(80, 6).paths), set(paper().paths)
    assert len(ours & theirs) > 50


@pytest.mark.parametrize(("nodes", "depth", "k"), [(80, 2, 8), (10, 6, 8), (7, 1, 8)])
def test_what_does_not_fit_is_refused(nodes, depth, k):
    with pytest.raises(ValueError, match=f"a tree of depth {depth} and {k} candidates can have, got {nodes}"):
        template(nodes, depth, k)


def asked(*categories):
    return [
        Question(f"{category}/{place}", category, (benching.TEXTS[place % 4],), "text")
        for place, category in enumerate(categories)
    ]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_entries_and_a_baseline(name):
    named = ["specdec_pp:model=FOLDER"] if name == "specdec-pp" else []
    made = benching.plan(named, asked("a", "b"), studies=[name])
    for workload in made.workloads:
        assert workload.study == name
        plain = "generate" if workload.mode == "generate" else "plain"
        assert any(one.method.spec == plain for one in workload.entries)
        assert len({(one.method.spec, one.point) for one in workload.entries}) == len(workload.entries)
        if workload.mode == "generate":
            assert all(workload.baseline(one).method.spec == "generate" for one in workload.entries)
    modes = {"generate"} if name == "temperature" else {"generate", "replay"}
    assert {workload.mode for workload in made.workloads} == modes


def points(name, *methods, mode="generate"):
    made = benching.plan(methods, asked("a", "b"), studies=[name])
    return [
        (one.method.spec, one.point) for workload in made.workloads if workload.mode == mode for one in workload.entries
    ]


def test_the_points_of_the_studies():
    assert points("breadth") == [("generate", None)] + [
        ("published", str(nodes)) for nodes in (20, 40, 60, 80, 100, 120, 160)
    ]
    assert points("depth", "published:tree=static:3,k=9")[1] == ("published:k=9", "3")
    assert points("k", "published:tree=static:3,k=9")[1] == ("published", "2")
    assert points("update", "published:tree=static:3") == [("generate", None)] + [
        ("published:tree=static:3", rule) for rule in ("last", "first", "unordered")
    ]
    assert points("hot", "published") == [("generate", None), ("published", "cold"), ("published", "hot")]
    assert points("hot", "published", mode="replay") == [("plain", None), ("published", "cold"), ("published", "hot")]
    assert points("parts", "published", "plain") == [("generate", None), ("published", None), ("plain", None)]
    assert points("temperature", "published")[-2:] == [("generate", "1"), ("published", "1")]
    assert [point for _, point in points("k")][1:] == ["2", "3", "4", "6", "8", "10", "12", "16"]


def test_order_takes_the_questions_together_and_mixed():
    mixed = asked(*"abababab")
    made = benching.plan(["published"], mixed, False, studies=["order"])
    consecutive, shuffled = ([item.category for item in workload.items] for workload in made.workloads)
    assert consecutive == [*"aaaabbbb"]
    assert sorted(shuffled) == consecutive != shuffled
    again = benching.plan(["published"], mixed, False, studies=["order"])
    assert [item.category for item in again.workloads[1].items] == shuffled
    assert [one.point for one in made.workloads[1].entries] == ["shuffled", "shuffled"]
    with pytest.raises(ValueError, match="two categories or more for the study order, got a only"):
        benching.plan([], asked("a", "a"), studies=["order"])


def test_what_a_study_cannot_do_is_said():
    with pytest.raises(ValueError, match=r"expected a study of breadth, depth.*got 'width'"):
        benching.plan([], asked("a"), studies=["width"])
    with pytest.raises(ValueError, match="expected drafters to study, got prompt_lookup_hf"):
        benching.plan(["prompt_lookup_hf", "published"], asked("a"), studies=["hot"])
    with pytest.raises(ValueError, match="a drafter with the option tree for the study breadth, got plain"):
        benching.plan(["plain"], asked("a"), studies=["breadth"])


def test_cold_forgets_and_hot_remembers(tmp_path):
    where = benching.setup()
    same = [Question(f"a/{place}", "a", (benching.TEXTS[0],), "text") for place in range(3)]
    made = benching.plan(["published:tree=chain:3"], same, False, studies=["hot"])
    found = benching.run(where, made, tmp_path)
    steps = {point: [one["steps"] for one in found if one["point"] == point] for point in ("cold", "hot")}
    assert len(set(steps["cold"])) == 1
    assert steps["hot"][0] == steps["cold"][0] > steps["hot"][1]


def test_temperature_is_measured_with_the_same_draws(tmp_path):
    where = benching.setup(max_new_tokens=12, repeats=2)
    made = benching.plan(["published:tree=chain:3"], asked("a"), studies=["temperature"])
    found = benching.run(where, made, tmp_path)
    assert [one["temperature"] for one in found[::2]] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert [one["identical"] for one in found] == [None, True] + [None] * 10
    assert [one["seed"] for one in found[:2]] == [None, None]
    assert {one["seed"] for one in found[2:]} == {0}
    assert "that study is of generation alone" in made.notes[0]


def test_the_varied_option_reaches_the_drafter(tmp_path):
    where = benching.setup(max_new_tokens=8)
    made = benching.plan(["published:update=first,tree=static:3"], asked("a"), False, studies=["breadth"])
    found = benching.run(where, made, tmp_path)[1:]
    assert [max(map(int, one["nodes"])) for one in found] == [nodes + 1 for nodes in studies.BREADTHS]
    assert {one["label"] for one in found} == {"published (update=first)"}
