"""Experiment files: the whole configuration of an experiment, read from YAML, checked, and split into its runs.

Every mistake is one line that names the file and the key; keys that do not exist or stand twice are mistakes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from dflash_core.config import (
    AnalyzeConfig,
    BucketingConfig,
    Config,
    DataConfig,
    DraftConfig,
    EvaluateConfig,
    MetricsConfig,
    PrefetchConfig,
    RegenerateConfig,
    RetrainConfig,
    RunVariant,
    TargetConfig,
    TopologyConfig,
    TrainConfig,
)
from dflash_core.errors import ConfigError
from dflash_core.redaction import secret_in, without_secrets


class ExperimentConfig(Config):
    """One experiment file. See the classes of each section for the keys."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the experiment, used in run names")
    description: str = Field("", description="What the experiment is for")
    target: TargetConfig
    data: DataConfig
    bucketing: BucketingConfig = BucketingConfig()
    draft: DraftConfig = DraftConfig()
    train: TrainConfig = TrainConfig()
    topology: TopologyConfig = TopologyConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    metrics: MetricsConfig = MetricsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    analyze: AnalyzeConfig = AnalyzeConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    retrain: RetrainConfig = RetrainConfig()
    runs: tuple[RunVariant, ...] = Field((), description="Runs that differ in some keys; none: one run as it stands")

    @model_validator(mode="after")
    def _sections_agree(self) -> ExperimentConfig:
        names = [run.name for run in self.runs]
        if len(set(names)) != len(names):
            raise ValueError("runs: two runs have the same name")
        if self.bucketing.batches_per_step < self.topology.cells:
            raise ValueError("bucketing.batches_per_step: fewer batches than cells; some cells would never train")
        if self.data.max_length > self.bucketing.token_budget:
            raise ValueError("bucketing.token_budget: smaller than data.max_length; the longest sequence fits no batch")
        if self.bucketing.strategy == "packed" and self.bucketing.sort_window:
            raise ValueError("bucketing.sort_window: packed rows are not sorted; bucketing.pack_window is their window")
        return self

    def variants(self) -> list[tuple[str, ExperimentConfig]]:
        """The runs of the experiment, by name, each a complete config without `runs`."""
        if not self.runs:
            return [("run", self)]
        base = self.model_dump(mode="json", exclude={"runs"})
        variants = []
        for run in self.runs:
            changed = _with_changes(base, dict(run.set))
            variants.append((run.name, _validated(changed, f"run {run.name!r} of experiment {self.name!r}")))
        return variants


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error instead of a silent choice of the last one."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`; what it brings in may be overridden
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a plain value", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def _with_changes(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of nested `values` with dotted keys replaced; a key that does not exist is left to validation."""
    result: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for dotted, value in changes.items():
        *sections, last = dotted.split(".")
        place = result
        for section in sections:
            inner = place.get(section)
            place[section] = inner = dict(inner) if isinstance(inner, dict) else {}
            place = inner
        old = place.get(last)  # a section given as a mapping changes the keys it names and keeps the others
        place[last] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    model: Any = ExperimentConfig
    for part in location[:-1]:
        fields = getattr(model, "model_fields", {})
        model = getattr(fields.get(str(part)), "annotation", None)
    return list(getattr(model, "model_fields", {}))


def _validated(values: Any, where: str) -> ExperimentConfig:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: not a mapping of sections")
    try:
        return ExperimentConfig.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        first = problems[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            close = get_close_matches(str(first["loc"][-1]), _known_keys(first["loc"]), n=1)
            message = "unknown key" + (f" (did you mean {close[0]}?)" if close else "")
        elif first["type"] not in {"missing", "value_error"}:
            message += f", not {first['input']!r}"
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{where}: {key}: {message}{more}" if key else f"{where}: {message}{more}") from None


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment file and apply overrides of the form `a.b=value` (the value is read as YAML).

    Raises:
        ConfigError: one line that names the file and the key, and shows no secret. An experiment that holds one is an error,
            for it is recorded with each run.
    """
    try:
        return _loaded(path, overrides)
    except ConfigError as error:
        raise ConfigError(without_secrets(str(error))) from None


def _loaded(path: str | Path, overrides: Sequence[str]) -> ExperimentConfig:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        text = _one_line(error) if isinstance(error, yaml.YAMLError) else str(error)
        raise ConfigError(f"{path}: not YAML: {text}") from None
    changes: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override}: expected key=value")
        try:
            changes[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not YAML: {_one_line(error)}") from None
    if changes and isinstance(values, dict):
        values = _with_changes(values, changes)
    config = _validated(values, str(path))
    _refuse_secrets(config, str(path))
    config.variants()  # an override inside `runs` must be right before anything starts
    return config


def _refuse_secrets(config: ExperimentConfig, where: str) -> None:
    for key, text in _strings(config.model_dump(mode="json")):
        if (kind := secret_in(text)) is not None:
            raise ConfigError(f"{where}: {key}: holds {kind}, and would be recorded with the run; it belongs in the environment")


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in nested values with their dotted keys; the keys themselves are texts, too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield key, str(name)
            yield from _strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)
