"""The frozen target: loaded once per device, tapped at some layers, and stopped after the last tap.

A target id `i` is the output of decoder layer `i`, counted from 0 (Hugging Face `hidden_states[i + 1]`). Hooks on the
tapped layers alone record the states; during training the forward pass is ended by an exception in the last hook, so
that neither later layers nor the language-model head cost anything. Records are kept per thread: on a CPU several
target loops share one model.

Each hook writes into its own columns of one tensor, cast to `feature_dtype`, so that no layer's output outlives the
next layer and nothing has to be joined at the end.

With `last_state` a pass goes through all layers and the final norm, whose output, what the head is applied to, follows
behind the taps. The head still costs nothing here: whoever needs the target's distribution computes it where it is needed.

A packed row goes through in runs of neighbouring documents. Attention with a mask costs the square of a run's length,
whatever the mask hides, so that runs are kept short; a document that fills a run of its own needs no mask at all.

Shapes: B batch, S sequence, T taps, H hidden size of the target, F = T * H or with the last state (T + 1) * H, V vocabulary.
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
from dflash_core.model.target_loading import DTYPES, load_causal_lm
from dflash_core.model.target_shape import TargetShape, read_target_shape

__all__ = ["DTYPES", "ForwardAbandoned", "FrozenTarget", "TargetShape", "read_target_shape"]

# Most tokens of neighbouring documents that share one forward pass, by kind of device. On a CPU the tiny target takes 0.9 s
# for a row of 8192 tokens in runs of 256, 1.1 s in runs of 1024 and 7.5 s in one; a GPU needs longer runs to be busy.
TOKENS_PER_RUN = {"cpu": 256, "cuda": 4096}
# How far a packed document's states may be from those of the document alone, as a share of their norm: rounding stays far
# below, and a target that looks across a border far above. The second document is short, so that a leak into its first
# tokens alone is seen in the mean, too.
PACKING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
PROBE_LENGTHS = (24, 12)
# How far logits from the last state may be from the model's own, as a share of their norm. The product is the same, so that
# the rounding of a cast state is all there is; a scale or a cap that a model puts on its logits is far above.
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
# What decoders call the norm behind their last layer.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class _LastTapReached(Exception):
    """Ends a forward pass once everything that was asked for is recorded."""


class ForwardAbandoned(Exception):
    """The caller asked to give up a forward pass between two layers; on a CPU a whole one can take many seconds."""


@dataclass(slots=True)
class _Pass:
    """One forward pass of one thread: where its taps go, and what ends it."""

    features_BSF: Tensor
    stop_at_last_tap: bool
    should_stop: Callable[[], bool] | None
    num_taken: int = 0

    def take(self, giver: str, columns: slice, output: Any) -> None:
        """Copy a layer's output into its columns, which casts it. A copy alone would broadcast a wrong shape."""
        states = output[0] if isinstance(output, tuple | list) and output else output
        place = self.features_BSF[..., columns]
        if not isinstance(states, Tensor):
            raise ValueError(f"{giver} of the target gave {type(states).__name__} instead of states")
        if states.shape != place.shape:
            raise ValueError(f"{giver} of the target gave states {list(states.shape)}, expected {list(place.shape)}")
        place.copy_(states)
        self.num_taken += 1


@dataclass(frozen=True)
class HiddenStates:
    """What the model itself says its hidden states are, from a plain `output_hidden_states=True` forward pass.

    Attributes:
        states: N + 1 tensors [1, S, H]: the embedding, and the output of each layer.
        final_norm: the norm that is applied in the last one of them; None where it is a plain output.
        last_is_known: False where the last one is normed and the norm was not found: nothing can be compared with it.
    """

    states: tuple[Tensor, ...]
    final_norm: nn.Module | None
    last_is_known: bool


