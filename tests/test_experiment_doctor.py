"""What `dflash doctor` says to a reader."""

from __future__ import annotations

from dflash_core.experiment_doctor import describe_check

CPU = [{"draft": "cpu", "targets": ["cpu", "cpu"]}]
DRAFT = {"num_layers": 2, "hidden_size": 192, "block_size": 8, "target_layer_ids": [1, 4], "num_target_layers": 6}
PASSED = {"checks": ["head", "taps"], "check_s": [0.1, 0.2], "skipped_checks": []}


def test_runs_of_the_same_kind_share_a_line() -> None:
    found = {
        "experiment": "demo", "runs": {"a": CPU, "b": CPU}, "draft": DRAFT, "target": {"a": PASSED, "b": PASSED},
        "files": ["data/train.jsonl"],
    }  # fmt: skip
    assert describe_check(found) == [
        "demo: nothing wrong",
        "    a, b: drafter on cpu, targets on cpu, cpu",
        "    drafter: 2 layers of width 192, blocks of 8, reads target layers 1, 4 of 6",
        "    target of a, b: passed head, taps",
        "    data: 1 file, there",
    ]


def test_what_was_not_looked_at_is_said() -> None:
    two = [{"draft": f"cuda:{3 * cell}", "targets": [f"cuda:{3 * cell + 1}"]} for cell in range(2)]
    lines = describe_check({"experiment": "x", "runs": {"a": two}, "not_checked": ["target", "data"]})
    assert lines[1:] == [
        "    a: cell 0: drafter on cuda:0, targets on cuda:1; cell 1: drafter on cuda:3, targets on cuda:4",
        "    not looked at, for another machine is asked about: target, data",
    ]
    skipped = {"checks": ["head"], "check_s": [0.1], "skipped_checks": ["taps: no second layer"]}
    large = "weights larger than 2 GiB, which are checked when a run starts"
    lines = describe_check({"experiment": "x", "runs": {"a": CPU, "b": CPU}, "target": {"a": skipped, "b": large}})
    assert lines[2:] == ["    target of a: passed head; left out: taps: no second layer", f"    target of b: {large}"]


def test_a_drafter_to_start_from_is_named_with_what_differs() -> None:
    start = {"a": {"path": "/old", "differs": []}, "b": {"path": "/old", "differs": ["block_size: 16 there, 8 here"]}}
    lines = describe_check({"experiment": "x", "runs": {"a": CPU, "b": CPU}, "init_from": start})
    assert lines[2:] == [
        "    a: starts from the drafter in /old",
        "    b: starts from the drafter in /old, which differs and may: block_size: 16 there, 8 here",
    ]
