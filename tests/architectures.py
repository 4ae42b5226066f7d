"""A small architecture, for tests that make their own weights."""

from __future__ import annotations

from ramify.models.families import Architecture
from ramify.models.rope_config import RopeConfig

SMALL = Architecture(
    family="llama",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=112,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=None,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_embeddings=False,
)
