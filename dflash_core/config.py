"""The configuration of each component: small, frozen, and closed (an unknown key is an error).

Every component gets only its own class. The experiment as a whole is put together in `dflash_core.experiment`.
Lengths and budgets are in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Order = Literal["diverse", "shuffle", "grouped", "clustered", "sorted"]
Strategy = Literal["padded", "packed"]
LayerType = Literal["full_attention", "sliding_attention"]
Loss = Literal["cross_entropy", "dpace", "kl", "total_variation"]
RowField = Literal["messages", "prompt", "response", "text", "tools", "id", "source", "finish_reason"]
Dispatch = Literal["round_robin", "least_loaded", "per_worker", "per_worker_skipping"]


class Config(BaseModel):
    """Base of all configuration classes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class TargetConfig(Config):
    """The frozen target model.

    `path` is a Hugging Face folder, or `package:NAME` for a GGUF file inside an installed Python package; the latter
    is converted once to safetensors under `<workspace>/cache/`.
    """

    path: str = Field(description="Hugging Face folder of the target, or package:NAME")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of the frozen weights")
    feature_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Number format of the captured states; default: that of the target"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="Attention of the target; flash_attention_2 needs the package flash-attn, a GPU and dtype bfloat16"
    )
    mask_token_id: NonNegativeInt | None = Field(
        None, description="Row of the target's embedding that stands for a masked slot; default: the tokenizer's mask token"
    )

    @property
    def state_bytes(self) -> int:
        """Bytes of one number of a captured state."""
        return {"float32": 4, "bfloat16": 2}[self.feature_dtype or self.dtype]


class DataConfig(Config):
    """Conversations in, dataset folder out."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the dataset folder under <workspace>/datasets"
    )
    files: tuple[str, ...] = Field(
        min_length=1, description="Files, globs or fsspec URLs: JSONL (plain, .gz, .zst), Parquet, Arrow (docs/data.md)"
    )
    columns: dict[RowField, str] = Field(
        default_factory=dict, description="Names of the rows' columns where they differ from ours, such as {messages: dialog}"
    )
    held_out: str | None = Field(None, description="File with held-out prompts for evaluation, in the same formats")
    template_variables: dict[str, bool | int | str] = Field(
        default_factory=dict, description="Variables for the chat template, such as {enable_thinking: false}; as in serving"
    )
    rewritten_history: Literal["reject", "last_answer", "each_answer"] = Field(
        "reject",
        description="Where the template shows earlier turns otherwise than when they were answered: leave the row out, keep"
        " its last answer, or make one sequence of each answer",
    )
    max_length: PositiveInt = Field(4096, description="Longest sequence in tokens")
    over_long: Literal["truncate", "drop"] = Field("truncate", description="What happens to longer conversations")
    on_bad_row: Literal["error", "reject"] = Field(
        "reject", description="A malformed row goes to rejects.parquet, or ends preparation with an error"
    )
    shard_sequences: PositiveInt = Field(4096, description="Most rows that make up one Arrow shard")
    num_workers: PositiveInt | None = Field(None, description="Processes that tokenize; default: one for each core")


class BucketingConfig(Config):
    """Length buckets and the order of batches."""

    num_buckets: PositiveInt = Field(6, description="Most length buckets")
    boundaries: Literal["min_padding", "equal_tokens"] | tuple[PositiveInt, ...] = Field(
        "min_padding", description="How boundaries are chosen, or the upper edges themselves"
    )
    strategy: Strategy = Field(
        "padded", description="A batch is sequences padded to the longest, or one row of whole sequences, one after the other"
    )
    token_budget: PositiveInt = Field(
        8192, description="Most padded tokens in a batch (sequences x longest), or tokens in a packed row"
    )
    max_sequences: PositiveInt | None = Field(None, description="Most sequences in a batch")
    quadratic_length: PositiveInt | None = Field(
        None, description="Length at which attention costs as much as all else; makes long sequences count for more"
    )
    sort_window: NonNegativeInt = Field(
        0, description="Batches whose sequences are drawn at random and then sorted by length; 0: no sorting (padded only)"
    )
    pack_window: PositiveInt = Field(
        128, description="Rows whose sequences are drawn at random and then fitted together (packed)"
    )
    batches_per_step: PositiveInt = Field(8, description="Batches in one optimizer step, over all cells")
    order: Order = Field("diverse", description="Order of batches; all but diverse exist to be compared with")


class DraftConfig(Config):
    """Shape of the DFlash draft network. Sizes left out are the target's own."""

    num_layers: PositiveInt = Field(5, description="Decoder layers of the draft")
    block_size: Annotated[int, Field(ge=2)] = Field(16, description="Slots per block, the anchor's included")
    num_taps: PositiveInt = Field(5, description="Tapped target layers, evenly spaced; ignored with target_layer_ids")
    target_layer_ids: tuple[NonNegativeInt, ...] | None = Field(None, description="Tapped target layers, counted from 0")
    intermediate_size: PositiveInt | None = Field(None, description="Width of the draft's MLP")
    sliding_window: PositiveInt | None = Field(None, description="Positions that a sliding layer sees, the query's included")
    layer_types: tuple[LayerType, ...] | None = Field(
        None, description="Kind of each layer; default: all full, or with sliding_window all sliding"
    )
    init_from: str | None = Field(
        None, description="Folder of an exported or published drafter (z-lab format) whose weights training begins with"
    )


