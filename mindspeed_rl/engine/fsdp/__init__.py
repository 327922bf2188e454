"""The training engine of transformers' own modules, sharded by FSDP2 (docs/engines.md)."""
