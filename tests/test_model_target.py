"""The frozen target: taps equal Hugging Face's own hidden states, nothing runs after the last tap."""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from dflash_core.errors import ConfigError
from dflash_core.model import target_loading
from dflash_core.model.gguf import resolve_target_folder
from dflash_core.model.target import ForwardAbandoned, FrozenTarget, read_target_shape
from dflash_core.model.target_shape import _end_tokens
from tests.conftest import TINY_TARGET


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


def test_the_stopped_pass_equals_the_whole_one_at_the_demos_shape() -> None:
    """The same model in fp32, whole: within 1e-5, in fact to the bit. States go up to several hundred."""
    target = FrozenTarget(TINY_TARGET, (1, 2, 4), "float32", "sdpa", "cpu")
    for rows, length in ((12, 128), (1, 700)):
        tokens = torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
        picked = torch.cat([states[2], states[3], states[5]], dim=-1)
        assert float((target.features(tokens) - picked).abs().max()) <= 1e-5


def test_nothing_runs_after_the_last_tap(target: FrozenTarget) -> None:
    """Counted over all modules: no later layer, no final norm, no head."""
    ran: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name, module in target.model.named_modules()
    ]
    try:
        target.features(torch.zeros(1, 4, dtype=torch.long))
    finally:
        for handle in handles:
            handle.remove()
    layers = {name.split(".")[2] for name in ran if name.startswith("model.layers.")}
    assert layers == {"0", "1", "2"}
    assert {name for name in ran if not name.startswith("model.layers.")} == {"model", "model.embed_tokens", "model.rotary_emb"}


def test_only_tapped_layers_are_hooked(micro_target: Path) -> None:
    layers = FrozenTarget(micro_target, (0, 2), "float32", "sdpa", "cpu").model.get_decoder().layers
    assert [len(layer._forward_hooks) for layer in layers] == [1, 0, 1, 0, 0]
    assert [len(layer._forward_pre_hooks) for layer in layers] == [1, 1, 1, 0, 0]  # the look for a stop


def test_features_have_no_history_and_keep_no_layers_output_alive(micro_target: Path) -> None:
    """A tapped layer's output is gone once the layer behind it is done: the taps are copies in one tensor."""
    target = FrozenTarget(micro_target, (0, 2), "float32", "sdpa", "cpu")
    outputs: list[Any] = []
    alive: list[bool] = []
    layers = target.model.get_decoder().layers
    layers[0].register_forward_hook(lambda *args: outputs.append(weakref.ref(args[2])))
    layers[1].register_forward_pre_hook(lambda *_: alive.append(outputs[0]() is not None))
    layers[2].register_forward_pre_hook(lambda *_: alive.append(outputs[0]() is not None))
    features = target.features(torch.zeros(2, 4, dtype=torch.long))
    assert alive == [True, False]
    assert features.grad_fn is None and not features.requires_grad and features.is_contiguous()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("feature_dtype", ["float32", "bfloat16", None])
def test_states_are_cast_to_the_feature_dtype(micro_target: Path, dtype: str, feature_dtype: str | None) -> None:
    """Rounded once, by the cast; in training and in decoding alike."""
    plain = FrozenTarget(micro_target, (1, 2), dtype, "sdpa", "cpu")
    cast = FrozenTarget(micro_target, (1, 2), dtype, "sdpa", "cpu", feature_dtype)
    tokens = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = getattr(torch, feature_dtype or dtype)
    assert plain.features(tokens).dtype == getattr(torch, dtype) and cast.feature_dtype == wanted
    for way in (lambda target: target.features(tokens), lambda target: target.step(tokens, None)[1]):
        assert way(cast).dtype == wanted
        assert torch.equal(way(cast), way(plain).to(wanted))


def test_threads_that_share_a_target_do_not_meet(target: FrozenTarget) -> None:
    """Two passes over different tokens, in step from layer to layer."""
    tokens = [torch.full((1, 5), n) for n in (3, 77)]
    alone = [target.features(x) for x in tokens]
    barrier, found = threading.Barrier(2, timeout=10), {}

    def in_step() -> bool:
        barrier.wait()
        return False

    threads = [threading.Thread(target=lambda n=n: found.update({n: target.features(tokens[n], in_step)})) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(torch.equal(found[n], alone[n]) for n in (0, 1))


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        (lambda states: None, "layer 1 of the target gave NoneType"),
        (lambda states: (), "layer 1 of the target gave tuple"),
        (lambda states: states[:1], r"layer 1 of the target gave states \[1, 4, 32\], expected \[2, 4, 32\]"),
        (lambda states: states[..., :16], r"gave states \[2, 4, 16\], expected"),
    ],
)
def test_a_layer_that_gives_garbage_is_named(micro_target: Path, garbage: Any, said: str) -> None:
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    layer = target.model.get_decoder().layers[1]
    real = layer.forward
    layer.forward = lambda *args, **kwargs: garbage(real(*args, **kwargs))
    with pytest.raises(ValueError, match=said):
        target.features(torch.zeros(2, 4, dtype=torch.long))


def test_a_tap_that_was_never_reached_is_noticed(micro_target: Path) -> None:
    """Its columns hold whatever was in memory."""
    target = FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
    decoder = target.model.get_decoder()
    del decoder.layers[1]  # the layer that is tapped as the last one then runs second
    with pytest.raises(RuntimeError, match="reached 1 of the target's 2 taps"):
        target.features(torch.zeros(1, 4, dtype=torch.long))


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