class TrainConfig(Config):
    """Optimisation of the draft (docs/field.md 1)."""

    seed: NonNegativeInt = Field(0, description="Seed of plan, anchors and initial weights")
    num_epochs: PositiveInt = Field(6, description="Passes over the dataset")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many optimizer steps")
    lr: PositiveFloat = Field(6e-4, description="Peak learning rate")
    warmup_fraction: Fraction = Field(0.04, description="Share of the steps in which the learning rate rises")
    final_lr_fraction: Fraction = Field(0.0, description="Learning rate at the end of the cosine, as a share of the peak")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Decoupled weight decay on matrices")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas")
    clip_norm: PositiveFloat = Field(1.0, description="Gradient norm above which gradients are scaled down")
    num_anchors: PositiveInt = Field(512, description="Most anchors drawn per sequence")
    loss: Loss = Field(
        "cross_entropy",
        description="On the labels with decaying slot weights, the same with D-PACE's weights, or the distance to the target's"
        " own distribution with decaying slot weights",
    )
    loss_gamma: PositiveFloat | None = Field(None, description="Decay of the slot weights; default by block size")
    dpace_alpha: Fraction = Field(0.5, description="D-PACE: how far a slot's probability is lifted towards 1")
    scale_features: bool = Field(
        False,
        description="Train with every channel of the target's states at the same size (exports take them as they are); helps"
        " where sizes differ by orders of magnitude",
    )
    calibrate_norm: bool = Field(
        False,
        description="Begin with logits of deviation 1, whatever the head's rows; for targets that begin at a loss of 20 and more",
    )
    checkpoint_every: PositiveInt = Field(100, description="Optimizer steps between checkpoints")
    keep_last: PositiveInt = Field(2, description="Newest checkpoints kept")
    keep_every: PositiveInt | None = Field(None, description="Checkpoints of steps divisible by this are kept for good, too")
    keep_best: bool = Field(
        False,
        description="The checkpoint with the highest acceptance length is kept, too: measured on held-out prompts whenever one is"
        " due (needs data.held_out)",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of the draft's arithmetic; weights stay fp32"
    )
    max_skipped_in_a_row: PositiveInt = Field(5, description="Non-finite steps in a row that end the run")
    self_checks: bool = Field(True, description="Look for leaks, wrong taps, heads and masks before the first step (seconds)")


class TopologyConfig(Config):
    """Which devices make up a cell (docs/design.md 2)."""

    cells: PositiveInt = Field(1, description="Processes; each is one drafter with its targets")
    targets_per_cell: PositiveInt = Field(1, description="Target loops of a cell")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Kind of device; auto takes GPUs where there are any")
    devices: Annotated[tuple[Annotated[str, Field(pattern=r"^cuda:\d+$")], ...], Field(min_length=1)] | None = Field(
        None, description="GPUs of a node in the order in which cells take them, targets first; default: all, from cuda:0"
    )
    colocated: bool = Field(False, description="Drafter and targets of a cell share one device")
    threads_per_device: PositiveInt = Field(1, description="Arithmetic threads of each CPU device")
    max_restarts: NonNegativeInt = Field(
        0, description="Times that all cells are started again after one has failed; they resume from the newest checkpoint"
    )


class PrefetchConfig(Config):
    """The prefetcher of a cell."""

    num_workers: PositiveInt = Field(4, description="Loading threads")
    dispatch: Dispatch = Field(
        "round_robin", description="How batches are given to targets; the two per_worker kinds are the historic fault"
    )
    queue_batches: PositiveInt = Field(8, description="Most batches in one target's queue")
    max_bytes: PositiveInt = Field(2 * 1024**3, description="Most bytes of loaded batches and features in flight per cell")
    stats_every_steps: PositiveInt = Field(10, description="Steps between two snapshots of the prefetcher in the metrics")
    stall_timeout_s: PositiveFloat = Field(
        600.0, description="Time without progress after which the stacks of all threads are logged and the run stops"
    )


class MetricsConfig(Config):
    """Where metrics go besides the JSONL files, which are always written."""

    wandb: Literal["offline", "online", "disabled"] = Field("offline", description="Weights & Biases mode")
    wandb_project: str = Field("dflash", description="Weights & Biases project")
    console_every_s: PositiveFloat = Field(5.0, description="Seconds between two progress lines")


