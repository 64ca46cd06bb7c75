"""Public figures of target models and of cards, each with its source.

Models: `config.json` of the model's repository on the Hugging Face hub. Cards: the maker's data sheets, TFLOPS without
sparsity. Both are facts about the part, not of what a program reaches on it; see `flops.Assumptions` for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.errors import ConfigError


@dataclass(frozen=True)
class ModelFigures:
    """Shape of a target; names as in the Hugging Face config."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    source: str

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer: q and o, k and v, and the three matrices of SwiGLU; norms are left out."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * queries + 2 * keys + 3 * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """All weights, embedding and head included."""
        return self.num_layers * self.layer_parameters + self.vocab_size * self.hidden_size * (1 if self.tied else 2)


@dataclass(frozen=True)
class CardFigures:
    """One card.

    Attributes:
        tflops: dense bf16 with fp32 accumulation.
        memory_gb, bandwidth_gb_s: 10^9 bytes.
        link_gb_s: to the other cards of the node, one direction.
    """

    name: str
    tflops: float
    memory_gb: float
    bandwidth_gb_s: float
    link_gb_s: float
    source: str


_QWEN3 = "Hugging Face Qwen/{}, config.json"
MODELS = {
    figures.name: figures
    for figures in (
        ModelFigures("qwen3-4b", 2560, 36, 32, 8, 128, 9728, 151_936, True, _QWEN3.format("Qwen3-4B")),
        ModelFigures("qwen3-8b", 4096, 36, 32, 8, 128, 12_288, 151_936, False, _QWEN3.format("Qwen3-8B")),
        ModelFigures("qwen3-14b", 5120, 40, 40, 8, 128, 17_408, 151_936, False, _QWEN3.format("Qwen3-14B")),
        # Five of six of its layers look back 1024 tokens only; the table counts all of them as full attention.
        ModelFigures(
            "gemma3-27b", 5376, 62, 32, 16, 128, 21_504, 262_208, True, "Hugging Face google/gemma-3-27b-it, text_config"
        ),
        ModelFigures("qwen3-32b", 5120, 64, 64, 8, 128, 25_600, 151_936, False, _QWEN3.format("Qwen3-32B")),
    )
}
CARDS = {
    figures.name.lower(): figures
    for figures in (
        CardFigures("H100", 989, 80, 3350, 450, "NVIDIA H100 data sheet, SXM5; NVLink 900 GB/s both ways"),
        CardFigures("H200", 989, 141, 4800, 450, "NVIDIA H200 data sheet, SXM; NVLink 900 GB/s both ways"),
        CardFigures("B200", 2250, 180, 8000, 900, "NVIDIA HGX B200 data sheet; NVLink 1.8 TB/s both ways"),
        CardFigures("A100-80", 312, 80, 2039, 300, "NVIDIA A100 80GB data sheet, SXM; NVLink 600 GB/s both ways"),
        CardFigures("L40S", 362, 48, 864, 32, "NVIDIA L40S data sheet; PCIe 4 x16, 64 GB/s both ways"),
        CardFigures("RTX4090", 165, 24, 1008, 32, "NVIDIA Ada GPU architecture paper, RTX 4090; PCIe 4 x16"),
    )
}


def find_model(name: str) -> ModelFigures:
    """A model of the table; raises `ConfigError`, naming those that there are."""
    if name.lower() not in MODELS:
        raise ConfigError(f"--target-model {name}: not in the table; there are {', '.join(MODELS)}")
    return MODELS[name.lower()]


def find_card(name: str) -> CardFigures:
    """A card of the table; raises `ConfigError`, naming those that there are."""
    found = CARDS.get(name.lower().replace(" ", ""))
    if found is None:
        raise ConfigError(f"--card {name}: not in the table; there are {', '.join(card.name for card in CARDS.values())}")
    return found
