"""Memory available to this process: the host's, or the smallest limit of its control groups."""

from __future__ import annotations

import pytest
import torch

from token_recycling._util import device

HOST = device.memory(torch.device("cpu"))
GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": 3 * GIB}, 3 * GIB),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0\n", {"system.slice/slurmstepd.scope/job_7/memory.max": 2}, 2),
        ("0::/user.slice/app.slice/run.scope\n", {"user.slice/memory.max": 9, "user.slice/app.slice/memory.max": 5}, 5),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": 6, "memory.max": 8}, 6),
        ("0::/gone/from/here\n", {"memory.max": 4}, 4),
        ("4:memory:/slurm/uid_0/job_7\n2:cpu:/x\n", {"memory/slurm/uid_0/memory.limit_in_bytes": 7}, 7),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": 9223372036854771712}, None),
        ("nonsense\n", {}, None),
        ("", {}, None),
        (None, {"memory.max": 12}, 12),
    ],
)
def test_smallest_limit_of_all_groups_applies(tmp_path, monkeypatch, groups, limits, expected):
    for name, limit in limits.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(device, "_OWN_CGROUPS", tmp_path / "own")
    found = device.memory(torch.device("cpu"))
    assert found == expected if expected is not None else found >= HOST
