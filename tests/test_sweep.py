"""Grids: which runs they make, how these are called, and which are refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.errors import ConfigError
from dflash_core.experiment_file import load_experiment
from flows import grid

KEYS = {
    "train.lr": st.floats(1e-6, 1, allow_nan=False),
    "draft.num_layers": st.integers(1, 9),
    "train.seed": st.integers(0, 99),
    "bucketing.order": st.sampled_from(["shuffle", "diverse"]),
}
axes = st.fixed_dictionaries(
    {}, optional={key: st.lists(value, min_size=1, max_size=3, unique=True) for key, value in KEYS.items()}
)


def lines(chosen: dict[str, list[Any]]) -> list[str]:
    return [
        f"{key}={','.join(yaml.safe_dump(v, default_flow_style=True).splitlines()[0] for v in vs)}" for key, vs in chosen.items()
    ]


@settings(max_examples=40, deadline=None)
@given(axes.filter(bool))
def test_every_point_is_one_run_with_a_name_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, chosen: dict[str, list[Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "one.yaml"
    if not path.exists():
        path.write_text(yaml.safe_dump({"name": "one", "target": {"path": "t"}, "data": {"name": "d", "files": ["x.jsonl"]}}))
    config = load_experiment(path, grid.expand(str(path), ["train.max_steps=7"], None, lines(chosen), most=81))
    points = [{key: _value(run, key) for key in chosen} for _, run in config.variants()]
    expected = 1
    for values in chosen.values():
        expected *= len(values)
    assert len(points) == len({repr(point) for point in points}) == len({name for name, _ in config.variants()}) == expected
    assert all({point[key] for point in points} == set(values) for key, values in chosen.items())
    assert config.name == "one-sweep" and all(run.train.max_steps == 7 for _, run in config.variants())


def _value(run: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        run = getattr(run, part)
    return run


def names(experiment: str, *lines: str, run: str | None = None, overrides: tuple[str, ...] = ()) -> list[str]:
    return [name for name, _ in load_experiment(experiment, grid.expand(experiment, overrides, run, lines)).variants()]


DEMO = "flows/experiments/demo.yaml"


def test_runs_are_called_by_what_they_change(in_repository: Path) -> None:
    assert names(DEMO, "train.lr=1.0e-3,2.0e-3", run="shuffle") == ["shuffle_lr-0.001", "shuffle_lr-0.002"]
    assert names(DEMO, "train.lr=1e-3,2E-3", run="shuffle") == ["shuffle_lr-0.001", "shuffle_lr-0.002"]
    assert names(DEMO, "train.seed=1") == ["shuffle_seed-1", "diverse_seed-1"]
    assert names(DEMO, "bucketing.order=diverse", run="shuffle") == ["shuffle_order-diverse"]
    assert names(DEMO, "draft.target_layer_ids=[1, 2],[2, 3]", run="diverse")[1] == "diverse_target_layer_ids-2-3"
    long = names(DEMO, "draft.target_layer_ids=" + ",".join(f"[{','.join(['1'] * n)}]" for n in (80, 81)), run="diverse")
    assert len(set(long)) == 2 and max(map(len, long)) <= grid.LONGEST_NAME


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ([], "--grid: nothing to change"),
        (["train.lr"], "expected key=value,value"),
        (["train.lr="], "no values"),
        (["train.lr=1,1"], "a value stands twice"),
        (["train.lr=1e-3,0.001"], "a value stands twice"),
        (["train.lr=1,2", "train.lr=3"], "train.lr stands twice"),
        (["train.lr=[1"], "not YAML"),
        (["train.nope=1,2"], "unknown key"),
        (["train.lr=-1,2"], "lr"),
        (["runs=1,2"], "runs is no setting of a run"),
        (["analyze.allow_different=true,false"], "no setting of a run"),
        (["data.max_length=256,512"], "all runs of a sweep train on one dataset"),
        (
            ["draft.block_size=4,8"],
            "runs of another draft.block_size are not comparable as they are; --set analyze.allow_different",
        ),
        (["train.seed=" + ",".join(map(str, range(17)))], "34 runs, more than 32; --most"),
        (["train.seed=a b,a-b"], "seed"),
    ],
)
def test_what_is_refused(in_repository: Path, line: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        grid.expand(DEMO, [], None, line)


def test_runs_that_differ_too_much_are_trained_where_that_is_asked_for(in_repository: Path) -> None:
    assert len(names(DEMO, "draft.block_size=4,8", overrides=("analyze.allow_different=true",), run="shuffle")) == 2
    assert len(names(DEMO, "draft.block_size=4", run="shuffle")) == 1, "one value makes no difference between runs"
    with pytest.raises(ConfigError, match="no run 'x'; there are: shuffle, diverse"):
        names(DEMO, "train.seed=1", run="x")
