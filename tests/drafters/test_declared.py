"""Options of drafters are read from their source as they are when the class is imported, without torch."""

import subprocess
import sys

import pytest

from token_recycling._util.options import is_required, options_of
from token_recycling.drafters._declared import check_spec, declared
from token_recycling.drafters._registry import drafter_class, own_names


@pytest.mark.parametrize("name", own_names())
def test_what_is_declared_is_what_the_class_has(name):
    made_by, (options, unnamed) = drafter_class(name), declared(name)
    known = options_of(made_by)
    assert set(options) == set(known)
    assert {option: found.required for option, found in options.items()} == {
        option: is_required(field) for option, field in known.items()
    }
    assert unnamed == made_by.unnamed


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("nothing", "nothing"),
        ("recycling:nope=1", "nope"),
        ("suffix:num_tokens=many", "many"),
        ("suffix:num_tokens=1,num_tokens=2", "num_tokens"),
        ("lookahead:pool_from_prompt=perhaps", "perhaps"),
        ("rest", "datastore"),
    ],
)
def test_a_mistyped_drafter_is_refused(spec, value):
    with pytest.raises(ValueError, match=value):
        check_spec(spec)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "models/target", "--drafter", "recycling:nope=1"],
        ["bench", "models/target", "--data", "models/prompts", "--method", "recycling:nope=1"],
        ["compare", "models/target", "--prompts", "nowhere"],
    ],
    ids=" ".join,
)
def test_a_typing_error_costs_no_import_of_torch(words):
    code = (
        "import sys\nfrom token_recycling.cli.app import app\n"
        f"try:\n    app({words!r})\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "2 False\n", found.stderr
    assert found.stderr.startswith("error: ")
