"""Feed-forward models: a small convolutional network, ResNets for CIFAR, VGG-16, and a multilayer perceptron for tables."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from raysim.notation import check_choice, check_integer
from raysim.workloads.splits import DataShape


def cnn(shape: DataShape, *, width: int = 16) -> nn.Sequential:
    """Return a CNN without BatchNorm: five convolutions of `width` to 4 x `width` channels, and two linear layers.

    The output for a sample does not depend on its microbatch. Every cut follows a ReLU, and weights are initialised
    accordingly (He et al. 2015, 1502.01852), so plain SGD needs no warm-up.

    >>> [name for name, _ in cnn(DataShape((1, 8, 8), "float32", 10)).named_children()]
    ['conv1', 'conv2', 'conv3', 'conv4', 'conv5', 'hidden', 'head']
    """
    channels, height, breadth = _image_shape("cnn", shape)
    width = check_integer("model.width", width, 1)
    spots = math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(breadth / 2) / 2)

    def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU())

    layers: dict[str, nn.Module] = {
        "conv1": conv(channels, width),
        "conv2": conv(width, width),
        "conv3": conv(width, 2 * width, stride=2),
        "conv4": conv(2 * width, 2 * width),
        "conv5": conv(2 * width, 4 * width, stride=2),
        "hidden": nn.Sequential(nn.Flatten(), nn.Linear(4 * width * spots, 8 * width), nn.ReLU()),
        "head": nn.Linear(8 * width, shape.num_classes),
    }
    return _initialised(nn.Sequential(OrderedDict(layers)), "fan_in")


def resnet18(shape: DataShape, *, width: int = 64, norm: str = "batch") -> nn.Sequential:
    """Return ResNet-18 for small images (He et al. 2016, 1512.03385), laid out as in kuangliu/pytorch-cifar.

    The first convolution is 3x3 with stride 1, and there is no max-pooling. 11,173,962 parameters for 10 classes. `width`: the
    number of channels of the first convolution and of layer1; layer2 to layer4 have 2, 4 and 8 times as many. `norm`: "batch",
    or "group" for GroupNorm (Wu and He 2018, 1803.08494), which keeps the output for a sample independent of other samples:
    8 channels per group, or a single group if the number of channels is not a multiple of 8.

    >>> model = resnet18(DataShape((3, 32, 32), "float32", 10))
    >>> sum(parameter.numel() for parameter in model.parameters())
    11173962
    """
    return _resnet("resnet18", shape, BasicBlock, (2, 2, 2, 2), width, norm)


def resnet101(shape: DataShape, *, width: int = 64, norm: str = "batch") -> nn.Sequential:
    """Return ResNet-101 for small images: bottleneck blocks in the layout of `resnet18`.

    42,512,970 parameters for 10 classes. `width` and `norm` as in `resnet18`; layer outputs have four times as many channels.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = resnet101(DataShape((3, 32, 32), "float32", 10))
    >>> sum(parameter.numel() for parameter in model.parameters())
    42512970
    """
    return _resnet("resnet101", shape, Bottleneck, (3, 4, 23, 3), width, norm)


def _resnet(
    name: str,
    shape: DataShape,
    block: type[BasicBlock] | type[Bottleneck],
    counts: Sequence[int],
    width: int,
    norm: str,
) -> nn.Sequential:
    """Return four layers of `counts` residual blocks; each layer but the first halves height and width in its first block."""
    channels, _, _ = _image_shape(name, shape)
    width = check_integer("model.width", width, 1)
    make_norm = _NORMS[check_choice("model.norm", norm, list(_NORMS))]
    stem: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(channels, width, 3, padding=1, bias=False),
        "bn1": make_norm(width),
        "relu": nn.ReLU(),
    }
    layers: dict[str, nn.Module] = {"conv1": nn.Sequential(OrderedDict(stem))}
    inputs = width
    for i, count in enumerate(counts, start=1):
        middle = width << (i - 1)
        outputs = middle * block.expansion
        blocks = [block(inputs, middle, 1 if i == 1 else 2, make_norm)]
        blocks += [block(outputs, middle, 1, make_norm) for _ in range(count - 1)]
        layers[f"layer{i}"] = nn.Sequential(*blocks)
        inputs = outputs
    layers["linear"] = nn.Sequential(MeanOverSpace(), nn.Linear(inputs, shape.num_classes))
    return nn.Sequential(OrderedDict(layers))


def vgg16(shape: DataShape, *, width: int = 64) -> nn.Sequential:
    """Return VGG-16 without BatchNorm: thirteen convolutions and three linear layers.

    Simonyan and Zisserman 2015, 1409.1556. The output of the convolutions is averaged or repeated to 7 x 7, as in
    torchvision. 134,670,244 parameters for 100 classes. `width`: the number of channels of the first block; all other
    layers scale with it. Linear layers are initialised with a standard deviation of 0.08 / sqrt(width), which is
    torchvision's 0.01 at width 64 and keeps outputs of about the same size at other widths.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = vgg16(DataShape((3, 32, 32), "float32", 100))
    >>> sum(parameter.numel() for parameter in model.parameters())
    134670244
    """
    channels, _, _ = _image_shape("vgg16", shape)
    layers: dict[str, nn.Module] = {}
    width = check_integer("model.width", width, 1)
    hidden = 64 * width
    for index, (factor, count) in enumerate(((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)), start=1):
        outputs = factor * width
        block: list[nn.Module] = []
        for _ in range(count):
            block += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
            channels = outputs
        layers[f"block{index}"] = nn.Sequential(*block, nn.MaxPool2d(2, ceil_mode=True))
    layers["hidden1"] = nn.Sequential(
        nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(outputs * 7 * 7, hidden), nn.ReLU(), nn.Dropout(0.5)
    )
    layers["hidden2"] = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5))
    layers["head"] = nn.Linear(hidden, shape.num_classes)
    return _initialised(nn.Sequential(OrderedDict(layers)), "fan_out", 0.08 / math.sqrt(width))


def _initialised(model: nn.Sequential, mode: Any, linear_std: float | None = None) -> nn.Sequential:
    """Initialise weights as He et al., or linear layers with standard deviation `linear_std` if given; biases are zero."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            if linear_std is not None and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, linear_std)
            else:
                nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model