class FrozenTarget:
    """A causal language model without gradients, its embedding and head, and its tapped states.

    Args:
        folder: Hugging Face folder.
        layer_ids: tapped layers, ascending.
        dtype: number format of the weights.
        attn_implementation: `sdpa`, `eager` or `flash_attention_2`.
        device: where it lives; features stay there.
        feature_dtype: number format of the features; None for that of the weights.
        last_state: `features` also gives the states behind the final norm, in columns of their own behind the taps.

    Raises:
        ConfigError: it cannot be loaded so; the key is named.
    """

    def __init__(
        self,
        folder: Path,
        layer_ids: tuple[int, ...],
        dtype: str,
        attn_implementation: str,
        device: str,
        feature_dtype: str | None = None,
        *,
        last_state: bool = False,
    ) -> None:
        self.shape = read_target_shape(folder)
        self.layer_ids = layer_ids
        self.last_state = last_state
        self.device = torch.device(device)
        self.feature_dtype = DTYPES[feature_dtype or dtype]
        self.model: Any = load_causal_lm(folder, dtype, attn_implementation, self.device)
        self._local = threading.local()
        layers: Any = self.model.get_decoder().layers
        for tap, index in enumerate(layer_ids):
            layers[index].register_forward_hook(self._make_hook(tap, index))
        for layer in layers if last_state else layers[: layer_ids[-1] + 1]:
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

    @property
    def feature_width(self) -> int:
        """Columns of `features`: those of the taps, and with `last_state` as many as one tap's behind them."""
        return self._tap_width + (self.shape.hidden_size if self.last_state else 0)

    @property
    def _tap_width(self) -> int:
        return len(self.layer_ids) * self.shape.hidden_size

    def _make_hook(self, tap: int, layer: int) -> Any:
        columns = slice(tap * self.shape.hidden_size, (tap + 1) * self.shape.hidden_size)
        is_last = tap == len(self.layer_ids) - 1

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            current: _Pass | None = getattr(self._local, "current", None)
            if current is None:
                return
            current.take(f"layer {layer}", columns, output)
            if is_last and current.stop_at_last_tap:
                raise _LastTapReached

        return hook

    def _look_for_stop(self, *_: Any) -> None:
        current: _Pass | None = getattr(self._local, "current", None)
        if current is not None and current.should_stop is not None and current.should_stop():
            raise ForwardAbandoned

    @contextmanager
    def _recording(self, current: _Pass) -> Iterator[None]:
        """Let this thread's hooks write into `current`; leaving without an error makes sure that all of them did."""
        self._local.current = current
        try:
            yield
        except _LastTapReached:
            pass
        finally:
            self._local.current = None
        if current.num_taken != len(self.layer_ids):
            raise RuntimeError(f"a forward pass reached {current.num_taken} of the target's {len(self.layer_ids)} taps")

    def _empty(self, input_ids_BS: Tensor, width: int) -> Tensor:
        return torch.empty(*input_ids_BS.shape, width, dtype=self.feature_dtype, device=self.device)

    @torch.inference_mode()
    def features(
        self,
        input_ids_BS: Tensor,
        should_stop: Callable[[], bool] | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Tapped states of right-padded rows, or of one packed row, joined on the feature axis: [B, S, F].

        `should_stop` is asked before every layer; when it says yes the pass ends with `ForwardAbandoned`.

        No attention mask is given. Right-padded rows need none: the target is causal, so padding at the end reaches no real
        position. In a packed row positions that begin again at 0 tell transformers where a document starts, and it
        masks what lies before; `check_packing` makes sure that this target listens.
        """
        if documents is None:
            return self._tapped(input_ids_BS, None, should_stop)
        features_BSF = self._empty(input_ids_BS, self.feature_width)
        for begin, end, count in runs_of_documents(documents.ids_RS, TOKENS_PER_RUN.get(self.device.type, 4096)):
            positions = documents.positions_RS[:, begin:end] if count > 1 else None
            self._tapped(input_ids_BS[:, begin:end], positions, should_stop, features_BSF[:, begin:end])
        return features_BSF

    def taps(self, input_ids_BS: Tensor) -> Tensor:
        """`features` of padded rows without the last state, whether or not it is captured: [B, S, T * H]."""
        return self.features(input_ids_BS)[..., : self._tap_width]

    def _tapped(
        self,
        input_ids_BS: Tensor,
        positions_BS: Tensor | None,
        should_stop: Callable[[], bool] | None = None,
        features_BSF: Tensor | None = None,
    ) -> Tensor:
        """One forward pass as far as it is needed; the states go into `features_BSF`, which is returned, or a new tensor."""
        packed = {} if positions_BS is None else {"position_ids": positions_BS.to(self.device)}
        features_BSF = self._empty(input_ids_BS, self.feature_width) if features_BSF is None else features_BSF
        current = _Pass(features_BSF, not self.last_state, should_stop)
        with self._recording(current):
            output = self.model.get_decoder()(input_ids=input_ids_BS.to(self.device), use_cache=False, **packed)
        if self.last_state:
            current.take("the final norm", slice(self._tap_width, None), output.last_hidden_state)
        return features_BSF

    @torch.inference_mode()
    def hidden_states(self, input_ids_1S: Tensor) -> HiddenStates:
        """All hidden states as transformers itself collects them, through all layers: slow, and to be compared with.

        transformers ties the last one to the output of the final norm for most models.
        """
        decoder = self.model.get_decoder()
        output = decoder(input_ids=input_ids_1S.to(self.device), use_cache=False, output_hidden_states=True)
        states = tuple(output.hidden_states)
        if not torch.equal(states[-1], output.last_hidden_state):
            return HiddenStates(states, None, last_is_known=True)
        norms = [module for name in FINAL_NORMS if isinstance(module := getattr(decoder, name, None), nn.Module)]
        return HiddenStates(states, norms[0] if norms else None, last_is_known=bool(norms))

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
            by_tap = (PROBE_LENGTHS[1], -1, self.shape.hidden_size)
            error_ST, norm_ST = (x.view(by_tap).norm(dim=-1) for x in (packed - alone, alone))
            share = float((error_ST / norm_ST).mean(dim=0).max())  # by token: the first ones of a document can be huge
            if share <= max(PACKING_TOLERANCE[self.model.dtype], PACKING_TOLERANCE[self.feature_dtype]):  # a NaN is none
                return
            cause = f"its documents see each other (states differ by {share:.1e} of their norm)"
        raise ConfigError(f"target.path: {path} cannot be trained with bucketing.strategy: packed: {cause}; use padded")

    @torch.inference_mode()
    def check_last_state(self, path: str) -> None:
        """Make sure that the head on the last state gives the model's own logits, on a short random row.

        Some models scale their logits behind the head; their distribution would be another one. `path` is the user's name of
        the target.

        Raises:
            ConfigError: it does not; the keys are named.
        """
        tokens_1S = torch.randint(0, self.shape.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
        own = self.model(input_ids=tokens_1S.to(self.device), use_cache=False).logits.float()
        last = self._tapped(tokens_1S, None)[..., self._tap_width :].to(self.head_VH.dtype)
        share = float((nn.functional.linear(last, self.head_VH).float() - own).norm() / own.norm())
        if not share <= max(HEAD_TOLERANCE[self.model.dtype], HEAD_TOLERANCE[self.feature_dtype]):  # a NaN is not
            raise ConfigError(
                f"target.path: {path} gives other logits than its head on its last state (off by {share:.1e} of their norm), so"
                " that train.loss cannot compare with its distribution; use cross_entropy or dpace"
            )

    @torch.inference_mode()
    def step(self, input_ids_BS: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """One forward pass over new tokens behind `cache` (which grows): logits [B, S, V] and features [B, S, T * H]."""
        features_BSF = self._empty(input_ids_BS, self._tap_width)
        with self._recording(_Pass(features_BSF, False, None)):
            output = self.model(input_ids=input_ids_BS.to(self.device), cache=cache, use_cache=True)
        return output.logits, features_BSF

    @torch.inference_mode()
    def step_rows(self, input_ids_BS: Tensor, rows: Any, logits_at_BN: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One forward pass over new tokens of rows of different lengths: logits and features [B, S, T * H].

        Args:
            rows: their cache (`evaluation.rows.TargetRows`), which says at which positions the tokens stand and what each
                sees; None: the rows begin here, without a cache.
            logits_at_BN: the new tokens of each row whose logits [B, N, V] are wanted; None: of all. The head is applied
                to these alone, and without the factor that some models scale logits with, which no choice depends on.
        """
        features_BSF = self._empty(input_ids_BS, self._tap_width)
        given: dict[str, Any] = {"use_cache": False}
        if rows is not None:
            positions_BS, mask = rows.begin(input_ids_BS.shape[1])
            given = {"use_cache": True, "cache": rows, "position_ids": positions_BS, "attention_mask": mask}
        with self._recording(_Pass(features_BSF, False, None)):
            states = self.model.get_decoder()(input_ids=input_ids_BS.to(self.device), **given).last_hidden_state
        if logits_at_BN is not None:
            states = states.take_along_dim(logits_at_BN.to(self.device).unsqueeze(-1), dim=1)
        logits: Tensor = self.model.get_output_embeddings()(states)
        return logits, features_BSF
