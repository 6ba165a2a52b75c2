"""Each drafter can be deleted without another one noticing: what two of them share is in `drafters/_shared`.

A command that is there for one drafter (`datastore`) goes with it, so that `cli` is left out.
"""

import grimp
import pytest

from token_recycling.drafters._registry import own_names

GRAPH = grimp.build_graph("token_recycling")


@pytest.mark.parametrize("drafter", own_names())
def test_without_it_everything_else_can_be_imported(drafter):
    deleted = f"token_recycling.drafters.{drafter}"
    parts = {deleted, *GRAPH.find_descendants(deleted)}
    users = {user for part in parts for user in GRAPH.find_modules_that_directly_import(part)} - parts
    assert {user for user in users if not user.startswith("token_recycling.cli")} == set()
