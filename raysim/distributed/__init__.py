"""Compression in torch's own distributed training (pipelining, DDP and FSDP2), through its public extension points."""
