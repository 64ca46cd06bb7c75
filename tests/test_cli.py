"""The command line as a user meets it: one readable line, the right exit code, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from dflash_core import cli
from dflash_core import experiment as root
from dflash_core.analysis import read_rows
from dflash_core.training import distributed
from tests.fake_runs import FakeRun, undocumented, write_run


def dflash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["dflash", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def only_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, text
    return lines[0]


def change(path: Path, section: str, key: str, value: object) -> None:
    values = yaml.safe_load(path.read_text())
    values[section][key] = value
    path.write_text(yaml.safe_dump(values))


def test_train_evaluate_analyze(
    micro_experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs" / "mine"
    code, out, _ = dflash(monkeypatch, capsys, "train", micro_experiment, "--run-dir", run_dir, "--set", "train.max_steps=4")
    assert code == 0 and out.strip().endswith(f"completed: 4 steps, {run_dir}")
    assert "step 4/4" in (run_dir / "logs" / "cell-0.log").read_text()
    code, out, _ = dflash(monkeypatch, capsys, "evaluate", run_dir)
    assert code == 0 and json.loads(out)["lossless"] is True
    assert undocumented(run_dir) == set()
    for stream in ("steps", "batches", "evals"):  # the run has ended and is evaluated: analyses begin with Parquet
        assert (
            len(read_rows(run_dir / "metrics" / f"{stream}.jsonl"))
            == pq.read_metadata(run_dir / "metrics" / f"{stream}.parquet").num_rows
        )
    code, out, _ = dflash(monkeypatch, capsys, "export", run_dir, "--out", tmp_path / "served")
    assert code == 0 and (tmp_path / "served" / "model.safetensors").is_file()
    code, out, _ = dflash(monkeypatch, capsys, "analyze", run_dir, "--out", tmp_path / "report")
    assert code == 0 and (tmp_path / "report" / "report.html").is_file()
    code, _, err = dflash(monkeypatch, capsys, "train", micro_experiment, "--run-dir", run_dir, "--set", "train.lr=1.0")
    assert code == 2 and "holds a run with another train.lr" in only_line(err)
    assert json.loads((run_dir / "manifest.json").read_text())["state"] == "completed"
    assert "lr: 0.003" in (run_dir / "config.yaml").read_text()


@pytest.mark.parametrize(("rank", "told"), [("0", "completed: 4 steps, "), ("1", "")])
def test_only_the_first_cell_says_how_the_run_ended(
    rank: str,
    told: str,
    micro_experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Another one reads the manifest before the first has written its end, and said `running: 0 steps`."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(distributed, "end_with_launcher", lambda: None)
    monkeypatch.setattr(root, "train_run", lambda *_: {"state": "completed", "num_steps": 4})
    code, out, _ = dflash(monkeypatch, capsys, "train", micro_experiment, "--run-dir", tmp_path)
    assert code == 0 and out.strip() == (told and f"{told}{tmp_path}")


def test_runs_that_differ_are_analysed_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = [write_run(tmp_path / name, FakeRun(name=name, num_steps=8, manifest={"target": name})) for name in ("a", "b")]
    words = ("analyze", *runs, "--out", tmp_path / "report")
    code, _, err = dflash(monkeypatch, capsys, *words)
    assert code == 2 and "target: a has a, b has b" in only_line(err) and "--allow-different" in err
    code, out, _ = dflash(monkeypatch, capsys, *words, "--allow-different")
    assert code == 0 and out.startswith("These runs are not comparable") and "target: a has a, b has b" in out


def test_bad_input_is_one_line_and_exit_code_2(
    micro_experiment: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    original = micro_experiment.read_text()
    corpus = tmp_path / "train.jsonl"
    rows = corpus.read_text()

    def refused(*words: str) -> str:
        code, _, err = dflash(monkeypatch, capsys, "train", *words)
        assert code == 2, err
        assert not list(home.glob("datasets/*/manifest.json")) and not list(home.glob("runs/*"))
        return only_line(err)

    assert str(tmp_path / "no.yaml") in refused(tmp_path / "no.yaml")
    assert "--run" in refused(micro_experiment, "--run", "nope")
    assert "train.lrr: unknown key" in refused(micro_experiment, "--set", "train.lrr=1")
    change(micro_experiment, "data", "files", [str(tmp_path / "missing.jsonl")])
    assert "missing.jsonl" in refused(micro_experiment)
    micro_experiment.write_text(original)
    corpus.write_text("{not json\n" * 3)
    assert f"not JSON: 3), the first: {corpus}: row 1: not JSON" in refused(micro_experiment)
    strict = (micro_experiment, "--set", "data.on_bad_row=error")
    corpus.write_text(rows + "{not json\n")
    assert f"{corpus}: row 41: not JSON" in refused(*strict)
    corpus.write_text(rows + json.dumps({"messages": []}) + "\n")
    assert f"{corpus}: row 41: " in refused(*strict)
    corpus.write_text(rows)
    change(micro_experiment, "target", "path", str(tmp_path / "no_target"))
    assert "target.path" in refused(micro_experiment)
    micro_experiment.write_text(original)
    change(micro_experiment, "target", "mask_token_id", 256)
    assert "target.mask_token_id" in refused(micro_experiment)  # that row is the pad token


def test_prepare_draws_shows_and_tells_what_is_left_out(
    micro_experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    corpus = tmp_path / "train.jsonl"
    corpus.write_text(corpus.read_text() + "{not json\n" + json.dumps({"messages": []}) + "\n")
    code, out, err = dflash(monkeypatch, capsys, "prepare", micro_experiment, "--show", "2")
    assert code == 0
    shown, summary = out[: out.index("\n{\n")], json.loads(out[out.index("\n{\n") :])
    assert summary["num_rejected"] == 2 and summary["rejected_by_reason"] == {"empty conversation": 1, "not JSON": 1}
    assert "2 of 42 rows are left out" in caplog.text and "rejects.parquet" in caplog.text
    assert shown.count("--- row-") == 2 and shown.count("⟦") == 2, "two samples with one supervised answer each"
    assert "supervised" in err and "\u2588" in err, "buckets are drawn beside the result"
    code, out, err = dflash(monkeypatch, capsys, "plan", micro_experiment)
    plan = json.loads(out)
    assert "modelled cost" in err and "longest bucket run (shortest possible)" in err
    assert code == 0 and [row["num_buckets"] for row in plan["num_buckets_compared"]] == list(range(1, 17))
    assert plan["orders"]["diverse"]["longest_run"] == plan["orders"]["diverse"]["shortest_possible_longest_run"]
    assert plan["orders"]["diverse"]["steps"]["num_steps"] == plan["num_steps"]


def test_a_target_without_a_mask_token(
    micro_experiment: Path,
    micro_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import shutil

    copy = tmp_path / "maskless"
    shutil.copytree(micro_target, copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("mask_token")
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    change(micro_experiment, "target", "path", str(copy))
    code, _, err = dflash(monkeypatch, capsys, "prepare", micro_experiment)
    assert code == 2 and "target.mask_token_id" in only_line(err) and str(copy) in err


def test_wrong_commands_and_folders(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = dflash(monkeypatch, capsys, "evaluate", tmp_path)
    assert code == 2 and str(tmp_path) in only_line(err)
    code, _, err = dflash(monkeypatch, capsys, "trian")
    assert code == 2 and "trian" in only_line(err)
    code, _, err = dflash(monkeypatch, capsys, "train")
    assert code == 2 and only_line(err)


def test_help_needs_no_heavy_imports() -> None:
    code = "import sys; sys.argv = ['dflash', '--help']\nfrom dflash_core.cli import main\n"
    check = (
        "\nheavy = {'torch', 'transformers', 'pandas', 'prefect', 'wandb', 'pyarrow'} & set(sys.modules)\nassert not heavy, heavy"
    )
    body = f"{code}try:\n    main()\nexcept SystemExit:\n    pass{check}"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "prepare" in done.stdout