class EvaluateConfig(Config):
    """The draft-verify loop on held-out prompts."""

    max_prompts: PositiveInt = Field(32, description="Held-out prompts decoded")
    max_new_tokens: PositiveInt = Field(128, description="Most new tokens per prompt")
    check_lossless: bool = Field(True, description="Compare the output with plain greedy decoding")
    untrained_prompts: NonNegativeInt = Field(4, description="Prompts on which the untrained draft is measured; 0: not measured")
    batch_prompts: PositiveInt = Field(8, description="Prompts decoded at once")
    bootstrap_samples: PositiveInt = Field(1000, description="Resamplings of the prompts behind each confidence interval")
    speed_prompts: NonNegativeInt = Field(2, description="Prompts on which both ways of decoding are timed; 0: not timed")
    every_steps: PositiveInt | None = Field(
        None,
        description="Steps between two measurements of the acceptance length while training (needs data.held_out); default: none",
    )
    prompts_while_training: PositiveInt = Field(8, description="Held-out prompts of these measurements")


class AnalyzeConfig(Config):
    """Comparison tables and the report."""

    spike_mad: PositiveFloat = Field(6.0, description="A gradient norm is a spike above median + this many MADs")
    smoothing_steps: PositiveInt = Field(15, description="Width of the running median in the plots")
    allow_different: bool = Field(
        False, description="Compare runs of other data, target, step size or loss, too; what differs heads the report"
    )


class RegenerateConfig(Config):
    """Answers for prompts from the target itself, so that a drafter learns what it will be asked to draft."""

    files: tuple[str, ...] = Field(
        (), description="Files with prompts or conversations whose answers are made anew, in the formats of data.files"
    )
    base_url: str | None = Field(
        None, description="OpenAI-compatible server of the target, such as http://127.0.0.1:8000/v1; default: in this process"
    )
    model: str | None = Field(None, description="Name of the target on the server; default: the only one that it serves")
    api_key_env: str | None = Field(None, description="Environment variable that holds the server's key; the key stands nowhere")
    concurrency: PositiveInt = Field(
        32,
        description="Requests under way at once, of all shards together; in process the prompts decoded together, by each shard",
    )
    max_new_tokens: PositiveInt = Field(1024, description="Most tokens of an answer")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0: greedy, as drafts are verified by default")
    thinking: bool | None = Field(None, description="Thinking mode of the target; default: as its chat template has it")
    retries: NonNegativeInt = Field(5, description="Tries after the first one of a request that failed for a passing reason")
    timeout_s: PositiveFloat = Field(600.0, description="Longest wait for one answer")


class RetrainConfig(Config):
    """What a retraining begins with, and when its drafter replaces the current one of the registry (docs/registry.md)."""

    min_gain: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Tokens per target forward by which it must accept more, with the whole interval of the difference"
    )
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = Field(0.95, description="Confidence of that interval")
    min_prompts: Annotated[int, Field(ge=2)] = Field(16, description="With fewer held-out prompts nothing is promoted")
    require_lossless: bool = Field(True, description="Promote only a drafter whose output equals plain greedy decoding")
    same_block_size: bool = Field(
        True, description="Promote only a drafter with the current one's block size, which stands in the commands that serve it"
    )
    warm_start: bool = Field(True, description="Begin with the weights of the current drafter, where there is one")
    force: bool = Field(False, description="Train even where the data hold nothing that the current drafter has not seen")
    approval: bool = Field(False, description="Ask a person in Prefect before promoting")
    approval_timeout_s: PositiveFloat = Field(86400.0, description="Without an answer for so long, the current one stays")


class RunVariant(Config):
    """One run of an experiment: a name, and the keys in which it differs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Short name of the run")
    set: dict[str, object] = Field(default_factory=dict, description="Overrides, such as {bucketing.order: shuffle}")

    @field_validator("set")
    @classmethod
    def _keys_are_dotted(cls, value: dict[str, object]) -> dict[str, object]:
        for key in value:
            if key.split(".")[0] in {"name", "runs"}:
                raise ValueError(f"a run cannot override {key!r}")
        return value


def check_draft_fits(draft: DraftConfig, num_target_layers: int) -> tuple[int, ...]:
    """Return the tapped layer ids for a target of `num_target_layers` layers.

    The default spacing is L points evenly spread from 1 to N - 3, rounded, and N // 2 for one tap (docs/field.md 1).

    Raises:
        ValueError: an id is not a layer, ids are not ascending, or there are fewer layers than taps.
    """
    if draft.target_layer_ids is not None:
        ids = draft.target_layer_ids
    elif draft.num_taps == 1:
        ids = (num_target_layers // 2,)
    else:
        first, last = 1, num_target_layers - 3
        if last - first + 1 < draft.num_taps:
            raise ValueError(f"draft.num_taps: {draft.num_taps} taps do not fit between layers 1 and {last} of the target")
        step = (last - first) / (draft.num_taps - 1)
        ids = tuple(round(first + step * i) for i in range(draft.num_taps))
    if not ids or list(ids) != sorted(set(ids)) or ids[-1] >= num_target_layers:
        raise ValueError(
            f"draft.target_layer_ids: {list(ids)} are not ascending layers of a target with {num_target_layers} layers"
        )
    return ids
