"""Data parallelism: ZeRO stages 0-3 over torch's FSDP2 and DistributedDataParallel."""
