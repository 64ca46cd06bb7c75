"""Checkpoints as files: what is written, how damage is recognised, and what a full disk leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from dflash_core.errors import CheckpointError, SchemaError
from dflash_core.model.weights import load_draft, save_draft, weight_pieces
from dflash_core.provenance import digest_file
from dflash_core.training.checkpoint import (
    CheckpointStore,
    Score,
    Snapshot,
    check_checkpoint,
    newest_checkpoint,
    restore,
    take_snapshot,
)
from dflash_core.training.hashed_file import PIECE_BYTES, HashedFile
from dflash_core.training.retention import Retention
from tests.test_model_draft import make_draft


def trained(steps: int = 1, seed: int = 0) -> tuple[Any, torch.optim.AdamW]:
    draft = make_draft(seed)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1.0)
    for number in range(steps):
        for parameter in draft.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
    return draft, optimizer


def snapshot_of(step: int, score: Score | float | None = None) -> Snapshot:
    draft, optimizer = trained()
    score = Score(score) if isinstance(score, float) else score
    return take_snapshot(step, draft, optimizer, {"identity": {"of": "this test"}, "skipped_in_a_row": 0}, score)


def write(root: Path, *steps: int, keep_last: int = 9) -> list[Path]:
    store = CheckpointStore(root, Retention(keep_last))
    return [store.write(snapshot_of(step)).folder for step in steps]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_written_is_what_is_restored(tmp_path: Path) -> None:
    draft, optimizer = trained(3)
    written = CheckpointStore(tmp_path, Retention(1)).write(take_snapshot(7, draft, optimizer, {"a": 1}, Score(1.5)))
    assert names(written.folder) == ["config.json", "model.safetensors", "optimizer.pt", "state.json"]
    assert written.num_bytes == sum(path.stat().st_size for path in written.folder.iterdir())
    assert written.kept == [7] and written.write_s > 0
    state = check_checkpoint(written.folder)
    assert (state["next_step"], state["score"], state["counters"]) == (7, 1.5, {"a": 1})
    assert all(digest_file(written.folder / name) == digest for name, digest in state["digests"].items())
    other, other_optimizer = trained(1, seed=1)
    restore(written.folder, other, other_optimizer)
    for ours, theirs in zip(draft.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        mine, its = optimizer.state[ours], other_optimizer.state[theirs]
        assert set(mine) == set(its) and all(torch.equal(mine[key], its[key]) for key in mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_byte_for_byte_what_the_library_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in make_draft().state_dict().items()}
    tensors |= {
        "an empty one": torch.zeros(0, 3, dtype=dtype),
        "b\u00e4": torch.tensor(5, dtype=dtype),
        "Z": torch.ones(3, 2, dtype=dtype).T,
    }
    ours = b"".join(weight_pieces(tensors))
    assert ours == save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    (tmp_path / "weights").write_bytes(ours)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "weights").items())


def test_a_checkpoint_holds_the_draft_as_it_is_served(tmp_path: Path) -> None:
    (folder,) = write(tmp_path / "checkpoints", 4)
    (tmp_path / "export").mkdir()
    save_draft(tmp_path / "export", snapshot_of(4).spec, snapshot_of(4).tensors)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "export" / name).read_bytes()
    load_draft(folder)


def test_a_file_is_digested_while_it_is_written(tmp_path: Path) -> None:
    pieces: list[bytes | memoryview] = [b"", b"abc", memoryview(bytes(range(256)) * (PIECE_BYTES // 100)), b"end"]
    with HashedFile(tmp_path / "file") as file:
        assert [file.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
    content = b"".join(bytes(piece) for piece in pieces)
    assert (tmp_path / "file").read_bytes() == content
    assert (file.digest, file.num_bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")


def test_a_snapshot_does_not_follow_the_training_and_uses_old_memory_again() -> None:
    draft, optimizer = trained()

    def step() -> None:
        for parameter in draft.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    first = take_snapshot(1, draft, optimizer, {})
    weight, moment = first.tensors["fc.weight"].clone(), first.optimizer["state"][0]["exp_avg"].clone()
    step()
    assert torch.equal(first.tensors["fc.weight"], weight)
    assert torch.equal(first.optimizer["state"][0]["exp_avg"], moment)
    second = take_snapshot(2, draft, optimizer, {}, room=first)
    assert second.tensors["fc.weight"].data_ptr() == first.tensors["fc.weight"].data_ptr()
    assert second.optimizer["state"][0]["exp_avg"].data_ptr() == first.optimizer["state"][0]["exp_avg"].data_ptr()
    fresh = take_snapshot(2, draft, optimizer, {})
    assert all(torch.equal(tensor, fresh.tensors[name]) for name, tensor in second.tensors.items())
    for number, state in fresh.optimizer["state"].items():
        assert all(torch.equal(tensor, second.optimizer["state"][number][key]) for key, tensor in state.items())
    assert second.optimizer["param_groups"] == fresh.optimizer["param_groups"]
    # Before its first step an optimizer has no state: then there is no room for it.
    empty = take_snapshot(0, make_draft(), torch.optim.AdamW(make_draft().parameters()), {})
    third = take_snapshot(2, draft, optimizer, {}, room=empty)
    assert torch.equal(third.optimizer["state"][0]["exp_avg"], fresh.optimizer["state"][0]["exp_avg"])


def truncate(folder: Path) -> None:
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-100])


def flip_in(name: str) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return flip


def empty_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def a_file(folder: Path) -> None:
    empty_folder(folder)
    folder.rmdir()
    folder.write_text("not a folder")


def state_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | changes))

    return change


def state_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "state.json").write_text(text) and None


def of_another_step(folder: Path) -> None:
    empty_folder(folder)
    folder.rmdir()
    write(folder.parent / "elsewhere", 5)[0].rename(folder)


DAMAGE = {
    "truncated": truncate,
    **{f"bit in {name}": flip_in(name) for name in ("config.json", "model.safetensors", "optimizer.pt", "state.json")},
    **{f"no {name}": (lambda folder, name=name: (folder / name).unlink()) for name in ("model.safetensors", "state.json")},
    "empty folder": empty_folder,
    "a file": a_file,
    "of another step": of_another_step,
    "counters changed": state_with(counters={}),
    "schema of another kind": state_with(schema_version="1"),
    "step of another kind": state_with(next_step="12"),
    **{f"state {text[:9]!r}": state_text(text) for text in ("", "null", "{", "[]", "7", "[" * 200_000, '{"schema_version": 2}')},
    "state not text": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00") and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_one_line(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = write(tmp_path, 8, 12)
    DAMAGE[damage](bad)
    with pytest.raises(CheckpointError, match="step-000012"):
        check_checkpoint(bad)
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(tmp_path)
    assert found is not None and found[0] == good and found[1]["next_step"] == 8
    assert len(caplog.records) == 1 and "\n" not in caplog.text.strip() and "step-000012" in caplog.text
    # The run reaches the step again, and the damaged one is replaced, whatever it is.
    (written,) = write(tmp_path, 12)
    check_checkpoint(written)
    assert [name for name in names(tmp_path) if name != "elsewhere"] == ["step-000008", "step-000012"]


def test_a_checkpoint_of_another_version_is_told_and_not_passed_over(tmp_path: Path) -> None:
    """Passing over it would begin the run anew, and drop what it had reached."""
    _, newest = write(tmp_path, 8, 12)
    state_with(schema_version=1)(newest)
    with pytest.raises(SchemaError, match="step-000012: schema version 1, expected 2; go on with the version"):
        newest_checkpoint(tmp_path)


def test_names_that_are_not_ours_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 4)
    for name in ("step-8", "step-0000008", "step-00000٣", "step-000008.bak", "notes"):
        (tmp_path / name).mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None and found[0].name == "step-000004" and not caplog.records
    write(tmp_path, 8, keep_last=1)
    assert set(names(tmp_path)) == {"step-8", "step-0000008", "step-00000٣", "step-000008.bak", "notes", "step-000008"}
    assert newest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.pt", "state.json"])
def test_a_full_disk_leaves_the_earlier_checkpoints_and_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In the middle of each file, also where `torch.save` would hide the cause."""
    (earlier,) = write(tmp_path, 4)
    real, left = HashedFile._file_write, [(earlier / name).stat().st_size // 2]

    def full(file: HashedFile, piece: memoryview) -> int:
        if Path(file.name).name != name:
            return real(file, piece)
        fits = piece[: left[0]]
        left[0] -= len(fits)
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, fits)

    with monkeypatch.context() as patch:
        patch.setattr(HashedFile, "_file_write", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write(tmp_path, 8)
    assert caught.value.errno == errno.ENOSPC and left == [0]
    assert names(tmp_path) == ["step-000004"]
    check_checkpoint(earlier)
    assert names(write(tmp_path, 8)[0]) == names(earlier)
