"""The frozen target: loaded once per device, tapped at some layers, and stopped after the last tap.

A target id `i` is the output of decoder layer `i`, counted from 0 (Hugging Face `hidden_states[i + 1]`). Hooks on the
tapped layers alone record the states; during training the forward pass is ended by an exception in the last hook, so
that neither later layers nor the language-model head cost anything. Records are kept per thread: on a CPU several
target loops share one model.

A packed row goes through in runs of neighbouring documents. Attention with a mask costs the square of a run's length,
whatever the mask hides, so that runs are kept short; a document that fills a run of its own needs no mask at all.

Shapes: B batch, S sequence, T taps, H hidden size of the target, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.errors import ConfigError
from dflash_core.model.documents import Documents, runs_of_documents

# Most tokens of neighbouring documents that share one forward pass, by kind of device. On a CPU the tiny target takes 0.9 s
# for a row of 8192 tokens in runs of 256, 1.1 s in runs of 1024 and 7.5 s in one; a GPU needs longer runs to be busy.
TOKENS_PER_RUN = {"cpu": 256, "cuda": 4096}
# How far a packed document's states may be from those of the document alone, as a share of their norm: rounding stays far
# below, and a target that looks across a border far above. The second document is short, so that a leak into its first
# tokens alone is seen in the mean, too.
PACKING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
PROBE_LENGTHS = (24, 12)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _LastTapReached(Exception):
    """Ends a forward pass once everything that was asked for is recorded."""


class ForwardAbandoned(Exception):
    """The caller asked to give up a forward pass between two layers; on a CPU a whole one can take many seconds."""


@dataclass(frozen=True)
class TargetShape:
    """The target's figures that a draft is built from (`head_dim` and sizes as in the Hugging Face config)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int


