"""The hot loops of codecs as Triton kernels, for tensors on GPUs.

Packets are those of the CPU, byte for byte: the arithmetic is that of the torch reference, in float64 where the reference computes
in float64, and no product is fused with a sum. Where `TRITON_INTERPRET=1` is set before this package is imported, Triton runs the
kernels on the CPU, which is how a machine without a GPU tests them; see `raysim.codecs.kernels.interpreted`.

No function here waits for the device, but for `select.select_at_least`. A function that can find a tensor or a packet wrong
returns a flag, int32 on the device, which is not zero then.
"""
