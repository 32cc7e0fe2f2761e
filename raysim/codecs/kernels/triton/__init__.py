"""The hot loops of codecs as Triton kernels, for tensors on GPUs.

Packets are those of the CPU, byte for byte: the arithmetic is that of the torch reference, in float64 if the reference computes
in float64, and no product is fused with a sum. If `TRITON_INTERPRET=1` is set before this package is imported, Triton runs the
kernels on the CPU, which is how a machine without a GPU tests them; see `raysim.codecs.kernels.interpreted`.

No function waits for the device, but for `count_at_least` and `select_at_least` of `select`. Errors that are found on the device are
raised when the open flight lands, see `raysim.codecs.transfers`.
"""
