"""Copies between a GPU and the host are ordered by streams, whichever stream is ahead; tried on streams that are not a GPU's."""

import pytest
import torch
from streams import GARBAGE, Device, recording

from raysim.codecs.transfers import Flight

VALUES = [1, 2, 3, 4]


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr("raysim.codecs.transfers.torch", device.module())
    with recording(device), device:
        yield device


def computed(device):
    """Return a tensor whose values are computed when its stream comes to it."""
    x = torch.full((4,), GARBAGE, dtype=torch.uint8)
    values = x.numpy()
    device.compute.queue.append(lambda: values.__setitem__(slice(None), VALUES))
    return x


def ahead(device, order):
    """Let streams run ahead: none, the first, or those behind it."""
    for stream in {"none": [], "compute": device.streams[:1], "copies": device.streams[1:]}[order]:
        stream.run()


orders = pytest.mark.parametrize("order", ["none", "compute", "copies"])


@orders
def test_downloaded_bytes_equal_computed_bytes(device, order):
    flight, x = Flight(), computed(device)
    host = flight.down(x)
    device.free(x, device.compute)
    ahead(device, order)
    flight.land()
    assert host.tolist() == VALUES


@orders
def test_uploaded_bytes_are_ready_for_later_work(device, order):
    flight, host = Flight(), torch.tensor(VALUES, dtype=torch.uint8)
    x = flight.up(host, "cpu")
    host.fill_(GARBAGE)  # whose memory the caller may use again
    seen, values = [], x.numpy()
    device.compute.queue.append(lambda: seen.extend(values.tolist()))
    device.free(x, device.streams[1])
    ahead(device, order)
    device.compute.run()
    assert seen == VALUES


@orders
def test_flag_is_set_after_download(device, order):
    flight, bad = Flight(), computed(device)
    flight.check(bad, ValueError("found"))
    device.free(bad, device.compute)
    ahead(device, order)
    flight.land()  # flags alone are not waited for
    flight.down(computed(device))
    with pytest.raises(ValueError, match="found"):
        flight.land()
    flight.settle()  # once


def test_upload_does_not_wait_for_download(device):
    flight, late = Flight(), computed(device)
    flight.down(late)
    x = flight.up(torch.tensor(VALUES, dtype=torch.uint8), "cpu")
    _, _, up = device.streams
    up.run()
    assert x.tolist() == VALUES
    assert late.tolist() == [GARBAGE] * 4