Norm = Callable[[int], nn.Module]  # from a number of channels


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(1 if channels % 8 else channels // 8, channels)


_NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential:
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))


class BasicBlock(nn.Module):
    """Two convolutions with a skip connection, projected if the shape changes."""

    expansion = 1

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """Three convolutions with a skip connection: `width` channels in the middle, 4 x `width` in the output."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class MeanOverSpace(nn.Module):
    """Mean over height and width: the paper's average pooling, for images of any size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


def _image_shape(name: str, shape: DataShape) -> tuple[int, int, int]:
    if len(shape.input_shape) != 3 or shape.input_dtype != "float32":
        raise ValueError(
            f"Model `{name}` needs images of (channel, height, width) in float32, "
            f"but the data has {shape.input_shape} in {shape.input_dtype}. Choose another `model` or `data`."
        )
    channels, height, breadth = shape.input_shape
    return channels, height, breadth


def mlp(*, shape: DataShape, width: int = 64, num_layers: int = 4, dropout: float = 0.0) -> nn.Sequential:
    """Return `num_layers` linear layers with `width` hidden features and ReLU between them.

    >>> [name for name, _ in mlp(shape=DataShape((5,), "float32", 1), num_layers=3).named_children()]
    ['layer0', 'layer1', 'head']
    """
    width, num_layers = check_integer("model.width", width, 1), check_integer("model.num_layers", num_layers, 1)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ValueError(f"`model.dropout` must be in [0, 1), but got {dropout!r}.")
    features = math.prod(shape.input_shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(num_layers - 1):
        first: list[nn.Module] = [] if index or len(shape.input_shape) == 1 else [nn.Flatten()]
        last: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        layers[f"layer{index}"] = nn.Sequential(*first, nn.Linear(features, width), nn.ReLU(), *last)
        features = width
    layers["head"] = nn.Linear(features, shape.num_classes)
    return nn.Sequential(layers)