def test_attention_implementations_agree(micro_target: Path, target: FrozenTarget) -> None:
    eager = FrozenTarget(micro_target, (1, 2), "float32", "eager", "cpu")
    assert eager.model.config._attn_implementation == "eager" and target.model.config._attn_implementation == "sdpa"
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    states = target.features(tokens)
    torch.testing.assert_close(eager.features(tokens), states, rtol=1e-5, atol=1e-5 * float(states.abs().max()))


def test_flash_attention_that_cannot_be_used_is_one_line(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which a user meets them; no weights are read, and no kernel is looked for on the network."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))

    def refused(dtype: str, device: str) -> str:
        with pytest.raises(ConfigError, match=r"^target\.attn_implementation: flash_attention_2 ") as caught:
            target_loading.load_causal_lm(micro_target, dtype, "flash_attention_2", torch.device(device))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    monkeypatch.setattr(target_loading, "find_spec", lambda name: None if name == "flash_attn" else pytest.fail(name))
    assert "needs the package flash-attn, which is not installed" in refused("bfloat16", "cuda")
    monkeypatch.setattr(target_loading, "find_spec", lambda _: object())
    assert "needs a GPU and the target is on cpu" in refused("bfloat16", "cpu")
    assert "needs target.dtype: bfloat16, not float32" in refused("float32", "cuda")


def test_flash_attention_that_fails_when_it_is_called_is_one_line(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target_loading._try_out(target.model, torch.device("cpu"))

    def old_gpu(*_: Any, **__: Any) -> None:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nException raised from mha_fwd")

    monkeypatch.setattr(target.model.get_decoder(), "forward", old_gpu)
    with pytest.raises(ConfigError, match=r"^target\.attn_implementation: flash_attention_2 fails on cpu: .*Ampere GPUs"):
        target_loading._try_out(target.model, torch.device("cpu"))


def test_an_implementation_that_the_model_does_not_have_is_one_line(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Qwen3ForCausalLM, "_supports_sdpa", False)
        with pytest.raises(ConfigError, match=r"^target\.attn_implementation: sdpa cannot be used .*does not support") as caught:
            FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")
        assert "\n" not in str(caught.value) and str(micro_target) in str(caught.value)
    real = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: real(*args, **{**kwargs, "attn_implementation": "eager"})
    )
    with pytest.raises(ConfigError, match=r"sdpa cannot be used for .*: transformers takes eager instead"):
        FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


def test_a_target_whose_weights_cannot_be_read_is_one_line(micro_target: Path, tmp_path: Path) -> None:
    for weights, why in ((None, "holds no weights in safetensors files"), (b"not a safetensors file", "cannot be loaded: ")):
        folder = Path(shutil.copytree(micro_target, tmp_path / str(weights is None)))
        (folder / "model.safetensors").unlink()
        if weights is not None:
            (folder / "model.safetensors").write_bytes(weights)
        with pytest.raises(ConfigError, match=rf"^target\.path: .* {why}") as caught:
            FrozenTarget(folder, (1, 2), "float32", "sdpa", "cpu")
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("place", ["../outside.safetensors", "sub/outside.safetensors", "{outside}", 7, "gone.safetensors"])
def test_an_index_of_a_target_names_only_files_of_its_folder(micro_target: Path, tmp_path: Path, place: object) -> None:
    folder, outside = tmp_path / "target", tmp_path / "outside.safetensors"
    shutil.copytree(micro_target, folder)
    names = list(safe_open(folder / "model.safetensors", "pt").keys())
    (folder / "model.safetensors").rename(outside)
    shutil.copy(outside, folder / "own.safetensors")
    (folder / "sub").mkdir()
    (folder / "sub" / "outside.safetensors").symlink_to(outside)
    where = place.format(outside=outside) if isinstance(place, str) else place
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, where)}))
    with pytest.raises(ConfigError) as caught:
        FrozenTarget(folder, (1, 2), "float32", "sdpa", "cpu")
    assert str(caught.value).startswith(f"target.path: {index}: ") and "\n" not in str(caught.value)


def test_a_target_that_does_not_fit_on_its_device_is_one_line(micro_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(Qwen3ForCausalLM, "to", full)
    with pytest.raises(ConfigError, match=r"^target\.path: .* does not fit on cpu: CUDA out of memory$"):
        FrozenTarget(micro_target, (1, 2), "float32", "sdpa", "cpu")


def test_a_target_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.path: .*no such folder"):
        resolve_target_folder(str(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(ConfigError, match="'no_such_package' is not installed"):
        resolve_target_folder("package:no_such_package", tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_target_shape(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("GPT2", "has no list of decoder layers to tap"),
        ("Phi", "has a language-model head with a bias, which a draft would not get"),
    ],
)
def test_a_model_that_a_draft_cannot_follow_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    name = {"GPT2": "GPT2LMHeadModel", "Phi": "PhiForCausalLM"}[kind]
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"^target.path: {tmp_path}: {name} {reason}; not supported"):
        FrozenTarget(tmp_path, (1, 2), "float32", "sdpa", "cpu")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(5, None, (5,)), (None, None, ()), ([5, 6], 7, (5, 6, 7)), (5, [6, 5], (5, 6)), (5, "{", None)],
)
def test_end_tokens_are_those_of_both_files(tmp_path: Path, config: Any, generation: Any, expected: Any) -> None:
    if generation is not None:
        text = generation if generation == "{" else json.dumps({"eos_token_id": generation})
        (tmp_path / "generation_config.json").write_text(text)
    if expected is None:
        with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read"):
            _end_tokens(tmp_path, config)
    else:
        assert _end_tokens(tmp_path, config) == expected
