"""Layer patterns of hybrid models: one letter for each layer.

Letters and separators are those of megatron/core/models/hybrid/hybrid_layer_allocation.py
(`Symbols`). "/" comes before the layers of each depth of multi-token prediction, "|" between
pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
LAYERS = {
    MAMBA: "a Mamba layer",
    ATTENTION: "an attention layer",
    MLP: "an MLP layer",
    EXPERTS: "a mixture-of-experts layer",
}
"""Letters of the layers that are modelled."""


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """The letters of the decoder's layers, of one depth of prediction, and how many depths."""

    decoder: str
    prediction: str = ""
    depths: int = 0

    @property
    def all_layers(self) -> str:
        """Every layer of the model, those of prediction once for each depth."""
        return self.decoder + self.prediction * self.depths


def parse_pattern(text: str) -> HybridPattern:
    """Read `text`. Raises ValueError, completing "hybrid_layer_pattern=...", where it has no sense.

    Prediction depths must all have the same layers, as in Megatron-Core.
    """
    decoder, *depths = text.split("/")
    decoder = decoder.replace("|", "")
    for letter in decoder + "".join(depths):
        if letter not in LAYERS:
            known = ", ".join(f"{name!r} for {what}" for name, what in LAYERS.items())
            raise ValueError(f"has {letter!r}; use {known}")
    if not decoder:
        raise ValueError("names no layer of the decoder")
    if len(set(depths)) > 1 or "" in depths:
        raise ValueError("must give every prediction depth after '/' the same layers")
    return HybridPattern(decoder, depths[0] if depths else "", len(depths))
