"""Compression inside torch's own distributed training, by its public extension points: pipelining, DDP and FSDP2."""
