"""MindSpeed-RL: Ascend-first post-training for large language models."""

__version__ = "0.1.0"
