"""Compressed links for any model in one process: modules between two layers that encode and decode the passing tensor.

>>> import torch
>>> from torch import nn
>>> from raysim.nn import CompressedLink, link_report
>>> model = nn.Sequential(nn.Linear(8, 8), CompressedLink("TopK(0.25)", backward="Quantize(8)"), nn.Linear(8, 1))
>>> model(torch.ones(4, 8)).sum().backward()
>>> link_report(model)[["direction", "codec", "packets", "dense_bytes"]].values.tolist()
[['forward', 'TopK(0.25)', 1, 128], ['backward', 'Quantize(8)', 1, 128]]
"""

from raysim.nn.boundary import samples
from raysim.nn.link import CompressedLink, end_step, insert_links, link_report

__all__ = ["CompressedLink", "end_step", "insert_links", "link_report", "samples"]
