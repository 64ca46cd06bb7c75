"""The frozen target: taps equal Hugging Face's own hidden states, nothing runs after the last tap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.errors import ConfigError
from dflash_core.model.gguf import resolve_target_folder
from dflash_core.model.target import ForwardAbandoned, FrozenTarget, read_target_shape
from dflash_core.training.target_loop import check_features


@pytest.fixture(scope="module")
def target(micro_target: Path) -> FrozenTarget:
    return FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


def test_taps_are_the_outputs_of_their_layers(target: FrozenTarget) -> None:
    """Id i is hidden_states[i + 1]; an off-by-one does not crash, it costs acceptance."""
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.features(tokens), torch.cat([states[2], states[3]], dim=-1), rtol=0, atol=1e-5)
    cache_states = target.step(tokens, None)[1]
    torch.testing.assert_close(cache_states, torch.cat([states[2], states[3]], dim=-1), rtol=0, atol=1e-5)


def test_nothing_runs_after_the_last_tap(target: FrozenTarget) -> None:
    ran: list[int] = []
    layers = target.model.get_decoder().layers
    handles = [layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(layers)]
    try:
        target.features(torch.zeros(1, 4, dtype=torch.long))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1, 2]


def test_a_pass_can_be_given_up_between_layers(target: FrozenTarget) -> None:
    asked: list[bool] = []

    def should_stop() -> bool:
        asked.append(len(asked) == 1)
        return asked[-1]

    with pytest.raises(ForwardAbandoned):
        target.features(torch.zeros(1, 4, dtype=torch.long), should_stop)
    assert asked == [False, True]
    assert target.features(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 64)  # and the next one is whole again


def test_padding_at_the_end_reaches_no_real_position(target: FrozenTarget) -> None:
    tokens = torch.randint(0, 250, (1, 9), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([tokens, torch.full((1, 6), target.shape.pad_token_id)], dim=1)
    torch.testing.assert_close(target.features(padded)[:, :9], target.features(tokens), rtol=1e-5, atol=1e-5)


def test_head_of_a_tied_target_is_its_embedding(target: FrozenTarget) -> None:
    assert target.head_VH.data_ptr() == target.embedding_VH.data_ptr()
    assert not any(p.requires_grad for p in target.model.parameters())


def test_unusable_states_are_refused() -> None:
    good = torch.ones(1, 2, 6)
    check_features(good, 6)
    with pytest.raises(ValueError, match="6 wide, expected 8"):
        check_features(good, 8)
    with pytest.raises(ValueError, match="all zero"):
        check_features(good * 0, 6)
    with pytest.raises(ValueError, match="not finite"):
        check_features(good / 0, 6)


def test_a_target_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.path: .*no such folder"):
        resolve_target_folder(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ConfigError, match="'no_such_package' is not installed"):
        resolve_target_folder("package:no_such_package", tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_target_shape(tmp_path)
