"""kvstrata keeps the KV cache of LLM inference on a ladder of tiers and brings back exactly what a request consumes.

Layers, lowest first; imports go one way (`tests/arch` enforces it):

    types, errors  <  layout, policy  <  core  <  primary, tiers, transfer  <  runtime  <  sim, integrations, cli

`docs/architecture.md` tells the life of a chunk through them.
"""

__version__ = "0.1.0"