def read_target_shape(folder: Path) -> TargetShape:
    """Read the shape from `config.json` without loading weights.

    Raises:
        ConfigError: the folder has no config, or the model has parts that a DFlash draft cannot follow.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; target.path must name a Hugging Face model folder")
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config = config.get_text_config(decoder=True)
    if getattr(config, "final_logit_softcapping", None):
        raise ConfigError(f"{folder}: the target caps its final logits (final_logit_softcapping); not supported")
    heads = config.num_attention_heads
    eos = config.eos_token_id if config.eos_token_id is not None else ()
    rope = getattr(config, "rope_parameters", None) or {}
    return TargetShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        pad_token_id=int(config.pad_token_id or 0),
    )


class FrozenTarget:
    """A causal language model without gradients, its embedding and head, and its tapped states."""

    def __init__(self, folder: Path, layer_ids: tuple[int, ...], dtype: str, attn_implementation: str, device: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # a bar for one file is noise in a log
        self.shape = read_target_shape(folder)
        self.layer_ids = layer_ids
        self.device = torch.device(device)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
        )
        self.model: Any = model.to(self.device).eval().requires_grad_(False)
        self._records = threading.local()
        layers: Any = self.model.get_decoder().layers
        for index in layer_ids:
            layers[index].register_forward_hook(self._make_hook(index))
        for layer in layers[: layer_ids[-1] + 1]:
            layer.register_forward_pre_hook(self._look_for_stop)

    @property
    def embedding_VH(self) -> Tensor:
        """Rows of the input embedding, [V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_VH(self) -> Tensor:
        """Rows of the language-model head, [V, H]; the embedding itself for a tied target."""
        head: nn.Linear = self.model.get_output_embeddings()
        return head.weight

    def _make_hook(self, index: int) -> Any:
        is_last = index == self.layer_ids[-1]

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            states: dict[int, Tensor] | None = getattr(self._records, "states", None)
            if states is None:
                return
            states[index] = output if isinstance(output, Tensor) else output[0]
            if is_last and self._records.stop_at_last_tap:
                raise _LastTapReached

        return hook

    def _look_for_stop(self, *_: Any) -> None:
        should_stop: Callable[[], bool] | None = getattr(self._records, "should_stop", None)
        if should_stop is not None and should_stop():
            raise ForwardAbandoned

    @contextmanager
    def _recording(self, *, stop_at_last_tap: bool) -> Iterator[dict[int, Tensor]]:
        self._records.states, self._records.stop_at_last_tap = {}, stop_at_last_tap
        try:
            yield self._records.states
        finally:
            self._records.states = None

    def _joined(self, states: dict[int, Tensor]) -> Tensor:
        return torch.cat([states[i] for i in self.layer_ids], dim=-1)

    @torch.inference_mode()
    def features(
        self,
        input_ids_BS: Tensor,
        should_stop: Callable[[], bool] | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Tapped states of right-padded rows, or of one packed row, joined on the feature axis: [B, S, T * H].

        `should_stop` is asked before every layer; when it says yes the pass ends with `ForwardAbandoned`.

        No attention mask is given. Right-padded rows need none: the target is causal, so padding at the end reaches no real
        position. In a packed row positions that begin again at 0 tell transformers where a document starts, and it
        masks what lies before; `check_packing` makes sure that this target listens.
        """
        if documents is None:
            return self._tapped(input_ids_BS, None, should_stop)
        parts = []
        for begin, end, count in runs_of_documents(documents.ids_RS, TOKENS_PER_RUN.get(self.device.type, 4096)):
            positions = documents.positions_RS[:, begin:end] if count > 1 else None
            parts.append(self._tapped(input_ids_BS[:, begin:end], positions, should_stop))
        return torch.cat(parts, dim=1)

    def _tapped(self, input_ids_BS: Tensor, positions_BS: Tensor | None, should_stop: Callable[[], bool] | None = None) -> Tensor:
        packed = {} if positions_BS is None else {"position_ids": positions_BS.to(self.device)}
        with self._recording(stop_at_last_tap=True) as states:
            self._records.should_stop = should_stop
            try:
                self.model.get_decoder()(input_ids=input_ids_BS.to(self.device), use_cache=False, **packed)
            except _LastTapReached:
                return self._joined(states)
            finally:
                self._records.should_stop = None
        raise RuntimeError("the target's forward pass ended without reaching its last tap")

    @torch.inference_mode()
    def check_packing(self, path: str) -> None:
        """Run two short random documents in one row and the second one alone: its states must agree in every tap.

        Layers that carry a state along the row (linear attention, convolutions) and models that ignore positions do not
        keep documents apart. `path` is the user's name of the target.

        Raises:
            ConfigError: they do not agree; the keys are named.
        """
        generator = torch.Generator().manual_seed(0)
        tokens_1S = torch.randint(0, self.shape.vocab_size, (1, sum(PROBE_LENGTHS)), generator=generator)
        positions_1S = torch.cat([torch.arange(n) for n in PROBE_LENGTHS]).unsqueeze(0)
        second = slice(PROBE_LENGTHS[0], None)
        try:
            packed = self._tapped(tokens_1S, positions_1S)[:, second].float()
        except (TypeError, ValueError) as error:
            cause = f"it cannot be given positions ({' '.join(str(error).split())})"
        else:
            alone = self._tapped(tokens_1S[:, second], None).float()
            by_tap = (PROBE_LENGTHS[1], len(self.layer_ids), -1)
            error_ST, norm_ST = (x.view(by_tap).norm(dim=-1) for x in (packed - alone, alone))
            share = float((error_ST / norm_ST).mean(dim=0).max())  # by token: the first ones of a document can be huge
            if share <= PACKING_TOLERANCE[self.model.dtype]:  # a NaN is none
                return
            cause = f"its documents see each other (states differ by {share:.1e} of their norm)"
        raise ConfigError(f"target.path: {path} cannot be trained with bucketing.strategy: packed: {cause}; use padded")

    @torch.inference_mode()
    def step(self, input_ids_BS: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """One forward pass over new tokens behind `cache` (which grows): logits [B, S, V] and features [B, S, T * H]."""
        with self._recording(stop_at_last_tap=False) as states:
            output = self.model(input_ids=input_ids_BS.to(self.device), cache=cache, use_cache=True)
            return output.logits, self._joined(states)
